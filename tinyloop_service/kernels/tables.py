"""Launches of kernels_cu/tables.cu: what a plan changes in the per-sequence tables of the device."""

from __future__ import annotations

import numpy as np

from tinyloop_service.kernels.device import Array, Device
from tinyloop_service.kernels.match import match

_THREADS = 256


def write_words(device: Device, words: Array, updates: Array) -> None:
    """words[index] = value for every row (index, value) of updates; indices differ, or values are equal.

    words int32 [W], updates int32 [n, 2].
    """
    n = match("write_words", words=(words, "int32", "W"), updates=(updates, "int32", "n, 2"))["n"]
    if n:
        kernel = device.kernel("tables", "write_words")
        device.launch(kernel, (-(-n // _THREADS), 1, 1), _THREADS, (words, updates, np.int32(n)))


def copy_rows(device: Device, table: Array, rows: Array) -> None:
    """table[target] = table[source] for every row (target, source) of rows; no target is a source, or comes twice.

    table int32 [S, E], rows int32 [n, 2].
    """
    sizes = match("copy_rows", table=(table, "int32", "S, E"), rows=(rows, "int32", "n, 2"))
    if sizes["n"]:
        kernel = device.kernel("tables", "copy_rows")
        device.launch(kernel, (sizes["n"], 1, 1), _THREADS, (table, rows, np.int32(sizes["E"])))
