"""Launches of kernels_cu/embed.cu: token ids to rows of the residual stream, and rows by index."""

from __future__ import annotations

import numpy as np

from tinyloop_service.kernels.device import Array, Device
from tinyloop_service.kernels.match import match, require

_THREADS, _HALVES, _FLOATS = 256, 8, 4


def embed(
    device: Device,
    table: Array,
    row_slot: Array,
    token: Array,
    length: Array,
    x: Array,
    position: Array,
    *,
    dependent: bool = False,
) -> None:
    """x[r] = table[token[slot]], position[r] = length[slot] with slot = row_slot[r].

    table fp16 [V, d], d a multiple of 8; row_slot int32 [R], −1 for padding: zeros and position −1; token and length
    int32 [S], a negative token likewise; x fp32 [R, d]; position int32 [R].
    """
    sizes = match(
        "embed",
        table=(table, "float16", "V, d"),
        row_slot=(row_slot, "int32", "R"),
        token=(token, "int32", "S"),
        length=(length, "int32", "S"),
        x=(x, "float32", "R, d"),
        position=(position, "int32", "R"),
    )
    _require_width("embed", sizes["d"])
    args = (table, row_slot, token, length, x, position, np.int32(sizes["d"]))
    device.launch(device.kernel("embed", "embed"), (sizes["R"], 1, 1), _THREADS, args, dependent=dependent)


def embed_prompt(device: Device, table: Array, ids: Array, x: Array, *, dependent: bool = False) -> None:
    """x[t] = table[ids[t]]; a negative id reads row 0.

    table fp16 [V, d], d a multiple of 8; ids int32 [T]; x fp32 [T, d].
    """
    sizes = match("embed_prompt", table=(table, "float16", "V, d"), ids=(ids, "int32", "T"), x=(x, "float32", "T, d"))
    _require_width("embed_prompt", sizes["d"])
    args = (table, ids, x, np.int32(sizes["d"]))
    device.launch(device.kernel("embed", "embed_prompt"), (sizes["T"], 1, 1), _THREADS, args, dependent=dependent)


def gather_rows(device: Device, x: Array, index: Array, out: Array, *, dependent: bool = False) -> None:
    """out[i] = x[index[i]].  x fp32 [T, E], E a multiple of 4; index int32 [n]; out fp32 [n, E], apart from x."""
    sizes = match("gather_rows", x=(x, "float32", "T, E"), index=(index, "int32", "n"), out=(out, "float32", "n, E"))
    require("gather_rows", sizes["E"] % _FLOATS == 0, f"E is {sizes['E']}, expected a multiple of {_FLOATS}")
    args = (x, index, out, np.int32(sizes["E"] // _FLOATS))
    device.launch(device.kernel("embed", "gather_rows"), (sizes["n"], 1, 1), _THREADS, args, dependent=dependent)


def _require_width(operation: str, width: int) -> None:
    require(operation, width % _HALVES == 0, f"d is {width}, expected a multiple of {_HALVES}")
