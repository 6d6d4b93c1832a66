"""Weights on their way to the device: tiles for decode linears, plain fp16 for prefill; launches kernels_cu/pack.cu.

In: linears as the model file holds them, on the host.  Out: `PackedLinear`, or a float16 array, on the device.  Raw
weights are uploaded, rearranged there and let go.  Refuses linears of different kinds or inputs side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.kernels.device import Array, Device
from tinyloop_service.kernels.match import KernelArgumentError

LinearKind = Literal["qkv", "o", "gate_up", "down", "head"]
Pairing = Literal["half", "interleaved"]  # RoPE turns dimension i with i + head_dim/2, or with its neighbour
PAIRINGS: tuple[Pairing, ...] = ("half", "interleaved")

TILE_ROWS = 16
BLOCK_INPUTS = 64  # of a tile
GROUPS = (32, 64, 128)
_THREADS = 256
_LINEARS: dict[LinearKind, tuple[str, ...]] = {
    "qkv": ("q, k, v", "k, v", "q"),
    "o": ("o",),
    "gate_up": ("gate, up",),
    "down": ("down",),
    "head": ("head",),
}


@runtime_checkable
class Int4Weights(Protocol):
    @property
    def qweight(self) -> NDArray[np.uint8]:
        """(out, in/2), the even input in the low nibble; weight = (nibble − 8) · scale."""

    @property
    def scales(self) -> NDArray[np.float16]:
        """(out, in/group)."""


@runtime_checkable
class Fp16Weights(Protocol):
    @property
    def weight(self) -> NDArray[np.float16]:
        """(out, in)."""


Weights = Int4Weights | Fp16Weights


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """One or more linears over the same inputs as tiles of 16 outputs × 64 inputs (weight_tiles.cuh draws them)."""

    kind: LinearKind
    weights: Array  # uint32 [tiles, K/64, pieces, 32, 4]; pieces: 1 of INT4, 4 of fp16
    scales: Array | None  # float16 [tiles, K/group, 8, 2]; None: fp16
    num_outputs: int  # N as given; rows from there to the end of the last tile are zeros
    pairing: Pairing = "half"  # of qkv: which rows of a head a tile brings together
    keep: bool = True  # worth keeping in L2 for the next use

    @property
    def num_tiles(self) -> int:
        return int(self.weights.shape[0])

    @property
    def num_padded(self) -> int:
        """N rounded up to whole tiles: the row length of partials and logits."""
        return self.num_tiles * TILE_ROWS

    @property
    def num_inputs(self) -> int:
        return int(self.weights.shape[1]) * BLOCK_INPUTS

    @property
    def group(self) -> int:
        """Inputs that share a scale; 0: fp16 weights."""
        return 0 if self.scales is None else self.num_inputs // int(self.scales.shape[1])

    @property
    def nbytes(self) -> int:
        return int(self.weights.nbytes) + (0 if self.scales is None else int(self.scales.nbytes))


def pack_linear(
    device: Device,
    linears: Sequence[Weights],
    *,
    kind: LinearKind,
    head_dim: int = 0,
    pairing: Pairing = "half",
    keep: bool = True,
) -> PackedLinear:
    """Upload and pack q, k, v, or k, v, or q ("qkv"), gate, up ("gate_up") or a single linear ("o", "down", "head").

    head_dim and pairing matter to "qkv" alone.  keep=False for weights that one step reads only once.
    """
    if len(linears) not in {names.count(",") + 1 for names in _LINEARS[kind]}:
        expected = " or ".join(_LINEARS[kind])
        raise KernelArgumentError(f"pack_linear: {len(linears)} linears, expected {expected} for {kind}")
    raw = _join("pack_linear", linears)
    row_of = row_map(kind, [_num_outputs(linear) for linear in linears], head_dim, pairing)
    weights, scales = _pack_int4(device, raw, row_of) if isinstance(raw, _Int4) else _pack_fp16(device, raw, row_of)
    device.synchronize()  # the raw arrays may go
    return PackedLinear(kind, weights, scales, _num_outputs(raw), pairing, keep)


def dequantise(device: Device, linears: Sequence[Weights]) -> Array:
    """The rows of all `linears`, one after the other, in their own order: float16 [N, K] for prefill's products."""
    raw = _join("dequantise", linears)
    if isinstance(raw, _Fp16):
        return device.upload(raw.weight)
    num_rows, num_inputs = raw.qweight.shape[0], raw.qweight.shape[1] * 2
    weight = device.empty((num_rows, num_inputs), np.float16)
    group = num_inputs // raw.scales.shape[1]
    arrays = device.upload(raw.qweight), device.upload(raw.scales), weight
    _launch(device, "dequantise", num_rows * num_inputs // 8, *arrays, num_rows, num_inputs, group)
    device.synchronize()
    return weight


def row_map(kind: LinearKind, num_rows: Sequence[int], head_dim: int, pairing: Pairing) -> NDArray[np.int32]:
    """The raw row (of all linears joined) that becomes each tile row; −1 pads the last tile.  int32 [tiles · 16].

    Tile rows g and g+8 are what an epilogue needs together: a RoPE pair of q and k, gate and up of one channel.
    """
    total = sum(num_rows)
    if kind == "qkv":
        rotated = total - (num_rows[-1] if len(num_rows) > 1 else 0)  # q alone has no values
        _require(head_dim > 0 and head_dim % TILE_ROWS == 0, "head_dim", head_dim, f"a multiple of {TILE_ROWS}")
        _require(all(n % head_dim == 0 for n in num_rows), "q, k, v rows", num_rows, f"multiples of {head_dim}")
        heads = np.arange(0, rotated, head_dim)[:, None] + _head_rows(head_dim, pairing)
        order = np.concatenate([heads.reshape(-1), np.arange(rotated, total)])
    elif kind == "gate_up":
        _require(
            num_rows[0] == num_rows[1] and num_rows[0] % 8 == 0, "gate, up rows", num_rows, "equal, multiples of 8"
        )
        gate = np.arange(num_rows[0]).reshape(-1, 8)
        order = np.concatenate([gate, gate + num_rows[0]], axis=1).reshape(-1)
    else:
        order = np.arange(total)
    return np.concatenate([order, np.full(-total % TILE_ROWS, -1)]).astype(np.int32)


def _head_rows(head_dim: int, pairing: Pairing) -> NDArray[np.int64]:
    pair = np.arange(head_dim // 2).reshape(-1, 8)  # (tile in head, g)
    first = pair if pairing == "half" else 2 * pair
    second = pair + head_dim // 2 if pairing == "half" else 2 * pair + 1
    return np.concatenate([first, second], axis=1).reshape(-1)


@dataclass(frozen=True, slots=True)
class _Int4:
    qweight: NDArray[np.uint8]
    scales: NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class _Fp16:
    weight: NDArray[np.float16]


def _num_outputs(linear: Weights) -> int:
    return len(linear.qweight if isinstance(linear, Int4Weights) else linear.weight)


def _join(name: str, linears: Sequence[Weights]) -> _Int4 | _Fp16:
    """The linears' rows one below the other, checked."""
    int4 = [linear for linear in linears if isinstance(linear, Int4Weights)]
    fp16 = [linear for linear in linears if not isinstance(linear, Int4Weights)]
    if not int4:
        weight = _concatenate(name, [linear.weight for linear in fp16])
        _require(weight.shape[1] % BLOCK_INPUTS == 0, "K", weight.shape[1], f"a multiple of {BLOCK_INPUTS}", name)
        return _Fp16(weight)
    if fp16:
        raise KernelArgumentError(f"{name}: INT4 and fp16 linears side by side")
    qweight = _concatenate(name, [linear.qweight for linear in int4])
    scales = _concatenate(name, [linear.scales for linear in int4])
    num_inputs, num_groups = qweight.shape[1] * 2, scales.shape[1]
    group = num_inputs // num_groups
    _require(
        group in GROUPS and group * num_groups == num_inputs,
        "K / groups",
        f"{num_inputs}/{num_groups}",
        str(GROUPS),
        name,
    )
    _require(num_inputs % BLOCK_INPUTS == 0, "K", num_inputs, f"a multiple of {BLOCK_INPUTS}", name)
    return _Int4(qweight, scales)


def _concatenate(name: str, tables: list[NDArray[Any]]) -> NDArray[Any]:
    if len({table.shape[1] for table in tables}) != 1:
        raise KernelArgumentError(f"{name}: linears side by side have {[t.shape for t in tables]}, expected one K")
    return np.ascontiguousarray(tables[0] if len(tables) == 1 else np.concatenate(tables))


def _pack_int4(device: Device, raw: _Int4, row_of: NDArray[np.int32]) -> tuple[Array, Array]:
    num_tiles, num_inputs, num_groups = len(row_of) // TILE_ROWS, raw.qweight.shape[1] * 2, raw.scales.shape[1]
    weights = device.empty((num_tiles, num_inputs // BLOCK_INPUTS, 1, 32, 4), np.uint32)
    scales = device.empty((num_tiles, num_groups, 8, 2), np.float16)
    order = device.upload(row_of)
    arrays = device.upload(raw.qweight), order, weights
    _launch(device, "pack_int4", num_tiles * num_inputs // 2, *arrays, num_tiles, num_inputs)
    arrays = device.upload(raw.scales), order, scales
    _launch(device, "pack_scales", num_tiles * num_groups * TILE_ROWS, *arrays, num_tiles, num_groups)
    return weights, scales


def _pack_fp16(device: Device, raw: _Fp16, row_of: NDArray[np.int32]) -> tuple[Array, None]:
    num_tiles, num_inputs = len(row_of) // TILE_ROWS, raw.weight.shape[1]
    weights = device.empty((num_tiles, num_inputs // BLOCK_INPUTS, 4, 32, 4), np.uint32)
    arrays = device.upload(raw.weight), device.upload(row_of), weights
    _launch(device, "pack_fp16", num_tiles * num_inputs * 2, *arrays, num_tiles, num_inputs)
    return weights, None


def _launch(device: Device, name: str, num_threads: int, *arguments: Array | int) -> None:
    scalars = [np.int32(a) if isinstance(a, int) else a for a in arguments]
    device.launch(device.kernel("pack", name), (-(-num_threads // _THREADS), 1, 1), _THREADS, scalars)


def _require(holds: bool, what: str, given: object, expected: str, name: str = "pack_linear") -> None:
    if not holds:
        raise KernelArgumentError(f"{name}: {what} is {given}, expected {expected}")
