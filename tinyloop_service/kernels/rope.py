"""Prompt tokens' q, K and V out of one product: turns q and K, stores K and V in pages; launches kernels_cu/rope.cu.

In: the product's rows and where each token belongs.  Out: `q` and the pages are written on the device's stream.
Refuses arrays of another shape or type.  Not checked, for that would be a read: that pages, slots and positions exist.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from tinyloop_service.kernels.decode_attention import PAGE_TOKENS
from tinyloop_service.kernels.device import Array, Device
from tinyloop_service.kernels.match import KernelArgumentError, match

Pairing = Literal["half", "interleaved"]
PAIRINGS: tuple[Pairing, ...] = ("half", "interleaved")
_THREADS = 256
_HEADS_PER_BLOCK = 4


def rope(
    device: Device,
    qkv: Array,
    token_slot: Array,
    token_position: Array,
    cos: Array,
    sin: Array,
    tables: Array,
    layer: int,
    pool: Array,
    q: Array,
    *,
    num_kv_heads: int,
    pairing: Pairing,
    dependent: bool = False,
) -> None:
    """q = turned q of every token; K turned and V as they are go to page tables[slot, layer, position / 64].

    qkv              float16 [T, (H + 2G)·D]    q heads, K heads, V heads; G = num_kv_heads
    token_slot       int32 [T]                  negative: a padding token, for which nothing is written
    token_position   int32 [T]                  absolute
    cos, sin         float32 [max_seq_len, D/2]
    tables           int32 [slots, max_layers, max_blocks]
    pool             float16 [pages, 2·G·64·D]
    q                float16 [T, H·D]
    """
    sizes = match(
        "rope",
        qkv=(qkv, "float16", "T, C"),
        token_slot=(token_slot, "int32", "T"),
        token_position=(token_position, "int32", "T"),
        cos=(cos, "float32", "M, F"),
        sin=(sin, "float32", "M, F"),
        tables=(tables, "int32", "S, L, B"),
        pool=(pool, "float16", "P, E"),
        q=(q, "float16", "T, Q"),
    )
    head_dim = 2 * sizes["F"]
    _check(sizes, head_dim, num_kv_heads, layer)
    heads = sizes["Q"] // head_dim
    kernel = device.kernel("rope", "rope", TL_HEAD_DIM=head_dim, TL_INTERLEAVED=PAIRINGS.index(pairing))
    tokens_per_block = _THREADS * 16 // head_dim  # a thread turns 8 pairs
    grid = (
        -(-sizes["T"] // tokens_per_block),
        -(-(heads + num_kv_heads) // _HEADS_PER_BLOCK) + num_kv_heads,  # groups of q and K heads, then V heads
        1,
    )
    arguments = (
        *(qkv, token_slot, token_position, cos, sin, tables, pool, q),
        *map(np.int32, (layer, sizes["T"], heads, num_kv_heads, sizes["L"], sizes["B"])),
    )
    device.launch(kernel, grid, _THREADS, arguments, dependent=dependent)


def _check(sizes: dict[str, int], head_dim: int, num_kv_heads: int, layer: int) -> None:
    if head_dim not in (64, 128):
        raise KernelArgumentError(f"rope: head_dim is {head_dim}, expected 64 or 128")
    if num_kv_heads < 1 or sizes["C"] != sizes["Q"] + 2 * num_kv_heads * head_dim or sizes["Q"] % head_dim:
        raise KernelArgumentError(
            f"rope: qkv has {sizes['C']} columns, expected (H + 2G)·D = {sizes['Q'] + 2 * num_kv_heads * head_dim}"
        )
    if sizes["E"] != 2 * num_kv_heads * PAGE_TOKENS * head_dim:
        page = 2 * num_kv_heads * PAGE_TOKENS * head_dim
        raise KernelArgumentError(f"rope: a page has {sizes['E']} elements, expected 2·G·64·D = {page}")
    if not 0 <= layer < sizes["L"]:
        raise KernelArgumentError(f"rope: layer is {layer}, the tables have {sizes['L']}")
