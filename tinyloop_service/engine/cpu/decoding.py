"""The decoding rows off one parent as rows of a forward pass.

    splits      0 ………… parent's last whole        own, in blocks of 16         the last 1 … 16 own, one being filled
    held by     tracks of the chain of parents    each row's own track         an Arena of rows with the same stretch
    attention   folded once for all rows          folded row by row            one call for each arena

A row begins with half a split, which is read faster than a whole one, and moves on to another arena when that is full,
when a split is, and when its window has passed one.  Its stretch is put into its track when it has 16 full splits.
Rows stand in the order of the arenas and their slots.

In: which sequences take part in the next step.  Out: the steps of `rows.Run`, which stay valid while `revision` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from tinyloop_service.engine.api import PAGE_TOKENS, SequenceId
from tinyloop_service.engine.cpu.attention import AttentionKernels
from tinyloop_service.engine.cpu.memory import HALF_SPLIT, Arena, SplitRange, Stretch
from tinyloop_service.engine.cpu.rows import Fold, RowArrays, Step, fold_steps, folds_over, hidden, most_widened
from tinyloop_service.engine.cpu.runtime import Array
from tinyloop_service.engine.cpu.sequences import Sequence, SequenceTable, inherited_ranges, inherited_split
from tinyloop_service.engine.spec import ModelSpec

BLOCK_SPLITS = 16  # the most that an arena holds of a row


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


def _stretch(sequence: Sequence) -> Stretch:
    """What the arena of a row holds when its next token comes to lie at `length`."""
    split, offset = divmod(sequence.length, PAGE_TOKENS)
    own = sequence.first_split
    first = max(split - (split - own) % BLOCK_SPLITS, sequence.first_visible(sequence.length))
    return Stretch(first, split + 1, HALF_SPLIT if first == split and offset < HALF_SPLIT else PAGE_TOKENS)


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the steps were bound for; another layout needs other steps."""

    arenas: tuple[tuple[Stretch, tuple[SequenceId, ...]], ...]
    visible: int  # the first split that any row reads


class DecodeGroup:
    """Mutable: rows join, advance and leave."""

    def __init__(self, spec: ModelSpec, kernels: AttentionKernels, table: SequenceTable, key: GroupKey) -> None:
        self._spec, self._kernels, self._table, self.key = spec, kernels, table, key
        self._layers = range(spec.cache_layers(key.loops))
        self._arenas: dict[Stretch, Arena] = {}
        self._sequences: dict[SequenceId, Sequence] = {}
        self._layout: _Layout | None = None
        self.revision = 0

    @property
    def num_rows(self) -> int:
        return len(self._sequences)

    @property
    def loops(self) -> int:
        return self.key.loops

    @property
    def rows(self) -> list[Sequence]:
        return [self._sequences[seq] for arena in self._arenas.values() for seq in arena.rows]

    def expect(self, sequences: Iterable[Sequence]) -> None:
        """Make room for rows that are about to join."""
        for stretch, count in Counter(map(_stretch, sequences)).items():
            self._arena(stretch).reserve(count)

    def join(self, sequence: Sequence) -> None:
        """Take a row in: its last splits are copied from its track, or from its parent's if it has none."""
        stretch = _stretch(sequence)
        arena = self._arena(stretch)
        slot = arena.append(sequence.id)
        self._sequences[sequence.id], self._layout = sequence, None
        first, end = stretch.first, -(-sequence.length // PAGE_TOKENS)
        if first < end:
            source = inherited_split(sequence) if sequence.track is None else sequence.track.splits(first, end)
            _copy(source, arena.splits(slot, first, end))
        if sequence.track is not None and sequence.track.first >= stretch.first:
            sequence.track = None  # it held nothing else

    def leave(self, seq: SequenceId, *, keep: bool) -> None:
        """Take a row out; `keep`: put its stretch into its track, so that it can join again."""
        arena = next(arena for arena in self._arenas.values() if seq in arena.rows)
        if keep:
            self._put_away(arena, seq)
        arena.remove(arena.rows.index(seq))
        self._layout = None
        del self._sequences[seq]

    def _arena(self, stretch: Stretch) -> Arena:
        if stretch not in self._arenas:
            self._arenas[stretch] = Arena(self._spec, len(self._layers), stretch)
        return self._arenas[stretch]

    def _put_away(self, arena: Arena, seq: SequenceId) -> None:
        """Copy a row's stretch into its track."""
        sequence, slot = self._sequences[seq], arena.rows.index(seq)
        track = self._table.grow_track(sequence, sequence.length)
        first, end = max(arena.stretch.first, track.first), -(-sequence.length // PAGE_TOKENS)
        _copy(arena.splits(slot, first, end), track.splits(first, end))

    def prepare(self) -> None:
        """Move rows to the arena of their stretch; a new `revision` if steps must be bound again."""
        for arena in list(self._arenas.values()):
            for seq in reversed([s for s in arena.rows if _stretch(self._sequences[s]) != arena.stretch]):
                self._move(seq, arena)  # the last one first: it leaves no gap
        self._arenas = {stretch: arena for stretch, arena in self._arenas.items() if arena.rows}
        rows = self.rows
        layout = _Layout(
            tuple((stretch, tuple(arena.rows)) for stretch, arena in self._arenas.items()),
            min(s.first_visible(s.length) for s in rows),
        )
        if layout != self._layout:
            self._layout = layout
            self.revision += 1
            self._bind_shapes(rows)

    def _move(self, seq: SequenceId, source: Arena) -> None:
        sequence = self._sequences[seq]
        target = self._arena(_stretch(sequence))
        target.reserve(len(source.rows))  # the others will follow
        if target.stretch.first > max(source.stretch.first, sequence.first_visible(sequence.length)):
            self._put_away(source, seq)
        slot, new_slot = source.rows.index(seq), target.append(seq)
        first, end = target.stretch.first, source.stretch.end
        if first < end:
            _copy(source.splits(slot, first, end), target.splits(new_slot, first, end))
        source.remove(slot)

    def _bind_shapes(self, rows: list[Sequence]) -> None:
        """Everything that depends on the layout and not on the layer."""
        n, key = len(rows), self.key
        assert self._layout is not None
        shared = list(inherited_ranges(rows[0], self._layout.visible))
        self._positions = np.empty(n, np.int64)
        self._shared = folds_over(shared, n, key.window)
        self._own = [self._own_folds(s) for s in rows]
        self._slots = np.empty(n, np.int64)
        self._pages = np.array([[s.page(s.length // PAGE_TOKENS, layer) for s in rows] for layer in self._layers])
        self._masks = [np.empty(arena.mask_shape, np.float32) for arena in self._arenas.values()]

    def _own_folds(self, sequence: Sequence) -> list[Fold]:
        """Over the splits before the row's arena."""
        first = max(sequence.first_split, sequence.first_visible(sequence.length))
        end = _stretch(sequence).first
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
        for arena, at, mask in self._placed_arenas():
            read = arena.positions  # (splits, 1, 1, size)
            mask[:] = hidden(read, self._positions[at].reshape(-1, 1, 1, 1, 1), window)

    def _placed_arenas(self) -> Iterator[tuple[Arena, slice, Array]]:
        """Every arena, its range of rows, and its mask."""
        start = 0
        for arena, mask in zip(self._arenas.values(), self._masks, strict=True):
            end = start + len(arena.rows)
            yield arena, slice(start, end), mask
            start = end

    def attend(self, layer: int, rows: RowArrays) -> list[Step]:
        steps: list[Step] = [self._store(layer, rows)]
        steps += fold_steps(self._kernels, self._shared, layer, rows, going_on=False)
        going_on = bool(self._shared)
        if not going_on and any(self._own):
            steps.append(rows.state.clear)
            going_on = True
        for i, folds in enumerate(self._own):
            steps += fold_steps(self._kernels, folds, layer, rows.rows(i, i + 1), going_on=going_on)
        for arena, at, mask in self._placed_arenas():
            steps += self._arena_steps(layer, rows.rows(at.start, at.stop), arena, mask, going_on=going_on)
        return steps

    def _arena_steps(self, layer: int, rows: RowArrays, arena: Arena, mask: Array, *, going_on: bool) -> Iterator[Step]:
        kv = arena.arrays(layer)
        most = most_widened(kv["k"][0].size)
        for start in range(0, len(mask), most):
            at, some = slice(start, start + most), rows.rows(start, start + most)
            inputs = {"q": some.q, "mask": mask[at], "k": kv["k"][at], "v": kv["v"][at]}
            if going_on:
                inputs |= some.state.named("_in")
            yield self._kernels.own(going_on=going_on).bind(inputs, {"a": some.a})

    def _store(self, layer: int, rows: RowArrays) -> Step:
        pool, pages, slots, stored = self._table.pool, self._pages[layer], self._slots, rows.stored
        writes = [(arena.last_splits(layer), slots[at], rows.kv[at]) for arena, at, _ in self._placed_arenas()]
        numbers = np.arange(len(slots))

        def store() -> None:
            for splits, positions, kv in writes:
                splits[:, numbers[: len(kv)], :, positions] = kv
            pool.write_rows(pages, slots, stored)

        return store


def _copy(source: Array, target: Array) -> None:
    """As many positions [..., t, D] of each split as both have."""
    size = min(source.shape[-2], target.shape[-2])
    target[..., :size, :] = source[..., :size, :]
