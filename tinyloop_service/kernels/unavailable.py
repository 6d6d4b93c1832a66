"""How it is said that no GPU can be had: for all who look for one, and all who ask."""

from tinyloop_service.errors import install

INSTALL = f"{install('cuda13')}; for a driver before 580 [cuda12]"


class DeviceUnavailable(Exception):
    """Why not, and the way out; completes a sentence such as "cuda was asked for, but …"."""
