"""Packing is exact: every nibble, scale and half lands where weight_tiles.cuh draws it, for every group and order."""

from __future__ import annotations

import numpy as np
import pytest

from tinyloop_service.engine.tensors import Fp16Linear, Int4Linear
from tinyloop_service.kernels import pack
from tinyloop_service.kernels.device import Device
from tinyloop_service.kernels.match import KernelArgumentError
from tinyloop_service.kernels.references import pack as reference


def int4_linear(num_out: int, num_in: int, group: int, seed: int) -> Int4Linear:
    rng = np.random.default_rng(seed)
    scales = rng.uniform(0.01, 0.1, (num_out, num_in // group)).astype(np.float16)
    return Int4Linear(rng.integers(0, 256, (num_out, num_in // 2), np.uint8), scales)


def fp16_linear(num_out: int, num_in: int, seed: int) -> Fp16Linear:
    return Fp16Linear(np.random.default_rng(seed).normal(size=(num_out, num_in)).astype(np.float16))


@pytest.mark.parametrize(("group", "num_inputs"), [(32, 64), (64, 192), (128, 256)])
def test_int4_tiles(device: Device, group: int, num_inputs: int) -> None:
    linear = int4_linear(50, num_inputs, group, seed=group)  # 50 rows: the fourth tile is padded
    packed = pack.pack_linear(device, [linear], kind="head")
    weights, scales = reference.pack_int4(linear.qweight, linear.scales, pack.row_map("head", [50], 0, "half"))
    assert (packed.num_outputs, packed.num_padded, packed.num_inputs, packed.group) == (50, 64, num_inputs, group)
    np.testing.assert_array_equal(device.download(packed.weights), weights)
    np.testing.assert_array_equal(device.download(packed.scales), scales)


@pytest.mark.parametrize("pairing", pack.PAIRINGS)
def test_qkv_tiles_keep_rope_pairs_together(device: Device, pairing: pack.Pairing) -> None:
    linears = [int4_linear(rows, 64, 32, seed) for seed, rows in enumerate((128, 64, 64))]
    packed = pack.pack_linear(device, linears, kind="qkv", head_dim=64, pairing=pairing)
    order = pack.row_map("qkv", [128, 64, 64], 64, pairing)
    joined = np.concatenate([x.qweight for x in linears]), np.concatenate([x.scales for x in linears])
    np.testing.assert_array_equal(device.download(packed.weights), reference.pack_int4(*joined, order)[0])
    np.testing.assert_array_equal(np.sort(order), np.arange(256))
    rotated, values = order[:192].reshape(-1, 2, 8), order[192:]
    assert (rotated[:, 1] - rotated[:, 0] == (32 if pairing == "half" else 1)).all()
    np.testing.assert_array_equal(values, np.arange(192, 256))


def test_q_alone_and_k_v_alone_are_the_tiles_of_all_three(device: Device) -> None:
    """Heads are whole tiles, and values come last."""
    linears = [int4_linear(rows, 64, 32, seed) for seed, rows in enumerate((128, 64, 64))]
    whole, q, kv = (
        pack.pack_linear(device, part, kind="qkv", head_dim=64) for part in (linears, linears[:1], linears[1:])
    )
    assert (q.num_outputs, kv.num_outputs) == (128, 128)
    for name in ("weights", "scales"):
        parts = [device.download(getattr(packed, name)) for packed in (q, kv)]
        np.testing.assert_array_equal(np.concatenate(parts), device.download(getattr(whole, name)), name)


def test_fp16_tiles_of_gate_and_up_channel_by_channel(device: Device) -> None:
    gate, up = fp16_linear(24, 128, 1), fp16_linear(24, 128, 2)
    packed = pack.pack_linear(device, [gate, up], kind="gate_up")
    order = pack.row_map("gate_up", [24, 24], 0, "half")
    np.testing.assert_array_equal(order[:16], [*range(8), *range(24, 32)])
    assert packed.scales is None and packed.group == 0
    expected = reference.pack_fp16(np.concatenate([gate.weight, up.weight]), order)
    np.testing.assert_array_equal(device.download(packed.weights), expected)


@pytest.mark.parametrize("group", pack.GROUPS)
def test_dequantise_rounds_each_weight_once(device: Device, group: int) -> None:
    linears = [int4_linear(19, 128, group, 1), int4_linear(3, 128, group, 2)]
    weight = device.download(pack.dequantise(device, linears))
    expected = np.concatenate([reference.dequantise(x.qweight, x.scales) for x in linears])
    np.testing.assert_array_equal(weight, expected)
    exact = np.concatenate([x.dequantize() for x in linears])
    np.testing.assert_array_equal(weight, exact.astype(np.float16))


def test_dequantise_of_fp16_is_the_weights(device: Device) -> None:
    linears = [fp16_linear(5, 64, 1), fp16_linear(6, 64, 2)]
    np.testing.assert_array_equal(
        device.download(pack.dequantise(device, linears)), np.concatenate([x.weight for x in linears])
    )


def test_refusals_name_what_is_wrong(device: Device) -> None:
    def refused(says: str, linears: list[pack.Weights], kind: pack.LinearKind, head_dim: int = 0) -> None:
        with pytest.raises(KernelArgumentError, match=says):
            pack.pack_linear(device, linears, kind=kind, head_dim=head_dim)

    int4, fp16 = int4_linear(64, 128, 128, 0), fp16_linear(64, 128, 0)
    refused("4 linears, expected q, k, v or k, v or q for qkv", [int4] * 4, "qkv", 64)
    refused("1 linears, expected gate, up for gate_up", [int4], "gate_up")
    refused("INT4 and fp16 linears side by side", [int4, fp16], "gate_up")
    refused("expected one K", [fp16, fp16_linear(64, 64, 0)], "gate_up")
    refused("K is 96, expected a multiple of 64", [fp16_linear(64, 96, 0)], "o")
    refused(r"expected \(32, 64, 128\)", [int4_linear(16, 256, 256, 0)], "head")
    refused("head_dim is 24, expected a multiple of 16", [int4] * 3, "qkv", 24)
    refused("gate, up rows", [int4, int4_linear(48, 128, 128, 0)], "gate_up")
