"""fold_norm: partials, post norm, loop norm, injection and the next norm, in the reference's order."""

from __future__ import annotations

import numpy as np
import pytest

from tinyloop_service.kernels import norm
from tinyloop_service.kernels.device import Device
from tinyloop_service.kernels.match import KernelArgumentError
from tinyloop_service.kernels.references import norm as reference

EPS = 1e-5


class Stream:
    """Random inputs of one call, kept on the host."""

    def __init__(self, rows: int, width: int, num_partials: int) -> None:
        rng = np.random.default_rng(width + num_partials)
        self.x = rng.normal(size=(rows, width)).astype(np.float32)
        self.partials = rng.normal(size=(num_partials, rows, width)).astype(np.float32) if num_partials else None
        self.gains = rng.uniform(0.5, 2, (3, width)).astype(np.float16)
        self.injected = rng.normal(size=(rows, width)).astype(np.float32)

    def run(self, device: Device, inject: norm.InjectMode, gains: str) -> dict[str, np.ndarray]:
        """Kernel and reference, by name: "x", "y", "injected" and "expected x" …; `gains` as in "post loop out"."""
        names = dict(zip(("post_gain", "loop_gain", "gain"), self.gains, strict=True))
        chosen = {name: value if name.split("_")[0] in gains.split() else None for name, value in names.items()}
        host = {"x": self.x.copy(), "y": np.empty(self.x.shape, np.float16), "injected": self.injected.copy()}
        on_device = {name: device.upload(value) for name, value in host.items()}
        injected, expected_injected = on_device["injected"], host["injected"]
        reference.fold_norm(
            *(host["x"], self.partials, host["y"]),
            **chosen,
            eps=EPS,
            inject=inject,
            injected=expected_injected if inject != "none" else None,
        )
        norm.fold_norm(
            *(device, on_device["x"], None if self.partials is None else device.upload(self.partials), on_device["y"]),
            **{name: None if value is None else device.upload(value) for name, value in chosen.items()},
            eps=EPS,
            inject=inject,
            injected=injected if inject != "none" else None,
        )
        return {name: device.download(a) for name, a in on_device.items()} | {
            f"expected {n}": a for n, a in host.items()
        }


@pytest.mark.parametrize(
    ("rows", "width", "num_partials", "inject", "gains"),
    [
        (1, 64, 0, "none", "gain"),
        (3, 2048, 1, "none", "post gain"),
        (7, 1536, 2, "store", "gain"),
        (2, 1088, 8, "add", "loop gain"),
        (1, 2048, 16, "none", "post loop"),
        (2, 384, 4, "none", ""),
        (3, 192, 0, "none", "gain"),
    ],
)
def test_against_the_reference(
    device: Device, rows: int, width: int, num_partials: int, inject: norm.InjectMode, gains: str
) -> None:
    result = Stream(rows, width, num_partials).run(device, inject, gains)
    # Partials are added in the same order, so x is off only by the order of squares in a norm: a few ulp of fp32.
    np.testing.assert_allclose(result["x"], result["expected x"], rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(result["injected"], result["expected injected"], rtol=2e-6, atol=1e-6)
    if gains in ("gain", ""):
        np.testing.assert_array_equal(result["x"], result["expected x"], "nothing before x is rounded differently")
    # y rounds to fp16 once, on either side of a tie.
    np.testing.assert_allclose(
        result["y"].astype(np.float32), result["expected y"].astype(np.float32), rtol=2.0**-10, atol=1e-6
    )


def test_a_row_among_others_equals_the_row_alone(device: Device) -> None:
    batch, alone = Stream(5, 1088, 4), Stream(5, 1088, 4)
    alone.x, alone.injected = alone.x[3:4], alone.injected[3:4]
    assert alone.partials is not None
    alone.partials = alone.partials[:, 3:4].copy()
    together, single = (s.run(device, "add", "post loop gain") for s in (batch, alone))
    for name in ("x", "y"):
        np.testing.assert_array_equal(single[name][0], together[name][3], name)


def test_a_norm_only_has_the_bits_of_a_fold(device: Device) -> None:
    """Nothing added is a fold all the same: its kernel is another."""
    folded, only = Stream(3, 1088, 1), Stream(3, 1088, 1)
    assert folded.partials is not None
    folded.partials[:], only.partials = 0, None
    expected, found = (s.run(device, "none", "gain") for s in (folded, only))
    for name in ("x", "y"):
        np.testing.assert_array_equal(found[name], expected[name], name)


def test_refusals(device: Device) -> None:
    x, y = device.zeros((2, 64), np.float32), device.zeros((2, 64), np.float16)
    gain = device.zeros((64,), np.float16)
    with pytest.raises(KernelArgumentError, match="3 partials, expected one of"):
        norm.fold_norm(device, x, device.zeros((3, 2, 64), np.float32), y, eps=EPS, gain=gain)
    with pytest.raises(KernelArgumentError, match="inject is 'add', injected is not given"):
        norm.fold_norm(device, x, None, y, eps=EPS, gain=gain, inject="add")
