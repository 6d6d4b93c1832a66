"""Decode linears: against the reference at awkward sizes, and the promise that a row's bits depend on it alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from emulation.device import EmulatedDevice
from linear_cases import Case, activations, nan_like, random_linear
from numpy.typing import NDArray

from tinyloop_service.kernels import linear
from tinyloop_service.kernels.cut import PARTS, Cut, Product, choose_cut
from tinyloop_service.kernels.device import Array, Device
from tinyloop_service.kernels.match import KernelArgumentError
from tinyloop_service.kernels.norm import Fold, InjectMode, fold_norm
from tinyloop_service.kernels.pack import LinearKind, Pairing, pack_linear
from tinyloop_service.kernels.references import linear as reference
from tinyloop_service.kernels.references.norm import sum_tree
from tinyloop_service.kernels.references.page_views import page_views

Host = NDArray[Any]
HALF_ULP = 2.0**-11  # of fp16, relative


def partials_of(device: Device, case: Case, y: Host, cut: linear.AnyCut | None = None) -> Host:
    chosen = cut or linear.cut_of(device, case.packed, len(y))
    shape = chosen.num_partials(case.packed.kind), len(y), case.packed.num_padded
    partials = nan_like(device, shape, np.float32)
    linear.linear_partials(device, case.packed, device.upload(y), partials, cut=cut)
    return device.download(partials)


@pytest.mark.parametrize(
    ("kind", "num_out", "num_in", "group", "rows"),
    [
        ("o", 128, 256, 128, 1),  # fewer units of K than parts: most parts are empty
        ("o", 48, 576, 64, 13),  # nine units over eight parts
        ("o", 80, 64, 32, 3),
        ("down", 64, 1536, 32, 9),
        ("o", 64, 1024, 128, 50),
    ],
)
def test_partials_add_up_to_the_product(
    device: Device, kind: LinearKind, num_out: int, num_in: int, group: int, rows: int
) -> None:
    case, y = Case.make(device, kind, (num_out,), num_in, group), activations(rows, num_in)
    total = sum_tree(partials_of(device, case, y))[:, :num_out]
    assert (np.abs(total - reference.product(case.dense, y)) <= case.slack(y)).all()


def test_rows_of_padding_in_the_last_tile_are_zeros(device: Device) -> None:
    case = Case.make(device, "head", (50,), 128, 64)
    logits = nan_like(device, (3, 64), np.float32)
    y = activations(3, 128)
    linear.linear_logits(device, case.packed, device.upload(y), logits)
    expected = np.empty((3, 64), np.float32)
    reference.linear_logits(case.dense, y, expected)
    result = device.download(logits)
    assert (result[:, 50:] == 0).all()
    assert (np.abs(result - expected)[:, :50] <= case.slack(y)).all()


@pytest.mark.parametrize(("num_ff", "num_in", "group", "rows"), [(40, 256, 128, 8), (136, 128, 0, 13)])
def test_gate_up(device: Device, num_ff: int, num_in: int, group: int, rows: int) -> None:
    case, y = Case.make(device, "gate_up", (num_ff, num_ff), num_in, group), activations(rows, num_in)
    h = nan_like(device, (rows, num_ff), np.float16)
    linear.linear_gate_up(device, case.packed, device.upload(y), h)
    expected = np.empty((rows, num_ff), np.float16)
    reference.linear_gate_up(case.dense, y, expected)
    # silu's slope is below 1.1 and |silu| below |gate|; the product rounds once to fp16, on either side of a tie.
    gate_slack, up_slack = np.split(case.slack(y), 2, axis=1)
    gate, up = np.split(np.abs(reference.product(case.dense, y)), 2, axis=1)
    slack = 1.1 * gate_slack * up + gate * up_slack + 2.1 * HALF_ULP * np.abs(expected.astype(np.float32)) + 1e-7
    assert (np.abs(device.download(h).astype(np.float32) - expected) <= slack).all()


class Pages:
    """Inputs of linear_qkv: two slots, two layers, three blocks each; every page starts as NaN."""

    def __init__(self, rows: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        rng = np.random.default_rng(3)
        self.tables = rng.permutation(12).astype(np.int32).reshape(2, 2, 3)
        self.pool = np.full((12, 2 * num_kv_heads * 64 * head_dim), np.nan, np.float16)
        self.position = (np.arange(rows) * 37 % 190).astype(np.int32)  # distinct for up to 190 rows
        self.row_slot = (np.arange(rows) % 2).astype(np.int32)
        angle = np.arange(192)[:, None] * 10000.0 ** (-2.0 * np.arange(head_dim // 2) / head_dim)
        self.cos, self.sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        self.q = np.full((rows, num_heads * head_dim), np.nan, np.float16)

    def run(
        self, device: Device, case: Case, y: Array | Fold, num_kv_heads: int, cut: linear.AnyCut | None = None
    ) -> tuple[Host, Host]:
        """q and the pool, as the kernel leaves them; of K and V alone there is no q."""
        upload = device.upload
        pool, q = upload(self.pool), upload(self.q) if self.q.size else None
        paging = upload(self.position), upload(self.row_slot), upload(self.tables), 1, pool
        angles = upload(self.cos), upload(self.sin)
        linear.linear_qkv(device, case.packed, y, *paging, *angles, q, num_kv_heads=num_kv_heads, cut=cut)
        return self.q if q is None else device.download(q), device.download(pool)

    def run_rows(
        self, device: Device, case: Case, y: Array | Fold, num_kv_heads: int, cut: linear.AnyCut | None = None
    ) -> tuple[Host, Host]:
        """q and kv, as linear_qkv_rows leaves them."""
        kv = nan_like(device, (len(self.position), 2, num_kv_heads, 2 * self.cos.shape[1]), np.float16)
        q, *given = map(device.upload, (self.q, self.position, self.cos, self.sin))
        linear.linear_qkv_rows(device, case.packed, y, given[0], kv, *given[1:], q, cut=cut)
        return device.download(q), device.download(kv)

    def rows_of(self, q: Host, pool: Host) -> tuple[Host, Host]:
        """Of q and a pool as `run` gives them: q, and what linear_qkv_rows makes of the pool's part."""
        head_dim = 2 * self.cos.shape[1]
        kv = np.full((len(q), 2, pool.shape[1] // (2 * 64 * head_dim), head_dim), np.nan, np.float16)
        for row in np.flatnonzero(self.position >= 0):
            block, place = divmod(int(self.position[row]), 64)
            page = page_views(pool[self.tables[self.row_slot[row], 1, block]], kv.shape[2])
            kv[row] = page.keys[:, place], page.values[:, :, place]
        return q, kv


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "pairing", "group", "rows"),
    [(4, 2, 64, "half", 128, 1), (1, 1, 128, "interleaved", 32, 9), (2, 1, 64, "half", 0, 7)],
)
def test_qkv(device: Device, heads: int, kv_heads: int, head_dim: int, pairing: Pairing, group: int, rows: int) -> None:
    num_rows = heads * head_dim, kv_heads * head_dim, kv_heads * head_dim
    case = Case.make(device, "qkv", num_rows, 256, group, head_dim=head_dim, pairing=pairing)
    y, pages = activations(rows, 256), Pages(rows, heads, kv_heads, head_dim)
    if rows > 8:
        pages.position[3] = pages.row_slot[5] = -1  # either mark makes a padding row
    q, pool = pages.run(device, case, device.upload(y), kv_heads)
    expected_q, expected_pool = pages.q.copy(), pages.pool.copy()
    reference.linear_qkv(
        *(case.dense, y, pages.position, pages.row_slot, pages.tables, 1, expected_pool, pages.cos, pages.sin),
        *(expected_q,),
        num_kv_heads=kv_heads,
        pairing=pairing,
    )
    # A turn adds two sums, each off by its slack and shorter than itself; then one rounding, on either side of a tie.
    slack = 2 * case.slack(y).max()
    for name, result, expected in (("q", q, expected_q), ("pool", pool, expected_pool)):
        written = ~np.isnan(expected)
        np.testing.assert_array_equal(~np.isnan(result), written, f"{name}: written elsewhere")
        error = np.abs(result[written].astype(np.float32) - expected[written])
        assert (error <= slack + 2.1 * HALF_ULP * np.abs(expected[written].astype(np.float32))).all(), name


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "pairing", "group", "rows"),
    [(3, 2, 64, "half", 128, 1), (1, 1, 128, "interleaved", 32, 19), (2, 1, 64, "half", 0, 7)],
)
def test_k_and_v_side_by_side_have_the_bits_of_pages(
    device: Device, heads: int, kv_heads: int, head_dim: int, pairing: Pairing, group: int, rows: int
) -> None:
    num_rows = heads * head_dim, kv_heads * head_dim, kv_heads * head_dim
    case = Case.make(device, "qkv", num_rows, 256, group, head_dim=head_dim, pairing=pairing)
    y, pages = activations(rows, 256), Pages(rows, heads, kv_heads, head_dim)
    pages.position[3:4] = -1
    given = device.upload(y)
    for one, other in zip(
        pages.run_rows(device, case, given, kv_heads),
        pages.rows_of(*pages.run(device, case, given, kv_heads)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
    q, kv = pages.q.copy(), np.full((rows, 2, kv_heads, head_dim), np.nan, np.float16)
    reference.linear_qkv_rows(case.dense, y, pages.position, kv, pages.cos, pages.sin, q, pairing=pairing)
    slack = 2 * case.slack(y).max()  # as of pages
    for result, expected in zip(pages.run_rows(device, case, given, kv_heads), (q, kv), strict=True):
        np.testing.assert_allclose(result, expected, rtol=2.1 * HALF_ULP, atol=slack)


@pytest.mark.parametrize(("group", "rows", "pairing"), [(128, 3, "half"), (32, 19, "interleaved"), (0, 9, "half")])
def test_q_and_k_v_apart_have_the_bits_of_one_linear(device: Device, group: int, rows: int, pairing: Pairing) -> None:
    heads, kv_heads, num_rows = 3, 2, (3 * 64, 2 * 64, 2 * 64)
    linears = [random_linear(n, 256, group, seed) for seed, n in enumerate(num_rows)]
    whole, q_alone, kv_alone = (
        pack_linear(device, part, kind="qkv", head_dim=64, pairing=pairing)
        for part in (linears, linears[:1], linears[1:])
    )
    pages, y = Pages(rows, heads, kv_heads, 64), device.upload(activations(rows, 256))
    pages.position[1] = pages.row_slot[2] = -1
    paged = *map(device.upload, (pages.position, pages.row_slot, pages.tables)), 1
    angles = device.upload(pages.cos), device.upload(pages.sin)
    pools = [device.upload(pages.pool) for _ in range(3)]
    together, apart = device.upload(pages.q), device.upload(pages.q)
    linear_qkv = partial(linear.linear_qkv, device)
    linear_qkv(whole, y, *paged, pools[0], *angles, together, num_kv_heads=kv_heads)
    linear_qkv(q_alone, y, *paged, pools[1], *angles, apart, num_kv_heads=0)
    linear_qkv(kv_alone, y, *paged, pools[2], *angles, None, num_kv_heads=kv_heads)
    np.testing.assert_array_equal(device.download(apart), device.download(together))
    np.testing.assert_array_equal(device.download(pools[1]), pages.pool, "q alone wrote to a page")
    np.testing.assert_array_equal(device.download(pools[2]), device.download(pools[0]))


CUTS: dict[LinearKind, list[tuple[Cut, int]]] = {  # and the rows that it takes of the batch below
    "o": [
        (Cut(1, 1, 1, 1, depth=3, resident=True), 1),
        (Cut(1, 1, 1, 1, depth=2, resident=False), 9),
        (Cut(2, 4, 1, 1, depth=4, resident=False), 50),
        (Cut(2, 8, 1, 1, depth=3, resident=True), 8),
    ],
    "down": [
        (Cut(1, 1, 2, 1, depth=3, resident=True), 3),
        (Cut(2, 4, 1, 1, depth=3, resident=False), 40),
        (Cut(3, 2, 2, 1, depth=2, resident=False), 17),
    ],
}


@pytest.mark.parametrize(("kind", "group"), [("o", 64), ("down", 128), ("down", 0)])
def test_a_rows_bits_do_not_depend_on_company_or_cut(device: Device, kind: LinearKind, group: int) -> None:
    """Different counts of row tiles, blocks of different shapes, rings that wrap: the same bits, row by row."""
    num_in = 1280  # ten units of 128: parts of one unit and of none; twenty of 64: uneven parts
    case, y = Case.make(device, kind, (80,), num_in, group), activations(64, num_in)
    alone = sum_tree(partials_of(device, case, y[:1]))
    whole = sum_tree(partials_of(device, case, y))
    assert (np.abs(whole[:, :80] - reference.product(case.dense, y)) <= case.slack(y)).all()
    np.testing.assert_array_equal(whole[:1], alone, "row 0 among 64 differs from row 0 alone")
    for cut, rows in CUTS[kind]:
        start = 64 - rows  # other neighbours, other places in a tile
        result = sum_tree(partials_of(device, case, y[start:], cut))
        np.testing.assert_array_equal(result, whole[start:], f"{cut} changes bits")


HELD: dict[LinearKind, list[tuple[int, int, int]]] = {  # tiles, warps_m, warp_parts
    "o": [(1, 1, 1), (2, 2, 1)],
    "down": [(1, 1, 2), (2, 4, 1)],
}


@pytest.mark.parametrize(
    ("kind", "group", "num_in"), [("o", 128, 1024), ("o", 32, 512), ("down", 64, 2048), ("down", 128, 4096)]
)
def test_weights_held_at_once_give_the_bits_of_rings(device: Device, kind: LinearKind, group: int, num_in: int) -> None:
    case, y = Case.make(device, kind, (80,), num_in, group), activations(8, num_in)
    rings = sum_tree(partials_of(device, case, y, Cut(1, 4, 1, 1, depth=2, resident=False)))
    for tiles, warps_m, warp_parts in HELD[kind]:
        cut = Cut(tiles, warps_m, warp_parts, 1, depth=2, resident=True, held=True)
        for rows in (8, 3):
            held = sum_tree(partials_of(device, case, y[:rows], cut))
            np.testing.assert_array_equal(held, rings[:rows], f"{cut}, {rows} rows")


def test_pages_do_not_depend_on_company(device: Device) -> None:
    case = Case.make(device, "qkv", (128, 64, 64), 256, 128, head_dim=64)
    y, pages = activations(19, 256), Pages(19, 2, 1, 64)
    q, pool = pages.run(device, case, device.upload(y), 1, Cut(3, 1, 1, 2, depth=2, resident=False))
    single = Pages(1, 2, 1, 64)
    single.position, single.row_slot = pages.position[18:], pages.row_slot[18:]
    q_alone, pool_alone = single.run(device, case, device.upload(y[18:]), 1)
    np.testing.assert_array_equal(q_alone[0], q[18])
    written = ~np.isnan(pool_alone)
    np.testing.assert_array_equal(pool_alone[written], pool[written])


@pytest.mark.parametrize(
    ("rows", "num_partials", "inject", "gains"),
    [(1, 1, "none", ("gain",)), (3, 4, "store", ("gain", "post_gain")), (3, 0, "add", ("loop_gain",))],
)
def test_a_linear_that_folds_its_input_equals_fold_norm_before_it(
    device: Device, rows: int, num_partials: int, inject: InjectMode, gains: tuple[str, ...]
) -> None:
    width, rng = 1152, np.random.default_rng(rows)  # more columns than one chunk; nine units in two parts
    case = Case.make(device, "gate_up", (24, 24), width, 128)
    x, injected = (rng.normal(size=(rows, width)).astype(np.float32) for _ in range(2))
    added = rng.normal(size=(num_partials, rows, width)).astype(np.float32) if num_partials else None
    common: dict[str, Any] = {name: device.upload(rng.uniform(0.5, 2, width).astype(np.float16)) for name in gains}
    common |= {"eps": 1e-5, "inject": inject, "gain": common.get("gain")}

    def run(fused: bool) -> list[Host]:
        stream, y = device.upload(x), nan_like(device, (rows, width), np.float16)
        partials = None if added is None else device.upload(added)
        kept = None if inject == "none" else device.upload(injected)
        h, out = nan_like(device, (rows, 24), np.float16), nan_like(device, (rows, width), np.float32)
        if fused:
            fold = Fold(x=stream, x_out=out, partials=partials, injected=kept, **common)
            linear.linear_gate_up(device, case.packed, fold, h)
        else:
            fold_norm(device, stream, partials, y, injected=kept, **common)
            linear.linear_gate_up(device, case.packed, y, h)
        written = [h, out if fused else stream, *([] if kept is None else [kept])]
        return [device.download(a) for a in written]

    for name, apart, fused in zip(("h", "x", "injected"), run(fused=False), run(fused=True), strict=False):
        np.testing.assert_array_equal(fused, apart, name)


def test_pages_and_logits_of_a_folded_input(device: Device) -> None:
    width, rng = 256, np.random.default_rng(0)
    x, gain = rng.normal(size=(2, width)).astype(np.float32), device.upload(np.ones(width, np.float16))
    stream, y = device.upload(x), nan_like(device, (2, width), np.float16)
    fold_norm(device, stream, None, y, eps=1e-5, gain=gain)
    fold = Fold(x=stream, x_out=nan_like(device, x.shape, np.float32), partials=None, eps=1e-5, gain=gain)

    head = Case.make(device, "head", (50,), width, 128)
    apart, fused = (nan_like(device, (2, 64), np.float32) for _ in range(2))
    linear.linear_logits(device, head.packed, y, apart)
    linear.linear_logits(device, head.packed, fold, fused)
    np.testing.assert_array_equal(device.download(fused), device.download(apart))

    qkv, pages = Case.make(device, "qkv", (128, 64, 64), width, 128, head_dim=64), Pages(2, 2, 1, 64)
    for run in (pages.run, pages.run_rows):
        for one, other in zip(run(device, qkv, y, 1), run(device, qkv, fold, 1), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("heads", [2, 0])
def test_pages_do_not_depend_on_shared_memory(device: Device, heads: int) -> None:
    case = Case.make(device, "qkv", (128, 64, 64)[0 if heads else 1 :], 512, 128, head_dim=64)
    y, pages = device.upload(activations(19, 512)), Pages(19, heads, 1, 64)
    whole = pages.run(device, case, y, 1)
    small = EmulatedDevice(max_shared_bytes=48 * 1024)
    if device.name == "emulated":
        assert linear.cut_of(small, case.packed, 8)
        with pytest.raises(KernelArgumentError, match="19 rows need more shared memory than 49152 bytes"):
            linear.cut_of(small, case.packed, 19)
        for one, other in zip(whole, pages.run(small, case, y, 1), strict=True):
            np.testing.assert_array_equal(one, other)
        if heads:
            for one, other in zip(pages.run_rows(small, case, y, 1), pages.rows_of(*whole), strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("limit", [99 * 1024, 163 * 1024, 227 * 1024])  # sm_86 and sm_89; sm_80; sm_90 and sm_100
@pytest.mark.parametrize("group", [0, 32, 128])
def test_every_size_has_a_cut_that_fits(limit: int, group: int) -> None:
    for width, ff in ((128, 128), (384, 1536), (768, 3072), (2048, 8192), (4096, 14336)):
        sizes: dict[LinearKind, tuple[int, int]] = {
            "qkv": (3 * width, width),
            "o": (width, width),
            "gate_up": (2 * ff, width),
            "down": (width, ff),
            "head": (50272, width),
        }
        for rows in (1, 4, 8, 9, 16, 32, 50, 64):
            for kind, (num_out, num_in) in sizes.items():
                product = Product(kind, num_out // 16, num_in, group, rows)
                cut = choose_cut(product, num_sms=132, limit=limit)
                if cut is None:
                    assert kind == "qkv" and rows > 16  # goes in two halves
                    continue
                assert cut.shared_bytes(product) <= limit
                assert PARTS[kind] % cut.num_partials(kind) == 0


def test_refusals(device: Device) -> None:
    case = Case.make(device, "o", (64,), 128, 64)
    y = device.upload(activations(3, 128))
    with pytest.raises(KernelArgumentError, match="number of partials: 3, expected 1"):
        linear.linear_partials(device, case.packed, y, device.zeros((3, 3, 64), np.float32))
    with pytest.raises(KernelArgumentError, match="packed is 'o', expected 'head'"):
        linear.linear_logits(device, case.packed, y, device.zeros((3, 64), np.float32))
    with pytest.raises(KernelArgumentError, match="257 rows, expected 1 to 256"):
        linear.cut_of(device, case.packed, 257)
    short = device.upload(activations(3, 64))
    with pytest.raises(KernelArgumentError, match="columns of y: 64, expected 128"):
        linear.linear_partials(device, case.packed, short, device.zeros((1, 3, 64), np.float32))
