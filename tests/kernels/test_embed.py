"""Embedding and gathering only widen and copy, so every comparison is exact."""

from __future__ import annotations

import numpy as np
import pytest

from tinyloop_service.kernels import embed
from tinyloop_service.kernels.device import Device
from tinyloop_service.kernels.match import KernelArgumentError
from tinyloop_service.kernels.references import embed as reference

VOCABULARY, SLOTS = 37, 9


def table_of(width: int) -> np.ndarray:
    return np.random.default_rng(width).standard_normal((VOCABULARY, width)).astype(np.float16)


@pytest.mark.parametrize("width", [8, 64, 2056])  # one piece; fewer than threads; one more than a block's pass
@pytest.mark.parametrize("rows", [1, 3, 19])
def test_decode_rows(device: Device, rows: int, width: int) -> None:
    rng = np.random.default_rng(rows)
    table, row_slot = table_of(width), rng.integers(0, SLOTS, rows).astype(np.int32)
    token, length = (rng.integers(0, VOCABULARY, SLOTS).astype(np.int32) for _ in range(2))
    row_slot[1::4] = -1
    token[row_slot[0]] = -1  # a slot that has ended
    x, position = np.empty((rows, width), np.float32), np.empty(rows, np.int32)
    reference.embed(table, row_slot, token, length, x, position)
    there = device.empty((rows, width), np.float32), device.empty(rows, np.int32)
    embed.embed(device, *map(device.upload, (table, row_slot, token, length)), *there)
    assert np.array_equal(device.download(there[0]), x)
    assert np.array_equal(device.download(there[1]), position)


@pytest.mark.parametrize("tokens", [1, 65])
def test_prompt_tokens(device: Device, tokens: int) -> None:
    table, ids = table_of(64), np.random.default_rng(tokens).integers(-1, VOCABULARY, tokens).astype(np.int32)
    x, there = np.empty((tokens, 64), np.float32), device.empty((tokens, 64), np.float32)
    reference.embed_prompt(table, ids, x)
    embed.embed_prompt(device, device.upload(table), device.upload(ids), there)
    assert np.array_equal(device.download(there), x)


def test_no_tokens_are_no_launch(device: Device) -> None:
    table, ids = device.upload(table_of(8)), device.empty(0, np.int32)
    embed.embed_prompt(device, table, ids, device.empty((0, 8), np.float32))
    device.synchronize()


@pytest.mark.parametrize("width", [4, 1028])
def test_gather_rows(device: Device, width: int) -> None:
    x, index = np.random.default_rng(width).standard_normal((11, width), np.float32), np.array([10, 0, 0, 7], np.int32)
    out, there = np.empty((4, width), np.float32), device.empty((4, width), np.float32)
    reference.gather_rows(x, index, out)
    embed.gather_rows(device, device.upload(x), device.upload(index), there)
    assert np.array_equal(device.download(there), out)


def test_what_is_refused(device: Device) -> None:
    table, ids, x = device.zeros((5, 12), np.float16), device.zeros(3, np.int32), device.zeros((3, 12), np.float32)
    with pytest.raises(KernelArgumentError, match="embed_prompt: d is 12, expected a multiple of 8"):
        embed.embed_prompt(device, table, ids, x)
    with pytest.raises(KernelArgumentError, match=r"embed_prompt: x is \(2, 12\), expected \(T, d\) = \(3, 12\)"):
        embed.embed_prompt(device, table, ids, x[:2])
    with pytest.raises(KernelArgumentError, match="gather_rows: E is 6"):
        embed.gather_rows(device, device.zeros((3, 6), np.float32), ids, device.zeros((3, 6), np.float32))
