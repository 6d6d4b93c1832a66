"""The newest token of every decoding row into its int8 page: launches kernels_cu/append.cu.

In: scratch pages in fp16 that `linear_qkv` wrote, one a row.  Out: the pages are written on the device's stream.  The
grid depends on shapes alone, so a captured launch stays right when the arrays' contents change.  Refuses arrays of
another shape or type.  Not checked, for that would be a read: that pages, slots and positions exist.
"""

from __future__ import annotations

import numpy as np

from tinyloop_service.kernels.device import Argument, Array, Device
from tinyloop_service.kernels.match import match, require
from tinyloop_service.kernels.page_layout import PAGE_TOKENS

_THREADS = 128
_WARPS = _THREADS // 32  # each codes one vector


def append_int8(
    device: Device,
    scratch: Array,
    position: Array,
    row_slot: Array,
    tables: Array,
    layer: int,
    pool: Array,
    *,
    num_kv_heads: int,
    head_dim: int,
    dependent: bool = False,
) -> None:
    """K and V of row r, at place position[r] % 64 of scratch page r, go to page tables[slot, layer, position / 64].

    scratch    float16 [R, 2·G·64·D]              G = num_kv_heads
    position   int32 [R]                          absolute; negative: a padding row, for which nothing is written
    row_slot   int32 [R]                          negative: likewise
    tables     int32 [slots, max_layers, max_blocks]
    pool       int8 [pages, 64·G·(2·D + 4)]

    With `dependent`, positions, slots and tables must be older than the kernel before.
    """
    sizes = match(
        "append_int8",
        {"G": num_kv_heads, "D": head_dim},
        scratch=(scratch, "float16", f"R, 2*G*{PAGE_TOKENS}*D"),
        position=(position, "int32", "R"),
        row_slot=(row_slot, "int32", "R"),
        tables=(tables, "int32", "S, L, B"),
        pool=(pool, "int8", f"P, {PAGE_TOKENS}*G*(2*D + 4)"),
    )
    require("append_int8", head_dim in (64, 128), f"head_dim is {head_dim}, expected 64 or 128")
    require("append_int8", 0 <= layer < sizes["L"], f"layer is {layer}, the tables have {sizes['L']}")
    vectors = sizes["R"] * 2 * num_kv_heads
    arguments: tuple[Argument, ...] = (
        *(scratch, position, row_slot, tables, pool),
        *map(np.int32, (layer, sizes["R"], num_kv_heads, sizes["L"], sizes["B"])),
    )
    kernel = device.kernel("append", "append_int8", TL_HEAD_DIM=head_dim)
    device.launch(kernel, (-(-vectors // _WARPS), 1, 1), _THREADS, arguments, dependent=dependent)
