"""decode_attention in NumPy: float32, with the kernel's rounding points, item by item.

Same names and order as kernels/decode_attention.py, without the device.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.kernels.page_layout import PAGE_TOKENS
from tinyloop_service.kernels.references.page_views import int8_page, page_views

Array = NDArray[Any]


def decode_attention(
    q: Array,
    pool: Array,
    newest: Array | None,
    tables: Array,
    layer: int,
    items: Array,
    num_items: Array,
    entries: Array,
    row_items: Array,
    position: Array,
    window: Array,
    partial_o: Array,
    partial_ml: Array,
    a: Array,
    *,
    num_kv_heads: int,
) -> None:
    """Writes `a`, the partials on the way there, and in int8 the rows' tokens to their pages."""
    heads, head_dim = partial_o.shape[1], partial_o.shape[3]
    queries = q.reshape(len(q), num_kv_heads, heads // num_kv_heads, head_dim).astype(np.float32)
    for slot, block, first, count, *_ in items[: int(num_items[0])].tolist():  # the others only save reading
        stored, last = pool[tables[slot, layer, block]], int(entries[first, 0])
        if newest is not None and count == 1 and position[last] // PAGE_TOKENS == block:
            page_views(stored, num_kv_heads).put(position[last] % PAGE_TOKENS, *newest[last])
        page = read_page(stored, num_kv_heads)
        for row, ordinal in entries[first : first + count].tolist():
            at = np.arange(block * PAGE_TOKENS, (block + 1) * PAGE_TOKENS)
            hidden = (at > position[row]) | ((at <= position[row] - window[row]) & (window[row] > 0))
            o, m, total = attend_page(queries[row], page, hidden)
            partial_o[row, :, ordinal] = o.reshape(heads, head_dim)
            partial_ml[row, :, ordinal, 0], partial_ml[row, :, ordinal, 1] = m.ravel(), total.ravel()
    for row in np.flatnonzero(row_items):
        a[row] = merge(partial_o[row, :, : row_items[row]], partial_ml[row, :, : row_items[row]]).ravel()


class Page(NamedTuple):
    """What is multiplied of a page, float32: K [G, 64, D] and transposed V [G, D, 64], halves or levels; the scales of
    both [G, 1, 64], 1 for halves; the largest power of 2 of a weight."""

    keys: Array
    values: Array
    key_scales: Array
    value_scales: Array
    weight_bits: int


def read_page(page: Array, num_kv_heads: int) -> Page:
    """Of a page of a float16 or int8 pool."""
    if page.dtype == np.int8:
        given = int8_page(page, num_kv_heads)
        arrays = given.keys, given.values, given.key_scales[:, None], given.value_scales[:, None]
        keys, values, key_scales, value_scales = (array.astype(np.float32) for array in arrays)
        return Page(keys, values, key_scales, value_scales, 6)
    halves = page_views(page, num_kv_heads)
    ones = np.ones((num_kv_heads, 1, PAGE_TOKENS), np.float32)
    return Page(halves.keys.astype(np.float32), halves.values.astype(np.float32), ones, ones, 0)


def attend_page(q: Array, page: Page, hidden: Array) -> tuple[Array, Array, Array]:
    """q [G, H/G, D] against a page: o [G, H/G, D], m and l [G, H/G]."""
    scale = np.float32(math.log2(math.e) / math.sqrt(q.shape[-1]))
    scores = q @ page.keys.transpose(0, 2, 1) * page.key_scales  # (G, H/G, 64)
    scores[..., hidden] = -np.inf
    m = scores.max(axis=-1) * scale - np.float32(page.weight_bits)
    weights = np.exp2(scores * scale - _base(m)[..., None])
    o = (weights * page.value_scales).astype(np.float16).astype(np.float32) @ page.values.transpose(0, 2, 1)
    return o, m, weights.sum(axis=-1)


def merge(o: Array, ml: Array) -> Array:
    """o [H, splits, D], (m, l) [H, splits, 2] → [H, D], splits in ascending order."""
    factor = np.exp2(ml[..., 0] - _base(ml[..., 0].max(axis=-1))[..., None])  # (H, splits)
    numerator, denominator = np.zeros_like(o[:, 0]), np.zeros_like(ml[:, 0, 0])
    for split in range(o.shape[1]):
        numerator += factor[:, split, None] * o[:, split]
        denominator += factor[:, split] * ml[:, split, 1]
    return (numerator / denominator[:, None]).astype(np.float16)


def _base(top: Array) -> Array:
    return np.where(np.isneginf(top), np.float32(0), top)
