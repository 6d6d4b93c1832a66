"""The tables of decoding rows: who reads what, as one item for all that read it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyloop_service.engine.api import Extend, Open
from tinyloop_service.engine.cuda.batch import (
    AttentionTables,
    TakesQuads,
    attention_tables,
    parts_of,
)
from tinyloop_service.engine.cuda.sequences import Sequence, SequenceTable
from tinyloop_service.engine.cuda.splits import SplitTables, families_of, tables_of_families
from tinyloop_service.kernels.decode_attention import MOST_ENTRIES, MOST_ROWS
from tinyloop_service.kernels.page_layout import QUAD_PAGES


class Chains:
    """Sequences of given lengths without an engine."""

    def __init__(self, slots: int = 8, blocks: int = 10) -> None:
        self.table, self.next = SequenceTable(slots, 4, blocks), 0

    def open(self, length: int, parent: Sequence | None = None, window: int = 0) -> Sequence:
        """`length`: all tokens, the parent's included."""
        self.next += 1
        start = parent.length if parent else 0
        sequence = self.table.open(Open(self.next, parent.id if parent else None, start, 1, window, None))
        blocks = -(-length // 64) - start // 64
        if blocks:
            self.table.extend([Extend(self.next, ((0, 0),) * blocks)])
        sequence.length = length
        return sequence


def split_tables(*, quads: bool = False) -> SplitTables:
    return SplitTables(lambda rows, pages: quads)


def after(rows: list[Sequence], num_steps: int) -> list[int]:
    return [row.length + num_steps for row in rows]


def read_splits(rows: list[Sequence], num_steps: int) -> list[list[tuple[int, int, int]]]:
    """(ordinal, owner's slot, block) of everything that each row reads, by ordinal."""
    tables = split_tables().tables(rows, after(rows, num_steps))
    result: list[list[tuple[int, int, int]]] = [[] for _ in rows]
    for owner, block, first, count, _, _ in tables.items.tolist():
        for row, ordinal in tables.entries[first : first + count].tolist():
            result[row].append((ordinal, owner, block))
    assert [len(splits) for splits in result] == tables.row_items.tolist()
    assert sum(tables.items[:, 3]) == len(tables.entries)
    return [sorted(splits) for splits in result]


def test_a_shared_prefix_is_one_item_a_block() -> None:
    chains = Chains()
    prefix = chains.open(130)  # two whole blocks and a part, which the rows have copies of
    rows = [chains.open(length, prefix) for length in (130, 135, 191)]
    tables = split_tables().tables(rows, after(rows, 1))
    assert tables.items[:2, :4].tolist() == [[prefix.slot, 0, 0, 3], [prefix.slot, 1, 3, 3]]
    assert sorted(map(tuple, tables.items[2:, [0, 1, 3]].tolist())) == sorted((row.slot, 2, 1) for row in rows)
    shared = [(0, prefix.slot, 0), (1, prefix.slot, 1)]
    assert read_splits(rows, 1) == [[*shared, (2, row.slot, 2)] for row in rows]


def test_copies_of_a_partial_page_name_it_and_come_first() -> None:
    chains = Chains(9)
    grandparent = chains.open(70)
    parent = chains.open(100, grandparent)  # its first own block is the grandparent's last, and its own last
    rows = [
        chains.open(length, its) for length, its in ((70, grandparent), (180, parent), (130, parent), (101, parent))
    ]
    narrow, whole = chains.open(300, parent, window=64), chains.open(65, chains.open(64))
    tables = split_tables().tables([*rows, narrow, whole], after([*rows, narrow, whole], 1))
    named = {(slot, block): (at, source, tokens) for at, (slot, block, _, _, source, tokens) in enumerate(tables.items)}
    copies = {key: its for key, its in named.items() if its[2]}
    expected = {(row.slot, 1): (parent.slot, 36) for row in rows[1:]} | {(rows[0].slot, 1): (grandparent.slot, 6)}
    assert {key: its[1:] for key, its in copies.items()} == expected
    num_shared = np.count_nonzero(tables.items[:, 3] > 1)
    assert sorted(its[0] for its in copies.values()) == list(range(num_shared, num_shared + 4))
    assert copies[rows[0].slot, 1][0] == num_shared + 3, "those of one source lie side by side"
    assert all(named[key][1] == key[0] for key in named.keys() - copies.keys()), "others are their own source"


def test_the_splits_of_later_steps_are_there_from_the_first() -> None:
    chains = Chains()
    row = chains.open(60)
    assert read_splits([row], 4) == [[(0, row.slot, 0)]]  # tokens 60 … 63
    assert read_splits([row], 5) == [[(0, row.slot, 0), (1, row.slot, 1)]]


def test_tables_are_made_again_when_a_row_comes_to_another_block() -> None:
    chains, tables = Chains(), split_tables()
    rows = [chains.open(60), chains.open(10)]
    made = tables.tables(rows, after(rows, 2))
    rows[0].length += 2
    assert tables.tables(rows, after(rows, 2)) is made
    rows[0].length += 1
    assert tables.tables(rows, after(rows, 2)).row_items.tolist() == [2, 1]
    assert tables.tables(rows[::-1], after(rows[::-1], 2)).row_items.tolist() == [1, 2]


def test_blocks_behind_the_window_are_left_out() -> None:
    chains = Chains()
    parent = chains.open(192)
    wide, narrow = chains.open(200, parent), chains.open(200, parent, window=73)  # the token at 200 reads 128 …
    assert read_splits([wide, narrow], 1) == [
        [(0, parent.slot, 0), (1, parent.slot, 1), (2, parent.slot, 2), (3, wide.slot, 3)],
        [(0, parent.slot, 2), (1, narrow.slot, 3)],
    ]


def test_a_chain_names_each_owner() -> None:
    chains = Chains()
    grandparent = chains.open(70)
    parent = chains.open(200, grandparent)
    row = chains.open(260, parent)
    owners = [grandparent.slot, parent.slot, parent.slot, row.slot, row.slot]
    assert read_splits([row], 1) == [[(i, owner, i) for i, owner in enumerate(owners)]]


def items_of(tables: AttentionTables) -> list[tuple[list[int], list[list[int]]]]:
    """Each item as it is, but for where its entries lie, and its entries."""
    return [
        ([*item[:2], *item[3:]], tables.entries[item[2] : item[2] + item[3]].tolist()) for item in tables.items.tolist()
    ]


@pytest.mark.parametrize("quads", [False, True])
@pytest.mark.parametrize("window", [0, 100, 200])
@pytest.mark.parametrize("inherited", [(0,), (64,), (300,), (512, 0), (840, 300, 70), (512, 515, 64, 0)])
def test_families_get_what_others_get(inherited: tuple[int, ...], window: int, quads: bool) -> None:
    """Rows off so many prefixes, which have a parent each; four rows off the first one, one off the last."""
    chains, rows = Chains(slots=40, blocks=20), []
    for nth, length in enumerate(inherited):
        chains.open(70)
        grandparent = chains.open(length // 2 + 6) if length else None
        parent = chains.open(length, grandparent) if length else None
        for i in (3, 0, 1, 4)[nth:]:
            width = window and window + length // 64 * 64 % 128
            rows.append(chains.open(length + (5 if window else 3 + 40 * i), parent, width))
    rows = rows[1::2] + rows[::2]
    first, end = [row.first_visible(row.length) for row in rows], [(row.length + 70) // 64 + 1 for row in rows]
    families = families_of(rows, first)
    assert families is not None and sorted(reader for family in families for reader in family.readers) == [
        *range(len(rows))
    ]
    asked: list[tuple[int, int]] = []

    def takes_quads(num_rows: int, pages: int) -> bool:
        asked.append((num_rows, pages))
        return quads

    wanted = attention_tables(rows, first, end, takes_quads)
    made = tables_of_families(rows, families, end, takes_quads)
    assert items_of(made) == items_of(wanted)
    assert (made.row_items.tolist(), made.num_quads) == (wanted.row_items.tolist(), wanted.num_quads)
    assert asked in ([], 2 * asked[:1]) and (made.num_quads > 0) == (bool(asked) and quads)


def check_tables(tables: AttentionTables, rows: list[Sequence], first: list[int], end: list[int]) -> None:
    """The items are as the kernels want them, and each row reads each of its blocks once, in order."""
    items = tables.items.tolist()
    counts = [item[3] for item in items]
    num_shared = sum(count > 1 for count in counts)
    assert max(counts) <= MOST_ENTRIES and all(count > 1 for count in counts[:num_shared]), "shared ones come first"
    assert tables.num_quads <= num_shared, "all quads are shared"
    places = sorted((at, at + count) for _, _, at, count, _, _ in items)
    assert [at for at, _ in places] == [0, *(to for _, to in places[:-1])] and places[-1][1] == len(tables.entries)
    reads: list[list[tuple[int, list[tuple[int, int]]]]] = [[] for _ in rows]  # (ordinal, (owner's slot, block) …)
    for nth, (slot, block, at, count, _, _) in enumerate(items):
        pages = [(slot, block + i) for i in range(QUAD_PAGES if nth < tables.num_quads else 1)]
        for row, ordinal in tables.entries[at : at + count].tolist():
            reads[row].append((ordinal, pages))
    for nth, row in enumerate(rows):
        reads[nth].sort()
        assert [ordinal for ordinal, _ in reads[nth]] == [*range(tables.row_items[nth])]
        owners = [*row.owners.tolist(), *[row.slot] * end[nth]]
        assert [*chain.from_iterable(pages for _, pages in reads[nth])] == [
            (owners[block], block) for block in range(first[nth], end[nth])
        ]


FAMILIES = st.lists(
    st.tuples(
        st.sampled_from((0, 64, 300, 512, 580)),  # tokens that they inherit
        st.one_of(st.integers(1, 5), st.sampled_from((63, 64, 65, 100, 128, 129, 200, 256))),  # rows
        st.sampled_from((0, 0, 150)),  # window
    ),
    min_size=1,
    max_size=4,
)


@given(FAMILIES, st.booleans(), st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_every_row_reads_each_block_once(
    families: list[tuple[int, int, int]], strangers: bool, quads: bool, random: Any
) -> None:
    """However many rows share a page, and by both ways to the tables.  Strangers: some read the first blocks alone."""
    chains, rows = Chains(slots=300, blocks=20), []
    for inherited, count, window in families:
        grandparent = chains.open(inherited // 2 + 6) if inherited else None
        parent = chains.open(inherited, grandparent) if inherited else None
        lengths = [inherited + (5 if window else 3 + 40 * i % 130) for i in range(min(count, MOST_ROWS - len(rows)))]
        rows += [chains.open(length, parent, window) for length in lengths]
        if strangers and len(rows) < MOST_ROWS:
            rows.append(chains.open(inherited // 2 + 9, grandparent))
    random.shuffle(rows)
    first, end = [row.first_visible(row.length) for row in rows], [(row.length + 70) // 64 + 1 for row in rows]
    wanted = attention_tables(rows, first, end, lambda *_: quads)
    check_tables(wanted, rows, first, end)
    alike = families_of(rows, first)
    if alike is not None:
        made = tables_of_families(rows, alike, end, lambda *_: quads)
        check_tables(made, rows, first, end)
        assert items_of(made) == items_of(wanted)
        assert (made.row_items.tolist(), made.num_quads) == (wanted.row_items.tolist(), wanted.num_quads)


@pytest.mark.parametrize("readers", [1, 16, 64, 65, 100, 128, 129, 193, 200, 256])
def test_parts_of_what_many_rows_read(readers: int) -> None:
    begins, sizes = zip(*parts_of(readers), strict=True)
    assert [*begins, readers] == [0, *np.cumsum(sizes)], "they lie side by side"
    assert len(sizes) == -(-readers // MOST_ENTRIES) and max(sizes) <= MOST_ENTRIES
    assert max(sizes) - min(sizes) <= 16 and sum(-(-size // 16) for size in sizes) == -(-readers // 16)


@pytest.mark.parametrize("quads", [False, True])
def test_pages_of_more_rows_than_an_item_has_entries(quads: bool) -> None:
    """Their items lie side by side; whether quads are taken is asked of items, not of pages."""
    chains, asked = Chains(slots=200), []
    crowd, few = chains.open(64 * 5), chains.open(64)
    rows = [chains.open(64 * 5 + 1, crowd) for _ in range(100)] + [chains.open(65, few) for _ in range(60)]

    def takes_quads(rows: int, items: int) -> bool:
        asked.append((rows, items))
        return quads

    for make in (SplitTables(takes_quads).tables, _without_families(takes_quads)):
        tables = make(rows, after(rows, 1))
        pages = [0, 4] if quads else [0, 1, 2, 3, 4]
        shared = [[crowd.slot, block, count] for block in pages for count in (48, 52)] + [[few.slot, 0, 60]]
        assert tables.items[: len(shared), [0, 1, 3]].tolist() == shared
        assert tables.num_quads == (2 if quads else 0) and (tables.items[len(shared) :, 3] == 1).all()
    assert asked == [(160, 11)] * 2


def _without_families(takes_quads: TakesQuads) -> Callable[[list[Sequence], list[int]], AttentionTables]:
    def tables(rows: list[Sequence], lengths: list[int]) -> AttentionTables:
        return attention_tables(rows, [0] * len(rows), [length // 64 + 1 for length in lengths], takes_quads)

    return tables


def test_who_are_no_families() -> None:
    chains = Chains(slots=12)
    grandparent = chains.open(64)
    parent, other, child = chains.open(130), chains.open(130), chains.open(200, grandparent)
    rows = [chains.open(150, parent), chains.open(160, parent), chains.open(150, other), chains.open(150, parent, 30)]
    rows += [chains.open(100, grandparent), chains.open(210, child)]

    def readers(*which: int) -> list[list[int]] | None:
        given = [rows[i] for i in which]
        families = families_of(given, [row.first_visible(row.length) for row in given])
        return families and [family.readers for family in families]

    assert readers(0, 2, 1) == [[0, 2], [1]]
    assert readers(0, 3) is None, "one sees less"
    assert readers(0, 4, 5) is None, "two inherit the same block from their grandparent"
    assert readers(0, 5) == [[0], [1]]


def quad_splits(rows: list[Sequence]) -> tuple[list[list[tuple[int, int, int, bool]]], int]:
    """(ordinal, owner's slot, block, whether it is a quad) of what each row reads, and the number of quads."""
    tables = split_tables(quads=True).tables(rows, after(rows, 1))
    result: list[list[tuple[int, int, int, bool]]] = [[] for _ in rows]
    for nth, (owner, block, first, count, _, _) in enumerate(tables.items.tolist()):
        for row, ordinal in tables.entries[first : first + count].tolist():
            result[row].append((ordinal, owner, block, nth < tables.num_quads))
    assert [len(splits) for splits in result] == tables.row_items.tolist()
    assert sum(tables.items[:, 3]) == len(tables.entries)
    for items in (tables.items[: tables.num_quads], tables.items[tables.num_quads :]):
        assert items[:, 3].tolist() == sorted(items[:, 3], reverse=True), "the most shared come first"
    return [sorted(splits) for splits in result], tables.num_quads


def test_four_pages_that_the_same_rows_share_are_a_quad() -> None:
    chains = Chains(9)
    grandparent = chains.open(64 * 5)
    parent = chains.open(64 * 9 + 10, grandparent)
    rows = [chains.open(64 * 9 + 10 + more, parent) for more in (0, 50)]
    whole, part = grandparent.slot, parent.slot
    shared = [(0, whole, 0, True), (1, whole, 4, False)]  # the next quad has two owners
    shared += [(ordinal, part, 3 + ordinal, False) for ordinal in range(2, 6)]
    assert quad_splits(rows) == ([[*shared, (6, row.slot, 9, False)] for row in rows], 1)
    assert quad_splits(rows[:1])[1] == 0, "nobody shares them"
    assert quad_splits([*rows, chains.open(600, parent, window=400)])[1] == 0, "one sees a part of them"
    assert quad_splits([*rows, chains.open(330, grandparent), chains.open(400, grandparent)])[1] == 1


def test_quads_only_where_they_are_taken() -> None:
    chains, asked = Chains(), []
    parent = chains.open(64 * 8)
    rows = [chains.open(64 * 8 + more, parent) for more in (1, 2, 3)]

    def takes_quads(rows: int, pages: int) -> bool:
        asked.append((rows, pages))
        return False

    assert SplitTables(takes_quads).tables(rows, after(rows, 1)).num_quads == 0 and asked == [(3, 8)]
