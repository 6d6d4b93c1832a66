"""Blocks' inputs h, stored in place of keys and values, and the linear's input that is read of them.

In: the residual stream, or stored pages.  Out: stored pages, and y = rms(decode(encode(x))) · gain, with the same bits
whether x is stored, only rounded, or loaded; launches kernels_cu/hidden.cu.  `mode` names the coding, which is
engine/cache_modes.py's.  Refuses arrays of another shape or type.  Not checked, for that would be a read: that places,
slots and positions exist.

A stored page lies in a slab of the pool, per_slab of them: place p is page p % per_slab of slab p // per_slab.
"""

from __future__ import annotations

import numpy as np

from tinyloop_service.kernels.columns import require_columns
from tinyloop_service.kernels.cut import block_rows
from tinyloop_service.kernels.device import Array, Device
from tinyloop_service.kernels.match import match, require
from tinyloop_service.types import CacheMode

_THREADS, _PAGE_TOKENS, _GROUP = 256, 64, 64
_CODINGS = (CacheMode.H_FP16, CacheMode.H_INT8, CacheMode.H_INT4)  # by TL_CODING
_CHANNEL_BYTES = {CacheMode.H_FP16: 128, CacheMode.H_INT8: 68, CacheMode.H_INT4: 36}  # of a stored page, a channel
_LEVEL_BYTES = {
    CacheMode.H_FP16: 128,
    CacheMode.H_INT8: 64,
    CacheMode.H_INT4: 32,
}  # likewise, without scale and minimum
_CHUNK = 2048  # channels
_LOAD_ROWS = 4  # of a block of load_hidden, where a row is one chunk
_PART = 16384  # bytes that a block of clone_hidden copies
_MOST_TRIPLES = 65535  # of a launch: they are along y, where a grid is no longer


def store_hidden(
    device: Device,
    mode: CacheMode,
    x: Array,
    token_slot: Array,
    token_position: Array,
    places: Array,
    layer: int,
    pool: Array,
    per_slab: int,
    gain: Array,
    y: Array,
    *,
    eps: float,
    dependent: bool = False,
) -> None:
    """x goes to place places[slot, layer, position / 64], and y follows from what is read there.

    x                float32 [T, d]             d a multiple of 64; h-fp16: of 8
    token_slot       int32 [T]                  negative: a token that is not stored; its y is written all the same
    token_position   int32 [T]                  absolute
    places           int32 [slots, max_layers, max_blocks]    −1: a block that is not stored
    pool             float16 [slabs, E], seen as bytes
    gain             float16 [d]
    y                float16 [T, d]
    """
    sizes = match(
        "store_hidden",
        x=(x, "float32", "T, d"),
        token_slot=(token_slot, "int32", "T"),
        token_position=(token_position, "int32", "T"),
        places=(places, "int32", "S, L, B"),
        pool=(pool, "float16", "N, E"),
        gain=(gain, "float16", "d"),
        y=(y, "float16", "T, d"),
    )
    slabs = _slabs("store_hidden", mode, sizes, per_slab)
    require("store_hidden", 0 <= layer < sizes["L"], f"layer is {layer}, the places have {sizes['L']}")
    kernel = device.kernel("hidden", "store_hidden", **_defines(mode, sizes["d"]))
    table = token_slot, token_position, places, np.int32(layer), np.int32(sizes["L"]), np.int32(sizes["B"])
    arguments = x, *table, pool, *slabs, gain, *_norm(eps, sizes["d"]), y, np.int32(sizes["d"])
    device.launch(kernel, (sizes["T"], 1, 1), _THREADS, arguments, dependent=dependent)


def round_hidden(
    device: Device,
    mode: CacheMode,
    x: Array,
    gain: Array,
    y: Array,
    *,
    eps: float,
    columns: bool = False,
    dependent: bool = False,
) -> None:
    """y as of store_hidden, and nothing is stored.

    x float32 [R, d], gain float16 [d], y float16 [R, d]; with `columns` the same memory in the order of
    kernels_cu/include/columns.cuh, if R fits (columns.py).
    """
    sizes = match("round_hidden", x=(x, "float32", "R, d"), gain=(gain, "float16", "d"), y=(y, "float16", "R, d"))
    _check_width("round_hidden", mode, sizes["d"])
    if columns:
        require_columns("round_hidden", "y", sizes["R"], sizes["d"])
    kernel = device.kernel("hidden", "round_hidden", **_defines(mode, sizes["d"]), TL_COLUMNS=int(columns))
    arguments = x, gain, *_norm(eps, sizes["d"]), y, np.int32(sizes["d"]), np.int32(block_rows(sizes["R"]))
    device.launch(kernel, (sizes["R"], 1, 1), _THREADS, arguments, dependent=dependent)


def load_hidden(
    device: Device, mode: CacheMode, pool: Array, per_slab: int, pages: Array, gain: Array, y: Array, *, eps: float
) -> None:
    """y of every token of stored pages, whoever wrote them; of tokens that nobody wrote it means nothing.

    pool float16 [slabs, E], pages int32 [n] (places), gain float16 [d], y float16 [n·64, d].
    """
    sizes = match(
        "load_hidden",
        pool=(pool, "float16", "N, E"),
        pages=(pages, "int32", "n"),
        gain=(gain, "float16", "d"),
        y=(y, "float16", f"n*{_PAGE_TOKENS}, d"),
    )
    slabs = _slabs("load_hidden", mode, sizes, per_slab)
    defines = _defines(mode, sizes["d"])
    rows = max(1, _LOAD_ROWS // defines["TL_CHUNKS"])
    kernel = device.kernel("hidden", "load_hidden", **defines)
    arguments = pool, *slabs, pages, gain, *_norm(eps, sizes["d"]), y, np.int32(sizes["d"])
    device.launch(kernel, (sizes["n"] * _PAGE_TOKENS // rows, 1, 1), _THREADS, arguments)


def clone_hidden(device: Device, mode: CacheMode, pool: Array, per_slab: int, triples: Array, *, d_model: int) -> None:
    """Copies the first tokens of stored pages, in one launch for up to 65535 of them.

    pool float16 [slabs, E], triples int32 [n, 3]: source place, target place, num_tokens ≤ 64.  No target is a source.
    """
    sizes = match("clone_hidden", {"d": d_model}, pool=(pool, "float16", "N, E"), triples=(triples, "int32", "n, 3"))
    slabs = _slabs("clone_hidden", mode, sizes, per_slab)
    kernel = device.kernel("hidden", "clone_hidden", **_defines(mode, d_model))
    parts = -(-d_model * _LEVEL_BYTES[mode] // _PART)
    for first in range(0, sizes["n"], _MOST_TRIPLES):
        part = triples[first : first + _MOST_TRIPLES]
        arguments = pool, *slabs, part, np.int32(d_model)
        device.launch(kernel, (parts, part.shape[0], 1), _THREADS, arguments)


def _slabs(
    operation: str, mode: CacheMode, sizes: dict[str, int], per_slab: int
) -> tuple[np.int32, np.int32, np.int32]:
    """The kernels' slab_bytes, per_slab and page_bytes; E and d checked."""
    _check_width(operation, mode, sizes["d"])
    slab_bytes, page_bytes = 2 * sizes["E"], sizes["d"] * _CHANNEL_BYTES[mode]
    require(operation, slab_bytes % 16 == 0, f"a slab is {slab_bytes} bytes, expected a multiple of 16")
    most = slab_bytes // page_bytes
    require(
        operation, 1 <= per_slab <= most, f"per_slab is {per_slab}, a slab holds {most} pages of {page_bytes} bytes"
    )
    return np.int32(slab_bytes), np.int32(per_slab), np.int32(page_bytes)


def _check_width(operation: str, mode: CacheMode, width: int) -> None:
    require(operation, mode in _CODINGS, f"mode is {mode.value}, expected one of {[m.value for m in _CODINGS]}")
    multiple = 8 if mode is CacheMode.H_FP16 else _GROUP
    require(operation, width % multiple == 0, f"d is {width}, expected a multiple of {multiple} in {mode.value}")


def _norm(eps: float, width: int) -> tuple[np.float32, np.float32]:
    return np.float32(eps), np.float32(1) / np.float32(width)


def _defines(mode: CacheMode, width: int) -> dict[str, int]:
    return {"TL_CODING": _CODINGS.index(mode), "TL_CHUNKS": -(-width // _CHUNK)}
