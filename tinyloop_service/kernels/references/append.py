"""append in NumPy: same names and order as kernels/append.py, without the device."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.kernels.page_layout import PAGE_TOKENS
from tinyloop_service.kernels.references.decode_attention import page_views
from tinyloop_service.kernels.references.int8_pages import int8_page, put

Array = NDArray[Any]


def append_int8(
    scratch: Array,
    position: Array,
    row_slot: Array,
    tables: Array,
    layer: int,
    pool: Array,
    *,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    for row in np.flatnonzero((position >= 0) & (row_slot >= 0)):
        block, place = divmod(int(position[row]), PAGE_TOKENS)
        keys, values = page_views(scratch[row], num_kv_heads)
        page = int8_page(pool[tables[row_slot[row], layer, block]], num_kv_heads)
        put(page, place, keys[:, place], values[:, :, place])
