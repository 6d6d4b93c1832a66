"""Attention of one token per row against the pages of its sequence: launches kernels_cu/decode_attention.cu; where a
K/V head has more queries than fill a tile, decode_attention_many.cu, or with quads decode_attention_wide.cu.

In: queries, pages, and the work list as device arrays.  Out: `a` is written on the device's stream.  Nothing is read on
the host, and the grid depends on shapes alone: a captured launch stays right when the arrays' contents change.
Refuses arrays of another shape or type.  Not checked, for that would be a read: that pages, rows and slots exist.
"""

from __future__ import annotations

import math

import numpy as np

from tinyloop_service.kernels.device import Argument, Array, Device, Kernel
from tinyloop_service.kernels.linear import WIDE_ARCH
from tinyloop_service.kernels.match import match, require
from tinyloop_service.kernels.page_layout import PAGE_TOKENS, expected_pool, is_int8

MOST_ROWS = 256
MOST_ENTRIES = 64  # of an item
MOST_QUERIES_PER_KV = 16  # they share one tile of queries
_TILE_QUERIES = 16
_THREADS = 128
_BLOCKS_PER_SM, _WIDE_BLOCKS_PER_SM = 4, 2  # as many as registers allow
_PAGES_PER_SM, _INT8_PAGES_PER_SM = 2.4, 2.5  # of a K/V head, above which quads pay; kernels_cu/README.md has figures
_MERGE_DIMS = 64  # of a warp
_FEW_ROWS = 16


def decode_attention(
    device: Device,
    q: Array,
    pool: Array,
    newest: Array | None,
    tables: Array,
    layer: int,
    items: Array,
    num_items: Array,
    entries: Array,
    row_items: Array,
    position: Array,
    window: Array,
    partial_o: Array,
    partial_ml: Array,
    a: Array,
    *,
    num_kv_heads: int,
    num_blocks: int | None = None,
    many: bool | None = None,
    quads: bool = False,
    dependent: bool = False,
) -> None:
    """a[r, h] = softmax(q[r, h]·K/√D)·V over the positions that row r sees.

    q, a        float16 [R, H·D]                     R ≤ 256
    pool        float16 [pages, 2·G·64·D]            G = num_kv_heads
                int8 [pages, 64·G·(2·D + 4)]         likewise (page_layout.py)
    newest      float16 [R, 2, G, D]                 int8: K and V of the rows' tokens, as `linear_qkv_rows` leaves
                                                     them; fp16: None, they are in their pages
    tables      int32 [slots, max_layers, max_blocks]
    items       int32 [max_items, 6]                 slot whose table names the page, block, first entry, 1..64 entries;
                                                     another slot, whose page of the block has the first n tokens too, n
    num_items   int32 [3]                        items; those of more than one entry, which come first; quads among
                                                 these, again first: items of four pages, of which all rows see all
    entries     int32 [max_entries, 2]               row, ordinal of the split among the row's, ascending from 0
    row_items   int32 [R]                            splits of the row; 0 for a padding row, whose `a` is not written
    position    int32 [R]                            of the row's token
    window      int32 [R]                            0: everything is seen
    partial_o   float32 [R, H, max_blocks, D], partial_ml float32 [R, H, max_blocks, 2]: scratch

    A split is a page or a quad; one that more rows read than an item has entries is several items.  Items that many
    rows share come first: a block takes items in order, and shared ones cost most.  There may be quads, of blocks 4n
    to 4n + 3, where `quads` says so; they change no bit.  An item whose n is not 0 may be read through the other slot's
    page, which must be the same bit for bit up to there; those of one such page belong side by side, behind the shared
    ones.  The page of a row's token has one entry; in int8 the token is coded and put there.  With `dependent`,
    positions and all but the newest tokens' K and V must have been written before a kernel of the stream that was not
    launched as a dependent one.  For tests: `num_blocks` along the items, and the kernel for `many` rows for few as
    well; bits are the same.
    """
    sizes = match(
        "decode_attention",
        {"G": num_kv_heads},
        partial_o=(partial_o, "float32", "R, H, B, D"),
        partial_ml=(partial_ml, "float32", "R, H, B, 2"),
        q=(q, "float16", "R, H*D"),
        pool=expected_pool(pool),
        newest=(newest, "float16", "R, 2, G, D"),
        tables=(tables, "int32", "S, L, B"),
        items=(items, "int32", "I, 6"),
        num_items=(num_items, "int32", "3"),
        entries=(entries, "int32", "N, 2"),
        row_items=(row_items, "int32", "R"),
        position=(position, "int32", "R"),
        window=(window, "int32", "R"),
        a=(a, "float16", "R, H*D"),
    )
    rows, heads, head_dim, blocks = (sizes[name] for name in "RHDB")
    check_heads("decode_attention", sizes, layer)
    given = "not given" if newest is None else "given"
    require("decode_attention", (newest is None) != is_int8(pool), f"newest is {given}, pool is {pool.dtype}")
    require("decode_attention", rows <= MOST_ROWS, f"{rows} rows, at most {MOST_ROWS} are possible")
    defines = attention_defines(pool, head_dim, heads // num_kv_heads)
    many = _is_many(rows, heads, num_kv_heads) or bool(many)
    require("decode_attention", not quads or has_quads(device), f"there are no quads on {device.arch}")
    at_once = max(1, (_WIDE_BLOCKS_PER_SM if quads else _BLOCKS_PER_SM) * device.num_sms // num_kv_heads)
    # Few rows: room for one wave of shared pages, and a block for each row's own.  Many: what is left over goes to the
    # blocks that were given least.
    num_blocks = min(sizes["I"], num_blocks or (at_once if many or quads else at_once + rows))
    arguments: tuple[Argument, ...] = (
        *(q, pool, newest, tables, items, num_items, entries, position, window, partial_o, partial_ml),
        *map(np.int32, (layer * blocks, sizes["L"] * blocks, rows, heads, num_kv_heads, blocks)),
        softmax_scale(head_dim),
    )
    stem = "decode_attention_wide" if quads else "decode_attention_many" if many else "decode_attention"
    kernel = device.kernel(stem, "decode_attention", **defines)
    shared = _quad_bytes(head_dim, is_int8(pool)) if quads else 0
    grid = num_kv_heads, num_blocks, 1
    device.launch(kernel, grid, _THREADS, arguments, shared_bytes=shared, dependent=dependent)
    merge = device.kernel("decode_attention", "decode_attention_merge", **defines)
    _launch_merge(device, merge, row_items, partial_o, partial_ml, a, dependent)


def has_quads(device: Device) -> bool:
    """Whether items may be quads on this device."""
    return device.arch == WIDE_ARCH


def takes_quads(device: Device, rows: int, items: int, heads: int, num_kv_heads: int, *, int8: bool) -> bool:
    """Whether rows of which several read pages, which are so many items, had better be given quads: there are enough to
    go round, and without them blocks would come in waves."""
    enough = items * num_kv_heads > (_INT8_PAGES_PER_SM if int8 else _PAGES_PER_SM) * device.num_sms
    return has_quads(device) and _is_many(rows, heads, num_kv_heads) and enough


def _quad_bytes(head_dim: int, int8: bool) -> int:
    """Of shared memory: QuadShared of quad_pages.cuh."""
    if not int8:  # K and V of two pages
        return 2 * 4 * PAGE_TOKENS * head_dim
    return 4 * (1024 + PAGE_TOKENS * (128 + head_dim))  # scales, rows of K, V


def _is_many(rows: int, heads: int, num_kv_heads: int) -> bool:
    return rows * heads > _TILE_QUERIES * num_kv_heads


def _launch_merge(
    device: Device, merge: Kernel, row_items: Array, partial_o: Array, partial_ml: Array, a: Array, dependent: bool
) -> None:
    """Each row's splits, in ascending order, into `a`."""
    rows, heads, blocks, head_dim = partial_o.shape
    together = 4 if rows > _FEW_ROWS else 1  # heads of a block: launching many small blocks takes longer than they do
    grid, threads = (rows, -(-heads // together), 1), 32 * head_dim // _MERGE_DIMS * together
    arguments = (row_items, partial_o, partial_ml, a, np.int32(heads), np.int32(blocks))
    device.launch(merge, grid, threads, arguments, dependent=dependent)


def attention_defines(pool: Array, head_dim: int, queries_per_kv: int) -> dict[str, int]:
    """What tells the kernels how pages store K and V, and how many heads share them."""
    defines = {"TL_HEAD_DIM": head_dim, "TL_QUERIES_PER_KV": queries_per_kv}
    return {**defines, "TL_INT8": 1} if is_int8(pool) else defines


def softmax_scale(head_dim: int) -> np.float32:
    """From a product of q and K to an exponent of 2."""
    return np.float32(math.log2(math.e) / math.sqrt(head_dim))


def check_heads(kernel: str, sizes: dict[str, int], layer: int) -> None:
    """What shapes alone do not say of heads H, K/V heads G, head_dim D and layers L."""
    heads, kv_heads = sizes["H"], sizes["G"]
    require(kernel, sizes["D"] in (64, 128), f"head_dim is {sizes['D']}, expected 64 or 128")
    require(
        kernel,
        heads % kv_heads == 0 and heads // kv_heads <= MOST_QUERIES_PER_KV,
        f"{heads} heads for {kv_heads} K/V heads, expected 1 to {MOST_QUERIES_PER_KV} for each",
    )
    require(kernel, 0 <= layer < sizes["L"], f"layer is {layer}, the tables have {sizes['L']}")
