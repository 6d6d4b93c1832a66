"""A plan under construction: which operations a sequence's next step needs, in the order engines carry them out.

In: planned sequences.  Out: one Plan.  It refuses to decide who is in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tinyloop_service.engine.api import PAGE_TOKENS, Clone, Drop, Extend, Open, Plan, Prefill, Restore, SequenceId
from tinyloop_service.scheduler.sequences import Drawing, Feed, Sequence, Sequences


class Draft:
    """Collects one plan.  Pages are taken at once; blocks that slide out are given back by `build`, after all takes:
    a plan drops last, so nothing else of the same plan may write to them."""

    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences
        self._pool = sequences.pool
        self._deactivate = list(sequences.take_deactivating())
        self._open: list[Open] = []
        self._extend: list[Extend] = []
        self._clone: list[Clone] = []
        self._activate: list[SequenceId] = []
        self._save: list[SequenceId] = []
        self._restore: list[Restore] = []
        self._first: list[SequenceId] = []
        self._prefill: list[Prefill] = []
        self._decode: list[SequenceId] = []
        self._slid: list[Sequence] = []
        self._num_steps = 1

    def activate(self, sequence: Sequence) -> None:
        self._activate.append(sequence.id)

    def deactivate(self, sequence: Sequence) -> None:
        self._deactivate.append(sequence.id)

    def open(self, sequence: Sequence, drawing: Drawing | None) -> None:
        """`drawing` None: a prefix, or a trunk."""
        extent, parent = sequence.extent, sequence.parent
        sequence.opened = True
        parent_id = parent.id if parent is not None else None
        first = sequence.first_block if sequence.first_block > extent.start // PAGE_TOKENS else None
        place = (sequence.id, parent_id, extent.start, extent.loops, extent.window)
        if drawing is not None:
            self._open.append(Open(*place, drawing.sampling, drawing.prompt, first, extent.end, drawing.stop_tokens))
            return
        self._open.append(Open(*place, None, first_block=first))
        if self._pool.active(sequence.id):
            self._activate.append(sequence.id)

    def save(self, sequence: Sequence) -> None:
        self._save.append(sequence.id)

    def restore(self, sequence: Sequence, state: object) -> None:
        """All of a prefix at once, from saved state."""
        sequence.skip(self._pool)
        self.open(sequence, None)
        sequence.cloned = True  # what it has inherited of its first block is among it
        self._grow(sequence, sequence.extent.end)
        self._restore.append(Restore(sequence.id, sequence.extent.end, state))

    def first(self, sequence: Sequence) -> None:
        """Sample from the parent's kept logits."""
        self._first.append(sequence.id)

    def feed(self, feed: Feed, count: int) -> None:
        """Prefill the next `count` tokens."""
        sequence = feed.sequence
        if not sequence.opened:
            self.open(sequence, feed.drawing)
        at = sequence.length
        offset = at - sequence.extent.start
        num_left = feed.remaining - count
        self._grow(sequence, at + count)
        self._prefill.append(Prefill(sequence.id, at, feed.tokens[offset : offset + count], num_left))

    def decode(self, sequences: Iterable[Sequence], num_steps: int) -> None:
        """All decode rows of the plan; every one takes as many steps, or what is left to it."""
        self._num_steps = num_steps
        for sequence in sequences:
            length, end = sequence.length + num_steps, sequence.extent.end
            self._grow(sequence, length if length < end else end)
            self._decode.append(sequence.id)

    @property
    def restores(self) -> bool:
        return bool(self._restore)

    @property
    def is_empty(self) -> bool:
        parts = (self._deactivate, self._save, self._open, self._activate, self._first, self._prefill, self._decode)
        return not any(parts)

    def build(self, number: int) -> Plan:
        close = self._sequences.take_closing()
        released = self._pool.take_returned()
        gone = set(close)
        return Plan(
            number=number,
            close=close,
            released=released,
            deactivate=tuple(seq for seq in self._deactivate if seq not in gone),
            save=tuple(self._save),
            open=tuple(self._open),
            extend=tuple(self._extend),
            clone=tuple(self._clone),
            restore=tuple(self._restore),
            activate=tuple(self._activate),
            first=tuple(self._first),
            prefill=tuple(self._prefill),
            decode=tuple(self._decode),
            num_steps=self._num_steps,
            drop=self._slide(),
        )

    def _grow(self, sequence: Sequence, length: int) -> None:
        blocks = sequence.grow(self._pool, length)
        if sequence.extent.window:
            self._slid.append(sequence)
        if not blocks:
            return
        self._extend.append(Extend(sequence.id, blocks))
        shared = sequence.extent.start % PAGE_TOKENS
        if not sequence.cloned:
            sequence.cloned = True
            if shared and sequence.parent is not None:
                self._clone.append(Clone(sequence.id, sequence.parent.blocks[-1], blocks[0], shared))

    def _slide(self) -> tuple[Drop, ...]:
        drops = (sequence.slide(self._pool) for sequence in self._slid)
        return tuple(drop for drop in drops if drop is not None)


def amended(plan: Plan, sequences: Sequences) -> Plan:
    """`plan` without the sequences that were closed since, and with all closes that are due."""
    return replace(
        plan,
        close=sequences.take_closing(plan.close),
        released=(),
        deactivate=(*sequences.take_deactivating(), *(seq for seq in plan.deactivate if seq in sequences)),
        save=tuple(seq for seq in plan.save if seq in sequences),
        open=tuple(item for item in plan.open if item.seq in sequences),
        extend=tuple(item for item in plan.extend if item.seq in sequences),
        clone=tuple(item for item in plan.clone if item.seq in sequences),
        restore=tuple(item for item in plan.restore if item.seq in sequences),
        activate=tuple(seq for seq in plan.activate if seq in sequences),
        first=tuple(seq for seq in plan.first if seq in sequences),
        prefill=tuple(item for item in plan.prefill if item.seq in sequences),
        decode=tuple(seq for seq in plan.decode if seq in sequences),
        drop=tuple(item for item in plan.drop if item.seq in sequences),
    )
