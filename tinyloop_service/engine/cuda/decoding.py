"""The decode step: a batch of rows, one token each, as a CUDA graph per (padded rows, loops).

    embed      token[slot] → x, position                        fold_norm, linear_logits, sample
    for each layer of the schedule:                                   at the end, which moves token and length on
      fold_norm → linear_qkv → decode_attention → linear_partials (o)
      fold_norm → linear_gate_up → linear_partials (down)

A graph reads nothing but fixed buffers, so it can be replayed for other rows, and for the next step of the same rows
with nothing changed by the host.  Padding rows have slot −1; they read and write nothing that lasts.

In: rows as device tables.  Out: tokens and logprobs in fixed buffers.  Refuses to know about plans and sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.cuda.batch import AttentionTables, Ints
from tinyloop_service.engine.cuda.memory import Arena, max_blocks
from tinyloop_service.engine.cuda.schedule import Fold, Layer, Schedule, schedule_of
from tinyloop_service.engine.cuda.staging import Section, Staging
from tinyloop_service.engine.cuda.weights import DeviceModel
from tinyloop_service.kernels.decode_attention import decode_attention
from tinyloop_service.kernels.device import Array, Device, Graph
from tinyloop_service.kernels.embed import embed
from tinyloop_service.kernels.linear import linear_gate_up, linear_logits, linear_partials, linear_qkv, num_partials
from tinyloop_service.kernels.norm import fold_norm
from tinyloop_service.kernels.sample import SamplerTables, sample
from tinyloop_service.types import MAX_LOGPROBS

_MOST_PARTIALS = 8
_ALIGNMENT = 32  # words


@dataclass(frozen=True, slots=True)
class BatchSections:
    """A batch's tables in a Staging."""

    head: Section
    items: Section
    entries: Section


class BatchState:
    """What graphs read about their batch: one int32 vector, cut up.  Fixed places, whatever the batch."""

    def __init__(self, device: Device, max_rows: int, blocks: int) -> None:
        splits = max_rows * blocks
        sizes = {"num_items": 1, "row_slot": max_rows, "base_length": max_rows, "window": max_rows}
        sizes |= {"row_items": max_rows, "items": splits * 4, "entries": splits * 2}
        self._places: dict[str, int] = {}
        at = 0
        for name, size in sizes.items():
            self._places[name] = at
            at += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.words: Array = device.zeros((at,), np.int32)
        self.num_items = self._part("num_items", 1)
        self.items = self._part("items", splits * 4).reshape(splits, 4)
        self.entries = self._part("entries", splits * 2).reshape(splits, 2)

    def _part(self, name: str, size: int) -> Array:
        part: Array = self.words[self._places[name] : self._places[name] + size]
        return part

    def row_slot(self, rows: int) -> Array:
        return self._part("row_slot", rows)

    def base_length(self, rows: int) -> Array:
        return self._part("base_length", rows)

    def window(self, rows: int) -> Array:
        return self._part("window", rows)

    def row_items(self, rows: int) -> Array:
        return self._part("row_items", rows)

    def stage(
        self, staging: Staging, slots: Ints, lengths: Ints, windows: Ints, tables: AttentionTables
    ) -> BatchSections:
        """Collect a batch; rows from len(slots) on are padding."""
        head = np.zeros(self._places["items"], np.int32)
        head[self._places["num_items"]] = len(tables.items)
        first = self._places["row_slot"]
        head[first : self._places["base_length"]] = -1
        named = {"row_slot": slots, "base_length": lengths, "window": windows, "row_items": tables.row_items}
        for name, values in named.items():
            head[self._places[name] : self._places[name] + len(values)] = values
        return BatchSections(staging.put(head), staging.put(tables.items), staging.put(tables.entries))

    def load(self, staging: Staging, sections: BatchSections) -> None:
        """Queue the copies to where graphs read."""
        staging.copy_to(self.words, sections.head)
        staging.copy_to(self.words[self._places["items"] :], sections.items)
        staging.copy_to(self.words[self._places["entries"] :], sections.entries)


class Outputs:
    """What a batch draws, step by step, on the device."""

    def __init__(self, device: Device, max_rows: int, max_steps: int) -> None:
        count = max_rows * max_steps
        self._tokens: Array = device.zeros((count,), np.int32)
        self._logprobs: Array = device.zeros((count * (1 + MAX_LOGPROBS),), np.float32)
        self._top: Array = device.zeros((count * MAX_LOGPROBS,), np.int32)
        self.max_steps = max_steps

    def of(self, rows: int, steps: int) -> tuple[Array, Array, Array]:
        """tokens [steps, rows], logprobs [steps, rows, 21], top [steps, rows, 20]."""
        count, top = steps * rows, MAX_LOGPROBS
        return (
            self._tokens[:count].reshape(steps, rows),
            self._logprobs[: count * (1 + top)].reshape(steps, rows, 1 + top),
            self._top[: count * top].reshape(steps, rows, top),
        )


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
        self._x = device.zeros((rows, spec.d_model), np.float32)
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
        self._counters = device.zeros((rows, spec.n_kv_heads), np.int32)
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
        """Make the graph of `rows` padded rows, if there is none.  The batch that is loaded is not advanced."""
        if (rows, loops) in self._graphs:
            return
        schedule = self.schedule(loops)
        self._graphs[rows, loops] = self._device.capture(lambda: self._step(rows, schedule))

    def warm(self, rows: int, loops: int) -> None:
        """Run the step once without a graph, which compiles and loads its kernels."""
        self._step(rows, self.schedule(loops))

    def run(self, rows: int, loops: int, num_steps: int) -> None:
        """`num_steps` steps of the batch that is loaded, `rows` padded rows."""
        self.capture(rows, loops)
        for _ in range(num_steps):
            self._graphs[rows, loops].launch()

    def draw(self, rows: int) -> None:
        """Logits of `y[:rows]`, and a token for each row of the batch that is loaded, at its length."""
        self._sample(rows, advance=False)

    def read_logits(self) -> NDArray[np.float32]:
        """Logits [V] of `y[0]`, on the host."""
        linear_logits(self._device, self._model.head, self.y[:1], self.logits[:1])
        return self._device.download(self.logits[0])[: self._model.spec.vocab_size]

    # ---- one step

    def _step(self, rows: int, schedule: Schedule) -> None:
        arena, x = self._arena, self._x[:rows]
        embed(
            self._device, self._model.embed, self.batch.row_slot(rows), arena.token, arena.length, x,
            self._position[:rows],
        )  # fmt: skip
        partials = None
        for layer in schedule.layers:
            # Not dependent at first: later kernels read positions before they wait for the one before them.
            self._fold(rows, partials, layer.before_attention, dependent=partials is not None)
            self._attend(rows, layer)
            partials = self._mlp(rows, layer)
        self._fold(rows, partials, schedule.final)
        self._sample(rows, advance=True)

    def _attend(self, rows: int, layer: Layer) -> None:
        arena, batch, model = self._arena, self.batch, self._model
        position, q = self._position[:rows], self._q[:rows]
        linear_qkv(
            self._device, layer.block.qkv.packed, self.y[:rows], position, batch.row_slot(rows), arena.tables,
            layer.index, arena.pool, model.cos, model.sin, q, num_kv_heads=model.spec.n_kv_heads, dependent=True,
        )  # fmt: skip
        decode_attention(
            self._device, q, arena.pool, arena.tables, layer.index, batch.items, batch.num_items, batch.entries,
            batch.row_items(rows), position, batch.window(rows), self._partial_o[:rows], self._partial_ml[:rows],
            self._counters[:rows], self._a[:rows], num_kv_heads=model.spec.n_kv_heads, dependent=True,
        )  # fmt: skip

    def _mlp(self, rows: int, layer: Layer) -> Array:
        """The o linear, and the mlp; partial sums of what is to join the residual."""
        block, h = layer.block, self._h[:rows]
        partials = self._partials_of(block.o.packed, rows)
        linear_partials(self._device, block.o.packed, self._a[:rows], partials, dependent=True)
        self._fold(rows, partials, layer.before_mlp)
        linear_gate_up(self._device, block.gate_up.packed, self.y[:rows], h, dependent=True)
        partials = self._partials_of(block.down.packed, rows)
        linear_partials(self._device, block.down.packed, h, partials, dependent=True)
        return partials

    def _partials_of(self, packed: Any, rows: int) -> Array:
        count, width = num_partials(self._device, packed, rows), self._model.spec.d_model
        partials: Array = self._partials[: count * rows * width].reshape(count, rows, width)
        return partials

    def _fold(self, rows: int, partials: Array | None, fold: Fold, *, dependent: bool = True) -> None:
        injected = None if fold.inject == "none" or self._injected is None else self._injected[:rows]
        fold_norm(
            self._device, self._x[:rows], partials, self.y[:rows], eps=self._model.spec.norm_eps, gain=fold.gain,
            post_gain=fold.post, loop_gain=fold.loop, inject=fold.inject, injected=injected, dependent=dependent,
        )  # fmt: skip

    def _sample(self, rows: int, *, advance: bool) -> None:
        arena, batch = self._arena, self.batch
        linear_logits(self._device, self._model.head, self.y[:rows], self.logits[:rows], dependent=advance)
        sample(
            self._device, self._sampler, self._row_logits[:rows], batch.row_slot(rows), batch.base_length(rows),
            arena.token, arena.length, *self.outputs.of(rows, self.outputs.max_steps), advance=advance,
            dependent=advance,
        )  # fmt: skip


def _address(array: Any) -> int:
    """Where a device array begins; NumPy's is the emulator's."""
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return int(interface["data"][0])
