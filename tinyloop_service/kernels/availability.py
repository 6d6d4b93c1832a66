"""Is there a GPU that the kernels can run on?

Out: a CupyDevice, or DeviceUnavailable with the reason.  Everything that needs CuPy is imported here, not before: a
machine without it still imports the package.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyloop_service.kernels.build import KERNELS, KernelBuildError, nvrtc_version
from tinyloop_service.kernels.unavailable import INSTALL, DeviceUnavailable

if TYPE_CHECKING:
    from tinyloop_service.kernels.cupy_device import CupyDevice

OLDEST = (8, 0)  # compute capability


def open_cupy_device(
    ordinal: int = 0, *, sources: Path = KERNELS, cache: Path | None = None, precompiled: Path | None = None
) -> CupyDevice:
    """GPU number `ordinal`.  `cache` and `precompiled`: directories of compiled kernels, see build.py."""
    _check_gpu(_import_cupy(), ordinal)
    try:
        from tinyloop_service.kernels.cupy_device import CupyDevice
    except ImportError as error:
        raise DeviceUnavailable(f"cuda-bindings are not installed ({error}): {INSTALL}") from None
    if precompiled is None:
        _check_compiler()
    return CupyDevice(ordinal, sources=sources, cache=cache, precompiled=precompiled)


def wake_driver() -> None:
    """Import CuPy and make the GPU's context, which takes a second.  Errors show when the device is opened."""
    with suppress(Exception):
        _import_cupy().cuda.runtime.free(0)


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise DeviceUnavailable("CuPy is not installed, which a GPU needs", f"({error}): {INSTALL}") from None
    return cupy


def _check_compiler() -> None:
    try:
        nvrtc_version()
    except KernelBuildError as error:
        raise DeviceUnavailable(str(error)) from None


def _check_gpu(cupy: Any, ordinal: int) -> None:
    runtime = cupy.cuda.runtime
    try:
        number = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:  # no driver, no device, or a driver older than the toolkit
        raise DeviceUnavailable(f"there is no CUDA device, or no driver for it ({error})") from None
    if ordinal >= number:
        raise DeviceUnavailable(f"there is no CUDA device {ordinal} (CUDA finds {number})")
    properties = runtime.getDeviceProperties(ordinal)
    capability = properties["major"], properties["minor"]
    if capability < OLDEST:
        given, needed = (".".join(map(str, pair)) for pair in (capability, OLDEST))
        name = properties["name"].decode()
        raise DeviceUnavailable(f"{name} has compute capability {given}, at least {needed} is needed")
