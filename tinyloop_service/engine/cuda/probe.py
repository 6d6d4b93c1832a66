"""Can this machine run this model on a GPU?

In: a spec.  Out: the device, or CudaUnavailable with the reason as the end of a sentence.
"""

from __future__ import annotations

from tinyloop_service.engine.spec import ModelSpec
from tinyloop_service.kernels.device import CupyDevice, Device

OLDEST = (8, 0)  # compute capability
HEAD_DIMS = (64, 128)
MULTIPLE = 64  # of every linear's inputs


class CudaUnavailable(Exception):
    """Why not; completes "cuda given, but …"."""


def open_device(spec: ModelSpec) -> Device:
    """The current CUDA device.  Raises CudaUnavailable."""
    check_spec(spec)
    try:
        import cupy
    except ImportError:
        raise CudaUnavailable(
            "CuPy is not installed: pip install 'tinyloop-service[cuda13]', or [cuda12] for an older driver"
        ) from None
    try:
        number = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise CudaUnavailable(f"there is no CUDA driver that works ({error})") from None
    if not number:
        raise CudaUnavailable("there is no CUDA device")
    device = cupy.cuda.Device()
    capability = int(device.compute_capability[:-1]), int(device.compute_capability[-1])
    if capability < OLDEST:
        name = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
        raise CudaUnavailable(f"{name} has compute capability {capability[0]}.{capability[1]}, 8.0 or later is needed")
    return CupyDevice()


def check_spec(spec: ModelSpec) -> None:
    """Raises CudaUnavailable for a model that the kernels cannot run."""
    if spec.head_dim not in HEAD_DIMS:
        raise CudaUnavailable(f"the model's head_dim is {spec.head_dim}, the CUDA kernels have 64 and 128")
    sizes = {"d_model": spec.d_model, "d_ff": spec.d_ff}
    for name, size in sizes.items():
        if size % MULTIPLE:
            raise CudaUnavailable(f"the model's {name} is {size}, the CUDA kernels need a multiple of {MULTIPLE}")
