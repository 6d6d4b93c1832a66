"""Blocks' inputs h in stored pages, and queries, keys and values where h is what is stored.

    x ──norm──► y ──────────────────────────► q
    └──► h = what is read of x as stored ──norm──► y' ──► K and V, in active pages

A prompt's tokens store x at their places, if their sequence has places; rows of a step only round it.  K and V are made
of y' by one product of its own, the same for prompts and for what is made active again: so they have the same bits.
Making active is a CUDA graph (`graphs.py`), that of short prefixes from the start.

In: as `projection.py`; and stored pages, to be copied and to be made active.  Out: q, K and V; stored pages.  Refuses
to know who owns a page.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from tinyloop_service.engine.api import PAGE_TOKENS
from tinyloop_service.engine.cuda.graphs import Graphs
from tinyloop_service.engine.cuda.memory import Arena, Layout
from tinyloop_service.engine.cuda.products import ProductKind, Products
from tinyloop_service.engine.cuda.projection import Tokens
from tinyloop_service.engine.cuda.rebuild import Rebuild, RebuildShape, RebuildTables
from tinyloop_service.engine.cuda.schedule import Layer
from tinyloop_service.engine.cuda.staging import Staging
from tinyloop_service.engine.cuda.stream import DecodeStream
from tinyloop_service.engine.cuda.weights import DeviceBlock, DeviceModel
from tinyloop_service.kernels.device import Array, Device
from tinyloop_service.kernels.hidden import clone_hidden, load_hidden, round_hidden, store_hidden
from tinyloop_service.kernels.linear import linear_qkv, takes_columns
from tinyloop_service.kernels.norm import Fold
from tinyloop_service.kernels.pack import PackedLinear
from tinyloop_service.kernels.rope import rope_keys_values, rope_queries
from tinyloop_service.kernels.tables import write_words

_Q, _KV = 0, 1  # of a block's linears before attention
_COMMON_BLOCKS = 16  # of a prefix that is made active by a graph from the start on; 1,024 tokens


class Hidden:
    """A `Projection`, and the launches on stored pages."""

    def __init__(
        self,
        device: Device,
        model: DeviceModel,
        layout: Layout,
        arena: Arena,
        products: Products,
        *,
        max_rows: int,
        step_rows: int,
    ) -> None:
        """max_rows: of a pass; step_rows: of a decode step."""
        spec = model.spec
        self._device, self._model, self._layout, self._arena = device, model, layout, arena
        self._multiply = products.multiply
        self._y = device.zeros((max_rows, spec.d_model), np.float16)
        self._step_y = device.zeros((step_rows, spec.d_model), np.float16)
        self._q = device.zeros((max_rows, spec.q_dim), np.float16)
        self._kv = device.zeros((max_rows, 2 * spec.kv_dim), np.float16)
        slots, layers, self._max_blocks = arena.tables.shape
        self._layer_tables: Array = arena.tables.reshape(slots * layers, 1, self._max_blocks)
        self._max_pages = max_rows // PAGE_TOKENS
        self._words: Array = device.zeros((RebuildTables.words(layers * self._max_blocks),), np.int32)
        self._graphs: Graphs[RebuildShape] = Graphs(device)

    @property
    def products(self) -> dict[ProductKind, Array]:
        return {"q": self._q, "kv": self._kv}

    def weight(self, kind: ProductKind, block: DeviceBlock) -> Array:
        return block.qkv[_Q if kind == "q" else _KV].dense

    def prompt(self, layer: Layer, x: Array, y: Array, tokens: Tokens, q: Array) -> None:
        rows, model, arena, mode = q.shape[0], self._model, self._arena, self._layout.mode
        store_hidden(
            self._device, mode, x[:rows], tokens.slots, tokens.positions, arena.places, layer.index, arena.pool,
            self._layout.per_slab, layer.block.attn_norm, self._y[:rows], eps=model.spec.norm_eps,
        )  # fmt: skip
        self._multiply("q", y, layer.block.qkv[_Q].dense, self._q, rows)
        rope_queries(
            self._device, self._q[:rows], tokens.slots, tokens.positions, model.cos, model.sin, q,
            pairing=model.spec.rope_pairing,
        )  # fmt: skip
        self._keys_values(layer.block, rows, tokens, arena.tables, layer.index)

    def decode(self, layer: Layer, stream: DecodeStream, rows: Tokens, q: Array) -> Array | None:
        count, model = q.shape[0], self._model
        queries, keys_values = (linear.packed for linear in layer.block.qkv)
        given = stream.fold(layer.before_attention, queries, alone=True)
        y, columns = self._step_y[:count], takes_columns(self._device, keys_values, count)
        round_hidden(
            self._device, self._layout.mode, stream.x, layer.block.attn_norm, y, eps=model.spec.norm_eps,
            columns=columns, dependent=True,
        )  # fmt: skip
        self._step(layer, rows, queries, given.y, given.columns, q)
        self._step(layer, rows, keys_values, y, columns, None)
        return None

    def capture_common(self, loops: int) -> None:
        """Graphs of short prefixes made active."""
        for blocks in range(1, min(_COMMON_BLOCKS, self._max_blocks) + 1):
            shape = RebuildShape(loops, blocks)
            self._graphs.capture(shape, partial(self._launch_rebuild, shape))

    def rebuild(self, work: Rebuild, staging: Staging) -> None:
        """K and V of a prefix's stored pages."""
        staging.copy_to(self._words, work.words)
        self._graphs.run(work.shape, partial(self._launch_rebuild, work.shape))

    def _launch_rebuild(self, shape: RebuildShape) -> None:
        spec = self._model.spec
        tables = RebuildTables.cut(self._words, shape.num_pages(spec))
        write_words(self._device, self._arena.words, tables.named)
        for block, batch in shape.batches(spec, self._max_pages):
            rows, weights = (batch.stop - batch.start) * PAGE_TOKENS, self._model.blocks[block]
            tokens = Tokens(tables.slots[batch].reshape(rows), tables.positions[batch].reshape(rows))
            self._load(weights, tables.places[batch], rows)
            self._keys_values(weights, rows, tokens, self._layer_tables, 0)

    def clone(self, triples: Array) -> None:
        """(source, target, tokens) [n, 3] places."""
        clone_hidden(
            self._device, self._layout.mode, self._arena.pool, self._layout.per_slab, triples,
            d_model=self._model.spec.d_model,
        )  # fmt: skip

    def rehearse(self, place: Array, triple: Array) -> None:
        """Launch what only stored pages need, for `Device.prepare`."""
        self.clone(triple)
        self._load(next(iter(self._model.blocks.values())), place, PAGE_TOKENS)

    def _step(
        self, layer: Layer, rows: Tokens, packed: PackedLinear, y: Array | Fold, columns: bool, q: Array | None
    ) -> None:
        """q, or without it K and V, of a step's rows."""
        model, arena, num_kv_heads = self._model, self._arena, self._model.spec.n_kv_heads if q is None else 0
        linear_qkv(
            self._device, packed, y, rows.positions, rows.slots, arena.tables, layer.index, arena.pool, model.cos,
            model.sin, q, num_kv_heads=num_kv_heads, columns=columns, dependent=True,
        )  # fmt: skip

    def _load(self, block: DeviceBlock, places: Array, rows: int) -> None:
        load_hidden(
            self._device, self._layout.mode, self._arena.pool, self._layout.per_slab, places, block.attn_norm,
            self._y[:rows], eps=self._model.spec.norm_eps,
        )  # fmt: skip

    def _keys_values(self, block: DeviceBlock, rows: int, tokens: Tokens, tables: Array, layer: int) -> None:
        """From y' to pages."""
        spec = self._model.spec
        self._multiply("kv", self._y, block.qkv[_KV].dense, self._kv, rows)
        rope_keys_values(
            self._device, self._kv[:rows], tokens.slots, tokens.positions, self._model.cos, self._model.sin, tables,
            layer, self._arena.pool, num_kv_heads=spec.n_kv_heads, pairing=spec.rope_pairing,
        )  # fmt: skip
