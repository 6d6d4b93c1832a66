"""A sequence as the host knows it: its slot on the device, its chain of parents, its length.

A *slot* is an index into the device's per-sequence arrays: its page table, its last token, its length, its sampling
state, its kept output.  The table names the pages of the whole chain; `owners` says whose they are, so that rows which
read a page through the same owner can share the reading.

    positions     0 ………… parent.start ………… start ………………… length
    blocks        grandparent's     parent's      own, its copy of a partial one first

In: the Open, Extend, Drop and close operations of plans.  Out: sequences, and the words to write into the device's
tables.  Refuses to know what lies in pages and how it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.api import PAGE_TOKENS, Block, Open, SequenceId
from tinyloop_service.types import Sampling

Ints = NDArray[np.int32]


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
    first_block: int  # absolute index of blocks[0]
    blocks: list[Block] = field(default_factory=list)
    has_output: bool = False  # a prefix whose last token's output is kept

    @property
    def next_block(self) -> int:
        return self.first_block + len(self.blocks)

    def first_visible(self, position: int) -> int:
        """The first block that a token at `position` reads."""
        return max(0, position - self.window + 1) // PAGE_TOKENS if self.window else 0


class SequenceTable:
    """All open sequences, and the layout of the device's page tables: int32 [slots][layers][blocks]."""

    def __init__(self, num_slots: int, max_layers: int, max_blocks: int) -> None:
        self._max_layers, self._max_blocks = max_layers, max_blocks
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_slots = num_slots
        self._open: dict[SequenceId, Sequence] = {}

    def __getitem__(self, seq: SequenceId) -> Sequence:
        return self._open[seq]

    def open(self, o: Open) -> Sequence:
        assert o.seq not in self._open, f"sequence {o.seq} is open already"
        parent = None if o.parent is None else self._open[o.parent]
        inherited = parent.length if parent else 0
        assert o.start == inherited, f"sequence {o.seq} starts at {o.start}, not at its parent's end {inherited}"
        assert self._free, f"{self._num_slots} sequences are open; keep fewer prefixes in memory"
        whole = o.start // PAGE_TOKENS
        owners = np.empty(whole, np.int32)
        if parent is not None:
            owners[: len(parent.owners)] = parent.owners
            owners[len(parent.owners) :] = parent.slot
        sequence = Sequence(
            o.seq, self._free.pop(), parent, o.start, o.loops, o.cache_window, o.sampling, owners, o.start, whole
        )
        self._open[o.seq] = sequence
        return sequence

    def close(self, seq: SequenceId) -> Sequence | None:
        """Forget a sequence; one that a failed plan never came to open is not there."""
        sequence = self._open.pop(seq, None)
        if sequence is not None:
            self._free.append(sequence.slot)
        return sequence

    def extend(self, seq: SequenceId, blocks: tuple[Block, ...]) -> Ints:
        """Append blocks; (index into the tables, page) of each of their pages, (pages, 2)."""
        sequence = self._open[seq]
        pages = np.array(blocks, np.int32)  # (blocks, layers)
        layers = np.arange(pages.shape[1], dtype=np.int32)
        at = sequence.next_block + np.arange(len(blocks), dtype=np.int32)
        assert at[-1] < self._max_blocks, f"sequence {seq} grows to block {at[-1]}"
        sequence.blocks.extend(blocks)
        index = (sequence.slot * self._max_layers + layers) * self._max_blocks + at[:, None]
        return np.stack([index.ravel(), pages.ravel()], axis=1).astype(np.int32)

    def drop(self, seq: SequenceId, first_block: int) -> None:
        sequence = self._open[seq]
        gone = first_block - sequence.first_block
        if gone > 0:
            del sequence.blocks[:gone]
            sequence.first_block = first_block

    def require_room(self, sequence: Sequence, end: int) -> None:
        """The sequence owns blocks for positions up to `end`."""
        have = sequence.next_block * PAGE_TOKENS
        assert end <= have, f"sequence {sequence.id} has pages for {have} tokens, {end} are written"

    def chain(self, sequence: Sequence) -> Iterator[Sequence]:
        """The sequence and its parents, itself first."""
        at: Sequence | None = sequence
        while at is not None:
            yield at
            at = at.parent
