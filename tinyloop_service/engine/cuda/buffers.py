"""What graphs read and write at fixed places: the tables of the batch that is decoded, and what it draws.

In: tables in a Staging.  Out: views of device memory, the same for every batch of a padded size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tinyloop_service.engine.cuda.batch import AttentionTables, Ints
from tinyloop_service.engine.cuda.staging import Aside, Staging
from tinyloop_service.kernels.device import Array, Device
from tinyloop_service.types import MAX_LOGPROBS

_ALIGNMENT = 32  # words


@dataclass(frozen=True, slots=True)
class BatchSections:
    """A batch's tables in a Staging."""

    head: Aside
    items: Aside
    entries: Aside


class BatchState:
    """What graphs read about their batch: one int32 vector, cut up.  Fixed places, whatever the batch."""

    def __init__(self, device: Device, max_rows: int, blocks: int) -> None:
        splits = max_rows * blocks
        sizes = {"num_items": 2, "row_slot": max_rows, "base_length": max_rows, "window": max_rows}
        sizes |= {"row_items": max_rows, "items": splits * 4, "entries": splits * 2}
        self._places: dict[str, int] = {}
        at = 0
        for name, size in sizes.items():
            self._places[name] = at
            at += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.words: Array = device.zeros((at,), np.int32)
        self.num_items = self._part("num_items", 2)
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
        first = self._places["num_items"]
        head[first : first + 2] = len(tables.items), np.count_nonzero(tables.items[:, 3] > 1)
        first = self._places["row_slot"]
        head[first : self._places["base_length"]] = -1
        named = {"row_slot": slots, "base_length": lengths, "window": windows, "row_items": tables.row_items}
        for name, values in named.items():
            head[self._places[name] : self._places[name] + len(values)] = values
        return BatchSections(*map(staging.put_aside, (head, tables.items, tables.entries)))

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
