"""Decode linears, 1 to 256 rows: launches kernels_cu/linear.cu, and linear_wide.cu for many rows on sm_90.

In: packed weights and fp16 activations.  Out: q and pages, h, partials or logits, written on the device's stream.
Bits of a row depend on that row and the weights alone.  Refuses arrays of another shape or type; how a launch is cut
into blocks is decided in cut.py and linear_wide.py, or given as `cut` (benchmarks and tests).  Not checked, for that
would be a read: that pages, slots and positions exist.

`dependent`: weights, gains, positions, slots, tables and angles are read while the kernel before still runs; they must
be older than that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tinyloop_service.kernels.columns import fit_columns, require_columns
from tinyloop_service.kernels.cut import MOST_ROWS, Cut, Product, block_rows, choose_cut, num_row_blocks
from tinyloop_service.kernels.device import Argument, Array, Device
from tinyloop_service.kernels.linear_wide import WideCut, choose_wide_cut
from tinyloop_service.kernels.match import KernelArgumentError, match
from tinyloop_service.kernels.norm import FOLD_ROWS, Fold, num_chunks
from tinyloop_service.kernels.pack import TILE_ROWS, LinearKind, PackedLinear
from tinyloop_service.kernels.page_layout import PAGE_TOKENS

AnyCut = Cut | WideCut
THREADS = 256
WIDE_ARCH = "sm_90"  # whose warpgroups linear_wide.cu needs
_QKV, _GATE_UP, _PARTIALS, _LOGITS = range(4)  # TL_EPILOGUE
_KINDS: tuple[tuple[LinearKind, ...], ...] = (("qkv",), ("gate_up",), ("o", "down"), ("head",))
_NO_FOLD: tuple[Argument, ...] = (*(None,) * 3, np.int32(0), *(None,) * 3, np.int32(0), None, np.float32(0))


def linear_qkv(
    device: Device,
    packed: PackedLinear,
    y: Array | Fold,
    position: Array,
    row_slot: Array,
    tables: Array,
    layer: int,
    pool: Array,
    cos: Array,
    sin: Array,
    q: Array | None,
    *,
    num_kv_heads: int,
    cut: AnyCut | None = None,
    columns: bool = False,
    dependent: bool = False,
) -> None:
    """q = rope(Wq·y); rope(Wk·y) and Wv·y go to page tables[slot, layer, position / 64], all rounded to fp16.

    Of q alone num_kv_heads is 0: no page is written, but rows without one are left out all the same.

    y          float16 [R, K], or the stream to make it of
    position   int32 [R]         absolute; −1: a padding row, for which nothing is written
    row_slot   int32 [R]         −1: likewise
    tables     int32 [slots, max_layers, max_blocks]
    pool       float16 [pages, 2·G·64·D]    G = num_kv_heads
    cos, sin   float32 [max_seq_len, D/2]
    q          float16 [R, H·D]; None of k and v alone
    """
    if not (cut or columns or isinstance(y, Fold)) and (parts := _parts(device, packed, int(y.shape[0]))):
        for rows in parts:
            inputs = y[rows], position[rows], row_slot[rows], tables, layer, pool, cos, sin
            part = None if q is None else q[rows]
            linear_qkv(device, packed, *inputs, part, num_kv_heads=num_kv_heads, dependent=dependent)
        return
    source = _Input.of("linear_qkv", y, columns)
    sizes = match(
        "linear_qkv",
        {"R": source.rows},
        position=(position, "int32", "R"),
        row_slot=(row_slot, "int32", "R"),
        tables=(tables, "int32", "S, L, B"),
        pool=(pool, "float16", "P, E"),
        cos=(cos, "float32", "M, F"),
        sin=(sin, "float32", "M, F"),
        q=(q, "float16", "R, Q"),
    )
    if num_kv_heads:
        _require("linear_qkv", "elements of a page", sizes["E"], 4 * num_kv_heads * PAGE_TOKENS * sizes["F"])
    if not 0 <= layer < sizes["L"]:
        raise KernelArgumentError(f"linear_qkv: layer is {layer}, the tables have {sizes['L']}")
    paging = (position, row_slot, tables, np.int32(layer), np.int32(sizes["L"]), np.int32(sizes["B"]), pool)
    heads = _heads(packed, sizes.get("Q", 0), num_kv_heads, 2 * sizes["F"])
    _launch(device, "linear_qkv", _QKV, packed, source, (*paging, cos, sin, q, *heads), cut, dependent)


def linear_qkv_rows(
    device: Device,
    packed: PackedLinear,
    y: Array | Fold,
    position: Array,
    kv: Array,
    cos: Array,
    sin: Array,
    q: Array,
    *,
    cut: AnyCut | None = None,
    columns: bool = False,
    dependent: bool = False,
) -> None:
    """linear_qkv, but that K and V of row r, rounded to fp16 all the same, are kv[r, 0] and kv[r, 1].

    kv   float16 [R, 2, G, D]       of padding rows nothing is written
    """
    if not (cut or columns or isinstance(y, Fold)) and (parts := _parts(device, packed, int(y.shape[0]))):
        for rows in parts:
            inputs = y[rows], position[rows], kv[rows], cos, sin, q[rows]
            linear_qkv_rows(device, packed, *inputs, dependent=dependent)
        return
    source = _Input.of("linear_qkv_rows", y, columns)
    source.defines["TL_KV_ROWS"] = 1
    sizes = match(
        "linear_qkv_rows",
        {"R": source.rows},
        position=(position, "int32", "R"),
        kv=(kv, "float16", "R, 2, G, 2*F"),
        cos=(cos, "float32", "M, F"),
        sin=(sin, "float32", "M, F"),
        q=(q, "float16", "R, Q"),
    )
    paging = (position, None, None, *(np.int32(0),) * 3, kv)
    heads = _heads(packed, sizes["Q"], sizes["G"], 2 * sizes["F"])
    _launch(device, "linear_qkv", _QKV, packed, source, (*paging, cos, sin, q, *heads), cut, dependent)


def _heads(packed: PackedLinear, q_width: int, num_kv_heads: int, head_dim: int) -> list[np.int32]:
    """What the kernel is told of heads."""
    _require("linear_qkv", "columns of q", q_width, packed.num_outputs - 2 * num_kv_heads * head_dim)
    log2_tiles = (head_dim // TILE_ROWS).bit_length() - 1
    _require("linear_qkv", "head_dim", head_dim, TILE_ROWS << max(0, log2_tiles))
    interleaved = packed.pairing == "interleaved"
    return [np.int32(n) for n in (q_width // head_dim, num_kv_heads, log2_tiles, interleaved)]


def linear_gate_up(
    device: Device,
    packed: PackedLinear,
    y: Array | Fold,
    h: Array,
    *,
    cut: AnyCut | None = None,
    columns: bool = False,
    h_columns: bool = False,
    dependent: bool = False,
) -> None:
    """h = silu(Wgate·y) · (Wup·y), rounded to fp16.   y float16 [R, K], h float16 [R, F], in columns if `h_columns`."""
    source = _Input.of("linear_gate_up", y, columns)
    sizes = match("linear_gate_up", {"R": source.rows}, h=(h, "float16", "R, F"))
    _require("linear_gate_up", "columns of h", sizes["F"], packed.num_outputs // 2)
    if h_columns:
        require_columns("linear_gate_up", "h", sizes["R"], sizes["F"])
        source.defines["TL_H_COLUMNS"] = 1
    _launch(device, "linear_gate_up", _GATE_UP, packed, source, (h,), cut, dependent)


def linear_partials(
    device: Device,
    packed: PackedLinear,
    y: Array,
    partials: Array,
    *,
    cut: AnyCut | None = None,
    columns: bool = False,
    dependent: bool = False,
) -> None:
    """Σ over C of partials = W·y for "o" and "down"; fold_norm adds them up.

    y float16 [R, K], partials float32 [C, R, N] with C = num_partials(device, packed, R).
    """
    source = _Input.of("linear_partials", y, columns)
    sizes = match("linear_partials", {"R": source.rows}, partials=(partials, "float32", "C, R, N"))
    cut = cut or cut_of(device, packed, sizes["R"])
    _require("linear_partials", "columns of partials", sizes["N"], packed.num_padded)
    _require("linear_partials", "number of partials", sizes["C"], cut.num_partials(packed.kind))
    _launch(device, "linear_partials", _PARTIALS, packed, source, (partials,), cut, dependent)


def linear_logits(
    device: Device,
    packed: PackedLinear,
    y: Array | Fold,
    logits: Array,
    *,
    cut: AnyCut | None = None,
    columns: bool = False,
    dependent: bool = False,
) -> None:
    """logits = W·y.   y float16 [R, K], logits float32 [R, V rounded up to 16]; the columns from V on are zeros."""
    source = _Input.of("linear_logits", y, columns)
    sizes = match("linear_logits", {"R": source.rows}, logits=(logits, "float32", "R, N"))
    _require("linear_logits", "columns of logits", sizes["N"], packed.num_padded)
    _launch(device, "linear_logits", _LOGITS, packed, source, (logits,), cut, dependent)


def num_partials(device: Device, packed: PackedLinear, rows: int) -> int:
    """C of linear_partials for this many rows: 1, 2, 4 or 8."""
    return cut_of(device, packed, rows).num_partials(packed.kind)


def takes_columns(device: Device, packed: PackedLinear, rows: int) -> bool:
    """Whether this linear's input of so many rows can be, and had better be, in columns."""
    return fit_columns(rows) and isinstance(_choose(device, product_of(packed, rows)), WideCut)


def gives_columns(device: Device, gate_up: PackedLinear, down: PackedLinear, rows: int) -> bool:
    """Whether h of so many rows had better be in columns: `down` takes it so, and `gate_up` can write it."""
    writer = _choose(device, product_of(gate_up, rows))
    return takes_columns(device, down, rows) and isinstance(writer, WideCut)


def cut_of(device: Device, packed: PackedLinear, rows: int) -> AnyCut:
    """How a launch over this many rows is cut."""
    if not 1 <= rows <= MOST_ROWS:
        raise KernelArgumentError(f"linear: {rows} rows, expected 1 to {MOST_ROWS}")
    cut = _choose(device, product_of(packed, rows))
    if cut is None:
        raise KernelArgumentError(f"linear: {rows} rows need more shared memory than {device.max_shared_bytes} bytes")
    return cut


def _choose(device: Device, product: Product) -> AnyCut | None:
    sizes = {"num_sms": device.num_sms, "limit": device.max_shared_bytes}
    wide = choose_wide_cut(product, **sizes) if device.arch == WIDE_ARCH else None
    return wide or choose_cut(product, **sizes)


def _parts(device: Device, packed: PackedLinear, rows: int) -> tuple[slice, ...]:
    """Two parts of a batch whose activations do not fit, whole tiles of rows the first; none: they fit.

    The blocks of "qkv" see all of K, which is much for the shared memory of some devices.
    """
    product = product_of(packed, rows)
    if rows <= 8 or _choose(device, product):
        return ()
    half = product.row_tiles // 2 * 8
    return slice(0, half), slice(half, None)


def product_of(packed: PackedLinear, rows: int) -> Product:
    row_blocks = num_row_blocks(rows)
    return Product(packed.kind, packed.num_tiles, packed.num_inputs, packed.group, block_rows(rows), row_blocks)


@dataclass(frozen=True, slots=True)
class _Input:
    """What a linear multiplies: y, or the stream that it makes y of."""

    rows: int
    width: int
    y: Array | None
    columns: bool
    fold: tuple[Argument, ...]
    defines: dict[str, int]

    @classmethod
    def of(cls, name: str, y: Array | Fold, columns: bool) -> _Input:
        if not isinstance(y, Fold):
            sizes = match(name, y=(y, "float16", "R, K"))
            if columns:
                require_columns(name, "y", sizes["R"], sizes["K"])
            return cls(sizes["R"], sizes["K"], y, columns, _NO_FOLD, {})
        sizes = y.check(name)
        rows, width = sizes["R"], sizes["W"]
        if rows > FOLD_ROWS:
            raise KernelArgumentError(f"{name}: {rows} rows to fold, expected at most {FOLD_ROWS}")
        defines = {"TL_FOLD_ROWS": rows, "TL_FOLD_PARTIALS": max(1, sizes["C"]), "TL_CHUNKS": num_chunks(width)}
        return cls(rows, width, None, False, y.arguments(sizes["C"]), defines)


def _launch(
    device: Device,
    name: str,
    epilogue: int,
    packed: PackedLinear,
    source: _Input,
    arguments: tuple[Argument, ...],
    cut: AnyCut | None,
    dependent: bool,
) -> None:
    kinds = _KINDS[epilogue]
    if packed.kind not in kinds:
        raise KernelArgumentError(f"{name}: packed is {packed.kind!r}, expected {' or '.join(map(repr, kinds))}")
    _require(name, "columns of y", source.width, packed.num_inputs)
    cut = cut or cut_of(device, packed, source.rows)
    product = product_of(packed, source.rows)
    sizes = [np.int32(n) for n in (source.rows, packed.num_tiles, packed.num_inputs, packed.keep)]
    inputs: tuple[Argument, ...] = (packed.weights, packed.scales, source.y, *sizes)
    if isinstance(cut, WideCut):
        if source.y is None:
            raise KernelArgumentError(f"{name}: {cut} cannot fold its input")
        stem, threads, shared_bytes = "linear_wide", cut.threads, cut.shared_bytes(product, columns=source.columns)
        defines = cut.defines(product, columns=source.columns)
    else:
        if source.columns or "TL_H_COLUMNS" in source.defines:
            raise KernelArgumentError(f"{name}: {cut} cannot read columns or write them")
        stem, threads, shared_bytes = (
            "linear",
            THREADS,
            cut.shared_bytes(product, source.defines.get("TL_FOLD_ROWS", 0)),
        )
        defines = cut.defines(product)
        inputs += source.fold if epilogue != _PARTIALS else ()
    kernel = device.kernel(stem, name, TL_EPILOGUE=epilogue, **defines, **source.defines)
    device.launch(
        kernel, cut.grid(product), threads, (*inputs, *arguments), shared_bytes=shared_bytes, dependent=dependent
    )


def _require(name: str, what: str, given: int, expected: int) -> None:
    if given != expected:
        raise KernelArgumentError(f"{name}: {what}: {given}, expected {expected}")
