"""The forward pass: any mix of runs as one matrix of rows through the blocks.

    ids → embedding → pre blocks → loop blocks × loops → post blocks → head, for the rows that are asked for

Runs stand in the order of falling depth, so that the rows still in the loop are always the first ones; rows that are
done wait in an array of their own.  What a pass does is written down once, as a list of steps with all memory bound,
and then run; decoding repeats the list until its layout changes.  Refuses to know about plans, pages and sampling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from tinyloop_service.engine.cpu.attention import AttentionKernels
from tinyloop_service.engine.cpu.coding import Coding
from tinyloop_service.engine.cpu.layers import BlockKernels, LayerCompiler
from tinyloop_service.engine.cpu.reading import PageReader
from tinyloop_service.engine.cpu.rows import RowArrays, Run, Step
from tinyloop_service.engine.cpu.runtime import Array, Call
from tinyloop_service.engine.cpu.selfcheck import Linear, check_attention, row_multiple
from tinyloop_service.engine.spec import BlockKind, ModelSpec
from tinyloop_service.engine.tensors import BlockWeights, ModelWeights
from tinyloop_service.types import CacheMode

_TILE_ROWS = 64  # of one call of a linear: what lies between its products stays in the cache


@dataclass(frozen=True, slots=True)
class Placed:
    """A run and its rows start … end−1 of the matrix."""

    run: Run
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Pass:
    """The steps of one forward pass; its result lies in `result`, row by row."""

    placed: tuple[Placed, ...]
    steps: tuple[Step, ...]
    result: Array  # (rows, d_model)


class Model:
    """Weights, kernels and the arrays of a pass of at most `max_rows` rows."""

    def __init__(
        self, weights: ModelWeights, cache_mode: CacheMode, *, max_rows: int, accuracy_level: int, threads: int
    ) -> None:
        self.spec = spec = weights.spec
        self.coding = Coding(cache_mode, spec)
        self._embed = weights.embed
        compiler = LayerCompiler(weights, self.coding, accuracy_level=accuracy_level, threads=threads)
        self._blocks: dict[tuple[BlockKind, int], BlockKernels] = {}
        groups: dict[BlockKind, tuple[BlockWeights, ...]] = {
            "pre": weights.pre,
            "loop": weights.loop,
            "post": weights.post,
        }
        for kind, blocks in groups.items():
            for index, block in enumerate(blocks):
                self._blocks[kind, index] = compiler.block(block)
        self._norm = compiler.norm() if spec.loop_norm else None
        self._head = compiler.head(normed=spec.loop_norm and not spec.post_blocks)
        self.attention = AttentionKernels(spec)
        self._multiple = row_multiple(self._linears())
        self._bound_head = self._bind_head(self._multiple)
        check_attention(self.attention, spec)
        capacity = self.padded(max_rows)
        self._rows = RowArrays.empty(capacity, spec, self.coding.fields)
        width = (capacity, spec.d_model)
        self._x = (np.zeros(width, np.float32), np.zeros(width, np.float32))
        self._done = np.zeros(width, np.float32)
        self._injected = np.zeros(width, np.float32) if spec.inject == "add" else None
        self._tokens = np.zeros(capacity, np.int64)
        self._positions = np.zeros((1, capacity), np.int64)

    def page_reader(self) -> PageReader:
        return PageReader(self.spec, self.coding, self._blocks)

    def padded(self, rows: int) -> int:
        """The number of rows to give to a linear for the sake of `rows` of them."""
        return -(-rows // self._multiple) * self._multiple

    def plan(self, runs: Sequence[Run]) -> Pass:
        """Write down the pass of `runs`, none of them empty."""
        return _PassWriter(self, runs).write()

    def run(self, forward: Pass) -> None:
        rows = forward.placed[-1].end
        for placed in forward.placed:
            placed.run.fill(self._tokens[placed.start : placed.end], self._positions[0, placed.start : placed.end])
        self._x[0][:rows] = self._embed[self._tokens[:rows]]
        self._x[0][rows : self.padded(rows)] = self._x[0][rows - 1]
        self._positions[0, rows : self.padded(rows)] = self._positions[0, rows - 1]
        for step in forward.steps:
            step()

    def logits(self, x: Array) -> Array:
        """x [rows, d_model] → [rows, vocab_size], which the next call may write over."""
        if len(self._bound_head[0]) != self.padded(len(x)):
            self._bound_head = self._bind_head(self.padded(len(x)))
        given, logits, call = self._bound_head
        given[: len(x)], given[len(x) :] = x, x[-1]
        call()
        return logits[: len(x)]

    def _bind_head(self, rows: int) -> tuple[Array, Array, Call]:
        x, logits = (np.empty((rows, width), np.float32) for width in (self.spec.d_model, self.spec.vocab_size))
        return x, logits, self._head.bind({"x": x}, {"logits": logits})

    def _head_of(self, x: Array) -> Array:
        given, logits, call = self._bind_head(len(x))
        given[:] = x
        call()
        return logits

    def _linears(self) -> Iterator[tuple[str, int, Linear]]:
        """(name, inputs, function) of every kernel that holds weights, for the self-check."""
        spec = self.spec
        for (kind, index), block in self._blocks.items():
            name = f"{kind} block {index}"
            inwards = partial(_attend_in, spec=spec, coding=self.coding, block=block)
            yield f"{name}, q k v", spec.d_model, inwards
            yield f"{name}, mlp", spec.d_model + spec.q_dim, partial(_attend_out, spec=spec, block=block)
        yield "the head", spec.d_model, self._head_of


def _attend_in(x: Array, *, spec: ModelSpec, coding: Coding, block: BlockKernels) -> Array:
    """All that a block computes of x [rows, d_model] before attention, side by side."""
    rows, positions = RowArrays.empty(len(x), spec, coding.fields), np.zeros((1, len(x)), np.int64)
    for call in block.inwards(x, positions, rows.q, rows.stored, rows.kv):
        call()
    return np.concatenate([each.reshape(len(x), -1) for each in (rows.q, rows.kv, *rows.stored.values())], axis=1)


def _attend_out(both: Array, *, spec: ModelSpec, block: BlockKernels) -> Array:
    """both [rows, d_model + H·D]: the residual and attention's result."""
    x, a = (np.ascontiguousarray(part) for part in np.split(both, [spec.d_model], axis=1))
    y = np.empty_like(x)
    block.attend_out.run({"x": x, "a": a}, {"y": y})
    return y


class _PassWriter:
    """Writes the steps of one pass; follows which of the two matrices holds x."""

    def __init__(self, model: Model, runs: Sequence[Run]) -> None:
        self._model, self._steps = model, list[Step]()
        self._placed: list[Placed] = []
        start = 0
        for run in sorted(runs, key=lambda run: -run.loops):
            self._placed.append(Placed(run, start, start + run.num_rows))
            start += run.num_rows
        self._x, self._y = model._x

    def write(self) -> Pass:
        spec, everyone = self._model.spec, self._placed
        for i in range(spec.pre_blocks):
            self._block("pre", i, [(placed, i) for placed in everyone])
        self._save_injected()
        active = everyone
        for loop in range(everyone[0].run.loops):
            active = self._let_go(active, loop)
            self._loop(active, spec.pre_blocks + loop * spec.loop_blocks)
        if len(active) < len(everyone):
            self._let_go(active, everyone[0].run.loops)
            self._x, done = self._model._done, self._x
            self._y = done
        for p in range(spec.post_blocks):
            self._block(
                "post", p, [(placed, spec.cache_layers(placed.run.loops) - spec.post_blocks + p) for placed in everyone]
            )
        return Pass(tuple(everyone), tuple(self._steps), self._x[: everyone[-1].end])

    def _let_go(self, active: list[Placed], loop: int) -> list[Placed]:
        """The runs that go through loop number `loop`; the others' rows are saved."""
        going = [placed for placed in active if placed.run.loops > loop]
        if len(going) < len(active):
            x, done = self._x, self._model._done
            at = slice(going[-1].end if going else 0, active[-1].end)
            self._steps.append(lambda: done.__setitem__(at, x[at]))
        return going

    def _save_injected(self) -> None:
        if self._model._injected is not None:
            rows = self._model.padded(self._placed[-1].end)
            x, injected = self._x[:rows], self._model._injected[:rows]
            self._steps.append(lambda: injected.__setitem__(slice(None), x))

    def _loop(self, active: list[Placed], first_layer: int) -> None:
        model, rows = self._model, self._model.padded(active[-1].end)
        if model._injected is not None:
            x, injected = self._x[:rows], model._injected[:rows]
            self._steps.append(lambda: x.__iadd__(injected))
        for j in range(model.spec.loop_blocks):
            self._block("loop", j, [(placed, first_layer + j) for placed in active])
        if model._norm is not None:
            self._steps.append(model._norm.bind({"x": self._x[:rows]}, {"y": self._y[:rows]}))
            self._x, self._y = self._y, self._x

    def _block(self, kind: BlockKind, index: int, runs: list[tuple[Placed, int]]) -> None:
        """One block over the runs' rows; each run with the cache layer it is at."""
        model, rows = self._model, self._model.padded(runs[-1][0].end)
        arrays, kernels = model._rows.rows(0, rows), model._blocks[kind, index]
        tiles = [slice(start, min(start + _TILE_ROWS, rows)) for start in range(0, rows, _TILE_ROWS)]
        for at in tiles:
            tile = arrays.rows(at.start, at.stop)
            calls = kernels.inwards(self._x[at], model._positions[:, at], tile.q, tile.stored, tile.kv)
            self._steps.extend(calls)
        for placed, layer in runs:
            self._steps.extend(placed.run.attend(layer, arrays.rows(placed.start, placed.end)))
        for at in tiles:
            self._steps.append(kernels.attend_out.bind({"x": self._x[at], "a": arrays.a[at]}, {"y": self._y[at]}))
        self._x, self._y = self._y, self._x
