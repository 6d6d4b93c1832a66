"""What the attention kernels are told about who reads what, as tables of 32-bit integers.

A *split* is one page: 64 absolute positions of a cache layer.  Decoding: splits that several rows of a batch read
through the same owner are one item with an entry for each of them, so that a shared prefix is read once.

    items      (owner's slot, block, first entry, number of entries)      the most shared first
    entries    (row, ordinal of the split among the row's)                 of one item side by side
    row_items  splits of each row; 0 for padding

Prompts: tiles of at most 64 neighbouring tokens of one sequence.

In: sequences with their lengths.  Out: NumPy tables.  Refuses to know about pages and the device.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.api import PAGE_TOKENS
from tinyloop_service.engine.cuda.sequences import Sequence

Ints = NDArray[np.int32]
TILE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class AttentionTables:
    """Of one batch of decoding rows, for all steps of a plan."""

    items: Ints  # (items, 4)
    entries: Ints  # (entries, 2)
    row_items: Ints  # (rows,)


def attention_tables(rows: Rows[Sequence], num_steps: int) -> AttentionTables:
    """Every split that a row reads in any of `num_steps` steps; in a step in which it does not, it weighs nothing.

    Rows feed their tokens at length … length + num_steps − 1.  Splits behind the window are left out: their pages may
    be someone else's.
    """
    first = np.array([row.first_visible(row.length) for row in rows], np.int32)
    counts = np.array([(row.length + num_steps - 1) // PAGE_TOKENS for row in rows], np.int32) + 1 - first
    ordinal = np.arange(int(counts.max()), dtype=np.int32)
    owners = np.empty((len(rows), ordinal.size), np.int64)
    for i, row in enumerate(rows):
        inherited = row.owners[first[i] :]
        owners[i, : len(inherited)] = inherited
        owners[i, len(inherited) :] = row.slot
    reader, nth = np.nonzero(ordinal < counts[:, None])
    key = owners[reader, nth] << 32 | (first[reader] + nth)
    order = np.argsort(key, kind="stable")
    unique, begins, sizes = np.unique(key[order], return_index=True, return_counts=True)
    items = np.stack([unique >> 32, unique & 0xFFFFFFFF, begins, sizes], axis=1).astype(np.int32)
    items = items[np.argsort(-sizes, kind="stable")]
    entries = np.stack([reader[order], nth[order]], axis=1).astype(np.int32)
    return AttentionTables(items, entries, counts)


def prompt_tiles(first_row: int, sequence: Sequence, start: int, count: int) -> Ints:
    """Tiles (slot, first row, tokens, position of the first, window, 0) of `count` tokens from position `start` on.

    first_row: of those tokens in the matrix of the pass.
    """
    offsets = np.arange(0, count, TILE_TOKENS, dtype=np.int32)
    tiles = np.zeros((offsets.size, 6), np.int32)
    tiles[:, 0] = sequence.slot
    tiles[:, 1] = first_row + offsets
    tiles[:, 2] = np.minimum(count - offsets, TILE_TOKENS)
    tiles[:, 3] = start + offsets
    tiles[:, 4] = sequence.window
    return tiles
