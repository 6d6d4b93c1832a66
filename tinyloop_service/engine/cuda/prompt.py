"""Prompt tokens: any mix of chunks of one depth as one matrix through the schedule, with fp16 products by cuBLAS.

    write_words, embed → per layer: fold_norm, q, K and V into pages (`projection.py`), prefill_attention, o,
                                    fold_norm, gate|up, swiglu, down

The residual stream is fp32, and products of o and down are added to it in place ("sandwich": they come apart, for they
go through a norm of their own).  Rows are padded to a multiple of 64.  How many rows cuBLAS is given, so that a row's
bits do not depend on it, is up to `products.py`.

A pass is a CUDA graph (`graphs.py`), those of common shapes from the start.

In: tokens, where they belong, and tiles.  Out: K and V in pages; the stream of chosen rows after the final norm.
Refuses to know about plans and sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tinyloop_service.engine.cuda.batch import TILE_TOKENS
from tinyloop_service.engine.cuda.graphs import Graphs
from tinyloop_service.engine.cuda.memory import Arena
from tinyloop_service.engine.cuda.products import ROW_MULTIPLE, ProductKind, Products
from tinyloop_service.engine.cuda.projection import Projection, Tokens
from tinyloop_service.engine.cuda.schedule import Layer, Schedule, Step
from tinyloop_service.engine.cuda.weights import DeviceBlock, DeviceModel
from tinyloop_service.kernels.device import Array, Device
from tinyloop_service.kernels.embed import embed_prompt, gather_rows
from tinyloop_service.kernels.norm import fold_norm
from tinyloop_service.kernels.prefill_attention import prefill_attention
from tinyloop_service.kernels.swiglu import swiglu
from tinyloop_service.kernels.tables import write_words


@dataclass(frozen=True, slots=True)
class PassShape:
    """Passes of one shape differ in the contents of their tables alone."""

    rows: int  # padded
    tiles: int
    loops: int

    @property
    def words(self) -> int:
        """Of a pass's tables, one after the other: ids, slots (−1: padding), positions [rows]; tiles [tiles, 6];
        written [rows, 2]: (index, value) of words of the arena, so that they need no launch of their own."""
        return 5 * self.rows + 6 * self.tiles


@dataclass(frozen=True, slots=True)
class _Tables:
    ids: Array  # int32 [rows]
    tokens: Tokens
    tiles: Array  # int32 [tiles, 6]
    written: Array  # int32 [rows, 2]


class PromptPass:
    """Buffers for at most `max_rows` rows."""

    def __init__(
        self,
        device: Device,
        model: DeviceModel,
        arena: Arena,
        products: Products,
        projection: Projection,
        *,
        max_rows: int,
        max_last: int,
    ) -> None:
        """max_rows: a multiple of FIXED_ROWS, `projection`'s too.  max_last: most rows of a pass whose output is wanted
        at once."""
        spec, rows = model.spec, max_rows
        self._device, self._model, self._arena, self._projection = device, model, arena, projection
        self.max_rows, self.products = rows, products
        self._graphs: Graphs[PassShape] = Graphs(device)
        self.tables: Array = device.zeros((12 * rows,), np.int32)  # a pass's, and the rows whose output is wanted
        self._x = device.zeros((rows, spec.d_model), np.float32)
        self._injected = device.zeros((rows, spec.d_model), np.float32) if spec.inject == "add" else None
        sandwich = spec.norm_placement == "sandwich"
        self._apart = device.zeros((rows, spec.d_model), np.float32) if sandwich else None
        self._y = device.zeros((rows, spec.d_model), np.float16)
        self._q = device.zeros((rows, spec.q_dim), np.float16)
        self._a = device.zeros((rows, spec.q_dim), np.float16)
        self._gate_up = device.zeros((rows, 2 * spec.d_ff), np.float16)
        self._h = device.zeros((rows, spec.d_ff), np.float16)
        self._last_x = device.zeros((max_last, spec.d_model), np.float32)
        self._last_apart = device.zeros((max_last, spec.d_model), np.float32) if sandwich else None

    @staticmethod
    def padded(tokens: int) -> int:
        """Rows of a pass of so many tokens."""
        return -(-tokens // ROW_MULTIPLE) * ROW_MULTIPLE

    @staticmethod
    def written(shape: PassShape, tables: Any) -> Any:
        """The part of a pass's tables of that name, [rows, 2], here or on the device."""
        return tables[shape.words - 2 * shape.rows : shape.words].reshape(shape.rows, 2)

    def capture_common(self, schedule: Schedule, loops: int, captured: Callable[[int, int], None]) -> None:
        """Graphs of passes of one chunk, or of suffixes off one prefix; `captured` hears how many, of how many."""
        counts = range(ROW_MULTIPLE, self.max_rows + 1, ROW_MULTIPLE)
        for done, rows in enumerate(counts, 1):
            shape = PassShape(rows, rows // TILE_TOKENS, loops)
            self._graphs.capture(shape, partial(self.launch, shape, schedule))
            captured(done, len(counts))

    def run(self, shape: PassShape, schedule: Schedule) -> None:
        """The pass whose tables are at the beginning of `tables`."""
        self._graphs.run(shape, partial(self.launch, shape, schedule))

    def launch(self, shape: PassShape, schedule: Schedule) -> None:
        """The same, launch by launch."""
        rows, tables = shape.rows, self._cut(shape)
        write_words(self._device, self._arena.words, tables.written)
        self.begin(tables.ids)
        apart = None
        for layer in schedule.layers:
            self._fold(rows, apart, layer.before_attention)
            self._attend(rows, tables, layer)
            apart = self._join("o", self._a, layer.block.o.dense, rows)
            self._fold(rows, apart, layer.before_mlp)
            self.products.multiply("gate_up", self._y, layer.block.gate_up.dense, self._gate_up, rows)
            swiglu(self._device, self._gate_up[:rows], self._h[:rows])
            apart = self._join("down", self._h, layer.block.down.dense, rows)

    def begin(self, ids: Array) -> None:
        """The stream of tokens int32 [rows], before the first layer."""
        embed_prompt(self._device, self._model.embed, ids, self._x[: ids.shape[0]])

    def last(self, shape: PassShape, at: int, count: int) -> Array:
        """Rows whose output is wanted, int32 [count]: they lie behind the tables of their pass."""
        rows: Array = self.tables[shape.words + at : shape.words + at + count]
        return rows

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

    @property
    def kinds(self) -> tuple[ProductKind, ...]:
        """The products of a layer."""
        return (*self._projection.products, "o", "gate_up", "down")

    def weight(self, kind: ProductKind, block: DeviceBlock) -> Array:
        """Of a product, fp16 [outputs, inputs]."""
        if kind in self._projection.products:
            return self._projection.weight(kind, block)
        return {"o": block.o, "gate_up": block.gate_up, "down": block.down}[kind].dense

    def target(self, kind: ProductKind) -> tuple[Array, bool]:
        """Where a product goes, [max_rows, outputs], and whether it is added to what is there."""
        if kind in self._projection.products:
            return self._projection.products[kind], False
        if kind == "gate_up":
            return self._gate_up, False
        return (self._x, True) if self._apart is None else (self._apart, False)

    def _cut(self, shape: PassShape) -> _Tables:
        ids, slots, positions = (self.tables[i * shape.rows : (i + 1) * shape.rows] for i in range(3))
        tiles = self.tables[3 * shape.rows : 3 * shape.rows + 6 * shape.tiles].reshape(shape.tiles, 6)
        return _Tables(ids, Tokens(slots, positions), tiles, self.written(shape, self.tables))

    def _attend(self, rows: int, tables: _Tables, layer: Layer) -> None:
        spec, arena, tokens, q = self._model.spec, self._arena, tables.tokens, self._q[:rows]
        self._projection.prompt(layer, self._x, self._y, tokens, q)
        prefill_attention(
            self._device, q, arena.pool, arena.tables, layer.index, tables.tiles, self._a[:rows],
            num_heads=spec.n_heads, num_kv_heads=spec.n_kv_heads, token_slot=tokens.slots,
            token_position=tokens.positions,
        )  # fmt: skip

    def _join(self, kind: ProductKind, inputs: Array, weight: Array, rows: int) -> Array | None:
        """A product into the residual, or apart [1, rows, d_model] where a norm comes between."""
        out, accumulate = self.target(kind)
        self.products.multiply(kind, inputs, weight, out, rows, accumulate=accumulate)
        return None if accumulate else out[:rows].reshape(1, rows, -1)

    def _fold(self, rows: int, apart: Array | None, step: Step) -> None:
        injected = None if step.inject == "none" or self._injected is None else self._injected[:rows]
        fold_norm(
            self._device, self._x[:rows], apart, self._y[:rows], eps=self._model.spec.norm_eps, gain=step.gain,
            post_gain=step.post, loop_gain=step.loop, inject=step.inject, injected=injected,
            dependent=True,  # measured: worth it here, behind a product; attention and rope lose by starting early
        )  # fmt: skip
