"""The decode step: a batch of rows, one token each, as a CUDA graph per (padded rows, loops).

    embed      token[slot] → x, position                        fold_norm, linear_logits, sample
    for each layer of the schedule:                                   at the end, which moves token and length on
      fold_norm → linear_qkv → decode_attention → linear_partials (o)
      fold_norm → linear_gate_up → linear_partials (down)

For a few rows a linear folds its input itself, and fold_norm is not launched; the bits are the same.

A graph reads nothing but fixed buffers, so it can be replayed for other rows, and for the next step of the same rows
with nothing changed by the host.  Padding rows have slot −1; they read and write nothing that lasts.

In: rows as device tables.  Out: tokens and logprobs in fixed buffers.  Refuses to know about plans and sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.cuda.buffers import BatchState, Outputs
from tinyloop_service.engine.cuda.memory import Arena, max_blocks
from tinyloop_service.engine.cuda.schedule import Layer, Schedule, Step, schedule_of
from tinyloop_service.engine.cuda.weights import DeviceModel
from tinyloop_service.kernels.decode_attention import decode_attention
from tinyloop_service.kernels.device import Array, Device, Graph
from tinyloop_service.kernels.embed import embed
from tinyloop_service.kernels.linear import (
    linear_gate_up,
    linear_logits,
    linear_partials,
    linear_qkv,
    num_partials,
    takes_columns,
)
from tinyloop_service.kernels.norm import FOLD_ROWS, Fold, fold_norm
from tinyloop_service.kernels.pack import PackedLinear
from tinyloop_service.kernels.sample import SamplerTables, sample

_MOST_PARTIALS = 8


@dataclass(slots=True)
class _Stream:
    """The residual of the step in the making, and partial sums that are to join it."""

    x: Array  # fp32 [rows, d_model]
    twin: Array  # where a linear that folds x leaves what it became
    partials: Array | None = None
    is_first: bool = True


@dataclass(frozen=True, slots=True)
class _Input:
    """Of the next linear: what it is, how it lies in memory, whether it may start while the kernel before it ends."""

    y: Array | Fold
    columns: bool
    dependent: bool


class Decoder:
    """Buffers of a batch of at most `max(row_counts)` rows, and the graphs over them."""

    def __init__(
        self,
        device: Device,
        model: DeviceModel,
        arena: Arena,
        sampler: SamplerTables,
        *,
        row_counts: tuple[int, ...],
        max_steps: int,
    ) -> None:
        """row_counts: what a batch is padded to, rising."""
        spec, rows = model.spec, max(row_counts)
        self._device, self._model, self._arena, self._sampler = device, model, arena, sampler
        self.row_counts = row_counts
        self.batch = BatchState(device, rows, max_blocks(spec))
        self.outputs = Outputs(device, rows, max_steps)
        self._schedules: dict[int, Schedule] = {}
        self._graphs: dict[tuple[int, int], Graph] = {}
        self._draws: dict[int, Graph] = {}
        self._x, self._twin = (device.zeros((rows, spec.d_model), np.float32) for _ in "xt")
        self._injected = device.zeros((rows, spec.d_model), np.float32) if spec.inject == "add" else None
        self.y = device.zeros((rows, spec.d_model), np.float16)
        self._q = device.zeros((rows, spec.q_dim), np.float16)
        self._a = device.zeros((rows, spec.q_dim), np.float16)
        self._h = device.zeros((rows, spec.d_ff), np.float16)
        self._partials = device.zeros((_MOST_PARTIALS * rows * spec.d_model,), np.float32)
        self._position = device.zeros((rows,), np.int32)
        splits = (rows, spec.n_heads, max_blocks(spec))
        self._partial_o = device.zeros((*splits, spec.head_dim), np.float32)
        self._partial_ml = device.zeros((*splits, 2), np.float32)
        self.logits = device.zeros((rows, model.head.num_padded), np.float32)
        first, stride = _address(self.logits), 4 * model.head.num_padded
        self._row_logits = device.upload(first + stride * np.arange(rows, dtype=np.int64))

    @property
    def max_rows(self) -> int:
        return self.row_counts[-1]

    def padded(self, rows: int) -> int:
        return next(count for count in self.row_counts if count >= rows)

    def schedule(self, loops: int) -> Schedule:
        if loops not in self._schedules:
            self._schedules[loops] = schedule_of(self._model, loops)
        return self._schedules[loops]

    def capture(self, rows: int, loops: int) -> None:
        """Make the graphs of `rows` padded rows, if there are none.  The batch that is loaded is not advanced."""
        if rows not in self._draws:
            self._draws[rows] = self._device.capture(lambda: self._draw(rows))
        if (rows, loops) in self._graphs:
            return
        schedule = self.schedule(loops)
        self._graphs[rows, loops] = self._device.capture(lambda: self._step(rows, schedule))

    def rehearse(self, rows: int, loops: int) -> None:
        """Launch everything that `run` and `draw` can launch, for `Device.prepare`."""
        self._step(rows, self.schedule(loops))
        self._draw(rows)

    def run(self, rows: int, loops: int, num_steps: int) -> None:
        """`num_steps` steps of the batch that is loaded, `rows` padded rows."""
        self.capture(rows, loops)
        for _ in range(num_steps):
            self._graphs[rows, loops].launch()

    def draw(self, rows: int) -> None:
        """Logits of `y[:rows]`, padded, and a token for each row of the batch that is loaded, at its length."""
        self._draws[rows].launch()

    def read_logits(self) -> NDArray[np.float32]:
        """Logits [V] of `y[0]`, on the host."""
        linear_logits(self._device, self._model.head, self.y[:1], self.logits[:1])
        return self._device.download(self.logits[0])[: self._model.spec.vocab_size]

    # ---- one step

    def _draw(self, rows: int) -> None:
        self._sample(rows, _Input(self.y[:rows], columns=False, dependent=False), advance=False)

    def _step(self, rows: int, schedule: Schedule) -> None:
        arena, stream = self._arena, _Stream(self._x[:rows], self._twin[:rows])
        embed(
            self._device, self._model.embed, self.batch.row_slot(rows), arena.token, arena.length, stream.x,
            self._position[:rows],
        )  # fmt: skip
        for layer in schedule.layers:
            self._attend(rows, layer, stream)
            self._mlp(rows, layer, stream)
        self._sample(rows, self._folded(rows, stream, schedule.final, self._model.head), advance=True)

    def _attend(self, rows: int, layer: Layer, stream: _Stream) -> None:
        """From the stream to what the o linear adds to it."""
        arena, batch, model, block = self._arena, self.batch, self._model, layer.block
        position, q = self._position[:rows], self._q[:rows]
        given = self._folded(rows, stream, layer.before_attention, block.qkv.packed)
        linear_qkv(
            self._device, block.qkv.packed, given.y, position, batch.row_slot(rows), arena.tables, layer.index,
            arena.pool, model.cos, model.sin, q, num_kv_heads=model.spec.n_kv_heads, columns=given.columns,
            dependent=given.dependent,
        )  # fmt: skip
        decode_attention(
            self._device, q, arena.pool, arena.tables, layer.index, batch.items, batch.num_items, batch.entries,
            batch.row_items(rows), position, batch.window(rows), self._partial_o[:rows], self._partial_ml[:rows],
            self._a[:rows], num_kv_heads=model.spec.n_kv_heads, dependent=True,
        )  # fmt: skip
        stream.partials = self._partials_of(block.o.packed, rows)
        linear_partials(self._device, block.o.packed, self._a[:rows], stream.partials, dependent=True)

    def _mlp(self, rows: int, layer: Layer, stream: _Stream) -> None:
        """From the stream to what the down linear adds to it."""
        block, h = layer.block, self._h[:rows]
        given = self._folded(rows, stream, layer.before_mlp, block.gate_up.packed)
        columns = takes_columns(self._device, block.down.packed, rows)
        linear_gate_up(
            self._device, block.gate_up.packed, given.y, h, columns=given.columns, h_columns=columns,
            dependent=given.dependent,
        )  # fmt: skip
        stream.partials = self._partials_of(block.down.packed, rows)
        linear_partials(self._device, block.down.packed, h, stream.partials, columns=columns, dependent=True)

    def _partials_of(self, packed: PackedLinear, rows: int) -> Array:
        count, width = num_partials(self._device, packed, rows), self._model.spec.d_model
        partials: Array = self._partials[: count * rows * width].reshape(count, rows, width)
        return partials

    def _folded(self, rows: int, stream: _Stream, step: Step, packed: PackedLinear) -> _Input:
        """The input of the next linear, which is `packed`.

        The first kernel after embed is not dependent: later ones read positions before they wait for the one before.
        """
        dependent, stream.is_first = not stream.is_first, False
        injected = None if step.inject == "none" or self._injected is None else self._injected[:rows]
        if rows > FOLD_ROWS:
            columns = takes_columns(self._device, packed, rows)
            fold_norm(
                self._device, stream.x, stream.partials, self.y[:rows], eps=self._model.spec.norm_eps, gain=step.gain,
                post_gain=step.post, loop_gain=step.loop, inject=step.inject, injected=injected, columns=columns,
                dependent=dependent,
            )  # fmt: skip
            return _Input(self.y[:rows], columns, dependent=True)
        fold = Fold(
            x=stream.x, x_out=stream.twin, partials=stream.partials, eps=self._model.spec.norm_eps, gain=step.gain,
            post_gain=step.post, loop_gain=step.loop, inject=step.inject, injected=injected,
        )  # fmt: skip
        stream.x, stream.twin = stream.twin, stream.x
        return _Input(fold, columns=False, dependent=dependent)

    def _sample(self, rows: int, given: _Input, *, advance: bool) -> None:
        arena, batch, dependent = self._arena, self.batch, given.dependent
        linear_logits(
            self._device, self._model.head, given.y, self.logits[:rows], columns=given.columns, dependent=dependent
        )
        sample(
            self._device, self._sampler, self._row_logits[:rows], batch.row_slot(rows), batch.base_length(rows),
            arena.token, arena.length, *self.outputs.of(rows, self.outputs.max_steps), advance=advance,
            dependent=dependent,
        )  # fmt: skip


def _address(array: Any) -> int:
    """Where a device array begins; NumPy's is the emulator's."""
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return int(interface["data"][0])
