"""Prompt tokens' q, K and V out of products: turns q and K, stores K and V in pages; launches kernels_cu/rope.cu, and
rope_int8.cu for int8 pages.

All three come out of one product, or q out of one and K and V out of another: the bits are the same.

In: the product's rows and where each token belongs.  Out: `q` and the pages are written on the device's stream.
Refuses arrays of another shape or type.  Not checked, for that would be a read: that pages, slots and positions exist.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from tinyloop_service.kernels.decode_attention import check_heads
from tinyloop_service.kernels.device import Argument, Array, Device
from tinyloop_service.kernels.match import match, require
from tinyloop_service.kernels.page_layout import PAGE_TOKENS, expected_pool, is_int8

Pairing = Literal["half", "interleaved"]
PAIRINGS: tuple[Pairing, ...] = ("half", "interleaved")
_THREADS = 256
_TOKENS, _HEADS = 64, 4  # whose V a block transposes; that a thread turns


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

    Into int8 pages they go coded: K from the fp32 values of its rotation, V from fp16.

    qkv              float16 [T, (H + 2G)·D]    q heads, K heads, V heads; G = num_kv_heads
    token_slot       int32 [T]                  negative: a padding token, for which nothing is written
    token_position   int32 [T]                  absolute
    cos, sin         float32 [max_seq_len, D/2]
    tables           int32 [slots, max_layers, max_blocks]
    pool             float16 [pages, 2·G·64·D], or int8 [pages, 64·G·(2·D + 4)]
    q                float16 [T, H·D]
    """
    head_dim = 2 * cos.shape[-1]
    sizes = match(
        "rope",
        {"G": num_kv_heads, "D": head_dim, "H": q.shape[-1] // head_dim},
        qkv=(qkv, "float16", "T, (H + 2*G)*D"),
        token_slot=(token_slot, "int32", "T"),
        token_position=(token_position, "int32", "T"),
        cos=(cos, "float32", "M, D/2"),
        sin=(sin, "float32", "M, D/2"),
        tables=(tables, "int32", "S, L, B"),
        pool=expected_pool(pool),
        q=(q, "float16", "T, H*D"),
    )
    check_heads("rope", sizes, layer)
    arrays = qkv, token_slot, token_position, cos, sin, tables, pool, q
    _launch(device, arrays, sizes, layer, pairing, dependent, stem="rope_int8" if is_int8(pool) else "rope")


def rope_queries(
    device: Device,
    q_in: Array,
    token_slot: Array,
    token_position: Array,
    cos: Array,
    sin: Array,
    q: Array,
    *,
    pairing: Pairing,
    dependent: bool = False,
) -> None:
    """q = turned q_in of every token, both float16 [T, H·D]; all else as `rope`, whose bits q has."""
    sizes = match(
        "rope_queries",
        {"D": 2 * cos.shape[-1], "H": q.shape[-1] // (2 * cos.shape[-1])},
        q_in=(q_in, "float16", "T, H*D"),
        token_slot=(token_slot, "int32", "T"),
        token_position=(token_position, "int32", "T"),
        cos=(cos, "float32", "M, D/2"),
        sin=(sin, "float32", "M, D/2"),
        q=(q, "float16", "T, H*D"),
    )
    _require_head_dim("rope_queries", sizes)
    arrays = q_in, token_slot, token_position, cos, sin, None, None, q
    _launch(device, arrays, sizes | {"G": 0, "L": 0, "B": 0}, 0, pairing, dependent)


def rope_keys_values(
    device: Device,
    kv: Array,
    token_slot: Array,
    token_position: Array,
    cos: Array,
    sin: Array,
    tables: Array,
    layer: int,
    pool: Array,
    *,
    num_kv_heads: int,
    pairing: Pairing,
    dependent: bool = False,
) -> None:
    """K turned and V as they are, out of kv float16 [T, 2G·D] (K heads, V heads), go to the page; as `rope`."""
    head_dim = 2 * cos.shape[-1]
    sizes = match(
        "rope_keys_values",
        {"G": num_kv_heads, "D": head_dim, "H": 0},
        kv=(kv, "float16", "T, 2*G*D"),
        token_slot=(token_slot, "int32", "T"),
        token_position=(token_position, "int32", "T"),
        cos=(cos, "float32", "M, D/2"),
        sin=(sin, "float32", "M, D/2"),
        tables=(tables, "int32", "S, L, B"),
        pool=(pool, "float16", f"P, 2*G*{PAGE_TOKENS}*D"),
    )
    _require_head_dim("rope_keys_values", sizes)
    require("rope_keys_values", 0 <= layer < sizes["L"], f"layer is {layer}, the tables have {sizes['L']}")
    arrays = kv, token_slot, token_position, cos, sin, tables, pool, None
    _launch(device, arrays, sizes, layer, pairing, dependent)


def _require_head_dim(operation: str, sizes: dict[str, int]) -> None:
    require(operation, sizes["D"] in (64, 128), f"head_dim is {sizes['D']}, expected 64 or 128")


def _launch(
    device: Device,
    arrays: tuple[Array | None, ...],
    sizes: dict[str, int],
    layer: int,
    pairing: Pairing,
    dependent: bool,
    stem: str = "rope",
) -> None:
    """`arrays` as the kernel takes them; sizes T, H, G, D, L and B."""
    num_tokens, heads, kv_heads, head_dim = (sizes[name] for name in "THGD")
    defines = {"TL_HEAD_DIM": head_dim, "TL_INTERLEAVED": PAIRINGS.index(pairing)}
    if kv_heads == 0:
        defines["TL_QUERIES_ONLY"] = 1
    groups = -(-(heads + kv_heads) // _HEADS)
    turning = num_tokens * groups * head_dim // 16  # threads: each turns 8 pairs of a token in a group of heads
    grid = (-(-num_tokens // _TOKENS) * kv_heads + -(-turning // _THREADS), 1, 1)
    scalars = (layer, num_tokens, heads, kv_heads, sizes["L"], sizes["B"])
    arguments: tuple[Argument, ...] = (*arrays, *map(np.int32, scalars))
    device.launch(device.kernel(stem, stem, **defines), grid, _THREADS, arguments, dependent=dependent)
