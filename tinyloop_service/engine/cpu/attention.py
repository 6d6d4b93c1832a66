"""Attention as a left fold over splits, so that any mix of rows and segments gives each row the same bits.

A split is one page's stretch of 64 absolute positions.  A row's attention over splits 0, 1, 2, … is a running state

    acc = Σᵢ wᵢ·oᵢ    den = Σᵢ wᵢ    wᵢ = 2^(eᵢ−E)·rᵢ    E = maxᵢ eᵢ          result acc / den

with mᵢ the largest score of split i, oᵢ its softmax-weighted values, eᵢ = ⌊mᵢ·log2 e⌋ and rᵢ = (Σ exp(score − mᵢ)) ·
2^(mᵢ·log2 e − eᵢ), a function of the row and the split alone.  Rescaling to a new E multiplies by a power of two, which
is exact.  So folding 16 splits in one call has the bits of folding 10, then 6; shared splits can be folded once for all
rows of a prefix, and each row goes on alone.  (A split more than 2^100 below the largest counts as nothing.)

Three kernels, each in a variant that starts a state and one that goes on with it:
    fold     n rows × the same whole splits                      → state
    finish   n rows × one split that all of them see, masked     → result     (a prompt's own split)
    own      n rows × f splits each, its own, masked             → result     (a decoded row's own splits)
A masked fold serves sliding windows.  Masks are added: 0 or a large finite negative (−inf would make a wholly masked
split NaN); its weight underflows to an exact zero.

Shapes: n rows, H heads, G K/V heads, D head_dim, f splits, t positions of a split.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
    """acc [n, H, D], den [n, H] and E [n, H] of n rows; what no split has been folded into is `clear`."""

    acc: Array
    den: Array
    top: Array

    @classmethod
    def empty(cls, rows: int, spec: ModelSpec) -> FoldState:
        shape = (rows, spec.n_heads)
        state = cls(np.empty((*shape, spec.head_dim), np.float32), *(np.empty(shape, np.float32) for _ in "de"))
        state.clear()
        return state

    def rows(self, start: int, end: int) -> FoldState:
        return FoldState(self.acc[start:end], self.den[start:end], self.top[start:end])

    def clear(self) -> None:
        self.acc[:], self.den[:], self.top[:] = 0, 0, MASKED

    def copy_from(self, other: FoldState) -> None:
        self.acc[:], self.den[:], self.top[:] = other.acc, other.den, other.top

    def named(self, suffix: str) -> dict[str, Array]:
        return {f"acc{suffix}": self.acc, f"den{suffix}": self.den, f"top{suffix}": self.top}


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
        state = self._state_in(
            lambda x, *width: g.reshape(g.transpose(x, 1, 0, *range(2, 2 + len(width))), 1, groups, -1, *width)
        )
        acc, den, top = self._accumulate(scores, v, 0, state)
        acc = g.transpose(g.reshape(acc, heads, -1, dim), 1, 0, 2)
        den, top = (g.transpose(g.reshape(x, heads, -1), 1, 0) for x in (den, top))
        if finish:
            self._finish(acc, den)
        else:
            g.output("acc", acc, F32, ["n", heads, dim])
            g.output("den", den, F32, ["n", heads])
            g.output("top", top, F32, ["n", heads])
        return g.build()

    def own(self) -> Kernel:
        spec, g = self.spec, self.g
        heads, groups, dim = spec.n_heads, spec.n_kv_heads, spec.head_dim
        each = (-1, 1, groups, heads // groups)
        q = g.reshape(g.input("q", F32, ["n", heads, dim]), *each, dim)
        k, v = self._keys_values("n", "f", groups, "t", dim)
        mask = g.input("mask", F32, ["n", "f", 1, 1, "t"])
        scores = g.op("Add", self._scores(q, k), mask)  # [n, f, G, H/G, t]
        acc, den, _ = self._accumulate(scores, v, 1, self._state_in(lambda x, *width: g.reshape(x, *each, *width)))
        self._finish(g.reshape(acc, -1, heads, dim), g.reshape(den, -1, heads))
        return g.build()

    def _keys_values(self, *shape: int | str) -> list[str]:
        return [self.g.cast(self.g.input(name, F16, shape), F32) for name in "kv"]

    def _accumulate(self, scores: str, v: str, axis: int, state: list[str] | None) -> list[str]:
        """acc, den and E after the splits, which lie on `axis` of the scores; the state has one entry there."""
        g = self.g
        softmax, weights, exponents = self._weigh(scores)
        top = g.reduce("ReduceMax", exponents, axis)
        if state is not None:
            top = g.op("Max", top, state[2])
        weights = g.op("Mul", weights, self._power(g.op("Sub", top, exponents)))
        terms = self._mix(g.op("Mul", softmax, self._column(weights)), v)
        if state is not None:
            faded = self._power(g.op("Sub", top, state[2]))
            terms = g.op("Concat", g.op("Mul", state[0], self._column(faded)), terms, axis=axis)
            weights = g.op("Concat", g.op("Mul", state[1], faded), weights, axis=axis)
        if axis:
            terms, weights = g.transpose(terms, 1, 0, 2, 3, 4), g.transpose(weights, 1, 0, 2, 3)
        return [*self._sum_splits(terms, weights), top]

    def _scores(self, q: str, k: str) -> str:
        return self.g.contrib("FusedMatMul", q, k, transB=1, alpha=self.spec.head_dim**-0.5)

    def _mix(self, weighted: str, v: str) -> str:
        """Twice the weighted values: a factor of 1 would choose the one-row kernel, whose bits differ."""
        return self.g.contrib("FusedMatMul", weighted, v, alpha=2.0)

    def _sum_splits(self, *each: str) -> list[str]:
        """[f, …] → [1, …], one addition after the other: a product with ½, doubled, twice as fast as ReduceSum.

        A product runs through at most 128 terms in one go, which bounds the splits of a fold.
        """
        g = self.g
        count = g.op("Shape", each[0], start=0, end=1)
        halves = g.op("Slice", self.halves, g.constant(np.zeros(1, np.int64)), count, g.constant(np.ones(1, np.int64)))
        return [g.contrib("FusedMatMul", halves, g.op("Flatten", terms, axis=1), alpha=2.0) for terms in each]

    def _weigh(self, scores: str) -> tuple[str, str, str]:
        """scores [..., t] → softmax [..., t], rᵢ [...], eᵢ [...].  Softmax's largest value is 1 / Σ exp(score − mᵢ).

        The last two without an axis of length 1 at the end, for which products with a constant are slow.
        """
        g = self.g
        softmax = g.op("Softmax", scores, axis=-1)
        largest, likeliest = (g.reduce("ReduceMax", x, -1, keep=False) for x in (scores, softmax))
        binary = g.op("Mul", largest, g.constant(math.log2(math.e)))
        exponents = g.op("Floor", binary)
        rest = g.op("Exp", g.op("Mul", g.op("Sub", binary, exponents), g.constant(math.log(2))))
        return softmax, g.op("Div", rest, likeliest), exponents

    def _power(self, distance: str) -> str:
        """2^-distance for whole distances ≥ 0."""
        g = self.g
        nearest = g.op("Clip", distance, g.constant(0.0), g.constant(127.0))
        return g.op("Gather", self.powers, g.cast(nearest, I32))

    def _column(self, x: str) -> str:
        """[...] → [..., 1]"""
        return self.g.op("Unsqueeze", x, self.g.constant(np.array([-1], np.int64)))

    def _state_in(self, arrange: Callable[..., str]) -> list[str] | None:
        """acc, den and E; `arrange` gives each the axes of the scores, but for the last."""
        if not self.going_on:
            return None
        g, heads, dim = self.g, self.spec.n_heads, self.spec.head_dim
        acc = g.input("acc_in", F32, ["n", heads, dim])
        den, top = (g.input(name, F32, ["n", heads]) for name in ("den_in", "top_in"))
        return [arrange(acc, dim), arrange(den), arrange(top)]

    def _finish(self, acc: str, den: str) -> None:
        """acc holds twice its value."""
        g = self.g
        result = g.op("Div", acc, self._column(g.op("Add", den, den)))
        g.output("a", g.reshape(result, -1, self.spec.q_dim), F32, ["n", self.spec.q_dim])
