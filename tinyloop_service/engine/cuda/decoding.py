"""The decode step: a batch of rows, one token each, as a CUDA graph per (padded rows, loops, with quads or without).

    embed      token[slot] → x, position                        fold_norm, linear_logits, sample
    for each layer of the schedule:                                   at the end, which moves token and length on
      fold_norm → linear_qkv (`projection.py`) → decode_attention → linear_partials (o)
      fold_norm → linear_gate_up → linear_partials (down)

A graph reads nothing but fixed buffers, so it can be replayed for other rows, and for the next step of the same rows
with nothing changed by the host.  Padding rows have slot −1; they read and write nothing that lasts.

In: rows as device tables.  Out: tokens and logprobs in fixed buffers.  Refuses to know about plans and sequences.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.cuda.buffers import BatchState, Outputs
from tinyloop_service.engine.cuda.memory import Arena, max_blocks
from tinyloop_service.engine.cuda.projection import Projection, Tokens
from tinyloop_service.engine.cuda.schedule import Layer, Schedule, schedule_of
from tinyloop_service.engine.cuda.stream import DecodeStream, Given
from tinyloop_service.engine.cuda.weights import DeviceModel
from tinyloop_service.kernels.decode_attention import decode_attention, takes_quads
from tinyloop_service.kernels.device import Device, Graph
from tinyloop_service.kernels.embed import embed
from tinyloop_service.kernels.linear import gives_columns, linear_gate_up, linear_logits, linear_partials
from tinyloop_service.kernels.page_layout import is_int8
from tinyloop_service.kernels.sample import SamplerTables, sample


class Decoder:
    """Buffers of a batch of at most `max(row_counts)` rows, and the graphs over them."""

    def __init__(
        self,
        device: Device,
        model: DeviceModel,
        arena: Arena,
        sampler: SamplerTables,
        projection: Projection,
        *,
        row_counts: tuple[int, ...],
        max_steps: int,
    ) -> None:
        """row_counts: what a batch is padded to, rising."""
        spec, rows = model.spec, max(row_counts)
        self._device, self._model, self._arena, self._sampler = device, model, arena, sampler
        self._projection = projection
        self.row_counts = row_counts
        self.batch = BatchState(device, rows, max_blocks(spec))
        self.outputs = Outputs(device, rows, max_steps)
        self._schedules: dict[int, Schedule] = {}
        self._graphs: dict[tuple[int, int, bool], Graph] = {}
        self._most_pages = max_blocks(spec)  # of a sequence
        self._draws: dict[int, Graph] = {}
        self._stream = DecodeStream(device, spec, rows)
        self.y = self._stream.y  # fp16 [rows, d_model]: what `draw` draws from
        self._q = device.zeros((rows, spec.q_dim), np.float16)
        self._a = device.zeros((rows, spec.q_dim), np.float16)
        self._h = device.zeros((rows, spec.d_ff), np.float16)
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

    def takes_quads(self, rows: int, items: int) -> bool:
        """Whether attention of so many rows, several of which share each of so many items, had better have quads."""
        spec, int8 = self._model.spec, is_int8(self._arena.pool)
        return takes_quads(self._device, self.padded(rows), items, spec.n_heads, spec.n_kv_heads, int8=int8)

    def kinds(self, rows: int) -> tuple[bool, ...]:
        """Whether batches of so many rows are without quads, with them."""
        most_shared = rows // 2 * self._most_pages  # every two rows off another prefix
        return (False, True) if self.takes_quads(rows, most_shared) else (False,)

    def schedule(self, loops: int) -> Schedule:
        if loops not in self._schedules:
            self._schedules[loops] = schedule_of(self._model, loops)
        return self._schedules[loops]

    def capture(self, rows: int, loops: int, quads: bool) -> None:
        """Make the graphs of `rows` padded rows, if there are none.  The batch that is loaded is not advanced."""
        if rows not in self._draws:
            self._draws[rows] = self._device.capture(lambda: self._draw(rows))
        if (rows, loops, quads) in self._graphs:
            return
        schedule = self.schedule(loops)
        self._graphs[rows, loops, quads] = self._device.capture(lambda: self._step(rows, schedule, quads))

    def rehearse(self, rows: int, loops: int) -> None:
        """Launch everything that `run` and `draw` can launch, for `Device.prepare`."""
        for quads in self.kinds(rows):
            self._step(rows, self.schedule(loops), quads)
        self._draw(rows)

    def run(self, rows: int, loops: int, num_steps: int, quads: bool) -> None:
        """`num_steps` steps of the batch that is loaded, `rows` padded rows."""
        self.capture(rows, loops, quads)
        for _ in range(num_steps):
            self._graphs[rows, loops, quads].launch()

    def draw(self, rows: int) -> None:
        """Logits of `y[:rows]`, padded, and a token for each row of the batch that is loaded, at its length."""
        self._draws[rows].launch()

    def read_logits(self) -> NDArray[np.float32]:
        """Logits [V] of `y[0]`, on the host."""
        linear_logits(self._device, self._model.head, self.y[:1], self.logits[:1])
        return self._device.download(self.logits[0])[: self._model.spec.vocab_size]

    # ---- one step

    def _draw(self, rows: int) -> None:
        self._sample(rows, Given(self.y[:rows], columns=False, dependent=False), advance=False)

    def _step(self, rows: int, schedule: Schedule, quads: bool) -> None:
        arena, tokens = self._arena, Tokens(self.batch.row_slot(rows), self._position[:rows])
        embed(
            self._device, self._model.embed, tokens.slots, arena.token, arena.length, self._stream.begin(rows),
            tokens.positions,
        )  # fmt: skip
        for layer in schedule.layers:
            self._attend(tokens, layer, quads)
            self._mlp(rows, layer)
        self._sample(rows, self._stream.fold(schedule.final, self._model.head), advance=True)

    def _attend(self, tokens: Tokens, layer: Layer, quads: bool) -> None:
        """From the stream to what the o linear adds to it."""
        rows, arena, batch, packed = tokens.slots.shape[0], self._arena, self.batch, layer.block.o.packed
        q = self._q[:rows]
        newest = self._projection.decode(layer, self._stream, tokens, q)
        decode_attention(
            self._device, q, arena.pool, newest, arena.tables, layer.index, batch.items, batch.num_items,
            batch.entries, batch.row_items(rows), tokens.positions, batch.window(rows), self._partial_o[:rows],
            self._partial_ml[:rows], self._a[:rows], num_kv_heads=self._model.spec.n_kv_heads, quads=quads,
            dependent=True,
        )  # fmt: skip
        linear_partials(self._device, packed, self._a[:rows], self._stream.joining(packed), dependent=True)

    def _mlp(self, rows: int, layer: Layer) -> None:
        """From the stream to what the down linear adds to it."""
        block, h = layer.block, self._h[:rows]
        given = self._stream.fold(layer.before_mlp, block.gate_up.packed)
        columns = gives_columns(self._device, block.gate_up.packed, block.down.packed, rows)
        linear_gate_up(
            self._device, block.gate_up.packed, given.y, h, columns=given.columns, h_columns=columns,
            dependent=given.dependent,
        )  # fmt: skip
        sums = self._stream.joining(block.down.packed)
        linear_partials(self._device, block.down.packed, h, sums, columns=columns, dependent=True)

    def _sample(self, rows: int, given: Given, *, advance: bool) -> None:
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
