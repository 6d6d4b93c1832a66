"""rope in NumPy: float32, products and sums rounded one by one, fp16 or int8's coding at the end.

Same names and order as kernels/rope.py, without the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.kernels.page_layout import PAGE_TOKENS
from tinyloop_service.kernels.references.page_views import page_views

Array = NDArray[Any]


def rope(
    qkv: Array,
    token_slot: Array,
    token_position: Array,
    cos: Array,
    sin: Array,
    tables: Array,
    layer: int,
    pool: Array,
    q: Array,
    *,
    num_kv_heads: int,
    pairing: str,
) -> None:
    """Writes q, and the tokens' K and V to their pages.  Tokens with a negative slot are left out."""
    head_dim = 2 * cos.shape[1]
    num_heads = q.shape[1] // head_dim
    for token in np.flatnonzero(token_slot >= 0):
        heads = qkv[token].reshape(-1, head_dim)  # (H + 2G, D)
        position = int(token_position[token])
        turned = _turn(heads[:-num_kv_heads].astype(np.float32), cos[position], sin[position], pairing)
        q[token] = turned[:num_heads].ravel()
        page = pool[tables[token_slot[token], layer, position // PAGE_TOKENS]]
        keys, values = turned[num_heads:], heads[-num_kv_heads:]
        page_views(page, num_kv_heads).put(position % PAGE_TOKENS, keys, values)


def rope_queries(
    q_in: Array, token_slot: Array, token_position: Array, cos: Array, sin: Array, q: Array, *, pairing: str
) -> None:
    """Writes q.  Tokens with a negative slot are left out."""
    for token in np.flatnonzero(token_slot >= 0):
        heads = q_in[token].reshape(-1, 2 * cos.shape[1]).astype(np.float32)
        q[token] = _turn(heads, cos[token_position[token]], sin[token_position[token]], pairing).ravel()


def rope_keys_values(
    kv: Array,
    token_slot: Array,
    token_position: Array,
    cos: Array,
    sin: Array,
    tables: Array,
    layer: int,
    pool: Array,
    *,
    num_kv_heads: int,
    pairing: str,
) -> None:
    """Writes the tokens' K and V to their pages: `rope` without a q head."""
    q = np.empty((len(kv), 0), np.float16)
    arguments = kv, token_slot, token_position, cos, sin, tables, layer, pool, q
    rope(*arguments, num_kv_heads=num_kv_heads, pairing=pairing)


def _turn(x: Array, cos: Array, sin: Array, pairing: str) -> Array:
    """x [heads, D], cos and sin [D/2] → float32 [heads, D]."""
    half = x.shape[1] // 2
    first, second = (slice(0, half), slice(half, None)) if pairing == "half" else (slice(0, None, 2), slice(1, None, 2))
    turned = np.empty(x.shape, np.float32)
    turned[:, first] = x[:, first] * cos - x[:, second] * sin
    turned[:, second] = x[:, second] * cos + x[:, first] * sin
    return turned
