"""Sequences in pages, for the tests of the attention kernels.

A `Sequences` holds a pool in which every page that no table names is NaN, tables of one cache layer among three, and
the same K and V as they would be in one piece.  Tokens past a sequence's length hold finite rubbish.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

PAGE = 64
LAYERS, LAYER = 3, 1


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
    rng: np.random.Generator = field(init=False)
    pool: Array = field(init=False)  # float16 [pages, 2·G·64·D]
    tables: Array = field(init=False)  # int32 [sequences, LAYERS, max_blocks]

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        blocks = [-(-length // PAGE) for length in self.lengths]
        self.max_blocks = self.max_blocks or max(blocks)
        own = sum(max(count - self.shared, 0) for count in blocks)
        pages = self.rng.permutation(2 * (self.shared + own) + 3).tolist()  # half of them nobody's
        self.pool = np.full((len(pages), 2 * self.kv_heads * PAGE * self.head_dim), np.nan, np.float16)
        self.tables = np.full((len(self.lengths), LAYERS, self.max_blocks), -1, np.int32)
        prefix = [pages.pop() for _ in range(self.shared)]
        for slot, count in enumerate(blocks):
            own_pages = [pages.pop() for _ in range(count - self.shared)]
            self.tables[slot, LAYER, :count] = (prefix + own_pages)[:count]
        for page in np.unique(self.tables[self.tables >= 0]):
            self.pool[page] = self.rng.standard_normal(self.pool.shape[1])
        for slot in range(len(self.lengths)):
            self.fill_unused(slot)

    def page(self, slot: int, block: int) -> tuple[Array, Array]:
        """K [G, 64, D] and transposed V [G, D, 64]: views."""
        keys, values = self.pool[self.tables[slot, LAYER, block]].reshape(2, self.kv_heads, -1)
        return keys.reshape(self.kv_heads, PAGE, -1), values.reshape(self.kv_heads, -1, PAGE)

    def fill_unused(self, slot: int) -> None:
        """Other rubbish past the end of the sequence."""
        used = self.lengths[slot] % PAGE
        if used and self.lengths[slot] // PAGE >= self.shared:
            keys, values = self.page(slot, self.lengths[slot] // PAGE)
            keys[:, used:] = 300 * self.rng.standard_normal(keys[:, used:].shape)
            values[:, :, used:] = 300 * self.rng.standard_normal(values[:, :, used:].shape)

    def whole(self, slot: int) -> tuple[Array, Array]:
        """K and V of a sequence, float64 [G, length, D]."""
        pages = [self.page(slot, block) for block in range(-(-self.lengths[slot] // PAGE))]
        keys = np.concatenate([keys for keys, _ in pages], axis=1)
        values = np.concatenate([values.transpose(0, 2, 1) for _, values in pages], axis=1)
        at = slice(0, self.lengths[slot])
        return keys[:, at].astype(np.float64), values[:, at].astype(np.float64)

    def queries(self, count: int) -> Array:
        """float16 [count, H·D]; scores spread over some ten powers of two."""
        return (2 * self.rng.standard_normal((count, self.heads * self.head_dim))).astype(np.float16)

    def exact(self, q: Array, slot: int, position: int, window: int) -> tuple[Array, Array]:
        """q [H·D] → its attention in float64 [H·D], and how far off the kernels may be, [H·D].

        Weights are rounded to fp16, 2^-11 of each, against a sum that is not: Σ w·|V|·2^-11.  The result is rounded
        once more.  Weights below 2^-14 of the largest of their page are off by up to 2^-25 of it, 2^-20 of V in
        all.  What fp32 adds is smaller by far; 2^-18 covers the exponents' and exp2's.
        """
        keys, values = (np.repeat(x, self.heads // self.kv_heads, axis=0) for x in self.whole(slot))
        at = np.arange(self.lengths[slot])
        seen = (at <= position) & ((at > position - window) if window else True)
        scores = np.einsum("hd,hpd->hp", q.reshape(self.heads, -1).astype(np.float64), keys) / np.sqrt(self.head_dim)
        scores[:, ~seen] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        result = np.einsum("hp,hpd->hd", weights, values)
        spread = np.einsum("hp,hpd->hd", weights, np.abs(values))
        tolerance = (2**-11 + 2**-18) * (spread + np.abs(result)) + 2**-20 * np.abs(values[:, seen]).max()
        return result.ravel(), tolerance.ravel()
