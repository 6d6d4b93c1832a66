"""pages in NumPy: same names and order as kernels/pages.py, without the device."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.kernels.page_layout import PAGE_TOKENS
from tinyloop_service.kernels.references.decode_attention import page_views
from tinyloop_service.kernels.references.int8_pages import int8_page

Array = NDArray[Any]


def clone(pool: Array, triples: Array, *, head_dim: int) -> None:
    if pool.dtype == np.int8:
        _clone_int8(pool, triples, head_dim)
        return
    num_kv_heads = pool.shape[1] // (2 * PAGE_TOKENS * head_dim)
    for source, target, num_tokens in triples:
        from_keys, from_values = page_views(pool[source], num_kv_heads)
        to_keys, to_values = page_views(pool[target], num_kv_heads)
        to_keys[:, :num_tokens] = from_keys[:, :num_tokens]
        to_values[:, :, :num_tokens] = from_values[:, :, :num_tokens]


def _clone_int8(pool: Array, triples: Array, head_dim: int) -> None:
    num_kv_heads = pool.shape[1] // (PAGE_TOKENS * (2 * head_dim + 4))
    for source, target, num_tokens in triples:
        taken, given = (int8_page(pool[page], num_kv_heads) for page in (target, source))
        taken.keys[:, :num_tokens] = given.keys[:, :num_tokens]
        values = taken.values
        values[:, :, :num_tokens] = given.values[:, :, :num_tokens]
        taken.put_values(values)
        taken.key_scales[:, :num_tokens] = given.key_scales[:, :num_tokens]
        taken.value_scales[:, :num_tokens] = given.value_scales[:, :num_tokens]


def zero(pool: Array, pages: Array) -> None:
    pool[pages] = 0


def poison(pool: Array, pages: Array) -> None:
    """In int8 levels of 127, and scales that are NaN: two bytes of 127."""
    pool[pages] = 127 if pool.dtype == np.int8 else np.nan
