"""What only sm_90 has (ptx_sm90.cuh): products of warpgroups have the bits of mma.sync; blocks of a cluster meet."""

from __future__ import annotations

import numpy as np
import pytest
from emulation.builder import EmulationError

from tinyloop_service.kernels.device import Device
from tinyloop_service.kernels.linear import WIDE_ARCH

COLUMNS = 64 // 8


@pytest.fixture(autouse=True)
def has_warpgroups(probe: Device) -> None:
    if probe.arch != WIDE_ARCH:
        pytest.skip("warpgroup products are sm_90's")


def shared_bytes(tiles: int) -> int:
    return COLUMNS * (tiles * 128 + 16)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("tiles", range(1, 9))
def test_products_of_a_warpgroup_have_the_bits_of_a_warps(probe: Device, tiles: int, swizzled: bool) -> None:
    """Integer weights, as INT4's are, and others; activations of several sizes.  Linears mix both: no tolerance."""
    if probe.name == "emulated" and tiles not in (1, 3):
        pytest.skip("a compilation each, and emulated alike")
    rng = np.random.default_rng(tiles)
    for weights, size in ((rng.integers(-8, 8, (64, 64)), 1), (rng.normal(size=(64, 64)), 30)):
        w, x = weights.astype(np.float16), (size * rng.normal(size=(tiles * 8, 64))).astype(np.float16)
        sums = probe.empty((2, 64, tiles * 8), np.float32)
        kernel = probe.kernel("warpgroup", "both", TL_TILES=tiles, TL_SWIZZLED=int(swizzled))
        arguments = probe.upload(w.view(np.uint32)), probe.upload(x.view(np.uint32)), sums
        probe.launch(kernel, (1, 1, 1), 128, arguments, shared_bytes=shared_bytes(tiles))
        together, apart = probe.download(sums)
        np.testing.assert_array_equal(together, apart)
        exact = w.astype(np.float64) @ x.astype(np.float64).T
        # 64 products, each below 16·4·size, four sums of them in turn, cut or rounded at 2⁻²³ of at most 64 of that.
        np.testing.assert_allclose(together, exact, rtol=0, atol=4 * 2**-23 * 64 * 64 * size)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("tiles", [4, 8])
def test_products_of_bytes_are_exact(probe: Device, tiles: int, swizzled: bool) -> None:
    rng = np.random.default_rng(tiles)
    w, x = (rng.integers(-128, 128, (rows, 128)).astype(np.int8) for rows in (64, 8 * tiles))
    sums = probe.empty((2, 64, tiles * 8), np.int32)
    kernel = probe.kernel("warpgroup", "of_bytes", TL_TILES=tiles, TL_SWIZZLED=int(swizzled))
    arguments = probe.upload(w.view(np.uint32)), probe.upload(x.view(np.uint32)), sums
    probe.launch(kernel, (1, 1, 1), 128, arguments, shared_bytes=shared_bytes(tiles))
    products = [left.astype(np.int32) @ x.astype(np.int32).T for left in (w, w.view(np.uint8))]
    assert np.array_equal(probe.download(sums), products)


@pytest.mark.parametrize("rounds", [1, 3])
def test_blocks_of_a_cluster_hand_on_what_they_have(probe: Device, rounds: int) -> None:
    values = np.random.default_rng(0).normal(size=(rounds, 8, 128)).astype(np.float32)
    out = probe.zeros(values.shape, np.float32)
    kernel = probe.kernel("warpgroup", "hand_on", TL_CLUSTER=4)
    probe.launch(kernel, (1, 8, 1), 32, (probe.upload(values), out, np.int32(rounds)), shared_bytes=16 + 512)
    expected = values.reshape(rounds, 2, 4, 128)[:, :, [1, 2, 3, 0]]
    np.testing.assert_array_equal(probe.download(out).reshape(rounds, 2, 4, 128), expected)


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (1, "without a wgmma_fence"),
        (2, "never called fence_for_wgmma"),
        (3, "before the wgmma_commit"),
        (4, "nobody waited for"),
    ],
)
def test_instructions_out_of_order_are_errors_in_emulation(probe: Device, mistake: int, says: str) -> None:
    if probe.name != "emulated":
        pytest.skip("undefined on a GPU")
    x, out = probe.zeros((16, 32), np.uint32), probe.empty(128, np.float32)
    kernel = probe.kernel("warpgroup", "mistaken", TL_TILES=2)
    with pytest.raises(EmulationError, match=says):
        probe.launch(kernel, (1, 1, 1), 128, (x, out, np.int32(mistake)), shared_bytes=shared_bytes(2))
        probe.synchronize()
