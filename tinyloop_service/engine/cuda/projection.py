"""How a layer's queries, keys and values are made of the stream, for each kind of cache.

    Direct    what is stored is K and V: one product makes q, K and V of one input
    Coded     the same, K and V as int8
    Hidden    what is stored is h, of which K and V are made: `hidden.py`

In: the stream of a pass or of a step, and where its tokens belong.  Out: q; K and V in the pages that attention reads.
Refuses to know how attention reads them, and who owns a page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tinyloop_service.engine.cuda.memory import Arena
from tinyloop_service.engine.cuda.products import ProductKind, Products
from tinyloop_service.engine.cuda.schedule import Layer
from tinyloop_service.engine.cuda.stream import DecodeStream
from tinyloop_service.engine.cuda.weights import DeviceBlock, DeviceModel
from tinyloop_service.kernels.device import Array, Device
from tinyloop_service.kernels.linear import linear_qkv, linear_qkv_rows
from tinyloop_service.kernels.rope import rope


@dataclass(frozen=True, slots=True)
class Tokens:
    """Where tokens belong.  int32 [rows] each; rows with slot −1 are padding."""

    slots: Array
    positions: Array


class Projection(Protocol):
    @property
    def products(self) -> dict[ProductKind, Array]:
        """Products of prompts, and where they go, [max_rows, outputs]."""
        ...

    def weight(self, kind: ProductKind, block: DeviceBlock) -> Array:
        """Of one of these products, fp16 [outputs, d_model]."""
        ...

    def prompt(self, layer: Layer, x: Array, y: Array, tokens: Tokens, q: Array) -> None:
        """Of a pass, q.shape[0] rows.  x fp32, y fp16 [max_rows, d_model]: the stream, and its norm."""
        ...

    def decode(self, layer: Layer, stream: DecodeStream, rows: Tokens, q: Array) -> Array | None:
        """Of a step, up to and with the fold before attention.  Where it is attention that puts K and V of the rows'
        tokens into pages: these, fp16 [rows, 2, G, D]."""
        ...


class Direct:
    """A `Projection`."""

    def __init__(self, device: Device, model: DeviceModel, arena: Arena, products: Products, max_rows: int) -> None:
        spec = model.spec
        self._device, self._model, self._arena, self._multiply = device, model, arena, products.multiply
        self._qkv = device.zeros((max_rows, spec.q_dim + 2 * spec.kv_dim), np.float16)

    @property
    def products(self) -> dict[ProductKind, Array]:
        return {"qkv": self._qkv}

    def weight(self, kind: ProductKind, block: DeviceBlock) -> Array:
        return block.qkv[0].dense

    def prompt(self, layer: Layer, x: Array, y: Array, tokens: Tokens, q: Array) -> None:
        rows, spec, arena = q.shape[0], self._model.spec, self._arena
        self._multiply("qkv", y, layer.block.qkv[0].dense, self._qkv, rows)
        rope(
            self._device, self._qkv[:rows], tokens.slots, tokens.positions, self._model.cos, self._model.sin,
            arena.tables, layer.index, arena.pool, q, num_kv_heads=spec.n_kv_heads, pairing=spec.rope_pairing,
        )  # fmt: skip

    def decode(self, layer: Layer, stream: DecodeStream, rows: Tokens, q: Array) -> Array | None:
        model, arena, packed = self._model, self._arena, layer.block.qkv[0].packed
        given = stream.fold(layer.before_attention, packed)
        linear_qkv(
            self._device, packed, given.y, rows.positions, rows.slots, arena.tables, layer.index, arena.pool,
            model.cos, model.sin, q, num_kv_heads=model.spec.n_kv_heads, columns=given.columns,
            dependent=given.dependent,
        )  # fmt: skip
        return None


class Coded(Direct):
    """A `Projection` to int8 pages.

    A step's K and V come side by side, in fp16; attention codes them, for a scale belongs to a whole vector, of which a
    block of `linear_qkv` has but a part.
    """

    def __init__(
        self, device: Device, model: DeviceModel, arena: Arena, products: Products, max_rows: int, *, step_rows: int
    ) -> None:
        """step_rows: most rows of a step."""
        super().__init__(device, model, arena, products, max_rows)
        spec = model.spec
        self._kv = device.zeros((step_rows, 2, spec.n_kv_heads, spec.head_dim), np.float16)

    def decode(self, layer: Layer, stream: DecodeStream, rows: Tokens, q: Array) -> Array | None:
        device, model, packed = self._device, self._model, layer.block.qkv[0].packed
        kv: Array = self._kv[: q.shape[0]]
        given = stream.fold(layer.before_attention, packed)
        linear_qkv_rows(
            device, packed, given.y, rows.positions, kv, model.cos, model.sin, q, columns=given.columns,
            dependent=given.dependent,
        )  # fmt: skip
        return kv
