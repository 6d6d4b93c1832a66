"""Launch of kernels_cu/swiglu.cu: the gated activation of prompt tokens."""

from __future__ import annotations

import numpy as np

from tinyloop_service.kernels.device import Array, Device
from tinyloop_service.kernels.match import match, require

_THREADS, _VECTOR, _TOKENS = 256, 8, 2


def swiglu(device: Device, gu: Array, h: Array, *, dependent: bool = False) -> None:
    """h = silu(gate) · up.  gu fp16 [T, 2·ff]: gate, then up; h fp16 [T, ff]; ff a multiple of 8."""
    sizes = match("swiglu", gu=(gu, "float16", "T, 2*F"), h=(h, "float16", "T, F"))
    require("swiglu", sizes["F"] % _VECTOR == 0, f"ff is {sizes['F']}, expected a multiple of {_VECTOR}")
    grid = (-(-sizes["F"] // (_VECTOR * _THREADS)), -(-sizes["T"] // _TOKENS), 1)
    kernel = device.kernel("swiglu", "swiglu", TL_TOKENS=_TOKENS)
    device.launch(kernel, grid, _THREADS, (gu, h, np.int32(sizes["F"]), np.int32(sizes["T"])), dependent=dependent)
