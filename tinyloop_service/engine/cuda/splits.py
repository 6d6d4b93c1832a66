"""The tables of decoding rows, kept while they read the same splits, and made quickly where they have one parent.

In: sequences, and how far each goes.  Out: `batch.AttentionTables`.  Refuses to know about pages and the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Rows

import numpy as np

from tinyloop_service.engine.api import PAGE_TOKENS
from tinyloop_service.engine.cuda.batch import AttentionTables, TakesQuads, attention_tables
from tinyloop_service.engine.cuda.sequences import Sequence
from tinyloop_service.kernels.page_layout import QUAD_PAGES

_MOST_TABLES = 8


class SplitTables:
    """Makes tables again only when a row has come to another block, or rows come and go."""

    def __init__(self, takes_quads: TakesQuads) -> None:
        self._takes_quads = takes_quads
        self._made: OrderedDict[tuple[object, ...], AttentionTables] = OrderedDict()

    def tables(self, rows: Rows[Sequence], lengths: Rows[int]) -> AttentionTables:
        """Every split that a row reads in any of the steps by which it comes to its length of `lengths`; in a step in
        which it does not, it weighs nothing.

        Splits behind the window are left out: their pages may be someone else's.
        """
        first = [row.first_visible(row.length) for row in rows]
        end = [(length - 1) // PAGE_TOKENS + 1 for length in lengths]
        key = (*rows, *first, *end)
        if key not in self._made:
            make = tables_of_siblings if are_siblings(rows, first) else attention_tables
            self._made[key] = make(rows, first, end, self._takes_quads)
            if len(self._made) > _MOST_TABLES:
                self._made.popitem(last=False)
        return self._made[key]


def are_siblings(rows: Rows[Sequence], first_blocks: Rows[int]) -> bool:
    """Several rows that share the array of what they inherit, and read it from the same block on."""
    owners = rows[0].owners
    return len(rows) > 1 and len({*first_blocks}) == 1 and all(row.owners is owners for row in rows)


def tables_of_siblings(
    rows: Rows[Sequence], first_blocks: Rows[int], end_blocks: Rows[int], takes_quads: TakesQuads
) -> AttentionTables:
    """`attention_tables` for rows that `are_siblings`: the same items, their entries elsewhere, by few calls of NumPy.

    What those cost in a service, which runs much else between two of them, is more than what they do.
    """
    first, count, owners = first_blocks[0], len(rows), rows[0].owners.tolist()
    quads = set() if any(row.window for row in rows) else _quads(owners, first)
    if quads and not takes_quads(count, len(owners) - first):
        quads = set()
    inner = {block + nth for block in quads for nth in range(1, QUAD_PAGES)}
    splits = [block for block in range(first, len(owners)) if block not in inner]
    shared = sorted((block not in quads, owners[block], block, ordinal) for ordinal, block in enumerate(splits))
    own = sorted(_own_splits(rows, max(first, len(owners)), end_blocks, len(splits)))
    num_entries = count * len(shared)
    items = [(slot, block, count * at, count, slot, 0) for at, (_, slot, block, _) in enumerate(shared)]
    items += [
        (slot, block, num_entries + at, 1, source, -not_copied)
        for at, (not_copied, source, slot, block, _, _) in enumerate(own)
    ]
    entries = np.empty((num_entries + len(own), 2), np.int32)
    of_all = entries[:num_entries].reshape(len(shared), count, 2)
    of_all[:, :, 0] = np.arange(count, dtype=np.int32)
    of_all[:, :, 1] = np.array([ordinal for *_, ordinal in shared], np.int32)[:, None]
    entries[num_entries:] = np.array([split[4:] for split in own], np.int32).reshape(-1, 2)
    row_items = np.array(end_blocks, np.int32) - np.int32(max(first, len(owners)) - len(splits))
    return AttentionTables(np.array(items, np.int32).reshape(-1, 6), entries, row_items, len(quads))


def _quads(owners: list[int], first: int) -> set[int]:
    """The blocks with which quads of one owner's pages begin."""
    begins = range(-(-first // QUAD_PAGES) * QUAD_PAGES, len(owners) - QUAD_PAGES + 1, QUAD_PAGES)
    return {block for block in begins if len({*owners[block : block + QUAD_PAGES]}) == 1}


def _own_splits(
    rows: Rows[Sequence], begin: int, end_blocks: Rows[int], ordinal: int
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Such that they sort: minus the tokens that it shares with its source, the source's slot; slot, block; row,
    ordinal.  From block `begin` on, the row's split of number `ordinal`."""
    for reader, (row, end) in enumerate(zip(rows, end_blocks, strict=True)):
        for block in range(begin, end):
            copied = row.start % PAGE_TOKENS if row.parent is not None and block == row.start // PAGE_TOKENS else 0
            source = row.parent.slot if copied and row.parent is not None else row.slot
            yield -copied, source, row.slot, block, reader, ordinal + block - begin
