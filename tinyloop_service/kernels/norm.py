"""The residual stream between two linears: launches kernels_cu/norm.cu.

In: the stream, what the last linear added, gains.  Out: the stream moved on in place, and the next linear's input.
Refuses arrays of another shape or type.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from tinyloop_service.kernels.device import Array, Device
from tinyloop_service.kernels.match import KernelArgumentError, match

InjectMode = Literal["none", "store", "add"]
INJECT_MODES: tuple[InjectMode, ...] = ("none", "store", "add")
THREADS = 256
_CHUNK = 4 * THREADS  # columns that a block holds in one register each
_PARTIALS = (0, 1, 2, 4, 8, 16)


def fold_norm(
    device: Device,
    x: Array,
    partials: Array | None,
    y: Array,
    *,
    eps: float,
    gain: Array | None,
    post_gain: Array | None = None,
    loop_gain: Array | None = None,
    inject: InjectMode = "none",
    injected: Array | None = None,
    dependent: bool = False,
) -> None:
    """Every row by itself, in float32, in this order:

    s = Σ partials;  x += rms(s)·post_gain, or s;  x = rms(x)·loop_gain;  x += injected;  y = rms(x)·gain, or x

    x          float32 [R, W]     in and out; W a multiple of 4
    partials   float32 [C, R, W]  C of 1, 2, 4, 8, 16, summed as a balanced tree; None: x is as it should be
    y          float16 [R, W]
    gains      float16 [W]; None: that norm is not taken
    injected   float32 [R, W]     "store": written, then added; "add": added
    """
    sizes = match(
        "fold_norm",
        x=(x, "float32", "R, W"),
        partials=(partials, "float32", "C, R, W"),
        y=(y, "float16", "R, W"),
        gain=(gain, "float16", "W"),
        post_gain=(post_gain, "float16", "W"),
        loop_gain=(loop_gain, "float16", "W"),
        injected=(injected, "float32", "R, W"),
    )
    num_partials = sizes.get("C", 0)
    if num_partials not in _PARTIALS:
        raise KernelArgumentError(f"fold_norm: {num_partials} partials, expected one of {_PARTIALS}")
    if (inject == "none") != (injected is None):
        raise KernelArgumentError(f"fold_norm: inject is {inject!r}, injected is {'not ' * (injected is None)}given")
    if sizes["W"] % 4:
        raise KernelArgumentError(f"fold_norm: x has {sizes['W']} columns, expected a multiple of 4")
    kernel = device.kernel("norm", "fold_norm", TL_CHUNKS=-(-sizes["W"] // _CHUNK))
    arguments = (
        *(x, partials, np.int32(num_partials), post_gain, loop_gain, np.int32(INJECT_MODES.index(inject)), injected),
        *(gain, y, np.int32(sizes["R"]), np.int32(sizes["W"]), np.float32(eps)),
    )
    device.launch(kernel, (sizes["R"], 1, 1), THREADS, arguments, dependent=dependent)
