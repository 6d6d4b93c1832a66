"""The same products as cublas.py, by a way that the caller picks: one that adds up each element in one piece.

cuBLAS picks for speed, and of few rows and many inputs it cuts a sum in parts, which gives other bits.  cuBLASLt tells
what else there is.  In: device addresses and sizes.  Refuses to know which way is worth taking:
`engine/cuda/selfcheck.py` tries them.
"""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

from tinyloop_service.kernels.cublas import WORKSPACE_BYTES, raise_if

_R_16F, _R_32F, _COMPUTE_32F = 2, 0, 68
_TRANSPOSE_FIRST = 3  # CUBLASLT_MATMUL_DESC_TRANSA
_MOST_WORKSPACE, _REDUCTIONS = 1, 3  # CUBLASLT_MATMUL_PREF_…
_MOST_WAYS = 2  # each is a kernel to be loaded, which takes longer than to try it
_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t


class Way(ctypes.Structure):
    """A cublasLtMatmulAlgo_t: opaque, good for the sizes that it was given out for."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Found(ctypes.Structure):
    """A cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("way", Way),
        ("workspace", _SIZE),
        ("status", _INT),
        ("waves", ctypes.c_float),
        ("reserved", _INT * 4),
    )


class CuBlasLt:
    """out[T, N] (+)= x[T, K] · weight[N, K]ᵀ, dense, on one stream; fp16 in, fp32 sums, fp16 or fp32 out."""

    def __init__(self, stream: int, workspace: int) -> None:
        """As of CuBlas.  Raises OSError or DynamicLibNotFoundError where the library is not there."""
        self._library: Any = ctypes.CDLL(str(load_nvidia_dynamic_lib("cublasLt").abs_path))
        self._stream, self._workspace = _POINTER(stream), _POINTER(workspace)
        self._handle = self._made("cublasLtCreate")
        self._product = self._made("cublasLtMatmulDescCreate", _INT(_COMPUTE_32F), _INT(_R_32F))
        transpose = ctypes.byref(_INT(1))
        self._check("cublasLtMatmulDescSetAttribute", self._product, _INT(_TRANSPOSE_FIRST), transpose, _SIZE(4))
        self._layouts: dict[tuple[int, int, int], ctypes.c_void_p] = {}
        self._factors = (ctypes.c_float * 2)(0, 1)

    def ways(self, *, tokens: int, outputs: int, inputs: int, out_is_fp16: bool) -> list[Way]:
        """Those without a reduction, which cuBLASLt thinks fast, the fastest first."""
        preference = self._made("cublasLtMatmulPreferenceCreate")
        for attribute, value in (
            (_MOST_WORKSPACE, ctypes.c_uint64(WORKSPACE_BYTES)),
            (_REDUCTIONS, ctypes.c_uint32(0)),
        ):
            size = _SIZE(ctypes.sizeof(value))
            self._check("cublasLtMatmulPreferenceSetAttribute", preference, _INT(attribute), ctypes.byref(value), size)
        found, count = (_Found * _MOST_WAYS)(), _INT()
        weight, x, out = self._matrices(tokens, outputs, inputs, out_is_fp16)
        status = self._library.cublasLtMatmulAlgoGetHeuristic(
            self._handle, self._product, weight, x, out, out, preference, _INT(_MOST_WAYS), found, ctypes.byref(count)
        )
        self._check("cublasLtMatmulPreferenceDestroy", preference)
        return [Way.from_buffer_copy(each.way) for each in found[: count.value] if not (status or each.status)]

    def gemm(
        self, way: Way, x: int, weight: int, out: int, *, tokens: int, outputs: int, inputs: int, out_is_fp16: bool,
        accumulate: bool,
    ) -> None:  # fmt: skip
        """Device addresses of dense matrices; the sizes are those that the way was found for."""
        one, added = ctypes.byref(self._factors, 4), ctypes.byref(self._factors, 4 * accumulate)
        weights, xs, outs = self._matrices(tokens, outputs, inputs, out_is_fp16)
        status = self._library.cublasLtMatmul(
            self._handle, self._product, one, _POINTER(weight), weights, _POINTER(x), xs,
            added, _POINTER(out), outs, _POINTER(out), outs,
            ctypes.byref(way), self._workspace, _SIZE(WORKSPACE_BYTES), self._stream,
        )  # fmt: skip
        raise_if("cublasLtMatmul", status)

    def close(self) -> None:
        if self._handle:
            for layout in self._layouts.values():
                self._library.cublasLtMatrixLayoutDestroy(layout)
            self._library.cublasLtMatmulDescDestroy(self._product)
            self._library.cublasLtDestroy(self._handle)
            self._handle = ctypes.c_void_p()

    def _matrices(self, tokens: int, outputs: int, inputs: int, out_is_fp16: bool) -> tuple[ctypes.c_void_p, ...]:
        """Of weight, x and out: column-major there, so that rows here are columns."""
        out = _R_16F if out_is_fp16 else _R_32F
        return (
            self._layout(_R_16F, inputs, outputs),
            self._layout(_R_16F, inputs, tokens),
            self._layout(out, outputs, tokens),
        )

    def _layout(self, kind: int, rows: int, columns: int) -> ctypes.c_void_p:
        key = kind, rows, columns
        if key not in self._layouts:
            sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
            self._layouts[key] = self._made("cublasLtMatrixLayoutCreate", _INT(kind), *sizes)
        return self._layouts[key]

    def _made(self, function: str, *args: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._check(function, ctypes.byref(made), *args)
        return made

    def _check(self, function: str, *args: Any) -> None:
        raise_if(function, getattr(self._library, function)(*args))


def open_cublaslt(stream: int, workspace: int) -> CuBlasLt | None:
    """None where the library is not there: then products go cuBLAS's own way."""
    try:
        return CuBlasLt(stream, workspace)
    except (DynamicLibNotFoundError, OSError):
        return None
