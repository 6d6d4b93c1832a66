"""Attention of levels: its rule by hand, and the whole against the kernel's reference, page by page."""

from __future__ import annotations

import numpy as np
import pytest

from tinyloop_service.engine.cache_modes import decode, encode
from tinyloop_service.engine.int8_attention import attend, round_query, round_weights
from tinyloop_service.engine.reference import attend_exactly, visible
from tinyloop_service.kernels.page_layout import PAGE_TOKENS
from tinyloop_service.kernels.references.decode_attention import attend_page, begin_sums, fold, merge, read_page
from tinyloop_service.kernels.references.page_views import int8_page
from tinyloop_service.types import CacheMode

HEADS, TOKENS, POSITIONS, DIM = 3, 5, 150, 32
DRAW = np.random.default_rng(8)
Q = (2 * DRAW.standard_normal((HEADS, TOKENS, DIM))).astype(np.float16).astype(np.float32)
KEYS, VALUES = (
    decode(CacheMode.INT8, encode(CacheMode.INT8, DRAW.standard_normal((HEADS, POSITIONS, DIM)))) for _ in range(2)
)
AT = POSITIONS - TOKENS + np.arange(TOKENS)  # the queries' positions


def test_a_query_becomes_levels_of_its_largest_element() -> None:
    whole = np.array([127, -64, 3.4, -0.6, 0])
    assert round_query(whole).tolist() == [127, -64, 3, -1, 0]
    np.testing.assert_allclose(round_query(8 * whole / 1000), 8 * round_query(whole) / 1000, rtol=2**-11)  # f is fp16
    assert round_query(np.full(4, 2.0**-12)).tolist() == [8 / 127 / 256] * 4  # 2^-8 is the least that counts
    assert np.abs(round_query(Q) - Q).max() <= 1.001 * np.abs(Q).max() / 254


def test_weights_become_levels_of_the_power_of_two_above_their_page_s_largest() -> None:
    weights = np.zeros(PAGE_TOKENS + 3)
    weights[:3] = 0.6, 0.3, 0.001  # unit 1
    weights[PAGE_TOKENS:] = 2.0**-9, 2.0**-10, 2.0**-20  # unit 2^-8: above the largest, which it never equals
    expected = np.zeros_like(weights)
    expected[:2] = 153 / 255, 76 / 255
    expected[PAGE_TOKENS:-1] = 128 / 255 / 2**8, 64 / 255 / 2**8
    np.testing.assert_allclose(round_weights(weights), expected, rtol=1e-15)


@pytest.mark.parametrize("window", [0, 70])
def test_it_is_the_kernel_s_reference_page_by_page(window: int) -> None:
    """Which ends in fp16, 2^-11 of a value.  Sums of float32 in another order move a score by some 2^-20, and with it,
    at most, a weight of 2250 to another level: so one o of 15 may be off by more."""
    pages = np.zeros((3, PAGE_TOKENS * HEADS * (2 * DIM + 4)), np.int8)
    for position in range(POSITIONS):
        page = int8_page(pages[position // PAGE_TOKENS], HEADS)
        page.put(position % PAGE_TOKENS, KEYS[:, position], VALUES[:, position])
    seen, expected = visible(AT, POSITIONS, window), np.empty_like(Q)
    for token, position in enumerate(AT.tolist()):
        sums = begin_sums(HEADS, DIM)
        for index, page in enumerate(pages):
            at = index * PAGE_TOKENS + np.arange(PAGE_TOKENS)
            hidden = (at > position) | ((at <= position - window) & (window > 0))
            sums = fold(sums, *attend_page(Q[:, token, None], read_page(page, HEADS), hidden))
        ml = np.stack(sums[1:], axis=-1)[:, None]
        expected[:, token] = merge(sums[0][:, None], ml, 255)
    alike, exact = (
        np.isclose(attended(Q, KEYS, VALUES, seen), expected, rtol=2**-11, atol=1e-5).all(axis=-1)
        for attended in (attend, attend_exactly)
    )
    assert alike.sum() >= alike.size - 1 and not exact.any()
