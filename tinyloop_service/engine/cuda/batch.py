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
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import chain, groupby

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.api import PAGE_TOKENS
from tinyloop_service.engine.cuda.sequences import Sequence

Ints = NDArray[np.int32]
TILE_TOKENS = 64
Tile = tuple[int, int, int, int, int, int]  # slot, first row, tokens, position of the first, window, shared blocks
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


def prompt_tiles(spans: Rows[Span]) -> list[Tile]:
    """Tiles of a pass.  spans: by parent and window (`tile_order`), rows without a gap."""
    tiles: list[Tile] = []
    for _, group in groupby(spans, key=lambda span: tile_order(span.sequence)):
        alike = list(group)
        shared = len(alike[0].sequence.owners)
        if len(alike) > 1 and shared:
            tiles += _cut(alike[0], sum(span.count for span in alike), shared)
        else:
            tiles += chain.from_iterable(_cut(span, span.count, 0) for span in alike)
    return tiles


def prompt_tables(spans: Rows[Span], tokens: Ints, rows: int) -> tuple[Ints, int]:
    """Tables of a pass of `rows` padded rows, one after the other, and the number of its tiles.

    ids, slots (−1: padding), positions, each (rows,); tiles (n, 6).  n is rows/64 or that times a power of two, the
    first tiles empty, so that passes of equal `rows` have few shapes.
    """
    tiles, most = prompt_tiles(spans), rows // TILE_TOKENS
    while most < len(tiles):
        most *= 2
    tables, used = np.zeros(3 * rows + 6 * most, np.int32), len(tokens)
    ids, slots, positions = tables[: 3 * rows].reshape(3, rows)
    counts = [span.count for span in spans]
    ids[:used] = tokens
    slots[:used] = _each([span.sequence.slot for span in spans], counts)
    slots[used:] = -1
    offsets = _each([span.position - span.row for span in spans], counts)
    positions[:used] = np.arange(used, dtype=np.int32) + offsets
    tables[tables.size - 6 * len(tiles) :] = [*chain.from_iterable(tiles)]
    return tables, most


def tile_order(sequence: Sequence) -> tuple[int, int]:
    """Sequences of equal order may share tiles."""
    return (sequence.parent.slot if sequence.parent is not None else -1, sequence.window)


def _each(values: list[int], counts: list[int]) -> int | Ints:
    """Each so often, one after the other; a single one stands for all."""
    return values[0] if len(values) == 1 else np.repeat(np.array(values, np.int32), counts)


def _cut(first: Span, count: int, shared: int) -> Iterator[Tile]:
    slot, window = first.sequence.slot, first.sequence.window
    for at in range(0, count, TILE_TOKENS):
        position = 0 if shared else first.position + at  # tokens that share a tile have positions of their own
        yield slot, first.row + at, min(count - at, TILE_TOKENS), position, window, shared
