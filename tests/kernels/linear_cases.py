"""Weights, activations and pages for tests of decode linears, small enough for the emulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.tensors import Fp16Linear, Int4Linear, Linear
from tinyloop_service.kernels.device import Array, Device
from tinyloop_service.kernels.pack import LinearKind, PackedLinear, Pairing, pack_linear

Host = NDArray[Any]


def random_linear(num_out: int, num_in: int, group: int, seed: int) -> Linear:
    """INT4 with the given group, or fp16 for group 0.  Outputs are about as large as inputs."""
    rng = np.random.default_rng(seed)
    if group == 0:
        return Fp16Linear((rng.normal(size=(num_out, num_in)) / num_in**0.5).astype(np.float16))
    scales = rng.uniform(0.1, 0.3, (num_out, num_in // group)) / num_in**0.5
    return Int4Linear(rng.integers(0, 256, (num_out, num_in // 2), np.uint8), scales.astype(np.float16))


@dataclass(frozen=True, slots=True)
class Case:
    """Packed linears beside their dense weights in natural order, float32 [N, K]."""

    packed: PackedLinear
    dense: Host

    @classmethod
    def make(
        cls,
        device: Device,
        kind: LinearKind,
        num_rows: tuple[int, ...],
        num_in: int,
        group: int,
        *,
        head_dim: int = 0,
        pairing: Pairing = "half",
    ) -> Case:
        linears = [random_linear(rows, num_in, group, seed) for seed, rows in enumerate(num_rows)]
        packed = pack_linear(device, linears, kind=kind, head_dim=head_dim, pairing=pairing)
        return cls(packed, np.concatenate([linear.dequantize() for linear in linears]))

    def slack(self, y: Host) -> Host:
        """How far fp32 sums may be from exact ones, [R, N].

        Σ|w·y| times K/64 roundings of 2^−22: the tensor core adds 16 products at a time and may cut instead of round
        (2^−23 each), and the sums between are no larger than Σ|w·y|.
        """
        bound: Host = np.abs(y.astype(np.float64)) @ np.abs(self.dense.astype(np.float64)).T
        return bound * (2.0**-22 * max(1, self.dense.shape[1] // 64)) + 1e-12


def activations(rows: int, num_in: int, seed: int = 7) -> Host:
    return np.random.default_rng(seed).normal(size=(rows, num_in)).astype(np.float16)


def nan_like(device: Device, shape: tuple[int, ...], dtype: type[np.generic]) -> Array:
    """Device memory that shows what was not written."""
    return device.upload(np.full(shape, np.nan, dtype))
