"""Pages are copied and filled bit for bit, and nothing beside them is touched."""

from __future__ import annotations

import numpy as np
import pytest

from tinyloop_service.kernels import pages
from tinyloop_service.kernels.device import Device
from tinyloop_service.kernels.match import KernelArgumentError
from tinyloop_service.kernels.references import pages as reference
from tinyloop_service.kernels.references.page_views import int8_page

NUM_PAGES = 7


def random_pool(heads: int, head_dim: int, dtype: str = "float16") -> np.ndarray:
    rng = np.random.default_rng(heads)
    if dtype == "int8":
        return rng.integers(-127, 128, (NUM_PAGES, heads * 64 * (2 * head_dim + 4)), np.int8)
    return rng.standard_normal((NUM_PAGES, 2 * heads * 64 * head_dim)).astype(np.float16)


def bits(pool: np.ndarray) -> np.ndarray:
    return pool.view(np.uint8)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 64), (3, 128)])
@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 31, 40, 63, 64])
def test_clone(device: Device, heads: int, head_dim: int, num_tokens: int, dtype: str) -> None:
    pool = random_pool(heads, head_dim, dtype)
    triples = np.array([[0, 3, num_tokens], [0, 4, num_tokens], [6, 1, 64 - num_tokens]], np.int32)
    pool[[3, 4, 1]] = 0  # as pages are when they are taken
    there = device.upload(pool)
    pages.clone(device, there, device.upload(triples), head_dim=head_dim)
    reference.clone(pool, triples, head_dim=head_dim)
    assert np.array_equal(bits(device.download(there)), bits(pool))


def test_more_clones_than_a_grid_is_long(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_MOST_TRIPLES", 2)
    pool, triples = random_pool(1, 64), np.array([[0, target, 9] for target in (1, 2, 3, 4, 5)], np.int32)
    pool[1:6] = 0
    there = device.upload(pool)
    pages.clone(device, there, device.upload(triples), head_dim=64)
    reference.clone(pool, triples, head_dim=64)
    assert np.array_equal(bits(device.download(there)), bits(pool))


@pytest.mark.parametrize("dtype", ["float16", "int8"])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("operation", ["zero", "poison"])
def test_fill(device: Device, operation: str, heads: int, dtype: str) -> None:
    pool, taken = random_pool(heads, 64, dtype), np.array([5, 0, 2], np.int32)
    there = device.upload(pool)
    getattr(pages, operation)(device, there, device.upload(taken))
    getattr(reference, operation)(pool, taken)
    assert np.array_equal(device.download(there), pool, equal_nan=True)


def test_poisoned_int8_pages_have_no_scale_and_no_zero(device: Device) -> None:
    there = device.zeros((1, 64 * (2 * 64 + 4)), np.int8)
    pages.poison(device, there, device.zeros(1, np.int32))
    page = int8_page(device.download(there)[0], 1)
    assert np.isnan(page.key_scales).all() and np.isnan(page.value_scales).all()
    assert page.keys.all() and page.values.all()


def test_no_pages_are_no_launch(device: Device) -> None:
    there = device.upload(random_pool(1, 64))
    pages.zero(device, there, device.empty(0, np.int32))
    pages.clone(device, there, device.empty((0, 3), np.int32), head_dim=64)
    device.synchronize()


def test_what_is_refused(device: Device) -> None:
    pool, triples = device.zeros((2, 2 * 64 * 64), np.float16), device.zeros((1, 3), np.int32)
    with pytest.raises(KernelArgumentError, match="clone: a page is 8192 halves, expected 2·G·64·128"):
        pages.clone(device, pool, triples, head_dim=128)
    with pytest.raises(KernelArgumentError, match="clone: triples is"):
        pages.clone(device, pool, triples.reshape(3, 1), head_dim=64)
    with pytest.raises(KernelArgumentError, match=r"clone: a page is 8192 bytes, expected 64·G·\(2·64 \+ 4\)"):
        pages.clone(device, device.zeros((2, 8192), np.int8), triples, head_dim=64)
    with pytest.raises(KernelArgumentError, match="zero: a page is 8200 bytes, expected a multiple of 16 bytes"):
        pages.zero(device, device.zeros((2, 8200), np.int8), triples[0])
