"""The engine's check of itself at start: does a row have the same bits, whatever stands beside it?

That it does rests on how ONNX Runtime's kernels are written for this processor, so it is tried, not assumed, with the
model's own kernels on random rows:

    linears      rows of a matrix of 2, 4, 6, … rows against the same rows of a large one.  Where small counts differ,
                 counts are padded to multiples of 4, 8, 16 instead
    attention    one row against many; one fold against two; half a split against a whole one; the decoding kernel
                 against the prompt's; a mask that hides nothing against none; a hidden split against a missing one

In: kernels.  Out: the row multiple to pad to, or an EngineFault that says which promise this processor breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from tinyloop_service.engine.api import PAGE_TOKENS
from tinyloop_service.engine.cpu.attention import MASKED, AttentionKernels, FoldState
from tinyloop_service.engine.cpu.memory import HALF_SPLIT
from tinyloop_service.engine.cpu.runtime import Array
from tinyloop_service.engine.spec import ModelSpec
from tinyloop_service.errors import EngineFault

Linear = Callable[[Array], Array]  # (rows, in) → (rows, out)

ROW_MULTIPLES = (2, 4, 8, 16)
_ROWS = 80
_COUNTS = (2, 4, 6, 8, 10, 16, 18, 32, 34, 48, 64)


def row_multiple(linears: Iterable[tuple[str, int, Linear]]) -> int:
    """The least of `ROW_MULTIPLES` at which every linear (name, inputs, function) keeps a row's bits."""
    multiple = ROW_MULTIPLES[0]
    rng = np.random.default_rng(0)
    for name, width, linear in linears:
        x = rng.standard_normal((_ROWS, width), np.float32)
        whole = linear(x)
        same = {count: np.array_equal(linear(x[:count]), whole[:count]) for count in _COUNTS}
        fitting = [m for m in ROW_MULTIPLES if m >= multiple and all(same[c] for c in _COUNTS if c % m == 0)]
        if not fitting:
            raise EngineFault(
                f"self-check: {name} gives a row other bits in matrices of other sizes on this processor "
                f"(of {', '.join(str(c) for c, ok in same.items() if not ok)} rows); try another accuracy_level"
            )
        multiple = fitting[0]
    return multiple


def check_attention(kernels: AttentionKernels, spec: ModelSpec) -> None:
    """Raises EngineFault if a row's attention depends on how it was cut or on who was there."""
    check = _AttentionCheck(kernels, spec)
    for promise, holds in check.promises():
        if not holds:
            raise EngineFault(f"self-check: attention on this processor breaks a promise: {promise}")


class _AttentionCheck:
    splits, rows = 5, 9

    def __init__(self, kernels: AttentionKernels, spec: ModelSpec) -> None:
        self.kernels, self.spec = kernels, spec
        rng = np.random.default_rng(1)
        kv = (2, self.splits, spec.n_kv_heads, PAGE_TOKENS, spec.head_dim)
        self.k, self.v = (rng.standard_normal(kv, np.float32) * 2).astype(np.float16)
        self.q = rng.standard_normal((self.rows, spec.n_heads, spec.head_dim), np.float32) * 2
        self.whole = self.fold(slice(None), 0, self.splits, None)

    def promises(self) -> Iterable[tuple[str, bool]]:
        everyone, end = slice(None), self.splits
        for count in (1, 2, 3):
            alone = self.fold(slice(count), 0, end, None)
            yield f"{count} of {self.rows} rows", _equal(alone, self.whole.rows(0, count))
        for cut in (1, 3):
            in_two = self.fold(everyone, cut, end, self.fold(everyone, 0, cut, None))
            yield f"splits folded in two calls, cut at {cut}", _equal(in_two, self.whole)
        mask = np.zeros((end, 1, 1, self.rows, PAGE_TOKENS), np.float32)
        yield "a mask that hides nothing", _equal(self.fold(everyone, 0, end, None, mask), self.whole)
        mask[:2] = MASKED
        hidden, missing = self.fold(everyone, 0, end, None, mask), self.fold(everyone, 2, end, None)
        yield "hidden splits", _equal(hidden, missing)
        clear = FoldState.empty(self.rows, self.spec)
        yield "a fold on top of nothing", _equal(self.fold(everyone, 0, end, clear), self.whole)
        yield from self._own_splits()

    def _own_splits(self) -> Iterable[tuple[str, bool]]:
        """Decoding rows after the shared splits: each at a position of its own, all in the first half of a split."""
        last, everyone, end = np.arange(self.rows) * 3, slice(None), self.splits
        full = self._own(last, end - 1, PAGE_TOKENS, self.whole)
        yield "half a split", np.array_equal(self._own(last, end - 1, HALF_SPLIT, self.whole), full)
        yield "one row's own split", np.array_equal(self._own(last[:1], end - 1, PAGE_TOKENS, self.whole), full[:1])
        mask = _causal(last, PAGE_TOKENS)[None, None, None]
        a = np.empty_like(full)
        inputs = {"q": self.q, "k": self.k[-1:], "v": self.v[-1:], "mask": mask, **self.whole.named("_in")}
        self.kernels.finish(going_on=True).run(inputs, {"a": a})
        yield "a token decoded or prefilled", np.array_equal(a, full)
        apart = self._own(last, end - 1, PAGE_TOKENS, self.fold(everyone, 0, end - 1, None))
        for first in (0, 2):
            state = self.fold(everyone, 0, first, None) if first else None
            together = self._own(last, first, PAGE_TOKENS, state)
            yield f"the last {end - first} splits a row's own, or the last one only", np.array_equal(together, apart)

    def fold(self, rows: slice, first: int, end: int, state: FoldState | None, mask: Array | None = None) -> FoldState:
        q = self.q[rows]
        out = FoldState.empty(len(q), self.spec)
        inputs = {"q": q, "k": self.k[first:end], "v": self.v[first:end]}
        if state is not None:
            inputs |= state.named("_in")
        if mask is not None:
            inputs["mask"] = mask
        self.kernels.fold(going_on=state is not None, masked=mask is not None).run(inputs, out.named(""))
        return out

    def _own(self, last: Array, first: int, size: int, state: FoldState | None) -> Array:
        """Splits `first` to the end as every row's own, the last one up to position `last` of `size`."""
        n, count = len(last), self.splits - first
        k, v = (np.repeat(x[None, first:, :, :size], n, axis=0) for x in (self.k, self.v))
        mask = np.zeros((n, count, 1, 1, size), np.float32)
        mask[:, -1, 0, 0] = _causal(last, size)
        a = np.empty((n, self.spec.q_dim), np.float32)
        inputs = {"q": self.q[:n], "k": k, "v": v, "mask": mask}
        if state is not None:
            inputs |= state.rows(0, n).named("_in")
        self.kernels.own(going_on=state is not None).run(inputs, {"a": a})
        return a


def _causal(last: Array, size: int) -> Array:
    return np.where(np.arange(size) <= last[:, None], np.float32(0), MASKED)  # (rows, size)


def _equal(a: FoldState, b: FoldState) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a.named("").values(), b.named("").values(), strict=True))
