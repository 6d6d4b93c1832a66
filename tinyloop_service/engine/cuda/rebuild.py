"""The active form of a prefix out of what is stored of it, as few large products.

A distinct block makes K and V of h with the same weights in all its cache layers, so a prefix's pages of all loops are
rows of one product, as many at a time as a prompt pass has.  There a cache layer is a sequence of its own:
the device's page tables [slots][layers][blocks], which name the new pages before anything else, are read as [slots ·
layers][1][blocks].

    pages    by distinct block, then by cache layer, then by block
    rows     64 of each page; those that hold no token belong to no sequence

In: a prefix, and where its pages are stored.  Out: what a graph of its shape reads, in one vector.  Refuses to know how
K and V are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from tinyloop_service.engine.api import PAGE_TOKENS
from tinyloop_service.engine.cuda.sequences import Ints, Sequence
from tinyloop_service.engine.cuda.staging import Aside, Staging
from tinyloop_service.engine.spec import BlockKind, ModelSpec
from tinyloop_service.kernels.device import Array

DistinctBlock = tuple[BlockKind, int]
_PADDING = -1


@dataclass(frozen=True, slots=True)
class RebuildShape:
    """Rebuilds of one shape differ in the contents of their tables alone."""

    loops: int
    num_blocks: int  # of 64 tokens

    def num_pages(self, spec: ModelSpec) -> int:
        return spec.cache_layers(self.loops) * self.num_blocks

    def batches(self, spec: ModelSpec, max_pages: int) -> Iterator[tuple[DistinctBlock, slice]]:
        """Pages that are made as one: of one distinct block, at most `max_pages`."""
        end = 0
        for block, layers in layers_of_blocks(spec, self.loops).items():
            begin, end = end, end + len(layers) * self.num_blocks
            yield from ((block, slice(at, min(at + max_pages, end))) for at in range(begin, end, max_pages))


@dataclass(frozen=True, slots=True)
class RebuildTables:
    """Views of an int32 vector, the host's or the device's."""

    slots: Any  # [pages, 64]: of the cache layer; −1 where there is no token
    positions: Any  # [pages, 64]
    places: Any  # [pages]
    named: Any  # [pages, 2]: (index, slab), of the arena's words

    @staticmethod
    def words(num_pages: int) -> int:
        return num_pages * (2 * PAGE_TOKENS + 3)

    @classmethod
    def cut(cls, words: Array | Ints, num_pages: int) -> RebuildTables:
        """From the beginning of `words`."""
        rows = num_pages * PAGE_TOKENS
        slots, positions = (words[at : at + rows].reshape(num_pages, PAGE_TOKENS) for at in (0, rows))
        named = words[2 * rows : 2 * rows + 2 * num_pages].reshape(num_pages, 2)
        return cls(slots, positions, words[2 * rows + 2 * num_pages : cls.words(num_pages)], named)


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Of one prefix."""

    shape: RebuildShape
    words: Aside  # as RebuildTables cuts them


class RebuildPlan:
    """For one model, with page tables of `max_blocks` blocks."""

    def __init__(self, spec: ModelSpec, max_blocks: int) -> None:
        self._spec, self._max_blocks = spec, max_blocks
        self._orders: dict[int, Ints] = {}  # cache layers as pages are made, by loops

    def pages(self, sequence: Sequence) -> Ints:
        """Ids of its own pages as they are made, [layers, blocks]."""
        if sequence.loops not in self._orders:
            layers = layers_of_blocks(self._spec, sequence.loops).values()
            self._orders[sequence.loops] = np.array([*chain.from_iterable(layers)], np.int32)
        order = self._orders[sequence.loops]
        return np.array(sequence.blocks, np.int32).reshape(-1, len(order)).T[order]

    def rebuild(self, sequence: Sequence, index: Ints, places: Ints, slabs: Ints, staging: Staging) -> Rebuild:
        """index: of each page in the arena's words; all [layers, blocks], as `pages` has them."""
        layers, blocks = places.shape
        words, aside = staging.set_aside(RebuildTables.words(places.size))
        tables = RebuildTables.cut(words, places.size)
        first, end = sequence.first_block * PAGE_TOKENS, sequence.next_block * PAGE_TOKENS
        slots = tables.slots.reshape(layers, blocks * PAGE_TOKENS)
        slots[:] = index[:, :1] // self._max_blocks
        if sequence.length < end:
            slots[:, max(0, sequence.length - first) :] = _PADDING
        tables.positions.reshape(slots.shape)[:] = np.arange(first, end, dtype=np.int32)
        tables.places[:] = places.reshape(-1)
        tables.named[:, 0], tables.named[:, 1] = index.reshape(-1), slabs.reshape(-1)
        return Rebuild(RebuildShape(sequence.loops, blocks), aside)


def layers_of_blocks(spec: ModelSpec, loops: int) -> dict[DistinctBlock, list[int]]:
    """The cache layers of each distinct block."""
    layers: dict[DistinctBlock, list[int]] = {}
    for layer, kind, index in spec.schedule(loops):
        layers.setdefault((kind, index), []).append(layer)
    return layers
