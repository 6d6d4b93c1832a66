"""What the attention kernels are told about who reads what, as tables of 32-bit integers.

A *split* is one page: 64 absolute positions of a cache layer.  Decoding: splits that several rows of a batch read
through the same owner are one item with an entry for each of them, so that a shared prefix is read once.

    items      (owner's slot, block, first entry, number of entries)      the most shared first
    entries    (row, ordinal of the split among the row's)                 of one item side by side
    row_items  splits of each row; 0 for padding

Prompts: a tile is at most 64 neighbouring tokens of one sequence, or of several off one parent, which then read its
whole blocks together.

In: sequences with their lengths.  Out: NumPy tables.  Refuses to know about pages and the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.api import PAGE_TOKENS
from tinyloop_service.engine.cuda.sequences import Sequence

Ints = NDArray[np.int32]
TILE_TOKENS = 64
_MOST_TABLES = 8


@dataclass(frozen=True, slots=True)
class AttentionTables:
    """Of one batch of decoding rows, for all steps of a plan."""

    items: Ints  # (items, 4)
    entries: Ints  # (entries, 2)
    row_items: Ints  # (rows,)


class SplitTables:
    """`attention_tables`, made again only when a row has come to another block."""

    def __init__(self) -> None:
        self._made: OrderedDict[tuple[object, ...], AttentionTables] = OrderedDict()

    def tables(self, rows: Rows[Sequence], num_steps: int) -> AttentionTables:
        """Every split that a row reads in any of `num_steps` steps; in a step in which it does not, it weighs nothing.

        Rows feed their tokens at length … length + num_steps − 1.  Splits behind the window are left out: their pages
        may be someone else's.
        """
        first = [row.first_visible(row.length) for row in rows]
        end = [(row.length + num_steps - 1) // PAGE_TOKENS + 1 for row in rows]
        key = (*rows, *first, *end)
        if key not in self._made:
            self._made[key] = attention_tables(rows, np.array(first, np.int32), np.array(end, np.int32))
            if len(self._made) > _MOST_TABLES:
                self._made.popitem(last=False)
        return self._made[key]


def attention_tables(rows: Rows[Sequence], first: Ints, end: Ints) -> AttentionTables:
    """Row i reads blocks first[i] … end[i]−1."""
    counts = end - first
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


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of a sequence at neighbouring rows of a pass and neighbouring positions."""

    sequence: Sequence
    row: int
    position: int
    count: int


def prompt_tiles(spans: Rows[Span]) -> Ints:
    """Tiles (slot, first row, tokens, position of the first, window, shared blocks) of a pass, (tiles, 6).

    spans: by parent and window (`tile_order`), rows without a gap.
    """
    tiles: list[Ints] = []
    for _, group in groupby(spans, key=lambda span: tile_order(span.sequence)):
        alike = list(group)
        shared = len(alike[0].sequence.owners)
        if len(alike) > 1 and shared:
            tiles.append(_cut(alike[0], sum(span.count for span in alike), shared))
        else:
            tiles += [_cut(span, span.count, 0) for span in alike]
    return np.concatenate(tiles)


def prompt_tables(spans: Rows[Span], tokens: Ints, rows: int) -> tuple[Ints, int]:
    """Tables of a pass of `rows` padded rows, one after the other, and the number of its tiles.

    ids, slots (−1: padding), positions, each (rows,); tiles (n, 6).  n is rows/64 or that times a power of two, the
    first tiles empty, so that passes of equal `rows` have few shapes.
    """
    tiles, most = prompt_tiles(spans), rows // TILE_TOKENS
    while most < len(tiles):
        most *= 2
    tables = np.zeros(3 * rows + 6 * most, np.int32)
    ids, slots, positions = tables[: 3 * rows].reshape(3, rows)
    counts = np.array([span.count for span in spans])
    offsets = np.array([span.position - span.row for span in spans], np.int32)
    ids[: len(tokens)] = tokens
    slots[: len(tokens)] = np.repeat(np.array([span.sequence.slot for span in spans], np.int32), counts)
    slots[len(tokens) :] = -1
    positions[: len(tokens)] = np.arange(len(tokens), dtype=np.int32) + np.repeat(offsets, counts)
    tables[tables.size - tiles.size :] = tiles.ravel()
    return tables, most


def tile_order(sequence: Sequence) -> tuple[int, int]:
    """Sequences of equal order may share tiles."""
    return (sequence.parent.slot if sequence.parent is not None else -1, sequence.window)


def _cut(first: Span, count: int, shared: int) -> Ints:
    offsets = np.arange(0, count, TILE_TOKENS, dtype=np.int32)
    tiles = np.zeros((offsets.size, 6), np.int32)
    tiles[:, 0] = first.sequence.slot
    tiles[:, 1] = first.row + offsets
    tiles[:, 2] = np.minimum(count - offsets, TILE_TOKENS)
    tiles[:, 3] = 0 if shared else first.position + offsets  # tokens that share a tile have positions of their own
    tiles[:, 4] = first.sequence.window
    tiles[:, 5] = shared
    return tiles
