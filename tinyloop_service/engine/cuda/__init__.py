"""The engine for NVIDIA GPUs: kernels of kernels_cu/ do the arithmetic, NumPy the bookkeeping."""

from tinyloop_service.engine.cuda.engine import CudaEngine
from tinyloop_service.engine.cuda.probe import CudaUnavailable, open_device

__all__ = ["CudaEngine", "CudaUnavailable", "open_device"]
