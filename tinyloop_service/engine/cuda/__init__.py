"""The engine for NVIDIA GPUs: kernels of kernels_cu/ do the arithmetic, NumPy the bookkeeping."""

from tinyloop_service.engine.cuda.engine import CudaEngine
from tinyloop_service.engine.cuda.probe import open_device
from tinyloop_service.kernels.availability import wake_driver
from tinyloop_service.kernels.unavailable import DeviceUnavailable

__all__ = ["CudaEngine", "DeviceUnavailable", "open_device", "wake_driver"]
