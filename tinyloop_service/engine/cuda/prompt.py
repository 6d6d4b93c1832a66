"""Prompt tokens: any mix of chunks of one depth as one matrix through the schedule, with fp16 products by cuBLAS.

    embed → per layer: fold_norm, qkv, rope into pages, prefill_attention, o, fold_norm, gate|up, swiglu, down

The residual stream is fp32, and products of o and down are added to it in place ("sandwich": they come apart, for they
go through a norm of their own).  Rows are padded to a multiple of 64.  A product's inputs are cut into slices of 2048,
summed in fp32 one after the other: cuBLAS then adds in an order that does not depend on the number of rows; where it
does all the same (`selfcheck.py`), `fix_tiles` makes every product one of a fixed number of rows.

A pass of a shape that comes again becomes a CUDA graph, for a hundred launches from Python take as long as the device.

In: tokens, where they belong, and tiles.  Out: K and V in pages; the stream of chosen rows after the final norm.
Refuses to know about plans and sequences.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from tinyloop_service.engine.cuda.memory import Arena
from tinyloop_service.engine.cuda.schedule import Layer, Schedule, Step
from tinyloop_service.engine.cuda.weights import DeviceModel
from tinyloop_service.kernels.device import Array, Device, Graph
from tinyloop_service.kernels.embed import embed_prompt, gather_rows
from tinyloop_service.kernels.norm import fold_norm
from tinyloop_service.kernels.prefill_attention import prefill_attention
from tinyloop_service.kernels.rope import rope
from tinyloop_service.kernels.swiglu import swiglu

ROW_MULTIPLE = 64
FIXED_ROWS = 256  # of every product, if cuBLAS gives a row other bits in matrices of other sizes
SLICE_INPUTS = 2048
_MOST_GRAPHS = 32


@dataclass(frozen=True, slots=True)
class PassShape:
    """Passes of one shape differ in the contents of their tables alone."""

    rows: int  # padded
    tiles: int
    loops: int

    @property
    def words(self) -> int:
        """Of a pass's tables, one after the other: ids, slots (−1: padding), positions [rows]; tiles [tiles, 6]."""
        return 3 * self.rows + 6 * self.tiles


@dataclass(frozen=True, slots=True)
class _Tables:
    ids: Array  # int32 [rows]
    slots: Array
    positions: Array
    tiles: Array  # int32 [tiles, 6]


class PromptPass:
    """Buffers for at most `max_tokens` rows."""

    def __init__(self, device: Device, model: DeviceModel, arena: Arena, *, max_tokens: int, max_last: int) -> None:
        """max_last: most rows of a pass whose output is wanted at once."""
        spec, rows = model.spec, -(-max_tokens // FIXED_ROWS) * FIXED_ROWS
        self._device, self._model, self._arena = device, model, arena
        self.max_rows, self._tile_rows = rows, 0
        self._uses: Counter[PassShape] = Counter()
        self._graphs: dict[PassShape, Graph] = {}
        self.tables: Array = device.zeros((9 * rows,), np.int32)
        self._x = device.zeros((rows, spec.d_model), np.float32)
        self._injected = device.zeros((rows, spec.d_model), np.float32) if spec.inject == "add" else None
        sandwich = spec.norm_placement == "sandwich"
        self._apart = device.zeros((rows, spec.d_model), np.float32) if sandwich else None
        self._y = device.zeros((rows, spec.d_model), np.float16)
        self._qkv = device.zeros((rows, spec.q_dim + 2 * spec.kv_dim), np.float16)
        self._q = device.zeros((rows, spec.q_dim), np.float16)
        self._a = device.zeros((rows, spec.q_dim), np.float16)
        self._gate_up = device.zeros((rows, 2 * spec.d_ff), np.float16)
        self._h = device.zeros((rows, spec.d_ff), np.float16)
        self._last_x = device.zeros((max_last, spec.d_model), np.float32)
        self._last_apart = device.zeros((max_last, spec.d_model), np.float32) if sandwich else None

    def fix_tiles(self) -> None:
        """From now on every product has the same number of rows."""
        self._tile_rows = FIXED_ROWS

    def padded(self, tokens: int) -> int:
        """Rows of a pass of so many tokens."""
        multiple = self._tile_rows or ROW_MULTIPLE
        return -(-tokens // multiple) * multiple

    def run(self, shape: PassShape, schedule: Schedule) -> None:
        """The pass whose tables are at the beginning of `tables`."""
        self._uses[shape] += 1
        if shape not in self._graphs and self._is_worth_a_graph(shape):
            self._graphs[shape] = self._device.capture(lambda: self.launch(shape, schedule))
        if shape in self._graphs:
            self._graphs[shape].launch()
        else:
            self.launch(shape, schedule)

    def _is_worth_a_graph(self, shape: PassShape) -> bool:
        """It comes again and again; where there are many graphs already, the least used one goes for it."""
        if len(self._graphs) < _MOST_GRAPHS:
            return self._uses[shape] > 1
        rarest = min(self._graphs, key=self._uses.__getitem__)
        if self._uses[shape] <= self._uses[rarest]:
            return False
        del self._graphs[rarest]
        return True

    def launch(self, shape: PassShape, schedule: Schedule) -> None:
        """The same, launch by launch."""
        rows, tables = shape.rows, self._cut(shape)
        embed_prompt(self._device, self._model.embed, tables.ids, self._x[:rows])
        apart = None
        for layer in schedule.layers:
            self._fold(rows, apart, layer.before_attention)
            self._attend(rows, tables, layer)
            apart = self._join(self._a[:rows], layer.block.o.dense)
            self._fold(rows, apart, layer.before_mlp)
            self.gemm(self._y[:rows], layer.block.gate_up.dense, self._gate_up[:rows])
            swiglu(self._device, self._gate_up[:rows], self._h[:rows])
            apart = self._join(self._h[:rows], layer.block.down.dense)

    def finish(self, index: Array, schedule: Schedule, y: Array) -> None:
        """The final norm of the rows index int32 [n] of the last pass → y fp16 [n, d_model]."""
        count = index.shape[0]
        x, apart = self._last_x[:count], None
        gather_rows(self._device, self._x, index, x)
        if self._apart is not None and self._last_apart is not None:
            gather_rows(self._device, self._apart, index, self._last_apart[:count])
            apart = self._last_apart[:count].reshape(1, count, -1)
        final = schedule.final
        fold_norm(
            self._device, x, apart, y, eps=self._model.spec.norm_eps, gain=final.gain, post_gain=final.post,
            loop_gain=final.loop,
        )  # fmt: skip

    def gemm(self, x: Array, weight: Array, out: Array, *, accumulate: bool = False) -> None:
        """out [T, N] (+)= x [T, K] · weight [N, K]ᵀ, in slices of K and, if they are set, tiles of T."""
        rows = x.shape[0]
        tile = self._tile_rows or rows
        for first in range(0, rows, tile):
            part = slice(first, first + tile)
            for at in range(0, x.shape[1], SLICE_INPUTS):
                inputs = slice(at, at + SLICE_INPUTS)
                add = accumulate or at > 0
                self._device.gemm(x[part, inputs], weight[:, inputs], out[part], accumulate=add)

    def _cut(self, shape: PassShape) -> _Tables:
        ids, slots, positions = (self.tables[i * shape.rows : (i + 1) * shape.rows] for i in range(3))
        return _Tables(ids, slots, positions, self.tables[3 * shape.rows : shape.words].reshape(shape.tiles, 6))

    def _attend(self, rows: int, tables: _Tables, layer: Layer) -> None:
        spec, arena = self._model.spec, self._arena
        q = self._q[:rows]
        self.gemm(self._y[:rows], layer.block.qkv.dense, self._qkv[:rows])
        rope(
            self._device, self._qkv[:rows], tables.slots, tables.positions, self._model.cos, self._model.sin,
            arena.tables, layer.index, arena.pool, q, num_kv_heads=spec.n_kv_heads, pairing=spec.rope_pairing,
        )  # fmt: skip
        prefill_attention(
            self._device, q, arena.pool, arena.tables, layer.index, tables.tiles, self._a[:rows],
            num_heads=spec.n_heads, num_kv_heads=spec.n_kv_heads, token_slot=tables.slots,
            token_position=tables.positions,
        )  # fmt: skip

    def _join(self, inputs: Array, weight: Array) -> Array | None:
        """A product into the residual, or apart [1, T, d_model] where a norm comes between."""
        rows = inputs.shape[0]
        if self._apart is None:
            self.gemm(inputs, weight, self._x[:rows], accumulate=True)
            return None
        self.gemm(inputs, weight, self._apart[:rows])
        apart: Array = self._apart[:rows].reshape(1, rows, -1)
        return apart

    def _fold(self, rows: int, apart: Array | None, step: Step) -> None:
        injected = None if step.inject == "none" or self._injected is None else self._injected[:rows]
        fold_norm(
            self._device, self._x[:rows], apart, self._y[:rows], eps=self._model.spec.norm_eps, gain=step.gain,
            post_gain=step.post, loop_gain=step.loop, inject=step.inject, injected=injected,
        )  # fmt: skip
