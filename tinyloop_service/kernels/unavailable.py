"""How it is said that no GPU can be had: for all who look for one, and all who ask."""

from tinyloop_service.errors import install

INSTALL = f"{install('cuda13')}; for a driver before 580 [cuda12]"


class DeviceUnavailable(Exception):
    """Why not; completes a sentence such as "cuda was asked for, but …".

    `reason` is enough for who asked for no GPU; the whole, with `more`, also has the cause and the way out.
    """

    def __init__(self, reason: str, more: str = "") -> None:
        super().__init__(f"{reason} {more}" if more else reason)
        self.reason = reason
