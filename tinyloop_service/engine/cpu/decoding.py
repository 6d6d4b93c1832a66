"""The decoding rows off one parent as rows of a forward pass.

    splits      0 ………… parent's last whole        own whole splits              the split being filled
    held by     tracks of the chain of parents    each row's own track          a TailArena of all rows
    attention   folded once for all rows          folded row by row             all rows in one call

A tail is read at 32 positions while they suffice, then at 64, so there are two arenas; rows move from the first to the
second, and out to their own track when a split is full.  Rows stand in the order of the arenas' slots.

In: which sequences take part in the next step.  Out: the steps of `rows.Run`, which stay valid while `revision` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tinyloop_service.engine.api import PAGE_TOKENS, SequenceId
from tinyloop_service.engine.cpu.attention import MASKED, AttentionKernels
from tinyloop_service.engine.cpu.memory import TAIL_SIZES, SplitRange, TailArena
from tinyloop_service.engine.cpu.rows import Fold, RowArrays, Step, fold_steps, folds_over
from tinyloop_service.engine.cpu.runtime import Array
from tinyloop_service.engine.cpu.sequences import Sequence, SequenceTable, inherited_ranges, inherited_split
from tinyloop_service.engine.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class GroupKey:
    """Rows with equal keys read the same splits of their parents under the same window."""

    parent: SequenceId | None
    loops: int
    window: int

    @classmethod
    def of(cls, sequence: Sequence) -> GroupKey:
        parent = sequence.parent
        return cls(None if parent is None else parent.id, sequence.loops, sequence.window)


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the steps were bound for; another layout needs other steps."""

    rows: tuple[SequenceId, ...]
    splits: tuple[int, ...]  # the split each row is filling
    tails: tuple[int, ...]  # rows in each arena
    visible: int  # the first split that any row reads


class DecodeGroup:
    """Mutable: rows join, advance and leave."""

    def __init__(self, spec: ModelSpec, kernels: AttentionKernels, table: SequenceTable, key: GroupKey) -> None:
        self._spec, self._kernels, self._table, self.key = spec, kernels, table, key
        layers = spec.cache_layers(key.loops)
        self._arenas = [TailArena(spec, layers, size) for size in TAIL_SIZES]
        self._sequences: dict[SequenceId, Sequence] = {}
        self._layout: _Layout | None = None
        self.revision = 0

    @property
    def num_rows(self) -> int:
        return sum(len(arena.rows) for arena in self._arenas)

    @property
    def loops(self) -> int:
        return self.key.loops

    @property
    def rows(self) -> list[Sequence]:
        return [self._sequences[seq] for arena in self._arenas for seq in arena.rows]

    def expect(self, sequences: Iterable[Sequence]) -> None:
        """Make room for rows that are about to join."""
        for arena, count in Counter(self._arena_at(s.length % PAGE_TOKENS) for s in sequences).items():
            arena.reserve(count)

    def join(self, sequence: Sequence) -> None:
        """Take a row in: its tail is copied from its track, or from its parent's if it has none."""
        offset = sequence.length % PAGE_TOKENS
        arena = self._arena_at(offset)
        slot = arena.append(sequence.id)
        self._sequences[sequence.id], self._layout = sequence, None
        if not offset:
            return
        for layer in range(len(arena.keys)):
            if sequence.track is not None:
                source = sequence.track.split(layer, sequence.length // PAGE_TOKENS)
            else:
                source = inherited_split(sequence, layer)
            for x, from_split in zip((arena.keys, arena.values), source, strict=True):
                x[layer][slot, :, :offset] = from_split[:, :offset]
        if sequence.track is not None and sequence.track.first == sequence.length // PAGE_TOKENS:
            sequence.track = None  # it held nothing else

    def leave(self, seq: SequenceId, *, keep: bool) -> None:
        """Take a row out; `keep`: put its tail into its track, so that it can join again."""
        arena = next(arena for arena in self._arenas if seq in arena.rows)
        slot, sequence = arena.rows.index(seq), self._sequences[seq]
        if keep:
            self._put_away(arena, slot, sequence)
        arena.remove(slot)
        self._layout = None
        del self._sequences[seq]

    def _arena_at(self, offset: int) -> TailArena:
        return next(arena for arena in self._arenas if offset < arena.size)

    def _put_away(self, arena: TailArena, slot: int, sequence: Sequence) -> None:
        """Copy a row's tail into its track."""
        if sequence.length % PAGE_TOKENS == 0 and arena is self._arenas[0]:
            return  # an empty tail: the full split before it was put away already
        split, last_slot = divmod(sequence.length - 1, PAGE_TOKENS)
        offset, track = last_slot + 1, self._table.grow_track(sequence, sequence.length)
        for layer in range(len(arena.keys)):
            keys, values = track.split(layer, split)
            keys[:, :offset] = arena.keys[layer][slot, :, :offset]
            values[:, :offset] = arena.values[layer][slot, :, :offset]

    def prepare(self) -> None:
        """Move rows whose tails outgrew their arena; a new `revision` if steps must be bound again."""
        self._widen_tails()
        self._put_full_splits_away()
        rows = self.rows
        layout = _Layout(
            tuple(s.id for s in rows),
            tuple(s.length // PAGE_TOKENS for s in rows),
            tuple(len(arena.rows) for arena in self._arenas),
            min(s.first_visible(s.length) for s in rows),
        )
        if layout != self._layout:
            self._layout = layout
            self.revision += 1
            self._bind_shapes(rows)

    def _widen_tails(self) -> None:
        small, large = self._arenas
        for seq in [s for s in small.rows if self._sequences[s].length % PAGE_TOKENS >= small.size]:
            slot, target = small.rows.index(seq), large.append(seq)
            for a, b in ((small.keys, large.keys), (small.values, large.values)):
                for layer in range(len(a)):
                    b[layer][target, :, : small.size] = a[layer][slot]
            small.remove(slot)

    def _put_full_splits_away(self) -> None:
        small, large = self._arenas
        for seq in [s for s in large.rows if self._sequences[s].length % PAGE_TOKENS == 0]:
            slot, sequence = large.rows.index(seq), self._sequences[seq]
            self._put_away(large, slot, sequence)
            large.remove(slot)
            small.append(seq)

    def _bind_shapes(self, rows: list[Sequence]) -> None:
        """Everything that depends on the layout and not on the layer."""
        n, key = len(rows), self.key
        assert self._layout is not None
        shared = list(inherited_ranges(rows[0], self._layout.visible))
        self._positions = np.empty(n, np.int64)
        self._shared = folds_over(shared, n, key.window)
        self._own = [self._own_folds(s) for s in rows]
        self._slots = np.empty(n, np.int64)
        layers = range(self._spec.cache_layers(key.loops))
        self._pages = np.array([[s.page(s.length // PAGE_TOKENS, layer) for s in rows] for layer in layers])
        self._masks = [np.empty((len(arena.rows), 1, 1, arena.size), np.float32) for arena in self._arenas]

    def _own_folds(self, sequence: Sequence) -> list[Fold]:
        first = max(sequence.first_split, sequence.first_visible(sequence.length))
        end = sequence.length // PAGE_TOKENS
        if first >= end:
            return []
        assert sequence.track is not None, f"sequence {sequence.id} lost its whole splits"
        return folds_over([SplitRange(sequence.track, first, end)], 1, self.key.window)

    def fill(self, tokens: Array, positions: Array) -> None:
        rows, window = self.rows, self.key.window
        tokens[:] = [s.last_token for s in rows]
        positions[:] = self._positions[:] = [s.length for s in rows]
        self._slots[:] = self._positions % PAGE_TOKENS
        for fold in self._shared:
            fold.update(self._positions, window)
        for i, folds in enumerate(self._own):
            for fold in folds:
                fold.update(self._positions[i : i + 1], window)
        start = 0
        for arena, mask in zip(self._arenas, self._masks, strict=True):
            slots = self._slots[start : start + len(arena.rows), None]
            at = np.arange(arena.size)
            seen = (at <= slots) & (at > slots - window) if window else at <= slots
            mask[:, 0, 0] = np.where(seen, np.float32(0), MASKED)
            start += len(arena.rows)

    def attend(self, layer: int, rows: RowArrays) -> list[Step]:
        steps: list[Step] = [lambda: self._store(layer, rows)]
        steps += fold_steps(self._kernels, self._shared, layer, rows, going_on=False)
        going_on = bool(self._shared)
        if not going_on and any(self._own):
            steps.append(rows.state.clear)
            going_on = True
        for i, folds in enumerate(self._own):
            steps += fold_steps(self._kernels, folds, layer, rows.rows(i, i + 1), going_on=going_on)
        start = 0
        for arena, mask in zip(self._arenas, self._masks, strict=True):
            end = start + len(arena.rows)
            if start < end:
                steps.append(self._tail(layer, rows.rows(start, end), arena, mask, going_on=going_on))
            start = end
        return steps

    def _tail(self, layer: int, rows: RowArrays, arena: TailArena, mask: Array, *, going_on: bool) -> Step:
        inputs = {"q": rows.q, "mask": mask, **arena.arrays(layer)}
        if going_on:
            inputs |= rows.state.named("_in")
        return self._kernels.tail(going_on=going_on).bind(inputs, {"a": rows.a})

    def _store(self, layer: int, rows: RowArrays) -> None:
        start = 0
        for arena in self._arenas:
            end = start + len(arena.rows)
            if start < end:
                at, slots = np.arange(end - start), self._slots[start:end]
                arena.keys[layer][at, :, slots] = rows.kv32[start:end, 0]
                arena.values[layer][at, :, slots] = rows.kv32[start:end, 1]
            start = end
        self._table.pool.write_rows(self._pages[layer], self._slots, rows.kv16)
