"""The engine's check of itself at start: does a row have the same bits, whatever stands beside it?

That it does rests on how ONNX Runtime's kernels are written for this processor, so it is tried, not assumed, with the
model's own kernels on random rows:

    linears      rows of a matrix of 2, 4, 6, … rows against the same rows of a large one.  Where small counts differ,
                 counts are padded to multiples of 4, 8, 16 instead
    attention    one row against many; one fold against two; half a tail against a whole one; the decoding kernel
                 against the prompt's; a mask that hides nothing against none; a hidden split against a missing one

In: kernels.  Out: the row multiple to pad to, or an EngineFault that says which promise this processor breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from tinyloop_service.engine.api import PAGE_TOKENS
from tinyloop_service.engine.cpu.attention import MASKED, AttentionKernels, FoldState
from tinyloop_service.engine.cpu.memory import TAIL_SIZES
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
        kv = (self.splits, spec.n_kv_heads, PAGE_TOKENS, spec.head_dim)
        self.k, self.v = (rng.standard_normal(kv, np.float32) * 2 for _ in "kv")
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
        yield from self._tails()

    def _tails(self) -> Iterable[tuple[str, bool]]:
        last = np.arange(self.rows) * 3  # the position each row is at: all in the first half
        full = self._tail(self.rows, TAIL_SIZES[-1], last)
        yield "half a tail", np.array_equal(self._tail(self.rows, TAIL_SIZES[0], last), full)
        yield "one row's tail", np.array_equal(self._tail(1, TAIL_SIZES[-1], last), full[:1])
        mask = _causal(last, PAGE_TOKENS)[None, None, None]
        a = np.empty_like(full)
        inputs = {"q": self.q, "k": self.k[:1], "v": self.v[:1], "mask": mask, **self.whole.named("_in")}
        self.kernels.finish(going_on=True).run(inputs, {"a": a})
        yield "a token decoded or prefilled", np.array_equal(a, full)

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

    def _tail(self, rows: int, size: int, last: Array) -> Array:
        k, v = (np.repeat(x[:1, :, :size], rows, axis=0) for x in (self.k, self.v))
        mask = _causal(last[:rows], size)[:, None, None]
        a = np.empty((rows, self.spec.q_dim), np.float32)
        inputs = {"q": self.q[:rows], "k": k, "v": v, "mask": mask, **self.whole.rows(0, rows).named("_in")}
        self.kernels.tail(going_on=True).run(inputs, {"a": a})
        return a


def _causal(last: Array, size: int) -> Array:
    return np.where(np.arange(size) <= last[:, None], np.float32(0), MASKED)  # (rows, size)


def _equal(a: FoldState, b: FoldState) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a.named("").values(), b.named("").values(), strict=True))
