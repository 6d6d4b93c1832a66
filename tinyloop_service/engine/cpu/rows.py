"""The rows of a forward pass, and what a run of rows has to offer to take part in one.

A pass is a matrix of rows.  The linears see only the matrix; a *run* is a range of its rows that attend alike: chunks
of prompts off one parent (`prefill.py`) or the decoding rows off one parent (`decoding.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tinyloop_service.engine.api import PAGE_TOKENS
from tinyloop_service.engine.cache_modes import Field, Stored
from tinyloop_service.engine.cpu.attention import MASKED, MOST_SPLITS, AttentionKernels, FoldState
from tinyloop_service.engine.cpu.memory import SplitRange
from tinyloop_service.engine.cpu.runtime import Array
from tinyloop_service.engine.spec import ModelSpec

_FOLD_ROWS = 2048  # splits × rows of one fold
_WIDENED_BYTES = 4 << 20  # of K, and as many of V, that one call makes float32: they stay in the cache

Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class RowArrays:
    """What attention reads and writes for n rows; every array's first axis is the row."""

    q: Array  # (n, H, D)
    stored: Stored  # (n, …) each
    kv: Array  # (n, 2, G, D) fp16, as read from what is stored
    a: Array  # (n, H·D)
    state: FoldState
    spare: FoldState  # where a fold that goes on writes

    @classmethod
    def empty(cls, rows: int, spec: ModelSpec, fields: Iterable[Field]) -> RowArrays:
        return cls(
            q=np.zeros((rows, spec.n_heads, spec.head_dim), np.float32),
            stored={field.name: np.zeros((rows, *field.shape), field.dtype) for field in fields},
            kv=np.zeros((rows, 2, spec.n_kv_heads, spec.head_dim), np.float16),
            a=np.zeros((rows, spec.q_dim), np.float32),
            state=FoldState.empty(rows, spec),
            spare=FoldState.empty(rows, spec),
        )

    def rows(self, start: int, end: int) -> RowArrays:
        at = slice(start, end)
        states = (self.state.rows(start, end), self.spare.rows(start, end))
        stored = {name: array[at] for name, array in self.stored.items()}
        return RowArrays(self.q[at], stored, self.kv[at], self.a[at], *states)


class Run(Protocol):
    """A range of rows that attend alike; all of one depth."""

    @property
    def num_rows(self) -> int: ...

    @property
    def loops(self) -> int: ...

    def fill(self, tokens: Array, positions: Array) -> None:
        """Write this pass's tokens and positions, int64 (n,) each, and whatever else depends on them."""
        ...

    def attend(self, layer: int, rows: RowArrays) -> Iterable[Step]:
        """The steps that put K and V of a cache layer away and fill `rows.a`; called once, run every pass."""
        ...


def hidden(at: Array, reader: Array, window: int) -> Array:
    """What to add to the scores of positions `at` for tokens at positions `reader`, which broadcast."""
    seen = (at <= reader) & (at > reader - window) if window else at <= reader
    return np.where(seen, np.float32(0), MASKED)


@dataclass(frozen=True, slots=True)
class Fold:
    """A range of splits that every row of a run reads; `mask` where a window hides some from some."""

    splits: SplitRange
    mask: Array | None  # (f, 1, 1, n, 64)

    def update(self, positions: Array, window: int) -> None:
        if self.mask is not None:
            at = np.arange(self.splits.first * PAGE_TOKENS, self.splits.end * PAGE_TOKENS).reshape(-1, 1, PAGE_TOKENS)
            self.mask[:, 0, 0] = hidden(at, positions[:, None], window)


def most_widened(values: int) -> int:
    """How many pieces, of so many values of K each, one call of attention takes."""
    return max(1, _WIDENED_BYTES // (4 * values))


def folds_over(ranges: Iterable[SplitRange], rows: int, window: int) -> list[Fold]:
    """Cut ranges into folds of a size that stays in the cache; where they are cut changes no bit."""
    folds = []
    most_splits = min(MOST_SPLITS, max(1, _FOLD_ROWS // rows))
    for splits in ranges:
        most = min(most_splits, most_widened(splits.track.kv[0, 0, 0].size))
        for first in range(splits.first, splits.end, most):
            piece = SplitRange(splits.track, first, min(first + most, splits.end))
            mask = np.zeros((piece.num_splits, 1, 1, rows, PAGE_TOKENS), np.float32) if window else None
            folds.append(Fold(piece, mask))
    return folds


def fold_steps(
    kernels: AttentionKernels, folds: Sequence[Fold], layer: int, rows: RowArrays, *, going_on: bool
) -> list[Step]:
    """Fold into `rows.state`, from nothing or from what it holds."""
    steps: list[Step] = []
    for fold in folds:
        inputs = {"q": rows.q, **fold.splits.arrays(layer)}
        if fold.mask is not None:
            inputs["mask"] = fold.mask
        kernel = kernels.fold(going_on=going_on, masked=fold.mask is not None)
        if going_on:
            steps.append(kernel.bind(inputs | rows.state.named("_in"), rows.spare.named("")))
            steps.append(lambda: rows.state.copy_from(rows.spare))
        else:
            steps.append(kernel.bind(inputs, rows.state.named("")))
        going_on = True
    return steps
