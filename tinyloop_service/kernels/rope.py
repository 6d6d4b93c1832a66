"""Prompt tokens' q, K and V out of one product: turns q and K, stores K and V in pages; launches kernels_cu/rope.cu.

In: the product's rows and where each token belongs.  Out: `q` and the pages are written on the device's stream.
Refuses arrays of another shape or type.  Not checked, for that would be a read: that pages, slots and positions exist.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from tinyloop_service.kernels.decode_attention import PAGE_TOKENS, check_heads
from tinyloop_service.kernels.device import Argument, Array, Device
from tinyloop_service.kernels.match import match

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

    qkv              float16 [T, (H + 2G)·D]    q heads, K heads, V heads; G = num_kv_heads
    token_slot       int32 [T]                  negative: a padding token, for which nothing is written
    token_position   int32 [T]                  absolute
    cos, sin         float32 [max_seq_len, D/2]
    tables           int32 [slots, max_layers, max_blocks]
    pool             float16 [pages, 2·G·64·D]
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
        pool=(pool, "float16", f"P, 2*G*{PAGE_TOKENS}*D"),
        q=(q, "float16", "T, H*D"),
    )
    check_heads("rope", sizes, layer)
    heads = sizes["H"]
    kernel = device.kernel("rope", "rope", TL_HEAD_DIM=head_dim, TL_INTERLEAVED=PAIRINGS.index(pairing))
    groups = -(-(heads + num_kv_heads) // _HEADS)
    turning = sizes["T"] * groups * head_dim // 16  # threads: each turns 8 pairs of a token in a group of heads
    grid = (-(-sizes["T"] // _TOKENS) * num_kv_heads + -(-turning // _THREADS), 1, 1)
    arguments: tuple[Argument, ...] = (
        *(qkv, token_slot, token_position, cos, sin, tables, pool, q),
        *map(np.int32, (layer, sizes["T"], heads, num_kv_heads, sizes["L"], sizes["B"])),
    )
    device.launch(kernel, grid, _THREADS, arguments, dependent=dependent)
