"""append in NumPy: same names and order as kernels/append.py, without the device."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.kernels.page_layout import PAGE_TOKENS
from tinyloop_service.kernels.references.page_views import page_views

Array = NDArray[Any]


def append_int8(
    kv: Array,
    position: Array,
    row_slot: Array,
    tables: Array,
    layer: int,
    pool: Array,
) -> None:
    for row in np.flatnonzero((position >= 0) & (row_slot >= 0)):
        block, place = divmod(int(position[row]), PAGE_TOKENS)
        page_views(pool[tables[row_slot[row], layer, block]], kv.shape[2]).put(place, *kv[row])
