"""What the attention kernels are told about who reads what, as tables of 32-bit integers.

A *split* is one page, 64 absolute positions of a cache layer, or a quad, four of them from a multiple of 4 blocks on.
Decoding: splits that several rows of a batch read through the same owner are one item with an entry for each of them,
so that a shared prefix is read once; of more than 64 rows they are several such items, side by side.

    items      (owner's slot, block, first entry, number of entries, source's slot, tokens)   quads first
    entries    (row, ordinal of the split among the row's)                 of one item side by side
    row_items  splits of each row; 0 for padding

The *source* of a row's copy of its parent's last page is that page, which rows off one parent can share for as many
tokens as were copied; such items come one after the other.  All others are their own source, of 0 tokens.

Prompts: a tile is at most 64 neighbouring tokens of one sequence, or of several off one parent, which then read its
whole blocks together.

In: sequences with their lengths.  Out: NumPy tables.  Refuses to know about pages and the device.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.api import PAGE_TOKENS
from tinyloop_service.engine.cuda.sequences import Sequence
from tinyloop_service.kernels.decode_attention import MOST_ENTRIES
from tinyloop_service.kernels.page_layout import QUAD_PAGES

Ints = NDArray[np.int32]
TILE_TOKENS = 64
TakesQuads = Callable[[int, int], bool]  # of so many rows, if the pages that several of them read are so many items
Tile = tuple[int, int, int, int, int, int]  # slot, first row, tokens, position of the first, window, shared blocks
_WORD = struct.Struct("i")
_WHOLE_ENTRIES = 16  # rows of whole tiles of queries, where 1, 2, 4, 8 or 16 heads share a K/V head


@dataclass(frozen=True, slots=True)
class AttentionTables:
    """Of one batch of decoding rows, for all steps of a plan."""

    items: Ints  # (items, 6)
    entries: Ints  # (entries, 2)
    row_items: Ints  # (rows,)
    num_quads: int = 0  # of the items, the first


def attention_tables(
    rows: Rows[Sequence], first_blocks: Rows[int], end_blocks: Rows[int], takes_quads: TakesQuads
) -> AttentionTables:
    """Row i reads blocks first_blocks[i] … end_blocks[i]−1."""
    first, end = np.array(first_blocks, np.int32), np.array(end_blocks, np.int32)
    lowest, highest = int(first.min()), int(end.max())
    blocks = np.arange(lowest, highest, dtype=np.int32)[:, None]
    key = _owners(rows, lowest, highest) << 32 | blocks  # (blocks, rows), nearly in order
    block, reader = np.nonzero((blocks >= first) & (blocks < end))
    read = key[block, reader]
    order = np.argsort(read, kind="stable")
    read, reader, block = read[order], reader[order], block[order]
    begins_item = np.ones(len(read) + 1, np.bool_)  # the end, too
    begins_item[1:-1] = read[1:] != read[:-1]
    bounds = np.flatnonzero(begins_item)
    begins, sizes = bounds[:-1], bounds[1:] - bounds[:-1]
    items = np.zeros((len(begins), 6), np.int32)
    items[:, 0], items[:, 1] = read[begins] >> 32, block[begins] + lowest
    items[:, 2], items[:, 3], items[:, 4] = begins, sizes, items[:, 0]
    _name_sources(items, read[begins], rows)
    entries = np.empty((len(read), 2), np.int32)
    entries[:, 0], entries[:, 1] = reader, block + lowest - first[reader]
    tables = AttentionTables(items, entries, end - first)
    quads = _quads(tables, np.array([row.window > 0 for row in rows]))
    if quads.size and takes_quads(len(rows), sum(len(parts_of(count)) for count in sizes[sizes > 1].tolist())):
        tables = _join(tables, quads)
    for items in (tables.items[: tables.num_quads], tables.items[tables.num_quads :]):
        items[:] = items[np.lexsort((items[:, 4], -items[:, 5], -items[:, 3]))]
    return _in_parts(tables)


@cache
def parts_of(readers: int) -> tuple[tuple[int, int], ...]:
    """The items of a split that so many rows read, each as its first entry and how many: as few as there must be, as
    equal as whole tiles allow.  Each of more than one has several entries."""
    tiles, count = -(-readers // _WHOLE_ENTRIES), -(-readers // MOST_ENTRIES)
    bounds = [min(tiles * nth // count * _WHOLE_ENTRIES, readers) for nth in range(count + 1)]
    return tuple((begin, end - begin) for begin, end in pairwise(bounds))


def _in_parts(tables: AttentionTables) -> AttentionTables:
    """With several items for each that has too many entries."""
    counts = tables.items[:, 3].tolist()
    if max(counts) <= MOST_ENTRIES:
        return tables
    parts = [parts_of(count) for count in counts]
    items = np.repeat(tables.items, [len(its) for its in parts], axis=0)
    begins, sizes = np.array([*chain.from_iterable(parts)], np.int32).T
    items[:, 2] += begins
    items[:, 3] = sizes
    return replace(tables, items=items, num_quads=sum(map(len, parts[: tables.num_quads])))


def _name_sources(items: Ints, keys: NDArray[np.int64], rows: Rows[Sequence]) -> None:
    """Of the rows' copies, in items of these keys, which rise: owner and block."""
    copies = [
        (row.slot << 32 | row.start // PAGE_TOKENS, row.parent.slot, row.start % PAGE_TOKENS)
        for row in rows
        if row.parent is not None and row.start % PAGE_TOKENS
    ]
    if copies:
        copied = np.array(copies, np.int64)
        at = np.minimum(np.searchsorted(keys, copied[:, 0]), len(keys) - 1)
        seen = keys[at] == copied[:, 0]  # else it lies behind the window
        items[at[seen], 4:] = copied[seen, 1:]


def _quads(tables: AttentionTables, has_window: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Of items by owner and block, the first of each four that make a quad: the same rows read all of them."""
    slot, block, first, count = tables.items[:, :4].T
    four = np.flatnonzero((block[:-3] % QUAD_PAGES == 0) & (count[:-3] > 1))[:, None] + np.arange(QUAD_PAGES)
    begin = four[:, :1]
    alike = (slot[four] == slot[begin]) & (block[four] - block[begin] == four - begin) & (count[four] == count[begin])
    four = four[alike.all(axis=1)]

    def is_seen(items: NDArray[np.intp]) -> bool:
        readers = tables.entries[first[items[0]] :][: QUAD_PAGES * count[items[0]], 0].reshape(QUAD_PAGES, -1)
        return bool((readers == readers[0]).all()) and not has_window[readers[0]].any()

    return np.array([items[0] for items in four if is_seen(items)], np.intp)


def _join(tables: AttentionTables, quads: NDArray[np.intp]) -> AttentionTables:
    """Four items as one, from each of `quads` on; these come first."""
    items, entries = tables.items.copy(), tables.entries.copy()
    joins = np.zeros(len(items), np.bool_)  # the item before it
    joins[quads[:, None] + np.arange(1, QUAD_PAGES)] = True
    gone = np.repeat(joins, items[:, 3])  # entries
    split_gone = np.zeros((len(tables.row_items), tables.row_items.max()), np.int32)
    split_gone[tuple(entries[gone].T)] = 1
    entries[:, 1] -= split_gone.cumsum(axis=1, dtype=np.int32)[tuple(entries.T)]
    items[:, 2] -= gone.cumsum(dtype=np.int32)[items[:, 2]]
    joins[quads] = True
    items = np.concatenate([items[quads], items[~joins]])
    row_items = tables.row_items - split_gone.sum(axis=1, dtype=np.int32)
    return AttentionTables(items, entries[~gone], row_items, len(quads))


def _owners(rows: Rows[Sequence], lowest: int, highest: int) -> NDArray[np.int64]:
    """Slots that own the blocks lowest … highest−1 of each row, (blocks, rows)."""
    alike: dict[int, list[int]] = {}  # rows that share the array of what they inherit
    for i, row in enumerate(rows):
        alike.setdefault(id(row.owners), []).append(i)
    owners = np.empty((highest - lowest, len(rows)), np.int64)
    owners[:] = [row.slot for row in rows]
    for readers in alike.values():
        inherited = rows[readers[0]].owners[lowest:highest]
        owners[: len(inherited), readers] = inherited[:, None]
    return owners


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


def prompt_tables(spans: Rows[Span], tokens: bytes, rows: int) -> tuple[Ints, int]:
    """Tables of a pass of `rows` padded rows, one after the other, and the number of its tiles.

    ids, slots (−1: padding), positions, each (rows,); tiles (n, 6).  n is rows/64 or that times a power of two, the
    first tiles empty, so that passes of equal `rows` have few shapes.  tokens: 32-bit ids.  Bytes are joined, for
    that needs no dozen calls of NumPy, none of which is ever warm.
    """
    tiles, most = prompt_tiles(spans), rows // TILE_TOKENS
    while most < len(tiles):
        most *= 2
    padding = 4 * rows - len(tokens)
    parts = [tokens, bytes(padding)]
    parts += [_WORD.pack(span.sequence.slot) * span.count for span in spans]
    parts += [_WORD.pack(-1) * (padding // 4)]
    parts += [_counting(span.position, span.count) for span in spans]
    parts += [bytes(padding + 24 * (most - len(tiles))), struct.pack(f"{6 * len(tiles)}i", *chain.from_iterable(tiles))]
    return np.frombuffer(b"".join(parts), np.int32), most


def _counting(first: int, count: int) -> bytes:
    """first, first + 1 …"""
    return _numbers((first + count).bit_length())[4 * first : 4 * (first + count)]


@cache
def _numbers(bits: int) -> bytes:
    return np.arange(1 << bits, dtype=np.int32).tobytes()


def tile_order(sequence: Sequence) -> tuple[int, int]:
    """Sequences of equal order may share tiles."""
    return (sequence.parent.slot if sequence.parent is not None else -1, sequence.window)


def _cut(first: Span, count: int, shared: int) -> Iterator[Tile]:
    slot, window = first.sequence.slot, first.sequence.window
    for at in range(0, count, TILE_TOKENS):
        position = 0 if shared else first.position + at  # tokens that share a tile have positions of their own
        yield slot, first.row + at, min(count - at, TILE_TOKENS), position, window, shared
