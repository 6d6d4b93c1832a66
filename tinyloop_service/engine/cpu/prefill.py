"""A chunk of one prompt as rows of a forward pass.

    splits      0 … first−1              first        first+1      …
    rows        all rows of the chunk    │ span 0 │ │ span 1 │     a span: the chunk's rows that lie in one split
    attention   one fold, for all rows   the whole splits of the chunk before a span, then its own, masked

In: a sequence, tokens, a position.  Out: the steps of `rows.Run`.  Refuses to know about other sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tinyloop_service.engine.api import PAGE_TOKENS
from tinyloop_service.engine.cpu.attention import MASKED, AttentionKernels
from tinyloop_service.engine.cpu.memory import PagePool, SplitRange, Track
from tinyloop_service.engine.cpu.rows import Fold, RowArrays, Step, fold_steps, folds_over
from tinyloop_service.engine.cpu.runtime import Array
from tinyloop_service.engine.cpu.sequences import Sequence, inherited_ranges
from tinyloop_service.types import TokenIds


@dataclass(frozen=True, slots=True)
class _Span:
    """Rows start … end−1 of the chunk, all of them in one split."""

    start: int
    end: int
    split: int
    folds: list[Fold]  # the chunk's own whole splits before it
    mask: Array  # (1, 1, 1, rows, 64)


class PrefillRun:
    """Appends `tokens` to `sequence`, whose track has room for them."""

    def __init__(
        self, kernels: AttentionKernels, pool: PagePool, sequence: Sequence, track: Track, tokens: TokenIds
    ) -> None:
        self._kernels, self._pool, self._sequence, self._track = kernels, pool, sequence, track
        self._tokens = np.array(tokens, np.int64)
        self._positions = sequence.length + np.arange(len(tokens))
        self._before = self._folds_before()
        self._spans = list(self._cut())

    @property
    def num_rows(self) -> int:
        return len(self._tokens)

    @property
    def loops(self) -> int:
        return self._sequence.loops

    @property
    def sequence(self) -> Sequence:
        return self._sequence

    def fill(self, tokens: Array, positions: Array) -> None:
        tokens[:], positions[:] = self._tokens, self._positions

    def _folds_before(self) -> list[Fold]:
        sequence, first = self._sequence, self._sequence.length // PAGE_TOKENS
        visible = sequence.first_visible(sequence.length)
        ranges = list(inherited_ranges(sequence, visible))
        if (begin := max(visible, sequence.first_split)) < first:
            ranges.append(SplitRange(self._track, begin, first))
        return self._folds(ranges, self._positions)

    def _folds(self, ranges: list[SplitRange], positions: Array) -> list[Fold]:
        rows, window = len(positions), self._sequence.window
        folds = folds_over(ranges, rows, window)
        for fold in folds:
            fold.update(positions, window)
        return folds

    def _cut(self) -> list[_Span]:
        spans: list[_Span] = []
        first, last = (int(self._positions[i]) // PAGE_TOKENS for i in (0, -1))
        for split in range(first, last + 1):
            start, end = np.searchsorted(self._positions, [split * PAGE_TOKENS, (split + 1) * PAGE_TOKENS]).tolist()
            positions = self._positions[start:end]
            begin = max(first, self._sequence.first_visible(int(positions[0])))
            ranges = [SplitRange(self._track, begin, split)] if begin < split else []
            folds = self._folds(ranges, positions)
            spans.append(_Span(start, end, split, folds, self._own_mask(split, positions)))
        return spans

    def _own_mask(self, split: int, positions: Array) -> Array:
        at, p = np.arange(split * PAGE_TOKENS, (split + 1) * PAGE_TOKENS), positions[:, None]
        seen = (at <= p) & (at > p - self._sequence.window) if self._sequence.window else at <= p
        return np.where(seen, np.float32(0), MASKED)[None, None, None]

    def attend(self, layer: int, rows: RowArrays) -> list[Step]:
        steps: list[Step] = [lambda: self._store(layer, rows)]
        steps += fold_steps(self._kernels, self._before, layer, rows, going_on=False)
        for span in self._spans:
            mine = rows.rows(span.start, span.end)
            steps += fold_steps(self._kernels, span.folds, layer, mine, going_on=bool(self._before))
            going_on = bool(self._before or span.folds)
            inputs = {
                "q": mine.q,
                "mask": span.mask,
                **SplitRange(self._track, span.split, span.split + 1).arrays(layer),
            }
            if going_on:
                inputs |= mine.state.named("_in")
            steps.append(self._kernels.finish(going_on=going_on).bind(inputs, {"a": mine.a}))
        return steps

    def _store(self, layer: int, rows: RowArrays) -> None:
        for span in self._spans:
            at = slice(span.start, span.end)
            position = int(self._positions[span.start])
            self._track.write_run(layer, position, rows.kv32[at])
            page = self._sequence.page(span.split, layer)
            self._pool.write_run(page, position % PAGE_TOKENS, rows.kv16[at])
