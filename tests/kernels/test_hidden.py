"""Stored inputs of blocks: codes are the engine's oracle's bit for bit, and y has one set of bits whoever makes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tinyloop_service.engine import cache_modes
from tinyloop_service.engine.spec import SIZES
from tinyloop_service.kernels import hidden
from tinyloop_service.kernels.device import Device
from tinyloop_service.kernels.match import KernelArgumentError
from tinyloop_service.kernels.references.columns import in_columns
from tinyloop_service.kernels.references.norm import normalised
from tinyloop_service.types import CacheMode

Host = NDArray[Any]

EPS = 1e-5
PAGE = 64
MODES = (CacheMode.H_FP16, CacheMode.H_INT8, CacheMode.H_INT4)
# A chunk of 2048 channels is whole, partly idle, or followed by another; only h-fp16 has groups that are not whole.
WIDTHS = (64, 1088, 2048, 2112)
CASES = [(mode, width) for mode in MODES for width in WIDTHS] + [(CacheMode.H_FP16, 40), (CacheMode.H_FP16, 2088)]
LAYERS, LAYER, BLOCKS = 2, 1, 3


def page_bytes(mode: CacheMode, width: int) -> int:
    return cache_modes.page_bytes(mode, replace(SIZES["tiny"], d_model=width))


def fields(mode: CacheMode, width: int, page: Host) -> dict[str, Host]:
    """Views of a stored page's bytes, each [64, …], as engine/cpu/memory.py lays them."""
    views, start = {}, 0
    for field in cache_modes.fields_of(mode, replace(SIZES["tiny"], d_model=width)):
        end = start + PAGE * field.num_bytes
        views[field.name] = page[start:end].view(field.dtype).reshape(PAGE, *field.shape)
        start = end
    return views


class Pool:
    """Slabs on the host, of 0xFF: halves that are NaN."""

    def __init__(self, mode: CacheMode, width: int, *, slabs: int = 3, per_slab: int = 3) -> None:
        self.mode, self.width, self.per_slab = mode, width, per_slab
        self.page_bytes = page_bytes(mode, width)
        self.bytes = np.full((slabs, per_slab * self.page_bytes + 48), 0xFF, np.uint8)  # a slab has a rest

    @property
    def halves(self) -> Host:
        return self.bytes.view(np.float16)

    def page(self, place: int) -> dict[str, Host]:
        slab, nth = divmod(place, self.per_slab)
        start = nth * self.page_bytes
        return fields(self.mode, self.width, self.bytes[slab, start : start + self.page_bytes])

    def write(self, place: int, token: int, x: Host) -> None:
        for name, value in cache_modes.encode(self.mode, x).items():
            self.page(place)[name][token] = value

    def fill(self, place: int, x: Host) -> None:
        for token, row in enumerate(x):
            self.write(place, token, row)


def places() -> Host:
    """Of two slots; the first one's second block and all of other layers are not stored."""
    table = np.full((2, LAYERS, BLOCKS), -1, np.int32)
    table[0, LAYER], table[1, LAYER] = [7, -1, 2], [4, 0, 5]
    return table


def residual(rows: int, width: int) -> Host:
    """Rows as they come: of about 1 with outliers, of a large mean, beyond fp16, constant, tiny, zero."""
    rng = np.random.default_rng(width)
    x = rng.normal(size=(rows, width)).astype(np.float32)
    x[:, ::31] *= 50
    for first, change in enumerate(
        (lambda r: r + 300, lambda r: r * 40000, lambda r: r * 0 + 1000.1, lambda r: r * 1e-6)
    ):
        x[first + 1 :: 7] = change(x[first + 1 :: 7])
    x[5::7] = 0
    return x


def gain_of(width: int) -> Host:
    return np.random.default_rng(width + 1).uniform(0.5, 2, width).astype(np.float16)


def expected_y(mode: CacheMode, x: Host, gain: Host) -> Host:
    return normalised(cache_modes.decode(mode, cache_modes.encode(mode, x)), gain, EPS).astype(np.float16)


def nan_y(device: Device, rows: int, width: int) -> Any:
    return device.upload(np.full((rows, width), np.nan, np.float16))


def store(device: Device, pool: Pool, x: Host, slots: Host, positions: Host) -> tuple[Host, Host]:
    """The pool's bytes and y."""
    there, y = device.upload(pool.halves), nan_y(device, *x.shape)
    tokens = (device.upload(values.astype(np.int32)) for values in (slots, positions))
    table = *tokens, device.upload(places()), LAYER
    arrays = device.upload(x), *table, there, pool.per_slab, device.upload(gain_of(pool.width)), y
    hidden.store_hidden(device, pool.mode, *arrays, eps=EPS)
    return device.download(there).view(np.uint8), device.download(y)


def rounded(device: Device, mode: CacheMode, x: Host, *, columns: bool = False) -> Host:
    y = nan_y(device, *x.shape)
    gain = device.upload(gain_of(x.shape[1]))
    hidden.round_hidden(device, mode, device.upload(x), gain, y, eps=EPS, columns=columns)
    return device.download(y)


def loaded(device: Device, pool: Pool, pages: list[int]) -> Host:
    """y [pages, 64, d]."""
    y = nan_y(device, len(pages) * PAGE, pool.width)
    taken, gain = device.upload(np.array(pages, np.int32)), device.upload(gain_of(pool.width))
    hidden.load_hidden(device, pool.mode, device.upload(pool.halves), pool.per_slab, taken, gain, y, eps=EPS)
    return device.download(y).reshape(len(pages), PAGE, pool.width)


@pytest.mark.parametrize(("mode", "width"), CASES)
def test_codes_are_the_oracles_and_y_is_the_norm_of_what_is_read(device: Device, mode: CacheMode, width: int) -> None:
    slots = np.array([0, 0, 0, 1, 1, 0, -1, 1, 0])
    positions = np.array([63, 64, 130, 63, 64, 0, 5, 128, 191])
    x, pool = residual(len(slots), width), Pool(mode, width)
    stored, y = store(device, pool, x, slots, positions)
    for row in np.flatnonzero(slots >= 0):
        place = places()[slots[row], LAYER, positions[row] // PAGE]
        if place >= 0:
            pool.write(place, positions[row] % PAGE, x[row])
    np.testing.assert_array_equal(stored, pool.bytes, "the whole pool: other codes, or something else was written")
    # The order of squares and rsqrt are a few ulp of fp32; then one rounding to fp16, on either side of a tie.
    expected = expected_y(mode, x, gain_of(width))
    np.testing.assert_allclose(y.astype(np.float32), expected.astype(np.float32), rtol=2.0**-10, atol=2.0**-24)
    np.testing.assert_array_equal(rounded(device, mode, x), y, "rounded without a place")


@pytest.mark.parametrize(("mode", "width"), [*((mode, 192) for mode in MODES), (CacheMode.H_FP16, 40)])
def test_what_is_loaded_has_the_bits_of_what_was_stored(device: Device, mode: CacheMode, width: int) -> None:
    pool, x = Pool(mode, width), residual(2 * PAGE, width).reshape(2, PAGE, width)
    for place, rows in zip((4, 8), x, strict=True):
        pool.fill(place, rows)
    for y, rows in zip(loaded(device, pool, [8, 4]), x[::-1], strict=True):
        np.testing.assert_array_equal(y, rounded(device, mode, rows))


@pytest.mark.parametrize(
    ("mode", "width"), [*((mode, 2048) for mode in MODES), (CacheMode.H_INT8, 2112), (CacheMode.H_INT4, 4160)]
)
def test_rows_of_one_two_and_three_chunks_are_loaded_alike(device: Device, mode: CacheMode, width: int) -> None:
    """A block loads four rows, two or one; a few rows are compared, for wide rows take the emulator long."""
    pool, x, some = Pool(mode, width, slabs=1, per_slab=1), residual(PAGE, width), [0, 1, 2, 3, 17, 63]
    pool.fill(0, x)
    np.testing.assert_array_equal(loaded(device, pool, [0])[0, some], rounded(device, mode, x[some]))


@pytest.mark.parametrize("mode", MODES)
def test_a_row_does_not_depend_on_its_company(device: Device, mode: CacheMode) -> None:
    x, positions = residual(9, 1088), np.arange(60, 69)
    slots = np.ones(9, np.int64)
    together, y = store(device, Pool(mode, 1088), x, slots, positions)
    one_by_one = Pool(mode, 1088)
    for row in (8, 3, 0, 5, 1, 7, 2, 6, 4):
        at = slice(row, row + 1)
        one_by_one.bytes, alone = store(device, one_by_one, x[at], slots[at], positions[at])
        np.testing.assert_array_equal(alone[0], y[row], f"row {row}")
    np.testing.assert_array_equal(one_by_one.bytes, together)


@pytest.mark.parametrize("mode", [CacheMode.H_INT8, CacheMode.H_INT4])
def test_ties_and_quotients_next_to_them(device: Device, mode: CacheMode) -> None:
    """Levels are what IEEE's division gives, then ties to even: values at, just below and just above half levels."""
    pool, rng = Pool(mode, 2048), np.random.default_rng(0)
    most = cache_modes.MOST_LEVEL[mode]
    spans = np.exp2(rng.uniform(-14, 14, (9, 32, 1))).astype(np.float32)
    steps = (spans / np.float32(most)).astype(np.float16).astype(np.float32)
    x = (rng.integers(0, int(most), (9, 32, 64)) + np.float32(0.5)) * steps
    x = np.nextafter(x, x * rng.choice([0, 1, 2], x.shape), dtype=np.float32)
    x[..., :1], x[..., 1:2] = 0, spans
    slots, positions = np.ones(9, np.int64), np.arange(9)
    stored, _ = store(device, pool, x.reshape(9, 2048), slots, positions)
    for position, row in enumerate(x.reshape(9, 2048)):
        pool.write(int(places()[1, LAYER, 0]), position, row)
    np.testing.assert_array_equal(stored, pool.bytes)


@pytest.mark.parametrize("mode", MODES)
def test_a_nan_shows(device: Device, mode: CacheMode) -> None:
    """In y, in a page, and in what is loaded from a page that nobody wrote since it was poisoned."""
    x, pool = residual(2, 128), Pool(mode, 128)
    x[0, 77] = np.nan
    pool.bytes, y = store(device, pool, x, np.array([1, 1]), np.array([0, 1]))
    assert np.isnan(y[0]).all() and not np.isnan(y[1]).any()
    read = loaded(device, pool, [4])[0]
    assert np.isnan(read[0]).all() and not np.isnan(read[1]).any() and np.isnan(read[2:]).all()


@pytest.mark.parametrize("mode", MODES)
def test_rows_rounded_in_columns(device: Device, mode: CacheMode) -> None:
    x = residual(16, 192)
    np.testing.assert_array_equal(rounded(device, mode, x, columns=True), in_columns(rounded(device, mode, x)))


@pytest.mark.parametrize(("mode", "width"), [*((mode, 64) for mode in MODES), (CacheMode.H_FP16, 40)])
@pytest.mark.parametrize("num_tokens", [0, 1, 19, 63, 64])
def test_clone(device: Device, mode: CacheMode, width: int, num_tokens: int) -> None:
    pool = random_pool(mode, width)
    triples = np.array([[0, 3, num_tokens], [0, 4, num_tokens], [8, 1, 64 - num_tokens]], np.int32)
    there = device.upload(pool.halves)
    hidden.clone_hidden(device, mode, there, pool.per_slab, device.upload(triples), d_model=width)
    copy(pool, triples)
    np.testing.assert_array_equal(device.download(there).view(np.uint8), pool.bytes)


@pytest.mark.parametrize("mode", MODES)
def test_clones_of_several_blocks_and_launches(
    device: Device, mode: CacheMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden, "_MOST_TRIPLES", 2)
    pool, triples = random_pool(mode, 640), np.array([[0, target, 61] for target in (1, 5, 8)], np.int32)
    there = device.upload(pool.halves)
    hidden.clone_hidden(device, mode, there, pool.per_slab, device.upload(triples), d_model=640)
    copy(pool, triples)
    np.testing.assert_array_equal(device.download(there).view(np.uint8), pool.bytes)


def random_pool(mode: CacheMode, width: int) -> Pool:
    pool = Pool(mode, width)
    pool.bytes = np.random.default_rng(width).integers(0, 256, pool.bytes.shape, np.uint8)
    return pool


def copy(pool: Pool, triples: Host) -> None:
    for source, target, num_tokens in triples.tolist():
        for name, field in pool.page(target).items():
            field[:num_tokens] = pool.page(source)[name][:num_tokens]


def test_refusals(device: Device) -> None:
    def refused(says: str, call: Callable[..., None], *arguments: Any, **options: Any) -> None:
        with pytest.raises(KernelArgumentError, match=says):
            call(device, *arguments, **options)

    x, y = device.zeros((8, 96), np.float32), device.zeros((8, 96), np.float16)
    gain, pool = device.zeros(96, np.float16), device.zeros((1, 2 * 96 * PAGE), np.float16)
    pages, triples = device.zeros(1, np.int32), device.zeros((1, 3), np.int32)
    round_hidden, load_hidden, clone_hidden = hidden.round_hidden, hidden.load_hidden, hidden.clone_hidden
    refused(
        "round_hidden: d is 96, expected a multiple of 64 in h-int8",
        round_hidden,
        CacheMode.H_INT8,
        x,
        gain,
        y,
        eps=EPS,
    )
    refused("mode is int8, expected one of", round_hidden, CacheMode.INT8, x, gain, y, eps=EPS)
    fp16 = CacheMode.H_FP16
    refused(r"y is \(8, 96\), in columns", round_hidden, fp16, x, gain, y, eps=EPS, columns=True)
    refused(r"load_hidden: y is \(8, 96\), expected", load_hidden, fp16, pool, 1, pages, gain, y, eps=EPS)
    says = "clone_hidden: per_slab is 3, a slab holds 2 pages of 12288 bytes"
    refused(says, clone_hidden, fp16, pool, 3, triples, d_model=96)
    says = "store_hidden: layer is 1, the places have 1"
    tokens, table = device.zeros(8, np.int32), device.zeros((1, 1, 1), np.int32)
    refused(says, hidden.store_hidden, fp16, x, tokens, tokens, table, 1, pool, 2, gain, y, eps=EPS)
