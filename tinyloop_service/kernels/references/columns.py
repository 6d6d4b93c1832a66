"""Activations in columns, as kernels_cu/include/columns.cuh says, and back in rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_AXES = (1, 2, 4, 0, 3)  # block, half, column, row, word of (row, block, half, word, column)


def in_columns(y: NDArray[np.float16]) -> NDArray[np.float16]:
    """y [R, K] as the same bytes in columns, R a multiple of 8 and K of 64; of more than 64 rows, a block's of them."""
    rows, inputs = y.shape
    words = np.ascontiguousarray(y).view(np.uint32).reshape(rows, inputs // 64, 2, 4, 4)
    return np.ascontiguousarray(words.transpose(_AXES)).view(np.float16).reshape(rows, inputs)


def in_rows(y: NDArray[Any]) -> NDArray[np.float16]:
    """The other way."""
    rows, inputs = y.shape
    words = np.ascontiguousarray(y).view(np.uint32).reshape(inputs // 64, 2, 4, rows, 4)
    return np.ascontiguousarray(words.transpose(np.argsort(_AXES))).view(np.float16).reshape(rows, inputs)
