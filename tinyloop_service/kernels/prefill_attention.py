"""Causal attention of prompt tokens against the pages of their sequences: launches kernels_cu/prefill_attention.cu, and
on sm_90 prefill_attention_wide.cu.

In: queries, pages, and tiles of queries as device arrays.  Out: `a` is written on the device's stream.  Refuses arrays
of another shape or type.  Not checked, for that would be a read: that pages, rows and slots exist.
"""

from __future__ import annotations

import numpy as np

from tinyloop_service.kernels.decode_attention import attention_defines, check_heads, softmax_scale
from tinyloop_service.kernels.device import Argument, Array, Device
from tinyloop_service.kernels.linear import WIDE_ARCH
from tinyloop_service.kernels.match import match
from tinyloop_service.kernels.page_layout import PAGE_TOKENS, expected_pool, is_int8

TILE_ROWS = 64  # most queries of a tile
_THREADS = 128
_STAGES, _WIDE_STAGES, _WIDE_INT8_STAGES = 2, 3, 2  # of fp16 K and V in shared memory
_OCTETS_APART = PAGE_TOKENS // 8 * 32  # bytes, of a stage


def prefill_attention(
    device: Device,
    q: Array,
    pool: Array,
    tables: Array,
    layer: int,
    tiles: Array,
    a: Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    token_slot: Array | None = None,
    token_position: Array | None = None,
    dependent: bool = False,
) -> None:
    """a[i, h] = softmax(q[i, h]·K/√D)·V over the positions that token i sees, its own included.

    q, a     float16 [T, H·D]                   H = num_heads
    pool     float16 [pages, 2·G·64·D]          G = num_kv_heads; the tokens' own K and V are in it already
             int8 [pages, 64·G·(2·D + 4)]       likewise (page_layout.py)
    tables   int32 [slots, max_layers, max_blocks]
    tiles    int32 [tiles, 6]                   slot, first row of q, 0..64 rows, position of the first, window, shared
    token_slot, token_position   int32 [T]      of each row; for tiles with shared > 0

    A tile with shared = 0 is neighbouring tokens of one sequence.  One with shared > 0 is tokens of several sequences,
    one sequence after the other, whose tables name the same pages for the first `shared` blocks and whose tokens all
    come later: short suffixes off one prefix read it together.  Either way a token's bits are the same.

    Every tile is launched: pass a view of as many as there are.  Rows of q that are in no tile are not written.
    A sequence's tiles come in order of position: blocks start with the last ones, which have most pages.
    """
    head_dim = q.shape[-1] // num_heads
    sizes = match(
        "prefill_attention",
        {"H": num_heads, "G": num_kv_heads, "D": head_dim},
        q=(q, "float16", "T, H*D"),
        pool=expected_pool(pool),
        tables=(tables, "int32", "S, L, B"),
        tiles=(tiles, "int32", "N, 6"),
        token_slot=(token_slot, "int32", "T"),
        token_position=(token_position, "int32", "T"),
        a=(a, "float16", "T, H*D"),
    )
    check_heads("prefill_attention", sizes, layer)
    wide = device.arch == WIDE_ARCH
    stem = "prefill_attention_wide" if wide else "prefill_attention"
    defines = attention_defines(pool, head_dim, num_heads // num_kv_heads)
    kernel = device.kernel(stem, "prefill_attention", **defines)
    blocks, num_tiles = sizes["B"], sizes["N"]
    arguments: tuple[Argument, ...] = (
        *(q, pool, tables, tiles, token_slot, token_position, a),
        *map(np.int32, (layer * blocks, sizes["L"] * blocks, num_tiles, num_heads, num_kv_heads, device.num_sms)),
        softmax_scale(head_dim),
    )
    device.launch(
        kernel,
        (num_heads * num_tiles, 1, 1),
        _THREADS,
        arguments,
        shared_bytes=_shared_bytes(pool, head_dim, wide),
        dependent=dependent,
    )


def _shared_bytes(pool: Array, head_dim: int, wide: bool) -> int:
    """K and V of a head in some pages, in int8 with their scales; the rows' slots and positions.  Unless `wide`: what
    lies between octets of fp16, and in int8 a page as it is stored."""
    scales = 4 if is_int8(pool) else 0  # bytes of a token
    token_bytes, rows = 4 * head_dim + scales, 2 * 4 * TILE_ROWS
    if wide:
        return (_WIDE_INT8_STAGES if scales else _WIDE_STAGES) * PAGE_TOKENS * token_bytes + rows
    arrival, stages = (2 * head_dim + scales, 1) if scales else (0, _STAGES)
    return PAGE_TOKENS * (arrival + stages * token_bytes) + stages * _OCTETS_APART + rows
