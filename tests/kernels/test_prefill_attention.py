"""prefill_attention against float64, against its reference, and against itself with prompts cut otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from attention_cases import FORMS, LAYER, LEAST_SCALE, MOST_SCALE, Sequences
from numpy.typing import NDArray

from tinyloop_service.kernels import prefill_attention as module
from tinyloop_service.kernels.device import Device
from tinyloop_service.kernels.match import KernelArgumentError
from tinyloop_service.kernels.prefill_attention import TILE_ROWS, prefill_attention
from tinyloop_service.kernels.references import prefill_attention as reference

Array = NDArray[Any]
Chunk = tuple[int, int, int, int, int]  # slot, first row of q, rows, position of the first, window

WINDOWS = (0, 1, 63, 64, 65, 100)
UNWRITTEN = 7.0
SHAPES = [(2, 2, 128), (4, 2, 64), (4, 1, 128), (3, 1, 64)]  # heads, K/V heads, head_dim
ALL_CASES = [(*shape, int8) for int8, shapes in ((False, SHAPES), (True, SHAPES[:2])) for shape in shapes]


@pytest.fixture(params=["warps", "warpgroup"], autouse=True)
def variant(request: pytest.FixtureRequest, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kernels on every machine that can run them."""
    if request.param == "warpgroup" and device.arch != module.WIDE_ARCH:
        pytest.skip("warpgroup products are sm_90's")
    if request.param == "warps" and device.arch == module.WIDE_ARCH:
        monkeypatch.setattr(module, "WIDE_ARCH", "none")


def tiles_of(chunks: Sequence[Chunk]) -> Array:
    tiles = [
        (slot, row + at, min(TILE_ROWS, count - at), position + at, window, 0)
        for slot, row, count, position, window in chunks
        for at in range(0, count, TILE_ROWS)
    ]
    return np.array(tiles, np.int32)


def run(device: Device, sequences: Sequences, q: Array, chunks: Sequence[Chunk]) -> Array:
    return run_tiles(device, sequences, q, tiles_of(chunks))


def run_tiles(device: Device, sequences: Sequences, q: Array, tiles: Array, **tokens: Array) -> Array:
    a = device.upload(np.full_like(q, UNWRITTEN))
    prefill_attention(
        device,
        device.upload(q),
        device.upload(sequences.pool),
        device.upload(sequences.tables),
        LAYER,
        device.upload(tiles),
        a,
        num_heads=sequences.heads,
        num_kv_heads=sequences.kv_heads,
        **{name: device.upload(array) for name, array in tokens.items()},
    )
    return device.download(a)


def check(sequences: Sequences, q: Array, a: Array, chunks: Sequence[Chunk]) -> None:
    for slot, first, count, position, window in chunks:
        for i in range(count):
            expected, tolerance = sequences.exact(q[first + i], slot, position + i, window)
            excess = np.abs(a[first + i].astype(np.float64) - expected) - tolerance
            assert excess.max() <= 0, f"slot {slot} position {position + i}: {excess.max():.2e} more than rounding"


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "int8"), ALL_CASES)
def test_against_float64(device: Device, heads: int, kv_heads: int, head_dim: int, int8: bool) -> None:
    """A whole prompt, a suffix off a prefix, one token, and a row that belongs to nobody."""
    sequences = Sequences([118, 83, 65], heads, kv_heads, head_dim, shared=1, int8=int8)
    chunks = [(0, 0, 118, 0, 0), (1, 118, 19, 64, 0), (2, 138, 1, 64, 0)]
    q = sequences.queries(139)
    a = run(device, sequences, q, chunks)
    check(sequences, q, a, chunks)
    assert np.all(a[137] == np.float16(UNWRITTEN))


@FORMS
@pytest.mark.parametrize("window", WINDOWS)
def test_windows(device: Device, window: int, int8: bool) -> None:
    sequences = Sequences([190], 2, 1, 64, int8=int8)
    q = sequences.queries(190)
    chunks = [(0, 0, 190, 0, window)]
    check(sequences, q, run(device, sequences, q, chunks), chunks)


@pytest.mark.parametrize("int8", [True])
@pytest.mark.parametrize("scales", [(LEAST_SCALE,), (MOST_SCALE,), (LEAST_SCALE, MOST_SCALE)])
def test_the_least_and_the_largest_values_of_int8(device: Device, scales: tuple[float, ...], int8: bool) -> None:
    sequences = Sequences([150], 2, 1, 64, int8=int8)
    sequences.scale_values(*scales)
    q, chunks = sequences.queries(150), [(0, 0, 150, 0, 0)]
    a = run(device, sequences, q, chunks)
    check(sequences, q, a, chunks)
    assert np.all(np.isfinite(a)) and a.any()


@FORMS
def test_against_the_reference(device: Device, int8: bool) -> None:
    sequences = Sequences([150, 90], 4, 2, 64, shared=1, int8=int8)
    chunks = [(0, 0, 150, 0, 70), (1, 150, 26, 64, 0)]
    q = sequences.queries(176)
    expected = np.zeros_like(q)
    pages = sequences.pool, sequences.tables
    reference.prefill_attention(q, *pages, LAYER, tiles_of(chunks), expected, num_heads=4, num_kv_heads=2)
    a = run(device, sequences, q, chunks)
    # A weight next to the middle of two fp16 numbers may be rounded the other way: 2^-11 of it, once in a while.
    np.testing.assert_allclose(a.astype(np.float32), expected.astype(np.float32), rtol=2**-10, atol=2**-10)


@FORMS
@pytest.mark.parametrize("window", WINDOWS)
def test_how_a_prompt_is_cut_does_not_show(device: Device, window: int, int8: bool) -> None:
    length = 150
    sequences = Sequences([length], 2, 1, 64, int8=int8)
    q = sequences.queries(length)
    whole = run(device, sequences, q, [(0, 0, length, 0, window)])
    for size in (1, 7, 64, 77):
        cut = [(0, at, min(size, length - at), at, window) for at in range(0, length, size)]
        assert np.array_equal(run(device, sequences, q, cut), whole), f"chunks of {size} tokens give other bits"


@FORMS
def test_where_a_tile_starts_does_not_show_at_head_dim_128(device: Device, int8: bool) -> None:
    sequences = Sequences([140], 2, 2, 128, int8=int8)
    q = sequences.queries(140)
    whole = run(device, sequences, q, [(0, 0, 140, 0, 0)])
    assert np.array_equal(run(device, sequences, q, [(0, 0, 39, 0, 0), (0, 39, 101, 39, 0)]), whole)


def test_other_prompts_of_the_batch_do_not_show(device: Device) -> None:
    sequences = Sequences([100, 90, 130], 2, 1, 64, shared=1)
    q = sequences.queries(36 + 26 + 66)
    chunks = [(0, 0, 36, 64, 0), (1, 36, 26, 64, 33), (2, 62, 66, 64, 0)]
    together = run(device, sequences, q, chunks)
    for slot, first, count, position, window in chunks:
        rows = slice(first, first + count)
        alone = run(device, sequences, q[rows], [(slot, 0, count, position, window)])
        assert np.array_equal(alone, together[rows])


def test_an_empty_tile_is_no_work(device: Device) -> None:
    sequences = Sequences([70], 2, 1, 64)
    q, tiles = sequences.queries(70), tiles_of([(0, 0, 70, 0, 0)])
    empty = np.array([[0, 0, 0, 0, 0, 0], [-1, 3, 0, -1, 0, 0]], np.int32)
    with_empty = run_tiles(device, sequences, q, np.vstack([empty, tiles]))
    assert np.array_equal(with_empty, run_tiles(device, sequences, q, tiles))
    assert (run_tiles(device, sequences, q, empty) == UNWRITTEN).all()


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "int8"), [(4, 2, 64, False), (1, 1, 128, False), (1, 1, 128, True)]
)
def test_suffixes_off_one_prefix_in_one_tile(
    device: Device, heads: int, kv_heads: int, head_dim: int, window: int, int8: bool
) -> None:
    """Rows of one warp belong to several sequences, one sequence to several warps, and some go on to a second page."""
    counts = [10, 1, 29, 3, 20]
    sequences = Sequences(
        [128 + 50 * (slot % 2) + n for slot, n in enumerate(counts)], heads, kv_heads, head_dim, shared=2, int8=int8
    )
    starts = [length - n for length, n in zip(sequences.lengths, counts, strict=True)]
    q = sequences.queries(sum(counts))
    rows = np.cumsum([0, *counts])
    chunks = [(slot, int(rows[slot]), n, starts[slot], window) for slot, n in enumerate(counts)]
    apart = run(device, sequences, q, chunks)
    check(sequences, q, apart, chunks)
    tokens = {
        "token_slot": np.repeat(np.arange(5), counts).astype(np.int32),
        "token_position": np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]).astype(
            np.int32
        ),
    }
    for cuts in ([0, 63], [0, 20, 63], [0, 1, 60, 63]):
        tiles = [(-1, first, end - first, -1, window, 2) for first, end in pairwise(cuts)]
        together = run_tiles(device, sequences, q, np.array(tiles, np.int32), **tokens)
        assert np.array_equal(together, apart), f"tiles cut at {cuts} give other bits than a tile for each suffix"
    expected = np.zeros_like(q)
    pages = sequences.pool, sequences.tables
    whole = np.array([(-1, 0, 63, -1, window, 2)], np.int32)
    reference.prefill_attention(q, *pages, LAYER, whole, expected, num_heads=heads, num_kv_heads=kv_heads, **tokens)
    np.testing.assert_allclose(apart.astype(np.float32), expected.astype(np.float32), rtol=2**-10, atol=2**-10)


@FORMS
def test_nothing_past_a_token_leaks(device: Device, int8: bool) -> None:
    sequences = Sequences([75], 2, 2, 128, int8=int8)
    q = sequences.queries(75)
    before = run(device, sequences, q, [(0, 0, 75, 0, 0)])
    sequences.fill_unused(0)
    assert np.array_equal(run(device, sequences, q, [(0, 0, 75, 0, 0)]), before)


def test_refusals(device: Device) -> None:
    sequences = Sequences([70], 2, 2, 64)
    q = sequences.queries(70)
    with pytest.raises(KernelArgumentError, match=r"pool is .* expected"):
        sequences.kv_heads = 1
        run(device, sequences, q, [(0, 0, 70, 0, 0)])
    with pytest.raises(KernelArgumentError, match=r"q is \(70, 128\), expected"):
        sequences.heads = 3
        run(device, sequences, q, [(0, 0, 70, 0, 0)])
