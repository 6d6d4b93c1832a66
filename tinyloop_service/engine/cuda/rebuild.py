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

    @property
    def blocks(self) -> Ints:
        """Absolute indices."""
        return self.sequence.first_block + np.arange(len(self.places), dtype=np.int32)

    @property
    def counts(self) -> Ints:
        """Tokens in each block."""
        return np.clip(self.sequence.length - self.blocks * PAGE_TOKENS, 0, PAGE_TOKENS)


class RebuildPlan:
    """For one model; at most `max_pages` pages in a batch."""

    def __init__(self, spec: ModelSpec, max_pages: int, max_blocks: int) -> None:
        self._spec, self._max_pages, self._max_blocks = spec, max_pages, max_blocks

    def unfilled(self, revived: Revived) -> Ints:
        """Slabs whose last tokens are nobody's, which are to be zeros."""
        slabs: Ints = revived.slabs[revived.counts < PAGE_TOKENS].reshape(-1)
        return slabs

    def batches(self, revived: Listed[Revived], staging: Staging) -> Iterator[Rebuild]:
        """In any order: no page is made of another."""
        pages: dict[tuple[BlockKind, int], list[Ints]] = {}  # (place, slab, block, tokens) [n, 4]
        for each in revived:
            for layer, kind, index in self._spec.schedule(each.sequence.loops):
                columns = each.places[:, layer], each.slabs[:, layer], each.blocks, each.counts
                pages.setdefault((kind, index), []).append(np.stack(columns, axis=1))
        for block, parts in pages.items():
            joined = np.concatenate(parts)
            joined = joined[joined[:, 3] > 0]
            for first in range(0, len(joined), self._max_pages):
                yield self._batch(block, joined[first : first + self._max_pages], staging)

    def _batch(self, block: tuple[BlockKind, int], pages: Ints, staging: Staging) -> Rebuild:
        places, slabs, blocks, counts = pages.T
        nth, token = np.arange(len(pages), dtype=np.int32), np.arange(PAGE_TOKENS, dtype=np.int32)
        tables = np.zeros((len(pages), 1, self._max_blocks), np.int32)
        tables[nth, 0, blocks] = slabs
        slots = np.where(token < counts[:, None], nth[:, None], _PADDING)
        return Rebuild(
            block,
            staging.put(np.ascontiguousarray(places)),
            staging.put(slots.astype(np.int32).reshape(-1)),
            staging.put((blocks[:, None] * PAGE_TOKENS + token).astype(np.int32).reshape(-1)),
            staging.put(tables),
        )
