"""Launch of kernels_cu/swiglu.cu: the gated activation of prompt tokens."""

from __future__ import annotations

import numpy as np

from tinyloop_service.kernels.device import Array, Device
from tinyloop_service.kernels.match import match, require

_THREADS, _VECTOR = 256, 8


def swiglu(device: Device, gu: Array, h: Array, *, dependent: bool = False) -> None:
    """h = silu(gate) · up.  gu fp16 [T, 2·ff]: gate, then up; h fp16 [T, ff]; ff a multiple of 8."""
    sizes = match("swiglu", gu=(gu, "float16", "T, 2*F"), h=(h, "float16", "T, F"))
    require("swiglu", sizes["F"] % _VECTOR == 0, f"ff is {sizes['F']}, expected a multiple of {_VECTOR}")
    if sizes["T"]:
        grid = (-(-sizes["F"] // (_VECTOR * _THREADS)), sizes["T"], 1)
        device.launch(
            device.kernel("swiglu", "swiglu"), grid, _THREADS, (gu, h, np.int32(sizes["F"])), dependent=dependent
        )
