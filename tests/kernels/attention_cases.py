"""Sequences in pages, for the tests of the attention kernels.

A `Sequences` holds a pool in which every page that no table names is NaN (in int8 its scales are), tables of one cache
layer among three, and the same K and V as they would be in one piece.  Tokens past a sequence's length hold finite
rubbish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tinyloop_service.kernels.references.decode_attention import query_levels, read_page
from tinyloop_service.kernels.references.page_views import Int8Page, int8_page, page_views

Array = NDArray[Any]

PAGE = 64
LAYERS, LAYER = 3, 1
LEAST_SCALE, MOST_SCALE = 2.0**-17, 65504 / 127  # of int8
FORMS = pytest.mark.parametrize("int8", [False, True], ids=["fp16", "int8"])


@dataclass
class Sequences:
    """Sequence i has lengths[i] tokens, of which the first 64·shared lie in pages that all of them name."""

    lengths: list[int]
    heads: int
    kv_heads: int
    head_dim: int
    shared: int = 0
    max_blocks: int = 0
    seed: int = 0
    int8: bool = False
    rng: np.random.Generator = field(init=False)
    pool: Array = field(init=False)  # float16 [pages, 2·G·64·D] or int8 [pages, 64·G·(2·D + 4)]
    tables: Array = field(init=False)  # int32 [sequences, LAYERS, max_blocks]

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        blocks = [-(-length // PAGE) for length in self.lengths]
        self.max_blocks = self.max_blocks or max(blocks)
        own = sum(max(count - self.shared, 0) for count in blocks)
        pages = self.rng.permutation(2 * (self.shared + own) + 3).tolist()  # half of them nobody's
        self.pool = self._nobodys(len(pages))
        self.tables = np.full((len(self.lengths), LAYERS, self.max_blocks), -1, np.int32)
        prefix = [pages.pop() for _ in range(self.shared)]
        for slot, count in enumerate(blocks):
            own_pages = [pages.pop() for _ in range(count - self.shared)]
            self.tables[slot, LAYER, :count] = (prefix + own_pages)[:count]
        for page in np.unique(self.tables[self.tables >= 0]):
            self._fill(page, slice(None), 1.0)
        for slot in range(len(self.lengths)):
            self.fill_unused(slot)

    def _nobodys(self, num_pages: int) -> Array:
        head = 2 * self.kv_heads * PAGE
        if self.int8:
            return np.full((num_pages, head * (self.head_dim + 2)), 127, np.int8)  # two of them are a NaN
        return np.full((num_pages, head * self.head_dim), np.nan, np.float16)

    def _fill(self, page: int, tokens: slice, spread: float) -> None:
        """Anything; values are some `spread` large."""
        given = page_views(self.pool[page], self.kv_heads)
        values = given.values
        for array in (given.keys[:, tokens], values[:, :, tokens]):
            many = self.rng.standard_normal(array.shape)
            array[...] = np.clip(np.rint(42 * many), -127, 127) if self.int8 else spread * many
        given.put_values(values)
        if isinstance(given, Int8Page):
            for array in (given.key_scales[:, tokens], given.value_scales[:, tokens]):
                array[...] = spread / 42 * self.rng.uniform(0.5, 1.5, array.shape)

    def fill_unused(self, slot: int) -> None:
        """Other rubbish past the end of the sequence."""
        used = self.lengths[slot] % PAGE
        if used and self.lengths[slot] // PAGE >= self.shared:
            self._fill(self.tables[slot, LAYER, self.lengths[slot] // PAGE], slice(used, None), 300.0)

    def copy_last(self, count: int) -> None:
        """Sequence 0 ends `count` tokens into its first own page, and the others have copies of them in theirs."""
        pages = [page_views(self.pool[page], self.kv_heads) for page in self.tables[:, LAYER, self.shared]]
        for page in pages[1:]:
            page.copy(pages[0], count)

    def spoil_copies(self, count: int) -> None:
        """Of all but sequence 0, the first `count` tokens of the first own page become NaN."""
        nobodys = page_views(self._nobodys(1)[0], self.kv_heads)
        for page in self.tables[1:, LAYER, self.shared]:
            page_views(self.pool[page], self.kv_heads).copy(nobodys, count)

    def _decoded(self, page: int) -> tuple[Array, Array]:
        """K and V of a page as they are read, float64 [G, 64, D]."""
        keys, values, key_scales, value_scales, _ = read_page(self.pool[page], self.kv_heads)
        decoded = keys.transpose(0, 2, 1) * key_scales.astype(np.float64), values * value_scales.astype(np.float64)
        return decoded[0].transpose(0, 2, 1), decoded[1].transpose(0, 2, 1)

    def put_newest(self, places: Sequence[tuple[int, int]]) -> tuple[Array, Array]:
        """In int8 the token of each row, at (slot, position), becomes one that is the same in every call, and is coded
        in its page.  What it is before, float16 [rows, 2, G, D]; and a pool that lacks these tokens."""
        newest = np.full((len(places), 2, self.kv_heads, self.head_dim), np.nan, np.float16)
        pool = self.pool.copy()
        for row, (slot, position) in enumerate(places):
            if position < 0:
                continue
            newest[row] = np.random.default_rng((slot, position)).standard_normal(newest.shape[1:])
            page, place = self.tables[slot, LAYER, position // PAGE], position % PAGE
            int8_page(self.pool[page], self.kv_heads).put(place, *newest[row])
            without = int8_page(pool[page], self.kv_heads)
            without.keys[:, place], without.octets[:, place // 8, :, place % 8] = -128, -128
            without.key_scales[:, place], without.value_scales[:, place] = np.nan, np.nan
        return newest, pool

    def scale_values(self, *scales: float) -> None:
        """int8: every token's V scale becomes one of these."""
        for page in np.unique(self.tables[self.tables >= 0]):
            value_scales = int8_page(self.pool[page], self.kv_heads).value_scales
            value_scales[...] = self.rng.choice(scales, value_scales.shape)

    def whole(self, slot: int) -> tuple[Array, Array]:
        """K and V of a sequence, float64 [G, length, D]."""
        pages = [self._decoded(page) for page in self.tables[slot, LAYER, : -(-self.lengths[slot] // PAGE)]]
        keys, values = (np.concatenate(arrays, axis=1) for arrays in zip(*pages, strict=True))
        return keys[:, : self.lengths[slot]], values[:, : self.lengths[slot]]

    def queries(self, count: int) -> Array:
        """float16 [count, H·D]; scores spread over some ten powers of two."""
        return (2 * self.rng.standard_normal((count, self.heads * self.head_dim))).astype(np.float16)

    def exact(self, q: Array, slot: int, position: int, window: int) -> tuple[Array, Array]:
        """q [H·D] → its attention in float64 [H·D], and how far off the kernels may be, [H·D].

        Weights are rounded to fp16, 2^-11 of each, against a sum that is not: Σ w·|V|·2^-11.  The result is rounded
        once more.  Weights below 2^-14 of the largest of their page are off by up to 2^-25 of it, 2^-20 of V in
        all.  What fp32 adds is smaller by far; 2^-18 covers the exponents' and exp2's.  In int8 64·w·(scale of V)
        is rounded, which below 2^-14 is off by up to 2^-25: 2^-31 of w·scale, times 64 levels of at most 127.
        """
        scores, values, seen = self._scores(q.astype(np.float64), slot, position, window)
        weights = np.exp2(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        result = np.einsum("hp,hpd->hd", weights, values)
        spread = np.einsum("hp,hpd->hd", weights, np.abs(values))
        least = 2**-31 * PAGE * 127 if self.int8 else 2**-20 * np.abs(values[:, seen]).max()
        tolerance = (2**-11 + 2**-18) * (spread + np.abs(result)) + least
        return result.ravel(), tolerance.ravel()

    def exact_of_levels(self, q: Array, slot: int, position: int, window: int) -> tuple[Array, Array]:
        """As `exact`, of int8 pages and a token that is decoded: q are levels, and so are the weights of a page.

        Each weight, scale of V included, is off by up to half of what a level of its page is worth, times levels of V.
        What fp32 adds is smaller by far: 2^-16 of Σ w·|V| covers scores of a hundred powers of two.
        """
        levels, unit = query_levels(q.reshape(self.heads, -1).astype(np.float32))
        scores, values, seen = self._scores((levels.astype(np.float64) * unit).ravel(), slot, position, window)
        weights = np.exp2(scores - scores.max(axis=1, keepdims=True))
        mass = weights.sum(axis=1, keepdims=True)
        result = np.einsum("hp,hpd->hd", weights, values) / mass
        tolerance = 2**-16 * np.einsum("hp,hpd->hd", weights, np.abs(values)) / mass + 2**-10 * np.abs(result) + 2**-24
        for block in range(-(-self.lengths[slot] // PAGE)):
            page = slice(block * PAGE, min((block + 1) * PAGE, self.lengths[slot]))
            if not seen[page].any():
                continue
            stored = int8_page(self.pool[self.tables[slot, LAYER, block]], self.kv_heads)
            of_page = seen[page].nonzero()[0]
            value_levels = np.abs(stored.values[:, :, of_page].astype(np.float64)).sum(axis=2)  # (G, D)
            value_scales = np.repeat(stored.value_scales.astype(np.float64), self.heads // self.kv_heads, axis=0)
            largest = (weights[:, page][:, of_page] * value_scales[:, of_page]).max(axis=1)  # (H,)
            value_levels = np.repeat(value_levels, self.heads // self.kv_heads, axis=0)
            tolerance += 0.501 * (2 * largest / 255)[:, None] * value_levels / mass
        return result.ravel(), tolerance.ravel()

    def _scores(self, q: Array, slot: int, position: int, window: int) -> tuple[Array, Array, Array]:
        """q [H·D] → exponents of 2 [H, length], −inf where not seen; V [H, length, D]; whether a token is seen."""
        keys, values = (np.repeat(x, self.heads // self.kv_heads, axis=0) for x in self.whole(slot))
        at = np.arange(self.lengths[slot])
        seen = (at <= position) & ((at > position - window) if window else True)
        scores = np.einsum("hd,hpd->hp", q.reshape(self.heads, -1), keys) * np.log2(np.e) / np.sqrt(self.head_dim)
        scores[:, ~seen] = -np.inf
        return scores, values, seen
