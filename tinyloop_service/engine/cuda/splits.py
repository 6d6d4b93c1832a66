"""The tables of decoding rows, kept while they read the same splits, and made quickly where rows are families.

A *family* inherits the same blocks, as most rows off one prefix do.  In: sequences, and how far each goes.  Out:
`batch.AttentionTables`.  Refuses to know about pages and the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np

from tinyloop_service.engine.api import PAGE_TOKENS
from tinyloop_service.engine.cuda.batch import AttentionTables, Ints, TakesQuads, attention_tables, parts_of
from tinyloop_service.engine.cuda.sequences import Sequence
from tinyloop_service.kernels.page_layout import QUAD_PAGES

# A split of one row, so that they sort: minus the tokens it shares with its source, the source's slot; slot, block;
# the row, and which of the row's it is.
Alone = tuple[int, int, int, int, int, int]
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
            families = families_of(rows, first)
            if families is None:
                self._made[key] = attention_tables(rows, first, end, self._takes_quads)
            else:
                self._made[key] = tables_of_families(rows, families, end, self._takes_quads)
            if len(self._made) > _MOST_TABLES:
                self._made.popitem(last=False)
        return self._made[key]


@dataclass(frozen=True, slots=True)
class Family:
    """Rows that share the array of what they inherit, and read it from the same block on."""

    readers: list[int]  # numbers of its rows
    owners: list[int]  # slots that own the blocks
    first: int  # block that they read

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Items of a split that they share: the first of its entries, and how many."""
        return parts_of(len(self.readers))

    @property
    def blocks(self) -> range:
        """Of those inherited, which they read."""
        return range(self.first, len(self.owners))

    @property
    def own_begin(self) -> int:
        """The first block that each has for itself."""
        return max(self.first, len(self.owners))

    def quads(self, rows: Rows[Sequence]) -> list[int]:
        """The blocks with which quads begin: pages of one owner, of which several rows see all."""
        if len(self.readers) == 1 or any(rows[reader].window for reader in self.readers):
            return []
        begins = range(-(-self.first // QUAD_PAGES) * QUAD_PAGES, len(self.owners) - QUAD_PAGES + 1, QUAD_PAGES)
        return [block for block in begins if len({*self.owners[block : block + QUAD_PAGES]}) == 1]


def families_of(rows: Rows[Sequence], first_blocks: Rows[int]) -> list[Family] | None:
    """None where it is not that simple: two share some of what they inherit, or some with a window see less."""
    by_owners: dict[int, list[int]] = {}
    for reader, row in enumerate(rows):
        by_owners.setdefault(id(row.owners), []).append(reader)
    families = []
    for readers in by_owners.values():
        first = first_blocks[readers[0]]
        if any(first_blocks[reader] != first for reader in readers):
            return None
        families.append(Family(readers, rows[readers[0]].owners.tolist(), first))
    roots = [family.owners[0] for family in families if family.owners]
    return families if len({*roots}) == len(roots) else None


def tables_of_families(
    rows: Rows[Sequence], families: Rows[Family], end_blocks: Rows[int], takes_quads: TakesQuads
) -> AttentionTables:
    """`attention_tables` for rows that are these families: the same items, their entries elsewhere, by few calls of
    NumPy.  What those cost in a service, which runs much else between two of them, is more than what they do."""
    quads = [family.quads(rows) for family in families]
    num_shared = sum(len(family.blocks) * len(family.parts) for family in families if len(family.readers) > 1)
    if not (any(quads) and takes_quads(len(rows), num_shared)):
        quads = [[]] * len(families)
    shared: list[tuple[bool, int, int, int, int]] = []  # not a quad; minus the readers, slot, block, first entry
    alone: list[Alone] = []
    of_shared: list[tuple[list[int], int]] = []  # of each family that shares: its readers, how many splits
    row_items, num_entries = [0] * len(rows), 0
    for family, begins in zip(families, quads, strict=True):
        inner = {block + nth for block in begins for nth in range(1, QUAD_PAGES)}
        splits = [block for block in family.blocks if block not in inner]
        begin, owners, count = family.own_begin, family.owners, len(family.readers)
        for reader in family.readers:
            row_items[reader] = len(splits) + end_blocks[reader] - begin
            alone += _own_splits(rows[reader], reader, range(begin, end_blocks[reader]), len(splits))
        if count == 1:
            (reader,) = family.readers
            alone += [(0, owners[block], owners[block], block, reader, nth) for nth, block in enumerate(splits)]
            continue
        for block in splits:
            shared.append((block not in begins, -count, owners[block], block, num_entries))
            num_entries += count
        of_shared.append((family.readers, len(splits)))
    shared.sort()
    alone.sort()
    items = [
        (slot, block, at + begin, count, slot, 0)
        for _, minus_readers, slot, block, at in shared
        for begin, count in parts_of(-minus_readers)
    ]
    items += [
        (slot, block, at, 1, source, -minus_copied)
        for at, (minus_copied, source, slot, block, _, _) in enumerate(alone, num_entries)
    ]
    return AttentionTables(
        np.array(items, np.int32).reshape(-1, 6),
        _entries(of_shared, alone, num_entries),
        np.array(row_items, np.int32),
        sum(len(begins) * len(family.parts) for family, begins in zip(families, quads, strict=True)),
    )


def _entries(of_shared: Rows[tuple[list[int], int]], alone: Rows[Alone], num_shared: int) -> Ints:
    """(row, ordinal): of each family that shares split by split, `num_shared` in all; then of those alone."""
    entries = np.empty((num_shared + len(alone), 2), np.int32)
    at = 0
    for readers, num_splits in of_shared:
        of_all = entries[at : at + num_splits * len(readers)].reshape(num_splits, len(readers), 2)
        of_all[:, :, 0], of_all[:, :, 1] = readers, np.arange(num_splits, dtype=np.int32)[:, None]
        at += num_splits * len(readers)
    entries[at:] = np.array([split[4:] for split in alone], np.int32).reshape(-1, 2)
    return entries


def _own_splits(row: Sequence, reader: int, blocks: range, ordinal: int) -> list[Alone]:
    """Of a row's own blocks, numbered from `ordinal` on."""
    slot, copied_block = row.slot, row.start // PAGE_TOKENS
    splits = [(0, slot, slot, block, reader, nth) for nth, block in enumerate(blocks, ordinal)]
    if row.parent is not None and row.start % PAGE_TOKENS and copied_block in blocks:
        nth = copied_block - blocks.start
        splits[nth] = (-(row.start % PAGE_TOKENS), row.parent.slot, *splits[nth][2:])
    return splits
