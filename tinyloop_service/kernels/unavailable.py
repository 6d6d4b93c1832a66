"""How it is said that no GPU can be had: for all who look for one, and all who ask."""

INSTALL = "pip install 'tinyloop-service[cuda13]', or [cuda12] for a driver before 580"


class DeviceUnavailable(Exception):
    """Why not, and the way out; completes a sentence such as "cuda was asked for, but …"."""
