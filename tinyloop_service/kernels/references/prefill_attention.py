"""prefill_attention in NumPy: float32, page by page, with the kernel's rounding points.

Same names and order as kernels/prefill_attention.py, without the device.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.kernels.page_layout import PAGE_TOKENS
from tinyloop_service.kernels.references.decode_attention import Page, read_page

Array = NDArray[Any]


def prefill_attention(
    q: Array,
    pool: Array,
    tables: Array,
    layer: int,
    tiles: Array,
    a: Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    token_slot: Array | None = None,
    token_position: Array | None = None,
) -> None:
    """Writes the rows of `a` that are in a tile."""
    for slot, first, count, position, window, shared in tiles.tolist():
        slots, positions = np.full(count, slot), position + np.arange(count)
        if shared and token_slot is not None and token_position is not None:
            slots, positions = token_slot[first : first + count], token_position[first : first + count]
        for one in np.unique(slots):
            rows = first + np.flatnonzero(slots == one)
            queries = q[rows].reshape(len(rows), num_heads, -1).transpose(1, 0, 2).astype(np.float32)  # (H, n, D)
            state = _attend(queries, positions[slots == one], window, pool, tables[one, layer], num_kv_heads)
            a[rows] = (state.o / state.sum).transpose(1, 0, 2).reshape(len(rows), -1).astype(np.float16)


def _attend(queries: Array, positions: Array, window: int, pool: Array, pages: Array, num_kv_heads: int) -> _State:
    """Queries [H, n, D] of one sequence against its pages, in order."""
    state, repeat = _State(queries), len(queries) // num_kv_heads
    first_block = max(int(positions.min()) - window + 1, 0) // PAGE_TOKENS if window else 0
    for block in range(first_block, int(positions.max()) // PAGE_TOKENS + 1):
        page = read_page(pool[pages[block]], num_kv_heads)
        distance = positions[:, None] - np.arange(block * PAGE_TOKENS, (block + 1) * PAGE_TOKENS)
        seen = (distance >= 0) & ((distance < window) if window else True)
        arrays = (page.keys, page.values, page.key_scales, page.value_scales)
        keys, values, key_scales, value_scales = (np.repeat(array, repeat, axis=0) for array in arrays)
        state.add(Page(keys, values, key_scales, value_scales, page.weight_bits), seen)
    return state


class _State:
    """The online softmax of n queries per head."""

    def __init__(self, queries: Array) -> None:
        self.queries = queries  # (H, n, D)
        self.scale = np.float32(math.log2(math.e) / math.sqrt(queries.shape[-1]))
        self.o = np.zeros_like(queries)
        self.sum = np.zeros((*queries.shape[:2], 1), np.float32)
        self.top = np.full_like(self.sum, -np.inf)

    def add(self, page: Page, seen: Array) -> None:
        """page: of H heads; seen [n, 64]."""
        scores = np.where(seen, self.queries @ page.keys.transpose(0, 2, 1) * page.key_scales, -np.inf)
        top = np.maximum(self.top, scores.max(axis=-1, keepdims=True) * self.scale - np.float32(page.weight_bits))
        base = np.where(np.isneginf(top), np.float32(0), top)
        weights, factor = np.exp2(scores * self.scale - base), np.exp2(self.top - base)
        rounded = (weights * page.value_scales).astype(np.float16).astype(np.float32)
        self.o = self.o * factor + rounded @ page.values.transpose(0, 2, 1)
        self.sum = self.sum * factor + weights.sum(axis=-1, keepdims=True)
        self.top = top
