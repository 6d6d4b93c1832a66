"""A sequence as the host knows it: its slot on the device, its chain of parents, its length.

A *slot* is an index into the device's per-sequence arrays: its page table, its last token, its length, its sampling
state, its kept output.  The table names the pages of the whole chain; `owners` says whose they are, so that rows which
read a page through the same owner can share the reading.  Page ids are the scheduler's; what they mean on the device,
`pages.py` says.

    positions     0 ………… parent.start ………… start ………………… length
    blocks        grandparent's     parent's      own, its copy of a partial one first

In: the Open, Extend, Drop and close operations of plans.  Out: sequences, and the words to write into the device's
tables.  Refuses to know what lies in pages and how it is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.api import PAGE_TOKENS, Block, Extend, Open, Prefill, SequenceId
from tinyloop_service.types import Sampling

Ints = NDArray[np.int32]
_NO_OWNERS: Ints = np.zeros(0, np.int32)
_NO_PAGES = _NO_OWNERS
_NO_WORDS: Ints = np.zeros((0, 2), np.int32)
_NO_BLOCKS = range(0)


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable; owned by the engine's thread.  `length` is ahead of the device by the plans in flight."""

    id: SequenceId
    slot: int
    parent: Sequence | None
    start: int  # inherited tokens
    loops: int
    window: int  # 0: all
    sampling: Sampling | None  # None: a prefix
    owners: Ints  # (start // 64,): slots that own the whole blocks it inherits
    length: int
    next_block: int  # absolute index of the block that comes next
    logprobs: int = 0  # wanted of each token, beside its own
    blocks: list[Block] = field(default_factory=list)
    active: bool = True  # its pages are there in the form that is read
    has_output: bool = False  # a prefix whose last token's output is kept
    children: dict[SequenceId, Sequence] = field(default_factory=dict, repr=False)  # that are open
    _handed: Ints | None = None  # to children
    listed: Ints | None = None  # the pages of `blocks` as `pages.py` orders them; None again when blocks come or go
    end: int | None = None  # of a request: the position of its last token; tokens that stop it only the device knows

    def owners_for_children(self) -> Ints:
        """`owners` of a child opened now; children share the array, which nobody changes."""
        whole = self.length // PAGE_TOKENS
        if self._handed is None or len(self._handed) != whole:
            self._handed = np.full(whole, self.slot, np.int32)
            self._handed[: len(self.owners)] = self.owners
        return self._handed

    @property
    def is_prefix(self) -> bool:
        return self.sampling is None

    @property
    def first_block(self) -> int:
        """Absolute index of blocks[0]."""
        return self.next_block - len(self.blocks)

    def readers(self) -> list[Sequence]:
        """Whoever may read its pages: itself, and all that descend from it."""
        readers = [self]
        for reader in readers:  # it grows meanwhile
            readers += reader.children.values()
        return readers

    def first_visible(self, position: int) -> int:
        """The first block that a token at `position` reads."""
        return max(0, position - self.window + 1) // PAGE_TOKENS if self.window else 0


class SequenceTable:
    """All open sequences, and the layout of the device's page tables: int32 [slots][layers][blocks]."""

    def __init__(self, num_slots: int, max_layers: int, max_blocks: int) -> None:
        self.max_layers, self.max_blocks = max_layers, max_blocks
        self._layers = np.arange(max_layers, dtype=np.int32) * np.int32(max_blocks)  # from a block's first page on
        self._free = list(range(num_slots - 1, -1, -1))
        self.num_slots = num_slots
        self._open: dict[SequenceId, Sequence] = {}

    def __getitem__(self, seq: SequenceId) -> Sequence:
        return self._open[seq]

    def peek(self, seq: SequenceId) -> Sequence | None:
        return self._open.get(seq)

    def open(self, o: Open) -> Sequence:
        assert o.seq not in self._open, f"sequence {o.seq} is open already"
        parent = None if o.parent is None else self._open[o.parent]
        inherited = parent.length if parent else 0
        assert o.start == inherited, f"sequence {o.seq} starts at {o.start}, not at its parent's end {inherited}"
        assert self._free, f"{self.num_slots} sequences are open; keep fewer prefixes in memory"
        owners = _NO_OWNERS if parent is None else parent.owners_for_children()
        sequence = Sequence(
            o.seq, self._free.pop(), parent, o.start, o.loops, o.cache_window, o.sampling, owners, o.start,
            o.first_own_block, end=o.end,
        )  # fmt: skip
        self._open[o.seq] = sequence
        if parent is not None:
            parent.children[o.seq] = sequence
        return sequence

    def close(self, seq: SequenceId) -> Sequence | None:
        """Forget a sequence; one that a failed plan never came to open is not there."""
        sequence = self._open.pop(seq, None)
        if sequence is not None:
            self._free.append(sequence.slot)
            if sequence.parent is not None:
                del sequence.parent.children[seq]
        return sequence

    def extend(self, extensions: Iterable[Extend], prefills: Iterable[Prefill] = ()) -> tuple[Ints, Ints]:
        """Append blocks: (index into the tables, page id) of each of their pages, (pages, 2), and the pages that these
        chunks do not write from the first token to the last."""
        filled = {prefill.seq: _filled(prefill) for prefill in prefills}
        by_depth: dict[int, tuple[list[int], list[Block]]] = {}  # where their first layers are in the tables, blocks
        unfilled: list[Block] = []
        for extension in extensions:
            sequence, new = self._open[extension.seq], extension.blocks
            at, end = sequence.next_block, sequence.next_block + len(new)
            assert end <= self.max_blocks, f"sequence {extension.seq} grows to block {end - 1}"
            sequence.next_block, sequence.listed = end, None
            sequence.blocks += new
            places, blocks = by_depth.setdefault(max(map(len, new), default=0), ([], []))
            first = sequence.slot * self.max_layers * self.max_blocks
            places += range(first + at, first + end)
            blocks += new
            kept = filled.get(extension.seq, _NO_BLOCKS)
            unfilled += new[: max(0, kept.start - at)] + new[max(0, kept.stop - at) :] if kept else new
        if not by_depth:
            return _NO_WORDS, _NO_PAGES
        parts = [self._words_of(*group, depth) for depth, group in by_depth.items()]
        words = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return words, _flat(unfilled) if filled else words[:, 1]

    def _words_of(self, places: list[int], blocks: list[Block], depth: int) -> Ints:
        """(index, page) of every page."""
        words = np.empty((len(blocks), depth, 2), np.int32)
        words[:, :, 0] = np.array(places, np.int32)[:, None] + self._layers[:depth]
        words[:, :, 1] = _flat(blocks).reshape(len(blocks), depth)
        return words.reshape(-1, 2)

    def drop(self, seq: SequenceId, first_block: int) -> list[Block]:
        """The blocks that go."""
        sequence = self._open[seq]
        count = max(0, first_block - sequence.first_block)
        gone = sequence.blocks[:count]
        del sequence.blocks[:count]
        sequence.listed = None
        return gone

    def lengths_after(self, rows: Iterable[Sequence], num_tokens: int) -> list[int]:
        """Of so many tokens more for each, up to its end, unless it is stopped; each owns blocks for them."""
        lengths = []
        for row in rows:
            length, end, have = row.length + num_tokens, row.end, row.next_block * PAGE_TOKENS
            if end is not None and length > end:
                length = max(end, row.length)
            assert length <= have, f"sequence {row.id} has pages for {have} tokens, {length} are written"
            lengths.append(length)
        return lengths


def _filled(prefill: Prefill) -> range:
    """Blocks that it writes from the first token to the last."""
    return range(-(-prefill.start // PAGE_TOKENS), (prefill.start + len(prefill.tokens)) // PAGE_TOKENS)


def _flat(blocks: list[Block]) -> Ints:
    return np.fromiter(chain.from_iterable(blocks), np.int32)
