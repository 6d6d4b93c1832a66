"""The active form of prefixes out of what is stored of them, as few large products.

A distinct block makes K and V of h with the same weights in all its cache layers, so its pages of all loops and of all
prefixes are rows of one product, as many as a prompt pass has.  Each page is a sequence of its own there, whose table
names its one slab.

In: prefixes, where their pages are stored and shall be read.  Out: batches of pages of one block, their tables in one
vector.  Refuses to know how K and V are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinyloop_service.engine.api import PAGE_TOKENS
from tinyloop_service.engine.cuda.sequences import Ints, Sequence
from tinyloop_service.engine.cuda.staging import Section, Staging
from tinyloop_service.engine.spec import BlockKind, ModelSpec
from tinyloop_service.kernels.device import Array

DistinctBlock = tuple[BlockKind, int]
_PADDING = -1
_TOKENS: Ints = np.arange(PAGE_TOKENS, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class RebuildShape:
    """Rebuilds of one shape differ in the contents of their tables alone."""

    batches: tuple[tuple[DistinctBlock, int], ...]  # pages of one distinct block, so many

    @classmethod
    def of(cls, pages: Mapping[DistinctBlock, int], max_pages: int) -> RebuildShape:
        """Batches of at most `max_pages`."""
        return cls(
            tuple(
                (block, min(max_pages, count - first))
                for block, count in pages.items()
                for first in range(0, count, max_pages)
            )
        )

    @property
    def num_pages(self) -> int:
        return sum(count for _, count in self.batches)


@dataclass(frozen=True, slots=True)
class RebuildTables:
    """Views of an int32 vector, the host's or the device's: of all pages, one batch after the other."""

    slots: Any  # [pages, 64]: which page of its batch; −1 where its sequence has no token
    positions: Any  # [pages, 64]
    tables: Any  # [pages, 1, max_blocks]
    places: Any  # [pages]

    @staticmethod
    def words(num_pages: int, max_blocks: int) -> int:
        return num_pages * (2 * PAGE_TOKENS + max_blocks + 1)

    @classmethod
    def cut(cls, words: Array | Ints, num_pages: int, max_blocks: int) -> RebuildTables:
        """From the beginning of `words`."""
        tokens, tables = num_pages * PAGE_TOKENS, num_pages * max_blocks
        at = 2 * tokens + tables
        return cls(
            words[:tokens].reshape(num_pages, PAGE_TOKENS),
            words[tokens : 2 * tokens].reshape(num_pages, PAGE_TOKENS),
            words[2 * tokens : at].reshape(num_pages, 1, max_blocks),
            words[at : at + num_pages],
        )


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Of any number of prefixes."""

    shape: RebuildShape
    words: Section  # as RebuildTables cuts them


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
        first, end = sequence.first_block, sequence.first_block + len(places)
        blocks = np.arange(first, end, dtype=np.int32)
        counts = np.minimum(np.maximum(sequence.length - blocks * PAGE_TOKENS, 0), PAGE_TOKENS)
        return cls(sequence, places, slabs, blocks, counts)


class RebuildPlan:
    """For one model; at most `max_pages` pages in a batch."""

    def __init__(self, spec: ModelSpec, max_pages: int, max_blocks: int) -> None:
        self._spec, self._max_pages, self._max_blocks = spec, max_pages, max_blocks
        self._layers_by_loops: dict[int, dict[DistinctBlock, Ints]] = {}

    def unfilled(self, revived: Revived) -> Ints:
        """Slabs whose last tokens are nobody's, which are to be zeros."""
        slabs: Ints = revived.slabs[revived.counts < PAGE_TOKENS].reshape(-1)
        return slabs

    def rebuild(self, revived: Iterable[Revived], staging: Staging) -> Rebuild | None:
        """In any order: no page is made of another.  None: there is nothing to make."""
        parts: dict[DistinctBlock, list[Ints]] = {}  # (place, slab, block, tokens) [n, 4]
        for each in revived:
            pages = np.empty((*each.places.shape, 4), np.int32)
            pages[:, :, 0], pages[:, :, 1] = each.places, each.slabs
            pages[:, :, 2], pages[:, :, 3] = each.blocks[:, None], each.counts[:, None]
            pages = pages[each.counts > 0]
            for block, layers in self._layers(each.sequence.loops).items():
                parts.setdefault(block, []).append(pages[:, layers].reshape(-1, 4))
        counts = {block: sum(map(len, of_block)) for block, of_block in parts.items()}
        shape = RebuildShape.of(counts, self._max_pages)
        if not shape.batches:
            return None
        pages = np.concatenate([part for of_block in parts.values() for part in of_block])
        return Rebuild(shape, staging.put(self._words(shape, pages)))

    def _layers(self, loops: int) -> dict[DistinctBlock, Ints]:
        if loops not in self._layers_by_loops:
            listed = layers_of_blocks(self._spec, loops)
            self._layers_by_loops[loops] = {block: np.array(layers) for block, layers in listed.items()}
        return self._layers_by_loops[loops]

    def _words(self, shape: RebuildShape, pages: Ints) -> Ints:
        """The tables of (place, slab, block, tokens) [n, 4]."""
        places, slabs, blocks, counts = np.ascontiguousarray(pages.T)
        words = np.zeros(RebuildTables.words(len(pages), self._max_blocks), np.int32)
        tables = RebuildTables.cut(words, len(pages), self._max_blocks)
        nth = np.concatenate([np.arange(count, dtype=np.int32) for _, count in shape.batches])
        tables.slots[:] = nth[:, None]
        for page in (counts < PAGE_TOKENS).nonzero()[0].tolist():
            tables.slots[page, counts[page] :] = _PADDING
        np.add(blocks[:, None] * np.int32(PAGE_TOKENS), _TOKENS, out=tables.positions)
        tables.tables[np.arange(len(pages)), 0, blocks] = slabs
        tables.places[:] = places
        return words


def layers_of_blocks(spec: ModelSpec, loops: int) -> dict[DistinctBlock, list[int]]:
    """The cache layers of each distinct block."""
    layers: dict[DistinctBlock, list[int]] = {}
    for layer, kind, index in spec.schedule(loops):
        layers.setdefault((kind, index), []).append(layer)
    return layers
