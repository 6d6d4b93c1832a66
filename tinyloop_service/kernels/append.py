"""The newest token of every decoding row into its int8 page: launches kernels_cu/append.cu.

In: K and V of rows in fp16, as `linear_qkv_rows` leaves them.  Out: the pages are written on the device's stream.  The
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
    kv: Array,
    position: Array,
    row_slot: Array,
    tables: Array,
    layer: int,
    pool: Array,
    *,
    dependent: bool = False,
) -> None:
    """K and V of row r, kv[r], are coded and go to page tables[slot, layer, position / 64].

    kv         float16 [R, 2, G, D]
    position   int32 [R]                          absolute; negative: a padding row, for which nothing is written
    row_slot   int32 [R]                          negative: likewise
    tables     int32 [slots, max_layers, max_blocks]
    pool       int8 [pages, 64·G·(2·D + 4)]       no two rows' tokens in one page

    With `dependent`, positions, slots and tables must be older than the kernel before.
    """
    sizes = match(
        "append_int8",
        kv=(kv, "float16", "R, 2, G, D"),
        position=(position, "int32", "R"),
        row_slot=(row_slot, "int32", "R"),
        tables=(tables, "int32", "S, L, B"),
        pool=(pool, "int8", f"P, {PAGE_TOKENS}*G*(2*D + 4)"),
    )
    require("append_int8", sizes["D"] in (64, 128), f"head_dim is {sizes['D']}, expected 64 or 128")
    require("append_int8", 0 <= layer < sizes["L"], f"layer is {layer}, the tables have {sizes['L']}")
    vectors = sizes["R"] * 2 * sizes["G"]
    arguments: tuple[Argument, ...] = (
        *(kv, position, row_slot, tables, pool),
        *map(np.int32, (layer, sizes["R"], sizes["G"], sizes["L"], sizes["B"])),
    )
    kernel = device.kernel("append", "append_int8", TL_HEAD_DIM=sizes["D"])
    device.launch(kernel, (-(-vectors // _WARPS), 1, 1), _THREADS, arguments, dependent=dependent)
