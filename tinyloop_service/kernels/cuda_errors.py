"""CUDA's errors as ours.

Runtime and driver share their numbers.  After some of them the context is gone for this process: those are DeviceLost,
the others EngineFault.  Refuses to know who made the call.
"""

from __future__ import annotations

from tinyloop_service.errors import DeviceLost, EngineFault

# deinitialized, device unavailable, ECC, NVLink, contained; illegal address, timeout, context gone, assert, and what
# ends a kernel that goes astray
_LOST = {4, 46, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 999}


def error_of_code(code: int, doing: str) -> EngineFault:
    """The exception for a CUresult or cudaError_t."""
    from cuda.bindings import driver

    try:
        name = driver.CUresult(code).name
    except ValueError:
        name = f"CUDA error {code}"
    if code in _LOST:
        return DeviceLost(f"the CUDA device was lost: {name} ({doing})")
    return EngineFault(f"{name} ({doing})")


class cuda_errors:
    """Maps what CuPy raises inside a `with`.  A class, because it is around every launch and copy."""

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if isinstance(error, MemoryError):
            raise EngineFault(f"{self._doing}: {error}") from error
        if isinstance(error, RuntimeError):
            status = getattr(error, "status", None)  # CUDARuntimeError and CUDADriverError have one
            if status is not None:
                raise error_of_code(int(status), f"{self._doing}: {error}") from error
