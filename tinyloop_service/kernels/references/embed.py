"""embed in NumPy: same names and order as kernels/embed.py, without the device.  Exact: fp16 is only widened."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def embed(table: Array, row_slot: Array, token: Array, length: Array, x: Array, position: Array) -> None:
    for row, slot in enumerate(row_slot):
        is_there = slot >= 0 and token[slot] >= 0
        x[row] = table[token[slot]] if is_there else 0
        position[row] = length[slot] if is_there else -1


def embed_prompt(table: Array, ids: Array, x: Array) -> None:
    x[...] = table[np.maximum(ids, 0)]


def gather_rows(x: Array, index: Array, out: Array) -> None:
    out[...] = x[index]
