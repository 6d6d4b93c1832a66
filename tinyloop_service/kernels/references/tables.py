"""NumPy twins of kernels/tables.py."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


def write_words(words: Ints, updates: Ints) -> None:
    words[updates[:, 0]] = updates[:, 1]


def copy_rows(table: Ints, rows: Ints) -> None:
    table[rows[:, 0]] = table[rows[:, 1]]
