"""The engine for processors: ONNX Runtime does the arithmetic, NumPy the bookkeeping."""

from tinyloop_service.engine.cpu.engine import CpuEngine

__all__ = ["CpuEngine"]
