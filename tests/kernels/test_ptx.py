"""Every instruction of ptx.cuh does what its comment says: on a GPU by PTX, else by the emulator."""

from __future__ import annotations

import numpy as np
import pytest

from tinyloop_service.kernels.device import Array, Device


def run(probe: Device, name: str, *arrays: Array, grid: int = 1, block: int = 32, shared_bytes: int = 2048) -> None:
    probe.launch(probe.kernel("probe", name), (grid, 1, 1), block, arrays, shared_bytes=shared_bytes)


def halves(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float16)


def test_fragments_of_mma_and_ldmatrix(probe: Device) -> None:
    """Small integers: products and sums are exact, so every element must be equal and no fragment can be swapped."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 9, size).astype(np.float16) for size in ((16, 16), (8, 16)))
    out = probe.empty((16, 8), np.float32)
    run(probe, "multiply", probe.upload(a), probe.upload(b), out)
    assert np.array_equal(probe.download(out), a.astype(np.float32) @ b.astype(np.float32).T)


def test_mma_accumulates_in_float32(probe: Device) -> None:
    """16 products of about 1, summed in fp32 in whatever order: 16 roundings of 2⁻²⁴ of at most 16·9."""
    rng = np.random.default_rng(1)
    a, b = halves(rng, 16, 16), halves(rng, 8, 16)
    out = probe.empty((16, 8), np.float32)
    run(probe, "multiply", probe.upload(a), probe.upload(b), out)
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(probe.download(out), expected, rtol=0, atol=16 * 2**-24 * 16 * 9)


def test_the_order_of_a_step_s_products_does_not_show(probe: Device) -> None:
    """decode_quads.cuh places the 16 of a step as it likes, and has the bits of kernels that place them otherwise."""
    rng = np.random.default_rng(6)
    for size in np.exp2(rng.uniform(-6, 6, 20)):
        a, b = halves(rng, 16, 16), (size * halves(rng, 8, 16) ** 3).astype(np.float16)
        order = rng.permutation(16)
        out = [probe.empty((16, 8), np.float32) for _ in range(2)]
        run(probe, "multiply", probe.upload(a), probe.upload(b), out[0])
        placed = probe.upload(np.ascontiguousarray(a[:, order])), probe.upload(np.ascontiguousarray(b[:, order]))
        run(probe, "multiply", *placed, out[1])
        assert np.array_equal(probe.download(out[0]), probe.download(out[1]))


def test_products_of_bytes(probe: Device) -> None:
    """Of signed and of unsigned ones with signed ones; the least and the largest are among them."""
    rng = np.random.default_rng(7)
    a, b = (rng.choice([-128, -1, 0, 1, 127, *range(-40, 40)], size).astype(np.int8) for size in ((16, 32), (8, 32)))
    before = rng.integers(-(2**20), 2**20, (2, 16, 8)).astype(np.int32)
    out = probe.upload(before)
    run(probe, "multiply_bytes", probe.upload(a.view(np.uint32)), probe.upload(b.view(np.uint32)), out)
    products = [left.astype(np.int32) @ b.astype(np.int32).T for left in (a, a.view(np.uint8))]
    assert np.array_equal(probe.download(out), before + products)


def test_powers_of_two_are_exact(probe: Device) -> None:
    """Sums of pages are brought from one exponent to another without rounding."""
    exponents = np.arange(-126, 128, dtype=np.float16)
    for some in np.pad(exponents, (0, 2)).reshape(8, 32):
        pairs, out = np.repeat(some, 2).view(np.uint32), probe.empty((9, 32), np.uint32)
        run(probe, "arithmetic", *(probe.upload(pairs) for _ in range(3)), out)
        assert np.array_equal(probe.download(out)[7].view(np.float32), np.ldexp(np.float32(1), some.astype(int)))


def test_transposed_matrices(probe: Device) -> None:
    values, out = halves(np.random.default_rng(2), 8, 8), probe.empty((8, 8), np.float16)
    run(probe, "transpose", probe.upload(values), out)
    assert np.array_equal(probe.download(out), values.T)


def test_eight_bytes_at_a_time(probe: Device) -> None:
    values, out = np.arange(1, 65, dtype=np.uint32).reshape(32, 2), probe.empty((2, 32, 2), np.uint32)
    run(probe, "load_pairs", probe.upload(values), out)
    wanted = np.arange(32)[:, None] % 2 == 1
    assert np.array_equal(probe.download(out), [np.where(wanted, values, 0), values])


def test_bits_and_halves(probe: Device) -> None:
    rng = np.random.default_rng(3)
    a, b, c = (halves(rng, 32, 2) for _ in range(3))
    out = probe.empty((9, 32), np.uint32)
    run(probe, "arithmetic", *(probe.upload(v.view(np.uint32).ravel()) for v in (a, b, c)), out)
    got = probe.download(out)
    words_a, words_b, words_c = (v.view(np.uint32).ravel() for v in (a, b, c))
    assert np.array_equal(got[0], words_a & words_b | words_c)
    exact = [v.astype(np.float64) for v in (a, b, c)]
    expected = exact[0] + exact[1], exact[0] - exact[1], exact[0] * exact[1], exact[0] * exact[1] + exact[2]
    for row, value in zip(got[1:5], expected, strict=True):
        assert np.array_equal(row, value.astype(np.float16).view(np.uint32).ravel())
    assert np.array_equal(got[5], words_a)
    bytes_a, bytes_b = words_a.view(np.uint8).reshape(32, 4), words_b.view(np.uint8).reshape(32, 4)
    mixed = np.stack([bytes_a[:, 0], bytes_b[:, 0], bytes_a[:, 1], bytes_b[:, 1]], axis=1)  # selector 0x5140
    assert np.array_equal(got[6], mixed.copy().view(np.uint32).ravel())
    assert np.array_equal(got[8], np.maximum(a, b).view(np.uint32).ravel())
    # ex2.approx: 2 ulp
    np.testing.assert_allclose(got[7].view(np.float32), np.exp2(a[:, 0].astype(np.float64)), rtol=2 * 2**-23)


def test_the_lesser_and_the_greater_are_nan_where_either_is(probe: Device) -> None:
    a, b = np.random.default_rng(5).standard_normal((2, 32)).astype(np.float32)
    a[3] = b[4] = a[5] = b[5] = np.nan
    out = probe.empty((2, 32), np.float32)
    run(probe, "extremes", probe.upload(a), probe.upload(b), out)
    np.testing.assert_array_equal(probe.download(out), [np.minimum(a, b), np.maximum(a, b)])


def test_the_greater_half_is_nan_where_either_is(probe: Device) -> None:
    a, b = halves(np.random.default_rng(8), 2, 32, 2)
    a[3, 0] = b[4, 1] = a[5, 1] = b[5, 1] = np.nan
    words, out = [probe.upload(v.view(np.uint32).ravel()) for v in (a, b, b)], probe.empty((9, 32), np.uint32)
    run(probe, "arithmetic", *words, out)
    np.testing.assert_array_equal(probe.download(out)[8].view(np.float16).reshape(32, 2), np.maximum(a, b))


def test_lane_exchanges(probe: Device) -> None:
    values, lanes = halves(np.random.default_rng(4), 32).astype(np.float32), np.arange(32)
    out = probe.empty((4, 32), np.uint32)
    run(probe, "exchanges", probe.upload(values), out)
    got = probe.download(out)
    assert np.array_equal(got[0].view(np.float32), values[lanes ^ 5])
    assert np.array_equal(got[1].view(np.float32)[:29], values[3:])  # the last lanes keep what is theirs
    assert np.array_equal(got[2].view(np.float32), np.full(32, values[7]))
    assert np.array_equal(got[3], np.full(32, sum(1 << int(i) for i in np.flatnonzero(values > 0)), np.uint32))


@pytest.mark.parametrize("blocks", [1, 19])
def test_the_last_block_to_arrive_knows_it(probe: Device, blocks: int) -> None:
    counter, out = probe.zeros(1, np.int32), probe.zeros(64, np.int32)
    run(probe, "last_arriver", counter, out, grid=blocks, block=64)
    assert np.array_equal(probe.download(out), np.full(64, blocks))
