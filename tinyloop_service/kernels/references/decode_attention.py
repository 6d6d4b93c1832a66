"""decode_attention in NumPy: float32, with the kernel's rounding points, item by item.

Same names and order as kernels/decode_attention.py, without the device.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.kernels.page_layout import PAGE_TOKENS, QUAD_PAGES
from tinyloop_service.kernels.references.page_views import int8_page, page_views

Array = NDArray[Any]
Sums = tuple[Array, Array, Array]  # of pages: o [H, D], m and l [H]


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
    one = 1 if newest is None else 255  # what o is times
    queries = q.reshape(len(q), num_kv_heads, heads // num_kv_heads, head_dim).astype(np.float32)
    for nth, (slot, block, first, count, *_) in enumerate(items[: int(num_items[0])].tolist()):
        blocks = range(block, block + (QUAD_PAGES if nth < num_items[2] else 1))
        last = int(entries[first, 0])
        if newest is not None and count == 1 and position[last] // PAGE_TOKENS == block:
            stored = pool[tables[slot, layer, block]]
            page_views(stored, num_kv_heads).put(position[last] % PAGE_TOKENS, *newest[last])
        pages = [read_page(pool[tables[slot, layer, each]], num_kv_heads) for each in blocks]
        for row, ordinal in entries[first : first + count].tolist():
            sums = begin_sums(heads, head_dim)
            for each, page in zip(blocks, pages, strict=True):
                at = np.arange(each * PAGE_TOKENS, (each + 1) * PAGE_TOKENS)
                hidden = (at > position[row]) | ((at <= position[row] - window[row]) & (window[row] > 0))
                sums = fold(sums, *attend_page(queries[row], page, hidden))
            partial_o[row, :, ordinal], m, mass = sums
            ends_quad = blocks[-1] % QUAD_PAGES == QUAD_PAGES - 1
            partial_ml[row, :, ordinal, 0], partial_ml[row, :, ordinal, 1] = m, -mass if ends_quad else mass
    for row in np.flatnonzero(row_items):
        a[row] = merge(partial_o[row, :, : row_items[row]], partial_ml[row, :, : row_items[row]], one).ravel()


class Page(NamedTuple):
    """What is multiplied of a page, float32: K [G, 64, D] and transposed V [G, D, 64], halves or levels; the scales of
    both [G, 1, 64], 1 for halves; of levels, the largest power of 2 of a prompt's weight."""

    keys: Array
    values: Array
    key_scales: Array
    value_scales: Array
    weight_bits: int

    @property
    def has_levels(self) -> bool:
        return self.weight_bits > 0


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


def query_levels(q: Array) -> tuple[Array, Array]:
    """q [..., D], of halves → levels -127..127 [..., D] and what one is worth [..., 1], float32."""
    largest = np.maximum(np.abs(q).max(axis=-1, keepdims=True), np.float32(2**-8))
    factor = (np.float32(127) * (np.float32(1) / largest)).astype(np.float16).astype(np.float32)
    return np.rint(q * factor), np.float32(1) / factor


def weight_levels(weights: Array) -> tuple[Array, Array]:
    """weights [..., 64], with scales of V in them → levels 0..255 [..., 64] and what 255 are worth [..., 1], a power of
    two."""
    exponents = np.frexp(np.maximum(weights.max(axis=-1, keepdims=True), np.float32(2**-30)))[1]
    unit = np.ldexp(np.float32(1), exponents)
    return np.rint(weights.astype(np.float64) * (255 / unit)).astype(np.float32), unit


def attend_page(q: Array, page: Page, hidden: Array) -> Sums:
    """q [G, H/G, D] against a page: o [H, D], of levels 255 times what it is, m and l [H]."""
    scale: Array = np.full((1, 1, 1), math.log2(math.e) / math.sqrt(q.shape[-1]), np.float32)
    if page.has_levels:
        q, unit = query_levels(q)
        scale = scale * unit
    scores = q @ page.keys.transpose(0, 2, 1) * page.key_scales  # (G, H/G, 64)
    scores[..., hidden] = -np.inf
    m = np.ceil(scores.max(axis=-1, keepdims=True) * scale)
    weights = np.exp2(scores * scale - _base(m))
    masses = np.rint(weights * np.float32(2**18)) * np.float32(2**-18)  # sums are exact
    if page.has_levels:
        levels, worth = weight_levels(np.where(hidden, np.float32(0), weights * page.value_scales))
        o = levels @ page.values.transpose(0, 2, 1) * worth
    else:
        o = weights.astype(np.float16).astype(np.float32) @ page.values.transpose(0, 2, 1)
    return o.reshape(-1, q.shape[-1]), m.ravel(), masses.sum(axis=-1).ravel()


def begin_sums(heads: int, head_dim: int) -> Sums:
    """Of nothing."""
    return np.zeros((heads, head_dim), np.float32), np.full(heads, -np.inf, np.float32), np.zeros(heads, np.float32)


def fold(sums: Sums, o: Array, m: Array, mass: Array) -> Sums:
    """Those of some pages of a quad, and the next one's."""
    top = np.maximum(sums[1], m)
    before, after = np.exp2(sums[1] - _base(top)), np.exp2(m - _base(top))
    return before[:, None] * sums[0] + after[:, None] * o, top, before * sums[2] + after * mass


def merge(o: Array, ml: Array, one: int) -> Array:
    """o [H, splits, D], (m, l) [H, splits, 2], l negative at the end of a quad → [H, D], splits in ascending order; o
    counts by `one`."""
    heads, splits, head_dim = o.shape
    base = _base(ml[..., 0].max(axis=-1))
    numerator, denominator = np.zeros((heads, head_dim), np.float32), np.zeros(heads, np.float32)
    quad = begin_sums(heads, head_dim)
    for split in range(splits):
        quad = fold(quad, o[:, split], ml[:, split, 0], np.abs(ml[:, split, 1]))
        if split + 1 == splits or np.signbit(ml[0, split, 1]):
            factor = np.exp2(quad[1] - base)
            numerator += factor[:, None] * quad[0]
            denominator += factor * quad[2]
            quad = begin_sums(heads, head_dim)
    return (numerator / (denominator * np.float32(one))[:, None]).astype(np.float16)


def _base(top: Array) -> Array:
    return np.where(np.isneginf(top), np.float32(0), top)
