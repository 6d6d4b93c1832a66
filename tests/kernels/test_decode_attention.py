"""decode_attention against float64, against its reference, and against itself in other company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from attention_cases import FORMS, LAYER, LEAST_SCALE, MOST_SCALE, PAGE, Sequences
from numpy.typing import NDArray

from tinyloop_service.engine.cache_modes import encode
from tinyloop_service.kernels.decode_attention import MOST_ROWS, decode_attention, has_quads
from tinyloop_service.kernels.device import Device
from tinyloop_service.kernels.match import KernelArgumentError
from tinyloop_service.kernels.page_layout import QUAD_PAGES
from tinyloop_service.kernels.references import decode_attention as reference
from tinyloop_service.kernels.references.page_views import int8_page
from tinyloop_service.types import CacheMode

Array = NDArray[Any]

WINDOWS = (0, 1, 63, 64, 65, 100)
SHAPES = [(2, 2, 128), (4, 2, 64), (16, 1, 64), (4, 1, 128), (3, 1, 64)]  # heads, K/V heads, head_dim
ALL_CASES = [(*shape, int8) for int8, shapes in ((False, SHAPES), (True, SHAPES[:3])) for shape in shapes]
COMPANY = [(*shape, int8) for int8 in (False, True) for shape in SHAPES[:2]] + [(4, 1, 128, False)]
UNWRITTEN = 7.0


@dataclass(frozen=True)
class Row:
    slot: int
    position: int
    window: int = 0

    def blocks(self, *, hidden: bool) -> list[int]:
        """Of the row's splits; with `hidden` also those of which it sees nothing."""
        first = max(self.position - self.window + 1, 0) // PAGE if self.window and not hidden else 0
        return list(range(first, self.position // PAGE + 1))


def work_list(
    rows: Sequence[Row],
    *,
    shared: int,
    group: int,
    hidden: bool,
    copied: int = 0,
    copies_first: bool = True,
    quads: bool = False,
) -> dict[str, Array]:
    """Items over `rows`: of blocks < shared up to `group` rows together, of the others each row alone.

    The first `copied` tokens of block `shared` may be read through slot 0.  With `quads`, four shared blocks are one
    for rows without a window.
    """
    end = shared // QUAD_PAGES * QUAD_PAGES if quads else 0  # of the quads

    def splits_of(row: Row) -> list[tuple[bool, int]]:
        """(whether it is a page, block), ascending."""
        blocks = [(block >= end or row.window > 0, block) for block in row.blocks(hidden=hidden)]
        return [split for split in blocks if split[0] or split[1] % QUAD_PAGES == 0]

    splits = [(*split, row) for row, its in enumerate(rows) for split in splits_of(its)]
    items: list[tuple[int, ...]] = []
    entries: list[tuple[int, int]] = []
    num_quads = 0
    for is_page, block in sorted({split[:2] for split in splits}):
        having = [row for *at, row in splits if at == [is_page, block]]
        size = group if block < shared else 1
        for together in (having[i : i + size] for i in range(0, len(having), size)):
            slot = rows[together[0]].slot
            source = (0, copied) if block == shared else (slot, 0)
            items.append((slot, block, len(entries), len(together), *source))
            entries.extend((row, splits_of(rows[row]).index((is_page, block))) for row in together)
        num_quads = num_quads if is_page else len(items)
    pages = items[num_quads:]
    pages.sort(key=lambda item: (item[3] == 1, -item[5] if copies_first else item[5]))
    items[num_quads:] = pages
    num_shared = num_quads + sum(item[3] > 1 for item in pages)
    items.append((99,) * 6)  # beyond num_items: never read
    return {
        "items": np.array(items, np.int32),
        "num_items": np.array([len(items) - 1, num_shared, num_quads], np.int32),
        "entries": np.array(entries, np.int32),
        "row_items": np.array([len(splits_of(row)) for row in rows], np.int32),
        "position": np.array([row.position for row in rows], np.int32),
        "window": np.array([row.window for row in rows], np.int32),
    }


def run(device: Device, sequences: Sequences, rows: Sequence[Row], q: Array, **options: Any) -> Array:
    """a [rows, H·D]; q has a row for each of `rows`.  In int8 their tokens are put into their pages on the way."""
    newest, pool = None, sequences.pool
    if sequences.int8:
        newest, pool = sequences.put_newest([(row.slot, row.position) for row in rows])
    a, there = launch(device, sequences, rows, q, newest, pool, **options)
    assert np.array_equal(there.view(np.uint8), sequences.pool.view(np.uint8)), "something else is written to pages"
    return a


def launch(
    device: Device,
    sequences: Sequences,
    rows: Sequence[Row],
    q: Array,
    newest: Array | None,
    pool: Array,
    *,
    group: int = 64,
    hidden: bool = False,
    num_blocks: int | None = None,
    many: bool | None = None,
    quads: bool = False,
    **items: Any,
) -> tuple[Array, Array]:
    """a, and the pool afterwards."""
    shape = (len(rows), sequences.heads, sequences.max_blocks)
    a, there = device.upload(np.full_like(q, UNWRITTEN)), device.upload(pool)
    work = work_list(rows, shared=sequences.shared, group=group, hidden=hidden, quads=quads, **items)
    decode_attention(
        device,
        device.upload(q),
        there,
        None if newest is None else device.upload(newest),
        device.upload(sequences.tables),
        LAYER,
        *map(device.upload, work.values()),
        device.upload(np.full((*shape, sequences.head_dim), np.nan, np.float32)),
        device.upload(np.full((*shape, 2), np.nan, np.float32)),
        a,
        num_kv_heads=sequences.kv_heads,
        num_blocks=num_blocks,
        many=many,
        quads=quads,
    )
    return device.download(a), device.download(there)


def check(sequences: Sequences, rows: Sequence[Row], q: Array, a: Array) -> None:
    for row, its in enumerate(rows):
        exact = sequences.exact_of_levels if sequences.int8 else sequences.exact
        expected, tolerance = exact(q[row], its.slot, its.position, its.window)
        excess = np.abs(a[row].astype(np.float64) - expected) - tolerance
        assert excess.max() <= 0, f"{its} is off by {excess.max():.2e} more than rounding explains"


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "int8"), ALL_CASES)
def test_against_float64(device: Device, heads: int, kv_heads: int, head_dim: int, int8: bool) -> None:
    lengths = [1, 2, 63, 64, 65, 118, 200]
    sequences = Sequences(lengths, heads, kv_heads, head_dim, int8=int8)
    rows = [Row(slot, length - 1) for slot, length in enumerate(lengths)]
    q = sequences.queries(len(rows))
    check(sequences, rows, q, run(device, sequences, rows, q))


@FORMS
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_windows(device: Device, window: int, many: bool, int8: bool) -> None:
    sequences = Sequences([150, 129, 192, 193], 2, 1, 64, shared=2, int8=int8)
    rows = [Row(slot, length - 1, window) for slot, length in enumerate(sequences.lengths)]
    q = sequences.queries(len(rows))
    check(sequences, rows, q, run(device, sequences, rows, q, many=many))


def test_more_splits_than_a_merge_keeps_in_flight(device: Device) -> None:
    sequences = Sequences([64 * 37 + 5], 1, 1, 64)
    rows = [Row(0, sequences.lengths[0] - 1)]
    q = sequences.queries(1)
    check(sequences, rows, q, run(device, sequences, rows, q))


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("scales", [(LEAST_SCALE,), (MOST_SCALE,), (LEAST_SCALE, MOST_SCALE)])
def test_the_least_and_the_largest_values_of_int8(device: Device, scales: tuple[float, ...], many: bool) -> None:
    """Weights times these scales neither overflow fp16 nor vanish in it."""
    sequences = Sequences([150, 129], 2, 1, 64, shared=1, int8=True)
    sequences.scale_values(*scales)
    rows = [Row(0, 149), Row(1, 128)]
    q = sequences.queries(2)
    a = run(device, sequences, rows, q, many=many)
    check(sequences, rows, q, a)
    assert np.all(np.isfinite(a)) and a.any()


@FORMS
@pytest.mark.parametrize("in_quads", [False, True])
def test_against_the_reference(device: Device, in_quads: bool, int8: bool) -> None:
    """The same rounding points: what differs is the order of fp32 sums, seen at most in the last bit of fp16."""
    sequences = Sequences([350, 330, 400], 4, 2, 64, shared=5, int8=int8)
    if in_quads and not has_quads(device):
        pytest.skip("quads are sm_90's")
    rows = [Row(0, 349), Row(1, 329, 70), Row(2, 399, 1)]
    q = sequences.queries(len(rows))
    work = work_list(rows, shared=5, group=64, hidden=True, quads=in_quads)
    shape = (len(rows), sequences.heads, sequences.max_blocks)
    expected, o, ml = np.zeros_like(q), np.zeros((*shape, 64), np.float32), np.zeros((*shape, 2), np.float32)
    newest, pool = sequences.put_newest([(row.slot, row.position) for row in rows]) if int8 else (None, sequences.pool)
    tables = sequences.tables
    reference.decode_attention(q, pool, newest, tables, LAYER, *work.values(), o, ml, expected, num_kv_heads=2)
    assert not int8 or np.array_equal(pool, sequences.pool)
    a = run(device, sequences, rows, q, hidden=True, quads=in_quads)
    # A weight next to the middle of two fp16 numbers may be rounded the other way: 2^-11 of it, once in a while.
    np.testing.assert_allclose(a.astype(np.float32), expected.astype(np.float32), rtol=2**-10, atol=2**-10)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "int8"), COMPANY)
def test_a_rows_bits_do_not_depend_on_its_company(
    device: Device, heads: int, kv_heads: int, head_dim: int, int8: bool
) -> None:
    """Twenty rows off one prefix: all together (two tiles of queries and more), in groups, each alone."""
    lengths = [129 + 3 * i for i in range(20)]
    sequences = Sequences(lengths, heads, kv_heads, head_dim, shared=2, int8=int8)
    rows = [Row(slot, length - 1, WINDOWS[slot % 6]) for slot, length in enumerate(lengths)]
    q = sequences.queries(len(rows))
    together = run(device, sequences, rows, q)
    check(sequences, rows, q, together)
    for group in (1, 3, 17):
        for num_blocks in (None, 1, 3):
            a = run(device, sequences, rows, q, group=group, num_blocks=num_blocks)
            assert np.array_equal(a, together), f"items of {group} rows in {num_blocks} blocks differ"
    for row in (0, 7, 19):
        for many in (False, True):
            alone = run(device, sequences, [rows[row]], q[row : row + 1], many=many)
            assert np.array_equal(alone[0], together[row]), f"row {row} alone has other bits"
    for some in (rows[:2], rows[5:12]):
        first = rows.index(some[0])
        few = run(device, sequences, some, q[first : first + len(some)], many=False)
        assert np.array_equal(few, together[first : first + len(some)]), f"{len(some)} rows alone have other bits"
    backwards = run(device, sequences, rows[::-1], np.ascontiguousarray(q[::-1]))
    assert np.array_equal(backwards[::-1], together), "the order of the rows shows"


@pytest.fixture
def quads(device: Device) -> None:
    if not has_quads(device):
        pytest.skip("quads are sm_90's")


@pytest.mark.usefixtures("quads")
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "int8"), COMPANY)
@pytest.mark.parametrize("shared", [4, 9])
def test_quads_have_the_bits_of_their_pages(
    device: Device, shared: int, heads: int, kv_heads: int, head_dim: int, int8: bool
) -> None:
    """Six rows, of which one has a window and so reads pages; the last of a row's pages may end a quad or not."""
    lengths = [PAGE * shared + more for more in (1, 64, 130, 190, 200, 300)]
    sequences = Sequences(lengths, heads, kv_heads, head_dim, shared=shared, int8=int8)
    rows = [Row(slot, length - 1, 100 if slot == 4 else 0) for slot, length in enumerate(lengths)]
    q = sequences.queries(len(rows))
    pages = run(device, sequences, rows, q)
    check(sequences, rows, q, pages)
    for group, num_blocks in ((64, None), (64, 1), (4, 3), (1, None)):
        a = run(device, sequences, rows, q, group=group, num_blocks=num_blocks, quads=True)
        assert np.array_equal(a, pages), f"quads of {group} rows in {num_blocks} blocks differ"


@pytest.mark.usefixtures("quads")
@pytest.mark.parametrize("kv_heads", [1, 16])
def test_quads_of_more_tiles_than_a_block_has_warps(device: Device, kv_heads: int) -> None:
    count = 5 if kv_heads == 1 else 64
    sequences = Sequences([PAGE * 4 + 1 + i for i in range(count)], 16, kv_heads, 64, shared=4)
    rows = [Row(slot, length - 1) for slot, length in enumerate(sequences.lengths)]
    q = sequences.queries(len(rows))
    assert np.array_equal(run(device, sequences, rows, q, quads=True), run(device, sequences, rows, q))


@FORMS
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2)])
@pytest.mark.parametrize("count", [65, 100, 128, 200, MOST_ROWS])
def test_batches_of_more_rows_than_an_item_has_entries(
    device: Device, count: int, heads: int, kv_heads: int, int8: bool
) -> None:
    """Rows off one prefix, some with a window, in pages and in quads: each has the bits that it has by itself, among
    few, and alone."""
    lengths = [PAGE * 4 + 1 + 7 * slot % PAGE for slot in range(count)]
    sequences = Sequences(lengths, heads, kv_heads, 64, shared=4, int8=int8)
    rows = [Row(slot, length - 1, 100 if slot % 40 == 9 else 0) for slot, length in enumerate(lengths)]
    q = sequences.queries(count)
    by_itself = run(device, sequences, rows, q, group=1)
    check(sequences, rows[-2:], q[-2:], by_itself[-2:])
    assert np.array_equal(run(device, sequences, rows, q), by_itself), "items of 64 rows have other bits"
    if has_quads(device):
        for group, num_blocks in ((64, None), (48, 3)):
            a = run(device, sequences, rows, q, group=group, num_blocks=num_blocks, quads=True)
            assert np.array_equal(a, by_itself), f"quads of {group} rows in {num_blocks} blocks differ"
    for first, end in ((0, 16), (56, 72), (count - 5, count), (63, 64), (count - 1, count)):
        few = run(device, sequences, rows[first:end], q[first:end])
        assert np.array_equal(few, by_itself[first:end]), f"rows {first} to {end - 1} alone have other bits"


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "int8"), COMPANY)
@pytest.mark.parametrize("copied", [5, 8, 31, 40, 63])
def test_a_copy_may_be_read_through_its_source(
    device: Device, copied: int, heads: int, kv_heads: int, head_dim: int, int8: bool
) -> None:
    """Six rows with copies of sequence 0's last page: the same bits, and of whole octets the copies are not read; in
    whichever order they come, which may cost that."""
    lengths = [64 + copied, *(65 + copied + more for more in (0, 1, 7, 24, 60, 90))]
    sequences = Sequences(lengths, heads, kv_heads, head_dim, shared=1, int8=int8)
    sequences.copy_last(copied)
    rows = [Row(slot, lengths[slot] - 1, WINDOWS[slot % 6]) for slot in range(1, 7)]
    q = sequences.queries(len(rows))
    own = run(device, sequences, rows, q)
    check(sequences, rows, q, own)
    assert np.array_equal(run(device, sequences, rows, q, many=True, copied=copied, copies_first=False), own)
    sequences.spoil_copies(copied // 8 * 8)
    for many in (False, True):
        for num_blocks in (None, 1):
            a = run(device, sequences, rows, q, many=many, num_blocks=num_blocks, copied=copied)
            assert np.array_equal(a, own), f"{copied} tokens read through their source give other bits"


@FORMS
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("window", WINDOWS[1:])
def test_a_split_of_which_nothing_is_seen_weighs_nothing(device: Device, window: int, many: bool, int8: bool) -> None:
    sequences = Sequences([290, 257], 4, 2, 64, shared=3, int8=int8)
    rows = [Row(0, 289, window), Row(1, 256, window)]
    q = sequences.queries(2)
    left_out = run(device, sequences, rows, q)
    assert np.array_equal(run(device, sequences, rows, q, hidden=True, many=many), left_out)


@FORMS
def test_splits_that_lie_ahead_weigh_nothing(device: Device, int8: bool) -> None:
    """A work list may name blocks that a row only reaches in a later step."""
    sequences = Sequences([200], 4, 2, 64, int8=int8)
    q = sequences.queries(1)
    now = run(device, sequences, [Row(0, 70)], q)

    class RowWithMore(Row):
        def blocks(self, *, hidden: bool) -> list[int]:
            return [0, 1, 2, 3]

    for many in (False, True):
        assert np.array_equal(run(device, sequences, [RowWithMore(0, 70)], q, many=many), now)


@FORMS
def test_nothing_past_a_rows_position_leaks(device: Device, int8: bool) -> None:
    sequences = Sequences([65, 100], 2, 2, 128, shared=1, int8=int8)
    rows = [Row(0, 64), Row(1, 99)]
    q = sequences.queries(2)
    before = run(device, sequences, rows, q)
    for slot in (0, 1):
        sequences.fill_unused(slot)
    for many in (False, True):
        assert np.array_equal(run(device, sequences, rows, q, many=many), before)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_newest_tokens_are_coded_as_the_engine_codes(device: Device, head_dim: int, many: bool) -> None:
    """At every place of a page; what is not finite shows: a NaN as the scale, infinity as fp16's largest."""
    sequences = Sequences([PAGE] * 64, 2, 1, head_dim, int8=True)
    rows = [Row(slot, slot) for slot in range(64)]
    newest, pool = sequences.put_newest([(row.slot, row.position) for row in rows])
    newest[5, 0, 0, 9], newest[6, 1, 0, 63] = np.nan, -np.inf
    there = launch(device, sequences, rows, sequences.queries(64), newest, pool, many=many)[1]
    for row, (slot, place) in enumerate((row.slot, row.position) for row in rows):
        page = int8_page(there[sequences.tables[slot, LAYER, 0]], 1)
        for x, levels, scales in (
            (newest[row, 0], page.keys[:, place], page.key_scales[:, place]),
            (newest[row, 1], page.values[:, :, place], page.value_scales[:, place]),
        ):
            if np.isnan(x).any():
                assert np.isnan(scales).all()
                continue
            stored = encode(CacheMode.INT8, x)
            assert np.array_equal(scales, stored["scales"][:, 0]) and np.array_equal(levels, stored["levels"])


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(
    ("where", "value"),
    [("q", np.nan), ("q", np.inf), ("q", -np.inf), ("key_scales", np.nan), ("value_scales", np.nan)],
)
def test_what_is_not_finite_shows_in_int8(device: Device, where: str, value: float, many: bool) -> None:
    """Rounding to levels loses no NaN, and no infinite q: the engine looks for them in what it samples from."""
    sequences = Sequences([150, 129], 2, 1, 64, shared=1, int8=True)
    rows, q = [Row(0, 149), Row(1, 128)], sequences.queries(2)
    dim = int(sequences.put_newest([(1, 128)])[0][0, 0, 0].argmax())
    if where == "q":  # a dim in which all keys are of one sign, so that every score might be taken for −inf
        for page in sequences.tables[1, LAYER, :3]:
            int8_page(sequences.pool[page], 1).keys[:, :, dim] = 100
    before = run(device, sequences, rows, q, many=many)
    if where == "q":
        q[1, 64 + dim] = value
    else:
        page = int8_page(sequences.pool[sequences.tables[1, LAYER, 1]], 1)
        getattr(page, where)[0, 30] = value
    a = run(device, sequences, rows, q, many=many)
    assert np.array_equal(a[0], before[0]) and np.isnan(a[1, 64:]).all()
    assert np.isnan(a[1]).all() == (where != "q")


def test_padding_rows_are_left_alone(device: Device) -> None:
    sequences = Sequences([80], 2, 2, 64)
    q = sequences.queries(3)

    class Padding(Row):
        def blocks(self, *, hidden: bool) -> list[int]:
            return []

    for many in (False, True):
        a = run(device, sequences, [Padding(0, -1), Row(0, 79), Padding(0, -1)], q, many=many)
        assert np.array_equal(a[[0, 2]], np.full_like(a[[0, 2]], UNWRITTEN))
        assert np.array_equal(a[1], run(device, sequences, [Row(0, 79)], q[1:2])[0])


def test_refusals(device: Device) -> None:
    sequences = Sequences([80], 2, 2, 64)
    with pytest.raises(KernelArgumentError, match="257 rows, at most 256"):
        run(device, sequences, [Row(0, 79)] * 257, sequences.queries(257))
    coded = Sequences([80], 2, 2, 64, int8=True)
    one = [Row(0, 79)], sequences.queries(1)
    newest, pool = coded.put_newest([(0, 79)])
    with pytest.raises(KernelArgumentError, match="pool is uint8, expected float16"):
        launch(device, coded, *one, newest, pool.view(np.uint8))
    with pytest.raises(KernelArgumentError, match="decode_attention: newest is not given, pool is int8"):
        launch(device, coded, *one, None, pool)
    with pytest.raises(KernelArgumentError, match="decode_attention: newest is given, pool is float16"):
        launch(device, sequences, *one, newest, sequences.pool)
    with pytest.raises(KernelArgumentError, match=r"newest is \(1, 2, 1, 64\), expected .* = \(1, 2, 2, 64\)"):
        launch(device, coded, *one, newest[:, :, :1].copy(), pool)
    coded.kv_heads = 1
    with pytest.raises(KernelArgumentError, match=r"pool is \(7, 16896\), expected .* = \(7, 8448\)"):
        launch(device, coded, *one, newest, pool)
    with pytest.raises(KernelArgumentError, match=r"pool is \(7, 16384\), expected .* = \(7, 8192\)"):
        sequences.kv_heads = 1
        run(device, sequences, [Row(0, 79)], sequences.queries(1))
