"""Chunks of prompts off one parent as rows of a forward pass.

    splits      0 ………… parent's last whole      own whole splits         the split that a span lies in
    attention   folded once for all rows        folded for each span     finished for each span, masked

A span is the rows of one chunk that lie in one split.  Own splits before a short chunk are folded once for all of it:
to read them is most of the work there, and twice as much where it lies across two splits.

In: chunks, of sequences with equal `GroupKey`s.  Out: the steps of `rows.Run`.  Refuses to know about other sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tinyloop_service.engine.api import PAGE_TOKENS
from tinyloop_service.engine.cpu.attention import AttentionKernels
from tinyloop_service.engine.cpu.memory import PagePool, SplitRange, Track
from tinyloop_service.engine.cpu.rows import Fold, RowArrays, Step, fold_steps, folds_over, hidden
from tinyloop_service.engine.cpu.runtime import Array
from tinyloop_service.engine.cpu.sequences import Sequence, inherited_ranges
from tinyloop_service.types import TokenIds

_SHORT = 2 * PAGE_TOKENS  # rows of a chunk


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens to append to a sequence, whose track has room for them."""

    sequence: Sequence
    track: Track
    tokens: TokenIds
    last: bool  # of its prompt: its last row's logits are wanted

    @property
    def positions(self) -> Array:
        return self.sequence.length + np.arange(len(self.tokens))


@dataclass(frozen=True, slots=True)
class _Past:
    """Rows start … end−1 of the run, a short chunk, and its own whole splits before it."""

    start: int
    end: int
    folds: list[Fold]


@dataclass(frozen=True, slots=True)
class _Span:
    """Rows start … end−1 of the run, all of them of one chunk and in one split."""

    chunk: Chunk
    start: int
    end: int
    split: int
    position: int  # of the first row
    has_past: bool  # something was folded into its rows before
    folds: list[Fold]  # the sequence's own whole splits, but for those of the past
    mask: Array  # (1, 1, 1, rows, 64)


class PrefillRun:
    """Appends chunks to their sequences."""

    def __init__(self, kernels: AttentionKernels, pool: PagePool, chunks: list[Chunk]) -> None:
        self._kernels, self._pool, self.chunks = kernels, pool, chunks
        self.ends: list[int] = np.cumsum([len(chunk.tokens) for chunk in chunks]).tolist()  # of the chunks' rows
        self._tokens = np.concatenate([np.array(chunk.tokens, np.int64) for chunk in chunks])
        self._positions = np.concatenate([chunk.positions for chunk in chunks])
        sequence = chunks[0].sequence
        visible = sequence.first_visible(int(self._positions.min()))
        self._shared = _folds(inherited_ranges(sequence, visible), self._positions, sequence.window)
        self._pasts: list[_Past] = []
        self._spans: list[_Span] = []
        for chunk, end in zip(chunks, self.ends, strict=True):
            self._cut(chunk, end)

    @property
    def num_rows(self) -> int:
        return len(self._tokens)

    @property
    def loops(self) -> int:
        return self.chunks[0].sequence.loops

    def fill(self, tokens: Array, positions: Array) -> None:
        tokens[:], positions[:] = self._tokens, self._positions

    def _cut(self, chunk: Chunk, chunk_end: int) -> None:
        splits = chunk.positions // PAGE_TOKENS
        chunk_start = chunk_end - len(splits)
        past_end = int(splits[0]) if len(splits) <= _SHORT else 0
        folds = self._own_folds(chunk, chunk_start, chunk_end, 0, past_end)
        if folds:
            self._pasts.append(_Past(chunk_start, chunk_end, folds))
        for split in range(splits[0], splits[-1] + 1):
            start, end = (chunk_start + np.searchsorted(splits, [split, split + 1])).tolist()
            positions = self._positions[start:end]
            at = np.arange(split * PAGE_TOKENS, (split + 1) * PAGE_TOKENS)
            mask = hidden(at, positions[:, None], chunk.sequence.window)[None, None, None]
            has_past, whole = bool(self._shared or folds), self._own_folds(chunk, start, end, past_end, split)
            self._spans.append(_Span(chunk, start, end, split, int(positions[0]), has_past, whole, mask))

    def _own_folds(self, chunk: Chunk, start: int, end: int, first: int, last: int) -> list[Fold]:
        """Of splits first … last−1, over those that the sequence owns and rows start … end−1 of the run see."""
        sequence, positions = chunk.sequence, self._positions[start:end]
        first = max(first, sequence.first_split, sequence.first_visible(int(positions[0])))
        return _folds([SplitRange(chunk.track, first, last)] if first < last else [], positions, sequence.window)

    def attend(self, layer: int, rows: RowArrays) -> list[Step]:
        steps: list[Step] = [lambda: self._store(layer, rows)]
        steps += fold_steps(self._kernels, self._shared, layer, rows, going_on=False)
        for past in self._pasts:
            mine = rows.rows(past.start, past.end)
            steps += fold_steps(self._kernels, past.folds, layer, mine, going_on=bool(self._shared))
        for span in self._spans:
            mine = rows.rows(span.start, span.end)
            steps += fold_steps(self._kernels, span.folds, layer, mine, going_on=span.has_past)
            going_on = span.has_past or bool(span.folds)
            own = SplitRange(span.chunk.track, span.split, span.split + 1)
            inputs = {"q": mine.q, "mask": span.mask, **own.arrays(layer)}
            if going_on:
                inputs |= mine.state.named("_in")
            steps.append(self._kernels.finish(going_on=going_on).bind(inputs, {"a": mine.a}))
        return steps

    def _store(self, layer: int, rows: RowArrays) -> None:
        for span in self._spans:
            mine, chunk = rows.rows(span.start, span.end), span.chunk
            chunk.track.write_run(layer, span.position, mine.kv)
            page = chunk.sequence.page(span.split, layer)
            self._pool.write_run(page, span.position % PAGE_TOKENS, mine.stored)


def _folds(ranges: Iterable[SplitRange], positions: Array, window: int) -> list[Fold]:
    folds = folds_over(ranges, len(positions), window)
    for fold in folds:
        fold.update(positions, window)
    return folds
