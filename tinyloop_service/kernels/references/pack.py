"""Packed weights in NumPy, written from the drawing in weight_tiles.cuh.

Same names as kernels/pack.py, without the device; arrays in place of a PackedLinear.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.kernels.pack import BLOCK_INPUTS, TILE_ROWS

Array = NDArray[Any]

_NIBBLES = (0, 4, 2, 6)  # of a word, for the four inputs of one step; row g+8 lies one nibble higher


def pack_int4(qweight: Array, scales: Array, row_of: Array) -> tuple[Array, Array]:
    """Tiles uint32 [tiles, K/64, 1, 32, 4] and scales float16 [tiles, K/group, 8, 2]."""
    nibbles = np.stack([qweight & 15, qweight >> 4], axis=-1).reshape(len(qweight), -1).astype(np.uint32)
    tiles = _tiles(_rows(nibbles, row_of, 8))  # (tile, upper, g, block, half, t, odd, input)
    shifts = 4 * (np.arange(2)[:, None, None, None, None, None, None] + np.array(_NIBBLES))
    words = np.bitwise_or.reduce(np.bitwise_or.reduce(tiles << shifts.astype(np.uint32), axis=-1), axis=1)
    words = words.transpose(0, 2, 1, 4, 3, 5)  # (tile, block, g, t, half, odd)
    grouped = _rows(scales, row_of, 0).reshape(-1, 2, 8, scales.shape[1]).transpose(0, 3, 2, 1)
    return words.reshape(*words.shape[:2], 1, 32, 4), grouped


def pack_fp16(weight: Array, row_of: Array) -> Array:
    """Tiles uint32 [tiles, K/64, 4, 32, 4]."""
    tiles = _tiles(_rows(weight, row_of, 0))
    pairs = tiles.reshape(*tiles.shape[:-1], 2, 2)  # (tile, upper, g, block, half, t, odd, word pair, input)
    order = pairs.transpose(0, 3, 4, 6, 2, 5, 7, 1, 8)  # (tile, block, half, odd, g, t, word pair, upper, input)
    return np.ascontiguousarray(order).view(np.uint32).reshape(*order.shape[:2], 4, 32, 4)


def dequantise(qweight: Array, scales: Array) -> Array:
    """float16 [N, K], rounded once."""
    nibbles = np.stack([qweight & 15, qweight >> 4], axis=-1).reshape(*scales.shape, -1)
    values = (nibbles.astype(np.float32) - 8) * scales.astype(np.float32)[:, :, None]
    return values.astype(np.float16).reshape(len(qweight), -1)


def _rows(values: Array, row_of: Array, absent: int) -> Array:
    return np.where(row_of[:, None] < 0, values.dtype.type(absent), values[row_of])


def _tiles(rows: Array) -> Array:
    """(tile, upper, g, block, half, t, odd, input) of packed rows [tiles · 16, K]."""
    return rows.reshape(-1, 2, TILE_ROWS // 2, rows.shape[1] // BLOCK_INPUTS, 2, 4, 2, 4)
