"""What a page id of the scheduler means on the device.

    PlainPages   K/V modes: the id is the page's index in the pool; as it is stored it is read
    SlabPages    h modes: an id has up to two homes, a *slab* where its K and V are read, and, if it is a prefix's, a
                 *place* where its h is stored (`slabs.py`).  A request's pages are never stored

    page id        ┌─ close, drop: both go ──────────────┐
      extend ──► slab, and place ──deactivate──► place alone ──activate──► slab made again from the place
                       └ a move changes the place ┘

The Planner asks: it says what became of sequences, and is told which words of the device's tables change and which
pages of the pool to zero, copy and poison.  What h modes must do besides is a `StoredWork`.

A plan may fail before any of it is launched, or in between: moves stay due until `begun` says that they are queued, and
what the device must be told of places until `launched` says that a whole plan is.  The places and slabs of its lost
sequences come back when those are closed.

In: sequences, page ids.  Out: words, pool indices, tables for h.  Refuses to know about the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np

from tinyloop_service.engine.api import PAGE_TOKENS, Block, Clone
from tinyloop_service.engine.cuda.rebuild import Rebuild, RebuildPlan
from tinyloop_service.engine.cuda.sequences import Ints, Sequence, SequenceTable
from tinyloop_service.engine.cuda.slabs import Move, SlabPool
from tinyloop_service.engine.cuda.staging import Section, Staging
from tinyloop_service.engine.spec import ModelSpec

_NOWHERE = -1
_NONE: Ints = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class StoredWork:
    """What a plan changes in stored pages, in this order, and then makes active."""

    moved: tuple[Section, ...]  # (source, target, 64) [n, 3] places, one after the other; before all else of the plan
    cleared: Section  # (target, source) [n, 2] rows of `places`
    cloned: Section  # (source, target, tokens) [n, 3] places
    zeroed: Section  # slabs [n] of what is rebuilt
    rebuilt: tuple[Rebuild, ...]  # each by the tables as they are then


@dataclass(frozen=True, slots=True)
class Changes:
    written: Ints  # (index, value) [n, 2] of the arena's words
    stored: StoredWork | None


class Pages(Protocol):
    def open(self, sequence: Sequence) -> None: ...

    def release(self, blocks: Iterable[Block]) -> None:
        """Their ids may be someone else's from the next plan on, or, of a closed sequence, from this one on."""
        ...

    def deactivate(self, sequence: Sequence) -> None: ...

    def change(
        self,
        extended: Ints,
        activated: Listed[Sequence],
        restored: Listed[Sequence],
        clones: Iterable[Clone],
        staging: Staging,
    ) -> Changes:
        """extended: (index into the tables, page id) [n, 2] of pages that are taken.  restored: what is stored of these
        comes with this plan."""
        ...

    def begun(self) -> None:
        """The last plan's moves are queued."""
        ...

    def launched(self) -> None:
        """All of the last plan is."""
        ...

    def find(self, pages: Ints) -> Ints:
        """Where in the pool active pages are."""
        ...

    def find_stored(self, pages: Ints) -> Ints:
        """Where pages are stored, once the last plan's moves are made."""
        ...

    def take_poisoned(self, released: Listed[int]) -> Listed[int]:
        """Where in the pool what was given back since the last plan lay; `released`: by page id."""
        ...


class PlainPages:
    """A `Pages`."""

    def open(self, sequence: Sequence) -> None:
        pass

    def release(self, blocks: Iterable[Block]) -> None:
        pass

    def deactivate(self, sequence: Sequence) -> None:
        pass

    def change(
        self,
        extended: Ints,
        activated: Listed[Sequence],
        restored: Listed[Sequence],
        clones: Iterable[Clone],
        staging: Staging,
    ) -> Changes:
        return Changes(extended, None)

    def begun(self) -> None:
        pass

    def launched(self) -> None:
        pass

    def find(self, pages: Ints) -> Ints:
        return pages

    def find_stored(self, pages: Ints) -> Ints:
        return pages

    def take_poisoned(self, released: Listed[int]) -> Listed[int]:
        return released


class SlabPages:
    """A `Pages`."""

    def __init__(self, spec: ModelSpec, table: SequenceTable, slabs: SlabPool, *, places_index: int) -> None:
        """places_index: of the first place in the arena's words."""
        num_pages = slabs.num_slabs * slabs.per_slab
        self._table, self._slabs, self._places_index = table, slabs, places_index
        self._rebuild = RebuildPlan(spec, table.max_blocks)
        self._slab, self._place, self._index, self._page_at = (np.full(num_pages, _NOWHERE, np.int32) for _ in range(4))
        self._freed: list[int] = []  # slabs that are free since the last plan
        self._moves: list[Ints] = []  # that are due, a plan's after the other's
        self._moved: set[int] = set()  # page ids whose places the device does not know yet
        self._is_prefix = np.zeros(table.num_slots, np.bool_)  # by slot
        self._named: set[int] = set()  # slots whose rows of places may name something
        self._clearing: set[int] = set()  # of requests, whose rows are to name nothing

    @property
    def num_active(self) -> int:
        """Slabs that hold an active page."""
        return self._slabs.num_active

    @property
    def num_stored(self) -> int:
        return self._slabs.num_stored

    def open(self, sequence: Sequence) -> None:
        self._is_prefix[sequence.slot] = sequence.is_prefix
        if sequence.is_prefix:
            self._named.add(sequence.slot)
            self._clearing.discard(sequence.slot)
        elif sequence.slot in self._named:
            self._clearing.add(sequence.slot)

    def release(self, blocks: Iterable[Block]) -> None:
        pages = _flat(blocks)
        self._give(pages)
        stored = pages[self._place[pages] >= 0]
        places = self._place[stored]
        self._freed += self._slabs.free(places.tolist())
        self._page_at[places] = _NOWHERE
        self._place[stored] = _NOWHERE
        self._moved.difference_update(stored.tolist())

    def deactivate(self, sequence: Sequence) -> None:
        if sequence.active:
            assert sequence.is_prefix, f"sequence {sequence.id} is a request's, which is nowhere but in its active form"
            self._give(self._own(sequence).reshape(-1))
            sequence.active = False

    def change(
        self,
        extended: Ints,
        activated: Listed[Sequence],
        restored: Listed[Sequence],
        clones: Iterable[Clone],
        staging: Staging,
    ) -> Changes:
        idle = list(dict.fromkeys(sequence for sequence in activated if not sequence.active))
        if not (len(extended) or idle or self._moves or self._moved or self._clearing):
            return Changes(extended, None)
        self._take(np.concatenate([extended[:, 1], *(self._own(sequence).reshape(-1) for sequence in idle)]))
        words = [*self._name(extended), *chain.from_iterable(map(self._revive, idle))]
        stored = self._stored_work([*idle, *restored], clones, staging)
        return Changes(np.concatenate(words) if words else extended, stored)

    def begun(self) -> None:
        self._moves.clear()

    def launched(self) -> None:
        self._moved.clear()
        self._named -= self._clearing
        self._clearing.clear()

    def find(self, pages: Ints) -> Ints:
        slabs = self._slab.take(pages)
        assert (slabs >= 0).all(), f"page {pages[slabs < 0][0]} is read or copied but not active"
        return slabs

    def find_stored(self, pages: Ints) -> Ints:
        places = self._place.take(pages)
        assert (places >= 0).all(), f"page {pages[places < 0][0]} is saved or restored but not stored"
        return places

    def take_poisoned(self, released: Listed[int]) -> Listed[int]:
        freed, self._freed = self._freed, []
        return freed

    # ---- homes

    def _take(self, pages: Ints) -> None:
        """A slab for each."""
        assert (self._slab[pages] < 0).all(), "a page is taken that was not given back"
        slabs, moves = self._slabs.take(len(pages))
        self._slab[pages] = slabs
        if moves:
            self._move(moves)

    def _give(self, pages: Ints) -> None:
        slabs = self._slab[pages]
        given = slabs[slabs >= 0]
        self._slabs.give(given)
        self._freed += given.tolist()
        self._slab[pages] = _NOWHERE

    def _name(self, extended: Ints) -> Iterator[Ints]:
        """What the tables say of pages that are taken, of which a prefix's get a place, and of those that moved."""
        renamed = np.array(sorted(self._moved), np.int32)  # they were there before
        if len(extended):
            index, new = extended[:, 0], extended[:, 1]
            self._index[new] = index
            stored = new[self._is_prefix[index // (self._table.max_layers * self._table.max_blocks)]]
            self._store(stored)
            renamed = np.concatenate([stored, renamed])
            yield _pairs(index, self._slab[new])
        if len(renamed):
            yield _pairs(self._places_index + self._index[renamed], self._place[renamed])

    def _store(self, pages: Ints) -> None:
        """A place for each."""
        places = np.array(self._slabs.place(len(pages)), np.int32)
        self._place[pages] = places
        self._page_at[places] = pages

    def _move(self, moves: list[Move]) -> None:
        source, target = np.array([(move.source, move.target) for move in moves], np.int32).T
        pages = self._page_at[source]
        self._page_at[source] = _NOWHERE
        self._page_at[target] = pages
        self._place[pages] = target
        self._moved.update(pages.tolist())
        self._moves.append(np.stack([source, target, np.full_like(source, PAGE_TOKENS)], axis=1))

    # ---- making active again

    def _own(self, sequence: Sequence) -> Ints:
        """Its own pages, [layers, blocks]."""
        if sequence.listed is None:
            sequence.listed = self._rebuild.pages(sequence)
        return sequence.listed

    def _revive(self, sequence: Sequence) -> Iterator[Ints]:
        """(index, slab) [n, 2] in the rows of the tables of all that read it; its own row is the rebuild's to write."""
        sequence.active = True
        for reader in sequence.readers()[1:]:
            seen = reader.owners[sequence.first_block : sequence.next_block] == sequence.slot
            pages = self._own(sequence)[:, : len(seen)][:, seen]
            moved = (reader.slot - sequence.slot) * self._table.max_layers * self._table.max_blocks
            yield _pairs(self._index[pages] + np.int32(moved), self._slab[pages])

    def _stored_work(self, revived: list[Sequence], clones: Iterable[Clone], staging: Staging) -> StoredWork | None:
        copies = [
            (self._place[source], self._place[target], clone.num_tokens)
            for clone in clones
            if self._table[clone.seq].is_prefix
            for source, target in zip(clone.source, clone.target, strict=True)
        ]
        if not (copies or revived or self._moves or self._clearing):
            return None
        nothing = self._table.num_slots  # the row of places that names nothing
        cleared = [(slot, nothing) for slot in sorted(self._clearing)]
        unfilled = [page for sequence in revived for page in self._unfilled(sequence)]
        return StoredWork(
            moved=tuple(staging.put(moves) for moves in self._moves),
            cleared=staging.put(np.array(cleared, np.int32).reshape(-1, 2)),
            cloned=staging.put(np.array(copies, np.int32).reshape(-1, 3)),
            zeroed=staging.put(self._slab[np.array(unfilled, np.int32)]),
            rebuilt=tuple(self._rebuilt(sequence, staging) for sequence in revived if sequence.blocks),
        )

    def _rebuilt(self, sequence: Sequence, staging: Staging) -> Rebuild:
        pages = self._own(sequence)
        return self._rebuild.rebuild(sequence, self._index[pages], self._place[pages], self._slab[pages], staging)

    @staticmethod
    def _unfilled(sequence: Sequence) -> Iterable[int]:
        """Pages whose last tokens are nobody's."""
        whole = max(0, sequence.length // PAGE_TOKENS - sequence.first_block)
        return chain.from_iterable(sequence.blocks[whole:])


def _pairs(index: Ints, value: Ints) -> Ints:
    """[n, 2] of two arrays of one shape."""
    pairs = np.empty((index.size, 2), np.int32)
    pairs[:, 0], pairs[:, 1] = index.reshape(-1), value.reshape(-1)
    return pairs


def _flat(blocks: Iterable[Block]) -> Ints:
    return np.fromiter(chain.from_iterable(blocks), np.int32)
