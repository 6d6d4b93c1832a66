"""embed in NumPy: same names and order as kernels/embed.py, without the device.  Exact: fp16 is only widened."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def embed(table: Array, row_slot: Array, token: Array, length: Array, x: Array, position: Array) -> None:
    for row, slot in enumerate(row_slot):
        x[row] = table[max(0, int(token[slot]))] if slot >= 0 else 0
        position[row] = length[slot] if slot >= 0 else -1


def embed_prompt(table: Array, ids: Array, x: Array) -> None:
    x[...] = table[np.maximum(ids, 0)]


def gather_rows(x: Array, index: Array, out: Array) -> None:
    out[...] = x[index]
