"""SwiGLU against its twin."""

from __future__ import annotations

import numpy as np
import pytest

from tinyloop_service.kernels.device import Device
from tinyloop_service.kernels.match import KernelArgumentError
from tinyloop_service.kernels.references import swiglu as twin
from tinyloop_service.kernels.swiglu import swiglu


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 19])
@pytest.mark.parametrize("d_ff", [8, 384, 2056])
def test_swiglu(device: Device, num_tokens: int, d_ff: int) -> None:
    gu = np.random.default_rng(d_ff).standard_normal((num_tokens, 2 * d_ff)).astype(np.float16) * np.float16(4)
    expected = np.empty((num_tokens, d_ff), np.float16)
    twin.swiglu(None, gu, expected)
    h = device.upload(np.full((num_tokens, d_ff), 9, np.float16))
    swiglu(device, device.upload(gu), h)
    # Both are float32 to a few ulp (the exponential is good to 2), so they may round to neighbouring halves: 2^-10.
    np.testing.assert_allclose(
        device.download(h).astype(np.float32), expected.astype(np.float32), rtol=2**-10, atol=2**-24
    )


def test_gates_of_any_size_stay_finite(device: Device) -> None:
    gate = np.array([-65504, -200, -20, 0, 20, 200, 65504, 1], np.float16)
    gu = np.concatenate([gate, np.ones(8, np.float16)])[None]
    h = device.upload(np.full((1, 8), 9, np.float16))
    swiglu(device, device.upload(gu), h)
    expected = np.array([0, 0, -20 / (1 + np.exp(20.0)), 0, 20, 200, 65504, 1 / (1 + np.exp(-1.0))])
    np.testing.assert_allclose(device.download(h)[0], expected, rtol=2**-10, atol=2**-24)


def test_what_does_not_fit_is_refused(device: Device) -> None:
    zeros = device.zeros((2, 24), np.float16)
    with pytest.raises(ValueError, match="ff is 12, expected a multiple of 8"):
        swiglu(device, zeros, device.zeros((2, 12), np.float16))
    with pytest.raises(KernelArgumentError, match="swiglu"):
        swiglu(device, zeros, device.zeros((3, 12), np.float16))
