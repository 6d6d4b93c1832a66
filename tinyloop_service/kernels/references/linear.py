"""Decode linears in NumPy: products in float64, epilogues in float32, rounded where the kernels round.

Same names and order as kernels/linear.py, without the device; `weight` is dense, float32 [N, K], rows in their own
order (q, k, v; gate, up).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.kernels.pack import Pairing
from tinyloop_service.kernels.page_layout import PAGE_TOKENS
from tinyloop_service.kernels.references.page_views import page_views

Array = NDArray[Any]


def linear_qkv(
    weight: Array,
    y: Array,
    position: Array,
    row_slot: Array,
    tables: Array,
    layer: int,
    pool: Array,
    cos: Array,
    sin: Array,
    q: Array | None,
    *,
    num_kv_heads: int,
    pairing: Pairing = "half",
) -> None:
    """Writes q and the pages of rows that are not padding; of q alone (no K/V heads) or K and V alone (no q) that."""
    head_dim = 2 * cos.shape[1]
    heads = product(weight, y).reshape(len(y), -1, head_dim)  # (R, H + 2G, D)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    for row in np.flatnonzero((position >= 0) & (row_slot >= 0)):
        at = position[row]
        turned = turn(heads[row, : num_heads + num_kv_heads], cos[at], sin[at], pairing).astype(np.float16)
        if q is not None:
            q[row] = turned[:num_heads].ravel()
        if not num_kv_heads:
            continue
        page = page_views(pool[tables[row_slot[row], layer, at // PAGE_TOKENS]], num_kv_heads)
        page.put(at % PAGE_TOKENS, turned[num_heads:], heads[row, num_heads + num_kv_heads :].astype(np.float16))


def linear_qkv_rows(
    weight: Array,
    y: Array,
    position: Array,
    kv: Array,
    cos: Array,
    sin: Array,
    q: Array,
    *,
    pairing: Pairing = "half",
) -> None:
    """Writes q and kv of rows that are not padding."""
    num_kv_heads, head_dim = kv.shape[2:]
    heads = product(weight, y).reshape(len(y), -1, head_dim)  # (R, H + 2G, D)
    for row in np.flatnonzero(position >= 0):
        at = position[row]
        turned = turn(heads[row, :-num_kv_heads], cos[at], sin[at], pairing).astype(np.float16)
        q[row] = turned[:-num_kv_heads].ravel()
        kv[row] = turned[-num_kv_heads:], heads[row, -num_kv_heads:].astype(np.float16)


def linear_gate_up(weight: Array, y: Array, h: Array) -> None:
    gate, up = np.split(product(weight, y), 2, axis=1)
    h[:] = (gate / (1 + np.exp(-gate)) * up).astype(np.float16)


def linear_logits(weight: Array, y: Array, logits: Array) -> None:
    logits[:] = 0
    logits[:, : len(weight)] = product(weight, y)


def product(weight: Array, y: Array) -> Array:
    """y · weightᵀ, float32 [R, N]: what partials add up to."""
    return (y.astype(np.float64) @ weight.astype(np.float64).T).astype(np.float32)


def turn(heads: Array, cos: Array, sin: Array, pairing: Pairing) -> Array:
    """RoPE of [heads, D] by the angles of one position, cos and sin [D/2]."""
    half = heads.shape[1] // 2
    first = slice(0, half) if pairing == "half" else slice(0, None, 2)
    second = slice(half, None) if pairing == "half" else slice(1, None, 2)
    turned = np.empty_like(heads)
    turned[:, first] = heads[:, first] * cos - heads[:, second] * sin
    turned[:, second] = heads[:, second] * cos + heads[:, first] * sin
    return turned
