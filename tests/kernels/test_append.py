"""append: bits of the engine's oracle, in the right places and in no others, whatever the company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention_cases import LAYER, LAYERS, PAGE
from numpy.typing import NDArray

from tinyloop_service.engine.cache_modes import encode
from tinyloop_service.kernels.append import append_int8
from tinyloop_service.kernels.device import Device
from tinyloop_service.kernels.match import KernelArgumentError
from tinyloop_service.kernels.references import append as reference
from tinyloop_service.kernels.references.page_views import int8_page
from tinyloop_service.types import CacheMode

Array = NDArray[Any]

SLOTS, MAX_BLOCKS = 9, 3


class Case:
    """Rows at all kinds of places; every fourth one is padding, by its slot or by its position."""

    def __init__(self, rows: int, kv_heads: int, head_dim: int) -> None:
        rng = np.random.default_rng(rows)
        self.kv = rng.standard_normal((rows, 2, kv_heads, head_dim)).astype(np.float16)
        self.row_slot = rng.permutation(SLOTS)[:rows].astype(np.int32)
        self.position = rng.integers(0, MAX_BLOCKS * PAGE, rows).astype(np.int32)
        self.position[:2] = (0, MAX_BLOCKS * PAGE - 1)[:rows]
        self.row_slot[3::8], self.position[7::8] = -1, -1
        self.tables = np.full((SLOTS, LAYERS, MAX_BLOCKS), -1, np.int32)
        self.tables[:, LAYER] = rng.permutation(SLOTS * MAX_BLOCKS).reshape(SLOTS, MAX_BLOCKS)
        self.pool = rng.integers(-127, 128, (SLOTS * MAX_BLOCKS, kv_heads * PAGE * (2 * head_dim + 4)), np.int8)

    def run(self, device: Device, rows: slice = slice(None), pool: Array | None = None) -> Array:
        """The pool afterwards."""
        there = device.upload(self.pool if pool is None else pool)
        given = (device.upload(array[rows]) for array in (self.kv, self.position, self.row_slot))
        append_int8(device, *given, device.upload(self.tables), LAYER, there)
        return device.download(there)


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 64), (3, 128), (2, 64)])
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_against_the_reference_and_the_oracle(device: Device, rows: int, kv_heads: int, head_dim: int) -> None:
    case = Case(rows, kv_heads, head_dim)
    pool, expected = case.run(device), case.pool.copy()
    reference.append_int8(case.kv, case.position, case.row_slot, case.tables, LAYER, expected)
    assert np.array_equal(pool, expected), "something else is written, or nothing"
    for row in np.flatnonzero((case.row_slot >= 0) & (case.position >= 0)):
        block, place = divmod(int(case.position[row]), PAGE)
        page = int8_page(pool[case.tables[case.row_slot[row], LAYER, block]], kv_heads)
        for x, levels, scales in (
            (case.kv[row, 0], page.keys[:, place], page.key_scales[:, place]),
            (case.kv[row, 1], page.values[:, :, place], page.value_scales[:, place]),
        ):
            stored = encode(CacheMode.INT8, x)
            assert np.array_equal(levels, stored["levels"]) and np.array_equal(scales, stored["scales"][:, 0])


def test_rows_one_at_a_time_give_the_same_pages(device: Device) -> None:
    case = Case(9, 2, 128)
    pool = case.pool
    for row in range(9):
        pool = case.run(device, slice(row, row + 1), pool)
    assert np.array_equal(pool, case.run(device))


def test_what_is_not_finite_shows(device: Device) -> None:
    """A NaN makes a token's scale NaN; infinity counts as fp16's largest number."""
    case = Case(1, 1, 64)
    case.position[:], case.row_slot[:] = 70, 4
    case.kv[0, 0, 0, 9], case.kv[0, 1, 0, 63] = np.nan, -np.inf
    page = int8_page(case.run(device)[case.tables[4, LAYER, 1]], 1)
    assert np.isnan(page.key_scales[0, 6])
    assert page.value_scales[0, 6] == np.float16(65504 / 127) and page.values[0, 63, 6] == -127


def test_what_is_refused(device: Device) -> None:
    case = Case(3, 1, 64)
    with pytest.raises(KernelArgumentError, match=r"append_int8: pool is \(27, 8448\), expected"):
        case.kv = np.zeros((3, 2, 2, 64), np.float16)
        case.run(device)
    narrow = Case(3, 1, 32)
    with pytest.raises(KernelArgumentError, match="append_int8: head_dim is 32, expected 64 or 128"):
        narrow.run(device)
