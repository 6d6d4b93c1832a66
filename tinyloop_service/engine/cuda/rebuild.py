"""The active form of prefixes out of what is stored of them, as few large products.

A distinct block makes K and V of h with the same weights in all its cache layers, so its pages of all loops and of all
prefixes are rows of one product, as many as a prompt pass has.  Each page is a sequence of its own there, whose table
names its one slab.

In: prefixes, where their pages are stored and shall be read.  Out: batches of pages of one block.  Refuses to know how
K and V are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Listed
from dataclasses import dataclass

import numpy as np

from tinyloop_service.engine.api import PAGE_TOKENS
from tinyloop_service.engine.cuda.sequences import Ints, Sequence
from tinyloop_service.engine.cuda.staging import Section, Staging
from tinyloop_service.engine.spec import BlockKind, ModelSpec

_PADDING = -1
_TOKENS: Ints = np.arange(PAGE_TOKENS, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Rebuild:
    """A batch: pages of one distinct block."""

    block: tuple[BlockKind, int]
    places: Section  # int32 [pages]
    slots: Section  # int32 [pages · 64]: which page of the batch; −1 where its sequence has no token
    positions: Section  # int32 [pages · 64]
    tables: Section  # int32 [pages, 1, max_blocks]


@dataclass(frozen=True, slots=True)
class Revived:
    """A prefix that becomes active; its own pages as [blocks, cache layers]."""

    sequence: Sequence
    places: Ints
    slabs: Ints
    blocks: Ints  # absolute indices
    counts: Ints  # tokens in each block

    @classmethod
    def of(cls, sequence: Sequence, places: Ints, slabs: Ints) -> Revived:
        blocks = sequence.first_block + np.arange(len(places), dtype=np.int32)
        counts = (sequence.length - blocks * PAGE_TOKENS).clip(0, PAGE_TOKENS).astype(np.int32)
        return cls(sequence, places, slabs, blocks, counts)


class RebuildPlan:
    """For one model; at most `max_pages` pages in a batch."""

    def __init__(self, spec: ModelSpec, max_pages: int, max_blocks: int) -> None:
        self._spec, self._max_pages, self._max_blocks = spec, max_pages, max_blocks
        self._layers_by_loops: dict[int, dict[tuple[BlockKind, int], list[int]]] = {}

    def unfilled(self, revived: Revived) -> Ints:
        """Slabs whose last tokens are nobody's, which are to be zeros."""
        slabs: Ints = revived.slabs[revived.counts < PAGE_TOKENS].reshape(-1)
        return slabs

    def batches(self, revived: Listed[Revived], staging: Staging) -> Iterator[Rebuild]:
        """In any order: no page is made of another."""
        parts: dict[tuple[BlockKind, int], list[Ints]] = {}  # (place, slab, block, tokens) [n, 4]
        for each in revived:
            pages = np.empty((*each.places.shape, 4), np.int32)
            pages[:, :, 0], pages[:, :, 1] = each.places, each.slabs
            pages[:, :, 2], pages[:, :, 3] = each.blocks[:, None], each.counts[:, None]
            pages = pages[each.counts > 0]
            for block, layers in self._layers(each.sequence.loops).items():
                parts.setdefault(block, []).append(pages[:, layers].reshape(-1, 4))
        for block, of_block in parts.items():
            yield from self._batches(block, of_block[0] if len(of_block) == 1 else np.concatenate(of_block), staging)

    def _layers(self, loops: int) -> dict[tuple[BlockKind, int], list[int]]:
        """The cache layers of each distinct block."""
        if loops not in self._layers_by_loops:
            layers: dict[tuple[BlockKind, int], list[int]] = {}
            for layer, kind, index in self._spec.schedule(loops):
                layers.setdefault((kind, index), []).append(layer)
            self._layers_by_loops[loops] = layers
        return self._layers_by_loops[loops]

    def _batches(self, block: tuple[BlockKind, int], pages: Ints, staging: Staging) -> Iterator[Rebuild]:
        places, slabs, blocks, counts = np.ascontiguousarray(pages.T)
        every = np.arange(len(pages), dtype=np.int32)
        tables = np.zeros((len(pages), 1, self._max_blocks), np.int32)
        tables[every, 0, blocks] = slabs
        nth = (every % self._max_pages)[:, None]
        slots = np.where(counts[:, None] > _TOKENS, nth, np.int32(_PADDING))
        positions = blocks[:, None] * np.int32(PAGE_TOKENS) + _TOKENS
        for first in range(0, len(pages), self._max_pages):
            batch = slice(first, first + self._max_pages)
            yield Rebuild(
                block,
                staging.put(places[batch]),
                staging.put(slots[batch].reshape(-1)),
                staging.put(positions[batch].reshape(-1)),
                staging.put(tables[batch]),
            )
