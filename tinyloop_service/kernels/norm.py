"""The residual stream between two linears: launches kernels_cu/norm.cu, or goes into a linear as its input.

In: the stream, what the last linear added, gains.  Out: the stream moved on, and the next linear's input.
Refuses arrays of another shape or type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tinyloop_service.kernels.columns import require_columns
from tinyloop_service.kernels.cut import block_rows
from tinyloop_service.kernels.device import Argument, Array, Device
from tinyloop_service.kernels.match import KernelArgumentError, match

InjectMode = Literal["none", "store", "add"]
INJECT_MODES: tuple[InjectMode, ...] = ("none", "store", "add")
THREADS = 256
FOLD_ROWS = 4  # a linear can fold at most so many rows itself
_CHUNK = 4 * THREADS  # columns that a block holds in one register each
_PARTIALS = (0, 1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fold:
    """Every row by itself, in float32, in this order:

    s = Σ partials;  x += rms(s)·post_gain, or s;  x = rms(x)·loop_gain;  x += injected;  y = rms(x)·gain, or x

    Given to a linear in place of y, for up to FOLD_ROWS rows: it makes y itself, with the same bits as fold_norm, which
    saves a launch.
    """

    x: Array  # float32 [R, W], W a multiple of 4
    x_out: Array | None  # float32 [R, W], what x becomes.  fold_norm: x itself, None: as it is; a linear: other memory
    partials: (
        Array | None
    )  # float32 [C, R, W], C of 1, 2, 4, 8, 16, summed as a balanced tree; None: x is as it should be
    eps: float
    gain: Array | None  # float16 [W], like the other gains; None: that norm is not taken
    post_gain: Array | None = None
    loop_gain: Array | None = None
    inject: InjectMode = "none"
    injected: Array | None = None  # float32 [R, W]; "store": written, then added; "add": added

    def check(self, operation: str) -> dict[str, int]:
        """Sizes R, W and C."""
        sizes = match(
            operation,
            x=(self.x, "float32", "R, W"),
            x_out=(self.x_out, "float32", "R, W"),
            partials=(self.partials, "float32", "C, R, W"),
            gain=(self.gain, "float16", "W"),
            post_gain=(self.post_gain, "float16", "W"),
            loop_gain=(self.loop_gain, "float16", "W"),
            injected=(self.injected, "float32", "R, W"),
        )
        if sizes.setdefault("C", 0) not in _PARTIALS:
            raise KernelArgumentError(f"{operation}: {sizes['C']} partials, expected one of {_PARTIALS}")
        if (self.inject == "none") != (self.injected is None):
            given = "not given" if self.injected is None else "given"
            raise KernelArgumentError(f"{operation}: inject is {self.inject!r}, injected is {given}")
        if sizes["W"] % 4:
            raise KernelArgumentError(f"{operation}: x has {sizes['W']} columns, expected a multiple of 4")
        return sizes

    def arguments(self, num_partials: int) -> tuple[Argument, ...]:
        """As the kernels take them, x first and eps last."""
        gains = (self.post_gain, self.loop_gain, self.gain)
        inject = np.int32(INJECT_MODES.index(self.inject))
        stream = (self.x, self.x_out, self.partials, np.int32(num_partials))
        return (*stream, *gains, inject, self.injected, np.float32(self.eps))


def num_chunks(width: int) -> int:
    """TL_CHUNKS for rows of this width."""
    return -(-width // _CHUNK)


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
    columns: bool = False,
    dependent: bool = False,
) -> None:
    """x moves on in place and y follows from it, as Fold says.

    y float16 [R, W]; with `columns` the same memory in columns, if R fits (columns.py).
    """
    norm_only = partials is None and loop_gain is None and inject == "none" and gain is not None
    fold = Fold(
        x=x,
        x_out=None if norm_only else x,
        partials=partials,
        eps=eps,
        gain=gain,
        post_gain=post_gain,
        loop_gain=loop_gain,
        inject=inject,
        injected=injected,
    )
    sizes = fold.check("fold_norm")
    match("fold_norm", sizes, y=(y, "float16", "R, W"))
    if columns:
        require_columns("fold_norm", "y", sizes["R"], sizes["W"])
    defines = {"TL_CHUNKS": num_chunks(sizes["W"]), "TL_NORM_ONLY": int(norm_only), "TL_COLUMNS": int(columns)}
    kernel = device.kernel("norm", "fold_norm", **defines)
    counts = (np.int32(n) for n in (sizes["R"], sizes["W"], block_rows(sizes["R"])))
    arguments = (*fold.arguments(sizes["C"]), y, *counts)
    device.launch(kernel, (sizes["R"], 1, 1), THREADS, arguments, dependent=dependent)
