"""Attention as a left fold over splits, so that any mix of rows and segments gives each row the same bits.

A split is one page's stretch of 64 absolute positions.  A row's attention over splits 0, 1, 2, … is a running state

    acc = Σᵢ 2^(eᵢ−E)·oᵢ    den = Σᵢ 2^(eᵢ−E)·dᵢ    E = maxᵢ eᵢ          result acc / den

with mᵢ the largest score of split i, eᵢ = ⌊mᵢ·log2 e⌋, pᵢ = exp(scores − eᵢ·ln 2), oᵢ = pᵢ·V and dᵢ = Σ pᵢ: functions
of the row and the split alone.  Rescaling to a new E multiplies by a power of two, which is exact.  So folding 16
splits in one call has the bits of folding 10, then 6; shared splits can be folded once for all rows of a prefix, and
each row goes on alone.  (A split more than 2^100 below the largest counts as nothing.)

Three kernels, each in a variant that starts a state and one that goes on with it:
    fold     n rows × the same whole splits                      → state
    finish   n rows × one split that all of them see, masked     → result     (a prompt's own split)
    own      n rows × f splits each, its own, masked             → result     (a decoded row's own splits)
A masked fold serves sliding windows.  Masks are added: 0 or a large finite negative (−inf would make a wholly masked
split NaN); what is masked underflows to an exact zero.

Shapes: n rows, H heads, G K/V heads, D head_dim, f splits, t positions of a split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tinyloop_service.engine.api import PAGE_TOKENS
from tinyloop_service.engine.cpu.runtime import F16, F32, I32, Array, GraphBuilder, Kernel
from tinyloop_service.engine.spec import ModelSpec

MASKED = np.float32(-1e30)
MOST_SPLITS = 64  # of one fold
_NEGLIGIBLE = 100  # binary orders of magnitude


@dataclass(frozen=True, slots=True)
class FoldState:
    """sums [n, H, D + 1], acc and den, and E [n, H] of n rows; what no split has been folded into is `clear`."""

    sums: Array
    top: Array

    @classmethod
    def empty(cls, rows: int, spec: ModelSpec) -> FoldState:
        shape = (rows, spec.n_heads)
        state = cls(np.empty((*shape, spec.head_dim + 1), np.float32), np.empty(shape, np.float32))
        state.clear()
        return state

    def rows(self, start: int, end: int) -> FoldState:
        return FoldState(self.sums[start:end], self.top[start:end])

    def clear(self) -> None:
        self.sums[:], self.top[:] = 0, MASKED

    def copy_from(self, other: FoldState) -> None:
        self.sums[:], self.top[:] = other.sums, other.top

    def named(self, suffix: str) -> dict[str, Array]:
        return {f"sums{suffix}": self.sums, f"top{suffix}": self.top}


class AttentionKernels:
    """The kernels for one head geometry, built on first use."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._built: dict[tuple[str, bool, bool], Kernel] = {}

    def fold(self, *, going_on: bool, masked: bool) -> Kernel:
        """q [n, H, D], k and v [f, G, t, D], mask [f, 1, 1, n, t]?, state → new state."""
        return self._get("fold", going_on, masked)

    def finish(self, *, going_on: bool) -> Kernel:
        """q, k and v [1, G, t, D], mask [1, 1, 1, n, t], state? → a [n, H·D]."""
        return self._get("finish", going_on, True)

    def own(self, *, going_on: bool) -> Kernel:
        """q, k and v [n, f, G, t, D], mask [n, f, 1, 1, t], state? → a [n, H·D]."""
        return self._get("own", going_on, True)

    def _get(self, kind: str, going_on: bool, masked: bool) -> Kernel:
        key = (kind, going_on, masked)
        if key not in self._built:
            graph = _AttentionGraph(self._spec, going_on, masked)
            self._built[key] = graph.own() if kind == "own" else graph.shared(finish=kind == "finish")
        return self._built[key]


class _AttentionGraph:
    """One graph in the making.  Inside, shared splits work on [f, H, n, …], own ones on [n, f, H, …]."""

    def __init__(self, spec: ModelSpec, going_on: bool, masked: bool) -> None:
        self.spec, self.going_on, self.masked, self.g = spec, going_on, masked, GraphBuilder()

    @cached_property
    def powers(self) -> str:
        """2^-i; looked up, so that it is exact whatever the library's exp does."""
        table = np.ldexp(np.float32(1), -np.arange(128)).astype(np.float32)
        table[_NEGLIGIBLE:] = 0
        return self.g.constant(table)

    @cached_property
    def halves(self) -> str:
        return self.g.constant(np.full((1, MOST_SPLITS + 1), 0.5, np.float32))

    def shared(self, *, finish: bool) -> Kernel:
        """`fold`, and with `finish` the kernel of that name."""
        spec, g = self.spec, self.g
        heads, groups, dim = spec.n_heads, spec.n_kv_heads, spec.head_dim
        q = g.input("q", F32, ["n", heads, dim])
        k, v = self._keys_values("f", groups, PAGE_TOKENS, dim)
        mask = g.input("mask", F32, ["f", 1, 1, "n", PAGE_TOKENS]) if self.masked else None
        q = g.reshape(g.transpose(q, 1, 0, 2), groups, -1, dim)  # [G, H/G·n, D]
        scores = self._scores(q, k)  # [f, G, H/G·n, t]
        if mask is not None:
            split_rows = g.reshape(scores, 0, groups, heads // groups, -1, PAGE_TOKENS)
            scores = g.reshape(g.op("Add", split_rows, mask), 0, groups, -1, PAGE_TOKENS)
        state = self._state_in()
        if state is not None:
            sums, top = g.transpose(state[0], 1, 0, 2), g.transpose(state[1], 1, 0)
            state = g.reshape(sums, 1, groups, -1, dim + 1), g.reshape(top, 1, groups, -1)
        sums, top = self._accumulate(scores, v, 0, state)
        sums = g.transpose(g.reshape(sums, heads, -1, dim + 1), 1, 0, 2)
        if finish:
            self._finish(sums)
        else:
            g.output("sums", sums, F32, ["n", heads, dim + 1])
            g.output("top", g.transpose(g.reshape(top, heads, -1), 1, 0), F32, ["n", heads])
        return g.build()

    def own(self) -> Kernel:
        spec, g = self.spec, self.g
        heads, groups, dim = spec.n_heads, spec.n_kv_heads, spec.head_dim
        each = (-1, 1, groups, heads // groups)
        q = g.reshape(g.input("q", F32, ["n", heads, dim]), *each, dim)
        k, v = self._keys_values("n", "f", groups, "t", dim)
        mask = g.input("mask", F32, ["n", "f", 1, 1, "t"])
        scores = g.op("Add", self._scores(q, k), mask)  # [n, f, G, H/G, t]
        state = self._state_in()
        if state is not None:
            state = g.reshape(state[0], *each, dim + 1), g.reshape(state[1], *each)
        sums, _ = self._accumulate(scores, v, 1, state)
        self._finish(g.reshape(sums, -1, heads, dim + 1))
        return g.build()

    def _accumulate(self, scores: str, v: str, axis: int, state: tuple[str, str] | None) -> tuple[str, str]:
        """sums and E after the splits, which lie on `axis` of the scores; the state has one entry there."""
        g = self.g
        weights, exponents = self._weigh(scores)
        terms = g.op("Concat", self._mix(weights, v), g.reduce("ReduceSum", weights, -1), axis=-1)
        if state is not None:
            terms = g.op("Concat", state[0], terms, axis=axis)
            exponents = g.op("Concat", state[1], exponents, axis=axis)
        top = g.reduce("ReduceMax", exponents, axis)
        terms = g.op("Mul", terms, self._column(self._power(g.op("Sub", top, exponents))))
        return self._sum_splits(g.transpose(terms, 1, 0, 2, 3, 4) if axis else terms), top

    def _keys_values(self, *shape: int | str) -> list[str]:
        return [self.g.cast(self.g.input(name, F16, shape), F32) for name in "kv"]

    def _scores(self, q: str, k: str) -> str:
        return self.g.contrib("FusedMatMul", q, k, transB=1, alpha=self.spec.head_dim**-0.5)

    def _mix(self, weights: str, v: str) -> str:
        """Twice the weighted values: a factor of 1 would choose the one-row kernel, whose bits differ."""
        return self.g.contrib("FusedMatMul", weights, v, alpha=2.0)

    def _sum_splits(self, terms: str) -> str:
        """[f, …] → [1, …], one addition after the other: a product with ½, doubled, twice as fast as ReduceSum.

        A product runs through at most 128 terms in one go, which bounds the splits of a fold.
        """
        g = self.g
        count = g.op("Shape", terms, start=0, end=1)
        halves = g.op("Slice", self.halves, g.constant(np.zeros(1, np.int64)), count, g.constant(np.ones(1, np.int64)))
        return g.contrib("FusedMatMul", halves, g.op("Flatten", terms, axis=1), alpha=2.0)

    def _weigh(self, scores: str) -> tuple[str, str]:
        """scores [..., t] → pᵢ [..., t], eᵢ [...]; a column of numbers times a constant is slow, a row is not."""
        g = self.g
        binary = g.op("Mul", g.reduce("ReduceMax", scores, -1, keep=False), g.constant(math.log2(math.e)))
        exponents = g.op("Floor", g.op("Clip", binary, g.constant(float(MASKED) / 10)))  # of a masked split: above it
        shift = self._column(g.op("Mul", exponents, g.constant(math.log(2))))
        return g.op("Exp", g.op("Sub", scores, shift)), exponents

    def _power(self, distance: str) -> str:
        """2^-distance for whole distances ≥ 0."""
        g = self.g
        nearest = g.op("Clip", distance, g.constant(0.0), g.constant(127.0))
        return g.op("Gather", self.powers, g.cast(nearest, I32))

    def _column(self, x: str) -> str:
        """[...] → [..., 1]"""
        return self.g.op("Unsqueeze", x, self.g.constant(np.array([-1], np.int64)))

    def _state_in(self) -> tuple[str, str] | None:
        if not self.going_on:
            return None
        heads, dim = self.spec.n_heads, self.spec.head_dim
        return self.g.input("sums_in", F32, ["n", heads, dim + 1]), self.g.input("top_in", F32, ["n", heads])

    def _finish(self, sums: str) -> None:
        """sums hold acc twice."""
        g = self.g
        acc, den = g.split(sums, 2, self.spec.head_dim, 1)
        result = g.op("Div", acc, g.op("Add", den, den))
        g.output("a", g.reshape(result, -1, self.spec.q_dim), F32, ["n", self.spec.q_dim])
