"""rope against the engine's oracle: every operation is rounded alike, so bits are compared, not distances."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_cases import LAYER, LAYERS, PAGE
from numpy.typing import NDArray

from tinyloop_service.engine.cache_modes import encode
from tinyloop_service.engine.reference import rope as exact_rope
from tinyloop_service.engine.spec import SIZES
from tinyloop_service.kernels.device import Device
from tinyloop_service.kernels.match import KernelArgumentError
from tinyloop_service.kernels.references import rope as reference
from tinyloop_service.kernels.references.page_views import int8_page
from tinyloop_service.kernels.rope import PAIRINGS, Pairing, rope, rope_keys_values, rope_queries
from tinyloop_service.types import CacheMode

Array = NDArray[Any]

SHAPES = [(2, 2, 128), (4, 2, 64), (6, 1, 64), (5, 5, 128)]  # heads, K/V heads, head_dim
MAX_SEQ_LEN = 256
MAX_BLOCKS = MAX_SEQ_LEN // PAGE
SLOTS = 3
POOLS = ["float16", "int8"]


def angles(head_dim: int) -> tuple[Array, Array]:
    frequencies = SIZES["tiny"].rope_theta ** (-2.0 * np.arange(head_dim // 2) / head_dim)
    angle = np.arange(MAX_SEQ_LEN)[:, None] * frequencies
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def page_tables() -> Array:
    pages = np.random.default_rng(1).permutation(SLOTS * MAX_BLOCKS).astype(np.int32).reshape(SLOTS, MAX_BLOCKS)
    tables = np.full((SLOTS, LAYERS, MAX_BLOCKS), -1, np.int32)
    tables[:, LAYER] = pages
    return tables


def empty_pool(kv_heads: int, head_dim: int, dtype: str = "float16") -> Array:
    if dtype == "int8":
        return np.full((SLOTS * MAX_BLOCKS, kv_heads * PAGE * (2 * head_dim + 4)), 127, np.int8)
    return np.full((SLOTS * MAX_BLOCKS, 2 * kv_heads * PAGE * head_dim), np.nan, np.float16)


def run(
    device: Device, qkv: Array, slots: Array, positions: Array, pool: Array, heads: int, kv_heads: int, pairing: Pairing
) -> tuple[Array, Array]:
    """q and the pool afterwards."""
    head_dim = qkv.shape[1] // (heads + 2 * kv_heads)
    on_device = device.upload(pool)
    q = device.upload(np.zeros((len(qkv), heads * head_dim), np.float16))
    rope(
        device,
        device.upload(qkv),
        device.upload(slots.astype(np.int32)),
        device.upload(positions.astype(np.int32)),
        *map(device.upload, angles(head_dim)),
        device.upload(page_tables()),
        LAYER,
        on_device,
        q,
        num_kv_heads=kv_heads,
        pairing=pairing,
    )
    return device.download(q), device.download(on_device)


def some_tokens(heads: int, kv_heads: int, head_dim: int) -> tuple[Array, Array, Array]:
    """qkv, slots, positions: two chunks that cross pages, a token alone, and padding among them."""
    slots = np.array([0] * 70 + [-1] * 3 + [2] * 31 + [1])
    positions = np.concatenate([np.arange(40, 110), [0, 999, 7], np.arange(120, 151), [255]])
    qkv = np.random.default_rng(0).standard_normal((len(slots), (heads + 2 * kv_heads) * head_dim)).astype(np.float16)
    return qkv, slots, positions


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_against_the_engines_oracle(device: Device, heads: int, kv_heads: int, head_dim: int, pairing: Pairing) -> None:
    spec = replace(
        SIZES["tiny"], n_heads=heads, n_kv_heads=kv_heads, head_dim=head_dim, rope_pairing=pairing, rope_theta=10000.0
    )
    qkv, slots, positions = some_tokens(heads, kv_heads, head_dim)
    q, pool = run(device, qkv, slots, positions, empty_pool(kv_heads, head_dim), heads, kv_heads, pairing)
    x = qkv.reshape(len(qkv), -1, head_dim).transpose(1, 0, 2).astype(np.float32)  # (H + 2G, T, D)
    turned = exact_rope(x[:-kv_heads], positions, spec).astype(np.float16)
    pages = pool.reshape(-1, 2, kv_heads, PAGE * head_dim)
    for token in np.flatnonzero(slots >= 0):
        assert np.array_equal(q[token].reshape(heads, head_dim), turned[:heads, token])
        page = pages[page_tables()[slots[token], LAYER, positions[token] // PAGE]]
        place = positions[token] % PAGE
        assert np.array_equal(page[0].reshape(kv_heads, PAGE, head_dim)[:, place], turned[heads:, token])
        values = qkv[token].reshape(-1, head_dim)[-kv_heads:]
        octets = page[1].reshape(kv_heads, PAGE // 8, head_dim, 8)
        assert np.array_equal(octets[:, place // 8, :, place % 8], values)
    assert not q[slots < 0].any(), "a padding token was written"


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_int8_against_the_engines_oracle(
    device: Device, heads: int, kv_heads: int, head_dim: int, pairing: Pairing
) -> None:
    """K is coded from what the rotation gives in fp32, before it is rounded to anything else."""
    spec = replace(
        SIZES["tiny"], n_heads=heads, n_kv_heads=kv_heads, head_dim=head_dim, rope_pairing=pairing, rope_theta=10000.0
    )
    qkv, slots, positions = some_tokens(heads, kv_heads, head_dim)
    q, pool = run(device, qkv, slots, positions, empty_pool(kv_heads, head_dim, "int8"), heads, kv_heads, pairing)
    x = qkv.reshape(len(qkv), -1, head_dim).transpose(1, 0, 2).astype(np.float32)  # (H + 2G, T, D)
    turned = exact_rope(x[:-kv_heads], positions, spec)
    keys, values = (encode(CacheMode.INT8, part) for part in (turned[heads:], x[-kv_heads:]))
    for token in np.flatnonzero(slots >= 0):
        assert np.array_equal(q[token].reshape(heads, head_dim), turned[:heads, token].astype(np.float16))
        page = int8_page(pool[page_tables()[slots[token], LAYER, positions[token] // PAGE]], kv_heads)
        place = positions[token] % PAGE
        assert np.array_equal(page.keys[:, place], keys["levels"][:, token])
        assert np.array_equal(page.key_scales[:, place], keys["scales"][:, token, 0])
        assert np.array_equal(page.values[:, :, place], values["levels"][:, token])
        assert np.array_equal(page.value_scales[:, place], values["scales"][:, token, 0])


def code_of_keys(device: Device, keys: Array) -> tuple[Array, Array]:
    """What the kernel makes of K float32 [T, 64]: levels [T, 64], scales [T]."""
    count, half = keys.shape[0], keys.shape[1] // 2
    qkv = np.zeros((count, 3, 2, half), np.float16)
    qkv[:, 1, 0] = 1  # pairs (1, 0) of K turn to (cos, sin), which may be any numbers here
    tables = np.arange(-(-count // PAGE), dtype=np.int32).reshape(1, 1, -1)
    pool = device.upload(np.zeros((tables.size, PAGE * (2 * 2 * half + 4)), np.int8))
    at = device.zeros(count, np.int32), device.upload(np.arange(count, dtype=np.int32))
    angles = (device.upload(np.ascontiguousarray(part)) for part in np.split(keys, 2, axis=1))
    paged = device.upload(tables), 0, pool, device.empty((count, 2 * half), np.float16)
    rope(device, device.upload(qkv.reshape(count, -1)), *at, *angles, *paged, num_kv_heads=1, pairing="half")
    pages = [int8_page(page, 1) for page in device.download(pool)]
    levels = np.concatenate([page.keys[0] for page in pages])[:count]
    return levels, np.concatenate([page.key_scales[0] for page in pages])[:count]


def test_int8_around_the_edges_of_levels(device: Device) -> None:
    """Values a few ulps around every edge, for scales of every kind: powers of two, all bits set, subnormal."""
    rng = np.random.default_rng(0)
    scales = np.array([2.0**-17, 2.0**-14 - 2.0**-24, 1, 2047 / 1024, 511.75, *rng.integers(1025, 2047, 20) / 1024])
    edges = (np.arange(-127, 127) + 0.5) * scales[:, None]  # (scales, 254), exact in float32
    ulps = rng.integers(-3, 4, edges.shape).astype(np.int32)
    x = (edges.astype(np.float32).view(np.int32) + ulps).view(np.float32)
    rows = np.concatenate([x, np.zeros((len(x), 61), np.float32)], axis=1).reshape(-1, 63)
    largest = np.repeat(127 * scales, 5).astype(np.float32)[:, None]
    keys = np.concatenate([rows, largest], axis=1)
    levels, found = code_of_keys(device, keys)
    expected = encode(CacheMode.INT8, keys)
    assert np.array_equal(found, expected["scales"][:, 0]) and np.array_equal(found, np.repeat(scales, 5))
    assert np.array_equal(levels, expected["levels"])


def test_int8_of_values_out_of_the_ordinary(device: Device) -> None:
    keys = np.random.default_rng(1).standard_normal((7, 64)).astype(np.float32)
    keys[0] = 0
    keys[1] *= 1e-12  # below every scale
    keys[2, 5] = 1e6  # beyond fp16
    keys[3, 6] = -3e38
    keys[4] *= 2.0**-130
    keys[5] = np.ldexp(np.float32(1), np.arange(-40, 24))
    keys[6, 9] = np.nan
    levels, scales = code_of_keys(device, keys)
    expected = encode(CacheMode.INT8, keys[:6])
    assert np.array_equal(levels[:6], expected["levels"]) and np.array_equal(scales[:6], expected["scales"][:, 0])
    assert np.isnan(scales[6]), "whoever reads this token is to notice"


@pytest.mark.parametrize("dtype", POOLS)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_against_the_reference(device: Device, pairing: Pairing, dtype: str) -> None:
    """The whole pool: nothing else is written."""
    heads, kv_heads, head_dim = 4, 2, 64
    qkv, slots, positions = some_tokens(heads, kv_heads, head_dim)
    q, pool = run(device, qkv, slots, positions, empty_pool(kv_heads, head_dim, dtype), heads, kv_heads, pairing)
    expected_q, expected_pool = np.zeros_like(q), empty_pool(kv_heads, head_dim, dtype)
    reference.rope(
        *(qkv, slots, positions, *angles(head_dim), page_tables(), LAYER, expected_pool, expected_q),
        num_kv_heads=kv_heads,
        pairing=pairing,
    )
    assert np.array_equal(q, expected_q)
    assert np.array_equal(pool, expected_pool, equal_nan=True)


@pytest.mark.parametrize("dtype", POOLS)
def test_one_token_at_a_time_gives_the_same_pages(device: Device, dtype: str) -> None:
    heads, kv_heads, head_dim = 2, 1, 128
    qkv, slots, positions = some_tokens(heads, kv_heads, head_dim)
    some = np.r_[20:27, 70:75, 104]
    qkv, slots, positions = qkv[some], slots[some], positions[some]
    empty = empty_pool(kv_heads, head_dim, dtype)
    together, pool = run(device, qkv, slots, positions, empty, heads, kv_heads, "half")
    one_by_one = empty
    for token in range(len(some)):
        at = slice(token, token + 1)
        q, one_by_one = run(device, qkv[at], slots[at], positions[at], one_by_one, heads, kv_heads, "half")
        assert np.array_equal(q[0], together[token])
    assert np.array_equal(one_by_one, pool, equal_nan=True)


def test_refusals(device: Device) -> None:
    qkv, slots, positions = some_tokens(4, 2, 64)
    with pytest.raises(KernelArgumentError, match=r"pool is \(12, 8192\), expected"):
        run(device, qkv, slots, positions, empty_pool(1, 64), 4, 2, "half")


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (5, 5, 128)])
def test_queries_and_keys_and_values_apart_have_the_bits_of_all_together(
    device: Device, heads: int, kv_heads: int, head_dim: int, pairing: Pairing
) -> None:
    """Out of products of their own; of NaN pages and q, so that nothing else is written."""
    qkv, slots, positions = some_tokens(heads, kv_heads, head_dim)
    together, pool = run(device, qkv, slots, positions, empty_pool(kv_heads, head_dim), heads, kv_heads, pairing)
    parts = (np.ascontiguousarray(part) for part in np.split(qkv, [heads * head_dim], axis=1))
    q_in, kv = map(device.upload, parts)
    tokens = device.upload(slots.astype(np.int32)), device.upload(positions.astype(np.int32))
    turning = *tokens, *map(device.upload, angles(head_dim))
    q = device.upload(np.zeros_like(together))
    rope_queries(device, q_in, *turning, q, pairing=pairing)
    np.testing.assert_array_equal(device.download(q), together)
    apart = device.upload(empty_pool(kv_heads, head_dim))
    tables = device.upload(page_tables())
    rope_keys_values(device, kv, *turning, tables, LAYER, apart, num_kv_heads=kv_heads, pairing=pairing)
    np.testing.assert_array_equal(device.download(apart), pool)


def test_parts_against_their_references(device: Device) -> None:
    heads, kv_heads, head_dim = 3, 1, 64
    qkv, slots, positions = some_tokens(heads, kv_heads, head_dim)
    q_in, kv = (np.ascontiguousarray(part) for part in np.split(qkv, [heads * head_dim], axis=1))
    turning = slots.astype(np.int32), positions.astype(np.int32), *angles(head_dim)
    q, pool = np.full_like(q_in, np.nan), empty_pool(kv_heads, head_dim)
    there, pages = device.upload(q), device.upload(pool)
    rope_queries(device, device.upload(q_in), *map(device.upload, turning), there, pairing="half")
    reference.rope_queries(q_in, *turning, q, pairing="half")
    np.testing.assert_array_equal(device.download(there), q)
    paged = *map(device.upload, (kv, *turning, page_tables())), LAYER, pages
    rope_keys_values(device, *paged, num_kv_heads=kv_heads, pairing="half")
    reference.rope_keys_values(kv, *turning, page_tables(), LAYER, pool, num_kv_heads=kv_heads, pairing="half")
    np.testing.assert_array_equal(device.download(pages), pool)


def test_refusals_of_parts(device: Device) -> None:
    tokens, cos = device.zeros(3, np.int32), device.zeros((64, 16), np.float32)
    q, pool = device.zeros((3, 64), np.float16), device.zeros((1, 2 * PAGE * 32), np.float16)
    with pytest.raises(KernelArgumentError, match="rope_queries: head_dim is 32, expected 64 or 128"):
        rope_queries(device, q, tokens, tokens, cos, cos, q, pairing="half")
    tables, cos = device.zeros((1, 2, 1), np.int32), device.zeros((64, 32), np.float32)
    pool, kv = device.zeros((1, 2 * PAGE * 64), np.float16), device.zeros((3, 128), np.float16)
    with pytest.raises(KernelArgumentError, match="rope_keys_values: layer is 2, the tables have 2"):
        rope_keys_values(device, kv, tokens, tokens, cos, cos, tables, 2, pool, num_kv_heads=1, pairing="half")
