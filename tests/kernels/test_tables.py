"""The per-sequence tables: exact copies, so exact comparisons."""

from __future__ import annotations

import numpy as np
import pytest

from tinyloop_service.kernels import tables
from tinyloop_service.kernels.device import Device
from tinyloop_service.kernels.match import KernelArgumentError
from tinyloop_service.kernels.references import tables as reference


@pytest.mark.parametrize("count", [0, 1, 255, 256, 700])
def test_write_words(device: Device, count: int) -> None:
    rng = np.random.default_rng(count)
    words = rng.integers(-9, 9, 1000, np.int32)
    index = rng.permutation(1000)[:count]
    updates = np.stack([index, rng.integers(0, 2**31 - 1, count)], axis=1).astype(np.int32)
    there = device.upload(words)
    tables.write_words(device, there, device.upload(updates))
    reference.write_words(words, updates)
    assert np.array_equal(device.download(there), words)


@pytest.mark.parametrize("width", [1, 255, 257, 1000])
def test_copy_rows(device: Device, width: int) -> None:
    table = np.random.default_rng(width).integers(-9, 9, (12, width), np.int32)
    rows = np.array([[5, 0], [7, 0], [8, 11]], np.int32)  # one source twice
    there = device.upload(table)
    tables.copy_rows(device, there, device.upload(rows))
    reference.copy_rows(table, rows)
    assert np.array_equal(device.download(there), table)


def test_what_is_refused(device: Device) -> None:
    words = device.zeros((10,), np.int32)
    with pytest.raises(KernelArgumentError, match="write_words: updates is"):
        tables.write_words(device, words, device.zeros((4, 3), np.int32))
    with pytest.raises(KernelArgumentError, match="copy_rows: table is"):
        tables.copy_rows(device, words, device.zeros((4, 2), np.int32))
