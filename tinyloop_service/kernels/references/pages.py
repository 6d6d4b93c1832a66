"""pages in NumPy: same names and order as kernels/pages.py, without the device."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.kernels.references.decode_attention import PAGE_TOKENS, page_views

Array = NDArray[Any]


def clone(pool: Array, triples: Array, *, head_dim: int) -> None:
    num_kv_heads = pool.shape[1] // (2 * PAGE_TOKENS * head_dim)
    for source, target, num_tokens in triples:
        from_keys, from_values = page_views(pool[source], num_kv_heads)
        to_keys, to_values = page_views(pool[target], num_kv_heads)
        to_keys[:, :num_tokens] = from_keys[:, :num_tokens]
        to_values[:, :, :num_tokens] = from_values[:, :, :num_tokens]


def zero(pool: Array, pages: Array) -> None:
    pool[pages] = 0


def poison(pool: Array, pages: Array) -> None:
    pool[pages] = np.nan
