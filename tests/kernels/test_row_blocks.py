"""Batches that several thread blocks share: every row has the bits that it has in a small batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from linear_cases import Case, activations, nan_like
from numpy.typing import NDArray
from test_linear import Pages, partials_of
from test_linear_wide import SIZES_407M

from tinyloop_service.kernels import linear
from tinyloop_service.kernels.columns import fit_columns
from tinyloop_service.kernels.cut import MOST_ROWS, Product, block_rows, num_row_blocks
from tinyloop_service.kernels.device import Array, Device
from tinyloop_service.kernels.linear_wide import WideCut, choose_wide_cut
from tinyloop_service.kernels.match import KernelArgumentError
from tinyloop_service.kernels.norm import fold_norm
from tinyloop_service.kernels.references.columns import in_columns
from tinyloop_service.kernels.references.norm import sum_tree

Host = NDArray[Any]
FEW = 8  # rows of a small batch
CUTS = [None, WideCut(1, 1, 2, depth=2, grid_outputs=1)]  # of linear.cu, of linear_wide.cu


def allowed(device: Device, cut: WideCut | None) -> WideCut | None:
    if cut is not None and device.arch != linear.WIDE_ARCH:
        pytest.skip("warpgroup products are sm_90's")
    return cut


def parts_of(rows: int) -> list[slice]:
    return [slice(at, min(at + FEW, rows)) for at in range(0, rows, FEW)]


def by_few(run: Callable[[slice], Host], rows: int) -> Host:
    return np.concatenate([run(part) for part in parts_of(rows)])


def test_rows_are_shared_out_by_whole_tiles() -> None:
    for rows in range(1, MOST_ROWS + 1):
        blocks, most = num_row_blocks(rows), block_rows(rows)
        assert most <= 64 and blocks == -(-rows // 64)
        assert (blocks - 1) * most < rows <= blocks * most
        assert blocks == 1 or most % 8 == 0
        assert fit_columns(rows) == (rows == blocks * most and most % 8 == 0)


@pytest.mark.parametrize(("rows", "cut"), [(65, None), (72, CUTS[1]), (128, CUTS[1]), (200, None)])
def test_partials(device: Device, rows: int, cut: WideCut | None) -> None:
    case, y = Case.make(device, "o", (48,), 256, 128), activations(rows, 256)
    together = sum_tree(partials_of(device, case, y, allowed(device, cut)))
    np.testing.assert_array_equal(together, by_few(lambda few: sum_tree(partials_of(device, case, y[few])), rows))


@pytest.mark.parametrize(("rows", "cut"), [(72, None), (100, CUTS[1])])
def test_gate_up(device: Device, rows: int, cut: WideCut | None) -> None:
    case, y = Case.make(device, "gate_up", (40, 40), 256, 128), activations(rows, 256)

    def run(part: Host, cut: WideCut | None = None) -> Host:
        h = nan_like(device, (len(part), 40), np.float16)
        linear.linear_gate_up(device, case.packed, device.upload(part), h, cut=cut)
        return device.download(h)

    np.testing.assert_array_equal(run(y, allowed(device, cut)), by_few(lambda few: run(y[few]), rows))


@pytest.mark.parametrize(("rows", "cut"), [(72, None), (100, CUTS[1])])
def test_logits(device: Device, rows: int, cut: WideCut | None) -> None:
    case, y = Case.make(device, "head", (50,), 256, 128), activations(rows, 256)

    def run(part: Host, cut: WideCut | None = None) -> Host:
        logits = nan_like(device, (len(part), 64), np.float32)
        linear.linear_logits(device, case.packed, device.upload(part), logits, cut=cut)
        return device.download(logits)

    np.testing.assert_array_equal(run(y, allowed(device, cut)), by_few(lambda few: run(y[few]), rows))


@pytest.mark.parametrize(("rows", "cut"), [(72, None), (100, WideCut(2, 2, 4, depth=2, grid_outputs=2))])
@pytest.mark.parametrize("in_pages", [True, False])
def test_qkv(device: Device, rows: int, cut: WideCut | None, in_pages: bool) -> None:
    case = Case.make(device, "qkv", (64, 64, 64), 1024, 128, head_dim=64)
    y, pages, chosen = activations(rows, 1024), Pages(rows, 1, 1, 64), allowed(device, cut)
    pages.position[3] = pages.position[70] = -1
    together = (pages.run if in_pages else pages.run_rows)(device, case, device.upload(y), 1, chosen)
    q, kv = pages.rows_of(*together) if in_pages else together

    def few(part: slice) -> Pages:
        alone = Pages(rows, 1, 1, 64)
        alone.position, alone.row_slot, alone.q = pages.position[part], pages.row_slot[part], pages.q[part]
        return alone

    apart = [few(part).run_rows(device, case, device.upload(y[part]), 1) for part in parts_of(rows)]
    np.testing.assert_array_equal(q, np.concatenate([each[0] for each in apart]))
    np.testing.assert_array_equal(kv, np.concatenate([each[1] for each in apart]))


def test_columns_are_of_each_block_of_rows(device: Device) -> None:
    """From fold_norm to the sums of down: 80 rows are twice 40 of them."""
    rows, width, inner = 80, 128, 64
    gate_up = Case.make(device, "gate_up", (inner, inner), width, 64).packed
    down = Case.make(device, "down", (width,), inner, 64).packed
    cut = allowed(device, WideCut(1, 1, 2, depth=2, grid_outputs=2))
    results: list[list[Host]] = []
    for columns in (False, True):
        stream = device.upload(activations(rows, width).astype(np.float32))
        y, h = nan_like(device, (rows, width), np.float16), nan_like(device, (rows, inner), np.float16)
        sums = nan_like(device, (8, rows, width), np.float32)
        fold_norm(device, stream, None, y, eps=1e-5, gain=None, columns=columns)
        linear.linear_gate_up(device, gate_up, y, h, cut=cut, columns=columns, h_columns=columns)
        linear.linear_partials(device, down, h, sums, cut=cut, columns=columns)
        results.append([device.download(array) for array in (y, h, sums)])
    for one, other in zip(results[0][:2], results[1][:2], strict=True):
        np.testing.assert_array_equal(np.concatenate([in_columns(one[:40]), in_columns(one[40:])]), other)
    np.testing.assert_array_equal(results[0][2], results[1][2])


def test_what_is_refused(device: Device) -> None:
    case, rows = Case.make(device, "o", (16,), 128, 128), MOST_ROWS + 1
    given: list[Array] = [device.zeros((rows, 128), np.float16), device.zeros((1, rows, 16), np.float32)]
    with pytest.raises(KernelArgumentError, match="257 rows, expected 1 to 256"):
        linear.linear_partials(device, case.packed, *given)
    with pytest.raises(KernelArgumentError, match=r"y is \(72, 128\), in columns a multiple of \(16, 64\)"):
        linear.linear_partials(device, case.packed, given[0][:72], given[1][:, :72], columns=True)


@pytest.mark.parametrize("rows", [72, 100, 128, 256])
def test_cuts_of_large_matrices_for_many_rows(rows: int) -> None:
    """They have the shape of 64 rows' and go round the device in few waves."""
    for kind in ("qkv", "down", "gate_up"):
        num_out, num_in = SIZES_407M[kind]
        product = Product(kind, num_out // 16, num_in, 128, block_rows(rows), num_row_blocks(rows))
        cut = choose_wide_cut(product, num_sms=132, limit=227 * 1024)
        assert cut is not None
        x, y, z = cut.grid(product)
        assert z == num_row_blocks(rows) and x * y * z <= 132 * z
        rounds = -(-num_out // (64 * cut.warpgroups * x))
        assert x * y * z * rounds * cut.warpgroups * 64 <= 1.1 * z * num_out * y + 132 * 64 * y
