"""Decode linears of many rows: the bits of linear.cu, for every number of rows, group and epilogue.

Both are emulated with the same numbers, and on an sm_90 GPU wgmma and mma.sync add up alike: so nothing is compared
within a tolerance here.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from linear_cases import Case, activations, nan_like
from numpy.typing import NDArray
from test_linear import Pages, partials_of

from tinyloop_service.kernels import linear
from tinyloop_service.kernels.cut import PARTS, Product, choose_cut
from tinyloop_service.kernels.device import Device
from tinyloop_service.kernels.linear_wide import WideCut, choose_wide_cut
from tinyloop_service.kernels.match import KernelArgumentError
from tinyloop_service.kernels.norm import Fold, fold_norm
from tinyloop_service.kernels.pack import LinearKind, PackedLinear, Pairing
from tinyloop_service.kernels.references.columns import in_columns, in_rows
from tinyloop_service.kernels.references.norm import sum_tree

Host = NDArray[Any]
SM_90_SHARED_BYTES = 227 * 1024
SIZES_407M: dict[LinearKind, tuple[int, int]] = {
    "qkv": (6144, 2048),
    "o": (2048, 2048),
    "gate_up": (16384, 2048),
    "down": (2048, 8192),
    "head": (50272, 2048),
}


@pytest.fixture(autouse=True)
def wide_device(device: Device) -> None:
    if device.arch != linear.WIDE_ARCH:
        pytest.skip("warpgroup products are sm_90's")


def narrow(device: Device, case: Case, rows: int) -> Any:
    packed = case.packed
    product = Product(packed.kind, packed.num_tiles, packed.num_inputs, packed.group, rows)
    cut = choose_cut(product, num_sms=device.num_sms, limit=device.max_shared_bytes)
    assert cut is not None
    return cut


@pytest.mark.parametrize(
    ("kind", "num_out", "num_in", "group", "rows", "cut"),
    [
        ("o", 80, 1024, 128, 9, WideCut(1, 1, 1, depth=2, grid_outputs=2)),  # a second warpgroup of one tile
        ("o", 48, 576, 64, 17, WideCut(2, 1, 2, depth=4, grid_outputs=1)),  # parts of one unit and of two
        ("o", 64, 256, 128, 50, WideCut(1, 2, 2, depth=3, grid_outputs=1)),  # most parts are empty
        ("o", 80, 512, 0, 64, WideCut(1, 1, 4, depth=2, grid_outputs=1)),  # two rounds; fp16 weights
        ("down", 64, 1280, 32, 30, WideCut(1, 2, 8, depth=2, grid_outputs=1)),  # one partial
    ],
)
def test_partials(
    device: Device, kind: LinearKind, num_out: int, num_in: int, group: int, rows: int, cut: WideCut
) -> None:
    case, y = Case.make(device, kind, (num_out,), num_in, group), activations(rows, num_in)
    wide = partials_of(device, case, y, cut)
    assert len(wide) == PARTS[kind] // (cut.parts * cut.cluster)
    np.testing.assert_array_equal(sum_tree(wide), sum_tree(partials_of(device, case, y, narrow(device, case, rows))))


def test_logits_over_several_rounds_of_a_cluster(device: Device) -> None:
    """Three rounds of two warpgroups, the last one of one tile: what others sent must be read before it is replaced."""
    case, y = Case.make(device, "head", (260,), 512, 128), activations(24, 512)
    wide, expected = (nan_like(device, (24, 272), np.float32) for _ in range(2))
    given = device.upload(y)
    linear.linear_logits(device, case.packed, given, wide, cut=WideCut(2, 1, 2, depth=3, grid_outputs=1))
    linear.linear_logits(device, case.packed, given, expected, cut=narrow(device, case, 24))
    np.testing.assert_array_equal(device.download(wide), device.download(expected))


@pytest.mark.parametrize(("group", "rows"), [(128, 12), (0, 40)])
def test_gate_up(device: Device, group: int, rows: int) -> None:
    case, y = Case.make(device, "gate_up", (72, 72), 256, group), activations(rows, 256)
    wide, expected = (nan_like(device, (rows, 72), np.float16) for _ in range(2))
    given = device.upload(y)
    linear.linear_gate_up(device, case.packed, given, wide, cut=WideCut(3, 1, 2, depth=2, grid_outputs=1))
    linear.linear_gate_up(device, case.packed, given, expected, cut=narrow(device, case, rows))
    np.testing.assert_array_equal(device.download(wide), device.download(expected))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "pairing", "rows"),
    [
        (2, 1, 64, "half", 19),
        (1, 1, 32, "interleaved", 43),
        (3, 0, 64, "half", 12),  # q alone
        (0, 2, 64, "half", 12),  # K and V alone
    ],
)
def test_qkv(device: Device, heads: int, kv_heads: int, head_dim: int, pairing: Pairing, rows: int) -> None:
    num_rows = tuple(n * head_dim for n in (heads, kv_heads, kv_heads) if n)
    case = Case.make(device, "qkv", num_rows, 1024, 128, head_dim=head_dim, pairing=pairing)
    y, pages = device.upload(activations(rows, 1024)), Pages(rows, heads, max(1, kv_heads), head_dim)
    pages.position[3] = pages.row_slot[5] = -1  # either mark makes a padding row
    wide = pages.run(device, case, y, kv_heads, WideCut(2, 2, 4, depth=2, grid_outputs=2))
    for one, other in zip(wide, pages.run(device, case, y, kv_heads, narrow(device, case, rows)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_k_and_v_side_by_side_have_the_bits_of_pages(device: Device) -> None:
    case = Case.make(device, "qkv", (128, 64, 64), 1024, 128, head_dim=64)
    y, pages = device.upload(activations(19, 1024)), Pages(19, 2, 1, 64)
    pages.position[3] = -1
    cut = WideCut(2, 2, 4, depth=2, grid_outputs=2)
    for one, other in zip(
        pages.run_rows(device, case, y, 1, cut), pages.rows_of(*pages.run(device, case, y, 1, cut)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_columns_are_of_whole_tiles_of_rows_and_of_wide_cuts(device: Device) -> None:
    case = Case.make(device, "o", (16,), 128, 128)
    y, sums = device.zeros((12, 128), np.float16), device.zeros((4, 12, 16), np.float32)
    with pytest.raises(KernelArgumentError, match=r"y is \(12, 128\), in columns a multiple of \(8, 64\)"):
        linear.linear_partials(device, case.packed, y, sums, cut=WideCut(1, 1, 2, 2, 1), columns=True)
    gate_up, h = Case.make(device, "gate_up", (64, 64), 128, 128).packed, device.zeros((12, 64), np.float16)
    with pytest.raises(KernelArgumentError, match=r"h is \(12, 64\), in columns a multiple of \(8, 64\)"):
        linear.linear_gate_up(device, gate_up, y, h, cut=WideCut(1, 1, 2, 2, 1), h_columns=True)
    with pytest.raises(KernelArgumentError, match="cannot read columns"):
        linear.linear_partials(device, case.packed, y[:8], sums[:1, :8], cut=narrow(device, case, 8), columns=True)
    with pytest.raises(KernelArgumentError, match="in columns"):
        fold_norm(device, device.zeros((12, 128), np.float32), None, y, eps=1e-5, gain=None, columns=True)


def test_what_is_given_in_columns_has_the_bits_of_rows(device: Device) -> None:
    """From fold_norm to the sums of down, two warpgroups and several rounds."""
    rows, width, inner = 16, 128, 320
    gate_up = Case.make(device, "gate_up", (inner, inner), width, 64).packed
    down = Case.make(device, "down", (width,), inner, 64).packed
    gain = device.upload(np.random.default_rng(5).normal(size=width).astype(np.float16))
    results = []
    for columns in (False, True):
        stream = device.upload(activations(rows, width).astype(np.float32))
        y, h = nan_like(device, (rows, width), np.float16), nan_like(device, (rows, inner), np.float16)
        sums = nan_like(device, (8, rows, width), np.float32)
        fold_norm(device, stream, None, y, eps=1e-5, gain=gain, columns=columns)
        cut = WideCut(2, 1, 2, depth=2, grid_outputs=1)
        linear.linear_gate_up(device, gate_up, y, h, cut=cut, columns=columns, h_columns=columns)
        linear.linear_partials(device, down, h, sums, cut=cut, columns=columns)
        results.append([device.download(array) for array in (y, h, sums)])
    for one, other in zip(results[0][:2], results[1][:2], strict=True):
        np.testing.assert_array_equal(one, in_rows(other))
        np.testing.assert_array_equal(in_columns(one), other)
    np.testing.assert_array_equal(results[0][2], results[1][2])


@pytest.mark.parametrize("rows", [9, 16, 50, 64])
@pytest.mark.parametrize("group", [0, 32, 128])
def test_cuts_of_large_matrices_fit(rows: int, group: int) -> None:
    for kind, (num_out, num_in) in SIZES_407M.items():
        product = Product(kind, num_out // 16, num_in, group, rows)
        cut = choose_wide_cut(product, num_sms=132, limit=SM_90_SHARED_BYTES)
        if cut is None:
            assert group == 0 and rows > 40  # fp16 weights take much of the shared memory
            continue
        assert cut.shared_bytes(product) <= SM_90_SHARED_BYTES
        assert cut.num_partials(kind) == {"o": 4, "down": 8}.get(kind, 1)
        grid = cut.grid(product)
        assert grid[0] * grid[1] <= 132  # one wave


def test_few_rows_small_matrices_and_long_inputs_are_left_to_the_others() -> None:
    sizes: dict[str, Any] = {"num_sms": 132, "limit": SM_90_SHARED_BYTES}
    assert choose_wide_cut(Product("o", 128, 2048, 128, 8), **sizes) is None
    assert choose_wide_cut(Product("o", 8, 128, 128, 64), **sizes) is None
    assert choose_wide_cut(Product("gate_up", 1024, 8192, 128, 64), **sizes) is None


@pytest.mark.parametrize("group", [0, 32, 128])
def test_h_is_in_columns_where_gate_up_can_write_them(device: Device, group: int) -> None:
    """The activations of wide models do not fit the shared memory of a block of gate_up, while down's do."""
    whole_gpu: Any = SimpleNamespace(arch=linear.WIDE_ARCH, num_sms=132, max_shared_bytes=SM_90_SHARED_BYTES)
    answers = set()
    for width, rows in itertools.product(range(512, 8193, 512), (*range(16, 65, 8), 80, 96, 112, 128)):
        sizes: dict[LinearKind, tuple[int, int]] = {"gate_up": (8 * width, width), "down": (width, 4 * width)}
        gate_up, down = (
            cast(PackedLinear, SimpleNamespace(kind=kind, num_tiles=n // 16, num_inputs=k, group=group))
            for kind, (n, k) in sizes.items()
        )
        takes, gives = (linear.takes_columns(whole_gpu, packed, rows) for packed in (down, gate_up))
        assert linear.gives_columns(whole_gpu, gate_up, down, rows) == (takes and gives)
        answers.add((takes, gives))
    assert (True, False) in answers and (True, True) in answers


def test_a_wide_cut_folds_nothing(device: Device) -> None:
    case = Case.make(device, "gate_up", (16, 16), 128, 128)
    x = device.zeros((2, 128), np.float32)
    fold = Fold(x=x, x_out=device.zeros((2, 128), np.float32), partials=None, eps=1e-5, gain=None)
    with pytest.raises(KernelArgumentError, match="cannot fold its input"):
        linear.linear_gate_up(
            device, case.packed, fold, device.zeros((2, 16), np.float16), cut=WideCut(1, 1, 2, depth=2, grid_outputs=1)
        )
