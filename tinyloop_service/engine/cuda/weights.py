"""A model's weights on the device, each twice: as tiles for decoding, and as plain fp16 for the products of prompts.

In: `ModelWeights`.  Out: a `DeviceModel`.  Raw weights are let go as they are packed.  Refuses to know what is done
with them; in which order, `schedule.py` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.spec import BlockKind, ModelSpec
from tinyloop_service.engine.tensors import BlockWeights, Int4Linear, Linear, ModelWeights
from tinyloop_service.kernels.device import Array, Device
from tinyloop_service.kernels.pack import LinearKind, PackedLinear, dequantise, pack_linear

Gain = NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class DeviceLinear:
    """One or more linears over the same inputs."""

    packed: PackedLinear
    dense: Array  # float16 [out, in], the rows of all of them in their own order


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """One distinct block.  Gains are fp16 [d_model]."""

    attn_norm: Array
    mlp_norm: Array
    attn_post_norm: Array | None
    mlp_post_norm: Array | None
    qkv: tuple[DeviceLinear, ...]  # q, k and v as one; or q, and k and v, where they have inputs of their own
    o: DeviceLinear
    gate_up: DeviceLinear
    down: DeviceLinear


@dataclass(frozen=True, slots=True)
class DeviceModel:
    spec: ModelSpec
    embed: Array  # fp16 [vocab_size, d_model]
    norm: Array  # fp16 [d_model]
    cos: Array  # fp32 [max_seq_len, head_dim / 2]
    sin: Array
    head: PackedLinear
    blocks: dict[tuple[BlockKind, int], DeviceBlock]


def load_weights(device: Device, weights: ModelWeights, *, q_apart: bool = False) -> DeviceModel:
    """q_apart: q has another input than k and v."""
    spec = weights.spec
    groups: dict[BlockKind, tuple[BlockWeights, ...]] = {
        "pre": weights.pre,
        "loop": weights.loop,
        "post": weights.post,
    }
    cos, sin = rope_tables(spec)
    return DeviceModel(
        spec=spec,
        embed=device.upload(np.ascontiguousarray(weights.embed)),
        norm=device.upload(np.ascontiguousarray(weights.norm)),
        cos=device.upload(cos),
        sin=device.upload(sin),
        head=pack_linear(device, [weights.head], kind="head", keep=False),
        blocks={
            (kind, index): _load_block(device, spec, block, keep=kind == "loop", q_apart=q_apart)
            for kind, blocks in groups.items()
            for index, block in enumerate(blocks)
        },
    )


def _load_block(device: Device, spec: ModelSpec, block: BlockWeights, *, keep: bool, q_apart: bool) -> DeviceBlock:
    """keep: the weights are used again at every loop and may stay in the L2 cache."""

    def gain(values: Gain) -> Array:
        return device.upload(np.ascontiguousarray(values))

    def gain_or_none(values: Gain | None) -> Array | None:
        return None if values is None else gain(values)

    def linear(kind: LinearKind, *parts: Linear) -> DeviceLinear:
        packed = pack_linear(device, parts, kind=kind, head_dim=spec.head_dim, pairing=spec.rope_pairing, keep=keep)
        return DeviceLinear(packed, dequantise(device, parts))

    heads = [[block.q], [block.k, block.v]] if q_apart else [[block.q, block.k, block.v]]
    return DeviceBlock(
        attn_norm=gain(block.attn_norm),
        mlp_norm=gain(block.mlp_norm),
        attn_post_norm=gain_or_none(block.attn_post_norm),
        mlp_post_norm=gain_or_none(block.mlp_post_norm),
        qkv=tuple(linear("qkv", *parts) for parts in heads),
        o=linear("o", block.o),
        gate_up=linear("gate_up", block.gate, block.up),
        down=linear("down", block.down),
    )


def rope_tables(spec: ModelSpec) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin of position · theta^(−2i/D), float32 [max_seq_len, D/2], computed in float64 as `reference.rope`."""
    half = spec.head_dim // 2
    frequencies = spec.rope_theta ** (-2.0 * np.arange(half) / spec.head_dim)
    angles = np.arange(spec.max_seq_len)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def weight_bytes(weights: ModelWeights) -> int:
    """About what `load_weights` takes on the device."""
    spec = weights.spec
    blocks = [*weights.pre, *weights.loop, *weights.post]
    names: tuple[Callable[[BlockWeights], Linear], ...] = (
        lambda b: b.q, lambda b: b.k, lambda b: b.v, lambda b: b.o, lambda b: b.gate, lambda b: b.up, lambda b: b.down,
    )  # fmt: skip
    total = weights.embed.nbytes + _packed_bytes(weights.head) + 4 * spec.max_seq_len * spec.head_dim
    for block in blocks:
        for name in names:
            linear = name(block)
            total += _packed_bytes(linear) + 2 * linear.shape[0] * linear.shape[1]
    return total


def _packed_bytes(linear: Linear) -> int:
    if isinstance(linear, Int4Linear):
        return linear.qweight.nbytes + linear.scales.nbytes
    return linear.weight.nbytes
