"""fp16 matrix products by cuBLAS, cheap to call and safe to capture in a CUDA graph.

CuPy's own call costs about 20 µs of host time and refuses a capturing stream; a prompt needs 40 of them.  So this is
the library itself through ctypes: one handle, bound to one stream, with a workspace of ours (cuBLAS must not allocate
while a graph is captured).  In: device addresses and sizes.  Refuses to know arrays and shapes; `cupy_device.py` checks
those.
"""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

from tinyloop_service.errors import DeviceLost, EngineFault
from tinyloop_service.kernels.unavailable import INSTALL, DeviceUnavailable

_TRANSPOSE, _NO_TRANSPOSE = 1, 0
_R_16F, _R_32F = 2, 0  # cudaDataType
_COMPUTE_32F = 68
_DEFAULT_ALGORITHM = -1
_LOST = (13, 14)  # CUBLAS_STATUS_EXECUTION_FAILED, _INTERNAL_ERROR
_NO_REDUCED_PRECISION_REDUCTION = 16
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_MATRIX = (_POINTER, _INT, _INT)  # address, type, row stride
_GEMM_ARGUMENTS = (_POINTER, *5 * (_INT,), _POINTER, *_MATRIX, *_MATRIX, _POINTER, *_MATRIX, _INT, _INT)
WORKSPACE_BYTES = 32 << 20  # what NVIDIA advises for Hopper


class CuBlas:
    """out[T, N] (+)= x[T, K] · weight[N, K]ᵀ on one stream; fp16 in, fp32 sums, fp16 or fp32 out."""

    def __init__(self, stream: int, workspace: int) -> None:
        """stream: a CUstream; workspace: device address of WORKSPACE_BYTES bytes, 256-byte aligned."""
        self._library: Any = ctypes.CDLL(find_library())
        self._handle = ctypes.c_void_p()
        self._check("cublasCreate_v2", ctypes.byref(self._handle))
        self._check("cublasSetStream_v2", self._handle, ctypes.c_void_p(stream))
        self._check("cublasSetWorkspace_v2", self._handle, ctypes.c_void_p(workspace), ctypes.c_size_t(WORKSPACE_BYTES))
        self._check("cublasSetMathMode", self._handle, _NO_REDUCED_PRECISION_REDUCTION)
        self._factors = (ctypes.c_float * 2)(0, 1)  # of what is added to, by `accumulate`
        zero = ctypes.addressof(self._factors)
        self._zero, self._one = zero, zero + ctypes.sizeof(ctypes.c_float)
        self._gemm = self._library.cublasGemmEx
        self._gemm.argtypes = _GEMM_ARGUMENTS

    @property
    def version(self) -> int:
        """For example 130100."""
        version = ctypes.c_int()
        self._check("cublasGetVersion_v2", self._handle, ctypes.byref(version))
        return version.value

    def gemm(
        self,
        x: int,
        weight: int,
        out: int,
        *,
        tokens: int,
        outputs: int,
        inputs: int,
        x_stride: int,
        weight_stride: int,
        out_stride: int,
        out_is_fp16: bool,
        accumulate: bool,
    ) -> None:
        """Device addresses; sizes and row strides in elements.  Row-major here is column-major, operands swapped."""
        status = self._gemm(
            self._handle, _TRANSPOSE, _NO_TRANSPOSE, outputs, tokens, inputs,
            self._one, weight, _R_16F, weight_stride, x, _R_16F, x_stride,
            self._one if accumulate else self._zero, out, _R_16F if out_is_fp16 else _R_32F, out_stride,
            _COMPUTE_32F, _DEFAULT_ALGORITHM,
        )  # fmt: skip
        raise_if("cublasGemmEx", status)

    def close(self) -> None:
        if self._handle:
            self._library.cublasDestroy_v2(self._handle)
            self._handle = ctypes.c_void_p()

    def _check(self, function: str, *args: Any) -> None:
        raise_if(function, getattr(self._library, function)(*args))


def raise_if(function: str, status: int) -> None:
    """What a status of cuBLAS other than 0 means."""
    if status:
        kind = DeviceLost if status in _LOST else EngineFault
        raise kind(f"{function} answered {status}")


def find_library() -> str:
    """The path of cuBLAS.  Raises DeviceUnavailable."""
    try:
        return str(load_nvidia_dynamic_lib("cublas").abs_path)
    except (DynamicLibNotFoundError, OSError) as error:  # OSError: there, and it cannot be loaded
        raise DeviceUnavailable(f"cuBLAS is not installed ({type(error).__name__}): {INSTALL}") from None
