"""What graphs read and write at fixed places: the tables of the batch that is decoded, and what it draws.

In: tables in a Staging.  Out: views of device memory, the same for every batch of a padded size.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np

from tinyloop_service.engine.cuda.batch import AttentionTables
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
    tables: AttentionTables  # of which items and entries are


class BatchState:
    """What graphs read about their batch: one int32 vector, cut up.  Fixed places, whatever the batch.

    numbers of items │ row_slot │ base_length │ window │ row_items │ items │ entries
    └────────────────── head: new with every plan ───────────────┘ └─ as long as rows read the same ─┘
    """

    def __init__(self, device: Device, max_rows: int, blocks: int) -> None:
        splits = max_rows * blocks
        self._max_rows = _aligned(max_rows)
        self._head = _ALIGNMENT + 4 * self._max_rows
        self._entries = self._head + _aligned(6 * splits)
        self.words: Array = device.zeros((self._entries + 2 * splits,), np.int32)
        self.num_items = self.words[:3]  # all, shared ones, quads
        self.items = self.words[self._head : self._head + 6 * splits].reshape(splits, 6)
        self.entries = self.words[self._entries :].reshape(splits, 2)
        self._there: AttentionTables | None = None  # whose items and entries are on the device

    def row_slot(self, rows: int) -> Array:
        return self._of_rows(0, rows)

    def base_length(self, rows: int) -> Array:
        return self._of_rows(1, rows)

    def window(self, rows: int) -> Array:
        return self._of_rows(2, rows)

    def row_items(self, rows: int) -> Array:
        return self._of_rows(3, rows)

    def _of_rows(self, nth: int, rows: int) -> Array:
        first = _ALIGNMENT + nth * self._max_rows
        part: Array = self.words[first : first + rows]
        return part

    def stage(
        self, staging: Staging, slots: Rows[int], lengths: Rows[int], windows: Rows[int], tables: AttentionTables
    ) -> BatchSections:
        """Collect a batch; rows from len(slots) on are padding."""
        words, head = staging.set_aside(self._head)
        words[:] = 0
        words[:3] = len(tables.items), np.count_nonzero(tables.items[:, 3] > 1), tables.num_quads
        by_row = words[_ALIGNMENT:].reshape(4, self._max_rows)
        by_row[:3, : len(slots)] = slots, lengths, windows
        by_row[0, len(slots) :] = -1
        by_row[3, : len(tables.row_items)] = tables.row_items
        return BatchSections(head, staging.put_aside(tables.items), staging.put_aside(tables.entries), tables)

    def load(self, staging: Staging, sections: BatchSections) -> None:
        """Queue the copies to where graphs read."""
        staging.copy_to(self.words, sections.head)
        if sections.tables is self._there or not sections.items.size:
            return
        self._there = None  # should a copy fail
        staging.copy_to(self.words[self._head :], sections.items)
        staging.copy_to(self.words[self._entries :], sections.entries)
        self._there = sections.tables


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


def _aligned(words: int) -> int:
    return -(-words // _ALIGNMENT) * _ALIGNMENT
