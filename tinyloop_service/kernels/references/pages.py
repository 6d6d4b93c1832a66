"""pages in NumPy: same names and order as kernels/pages.py, without the device."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.kernels.page_layout import PAGE_TOKENS
from tinyloop_service.kernels.references.page_views import page_views

Array = NDArray[Any]


def clone(pool: Array, triples: Array, *, head_dim: int) -> None:
    token_elements = 2 * head_dim + (4 if pool.dtype == np.int8 else 0)  # of a head
    num_kv_heads = pool.shape[1] // (PAGE_TOKENS * token_elements)
    for source, target, num_tokens in triples:
        page_views(pool[target], num_kv_heads).copy(page_views(pool[source], num_kv_heads), num_tokens)


def zero(pool: Array, pages: Array) -> None:
    pool[pages] = 0


def poison(pool: Array, pages: Array) -> None:
    """In int8 levels of 127, and scales that are NaN: two bytes of 127."""
    pool[pages] = 127 if pool.dtype == np.int8 else np.nan
