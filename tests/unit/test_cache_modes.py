"""What is stored of a token: sizes, hand-made cases, and the bounds and identities that hold for any values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tinyloop_service.engine.cache_modes import (
    GROUP,
    LARGEST,
    Stored,
    check_mode,
    decode,
    encode,
    fields_of,
    page_bytes,
)
from tinyloop_service.engine.spec import SIZES
from tinyloop_service.errors import InvalidArgument
from tinyloop_service.types import CacheMode

GROUPED = {CacheMode.H_INT8: 255, CacheMode.H_INT4: 15}
FINITE = st.floats(-1e9, 1e9, width=32)
NEAR = st.floats(-1.0, 1.0, width=32)  # hypothesis likes special values; these leave room for ordinary ones


@st.composite
def vectors(draw: st.DrawFn) -> np.ndarray:
    """Two tokens of two groups: around any centre, in any range, with outliers."""
    shape = (2, 2 * GROUP)
    x = draw(arrays(np.float32, shape, elements=NEAR)) * np.float32(2.0 ** draw(st.integers(-26, 16)))
    x = x + np.float32(draw(FINITE) if draw(st.booleans()) else 0.0)
    for _ in range(draw(st.integers(0, 2))):
        x[draw(st.integers(0, 1)), draw(st.integers(0, 2 * GROUP - 1))] = draw(FINITE)
    return x


def equal(a: Stored, b: Stored) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def rounding(x: np.ndarray) -> np.ndarray:
    """How far x may be from the next fp16 number."""
    return np.maximum(np.abs(x) * 2.0**-11, 2.0**-25)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [*zip(CacheMode, [524288, 266240, 262144, 139264, 73728], strict=True)],
)
def test_bytes_of_a_page_at_407m(mode: CacheMode, expected: int) -> None:
    assert page_bytes(mode, SIZES["407m"]) == expected


@pytest.mark.parametrize("mode", CacheMode)
def test_fields_are_what_encode_gives(mode: CacheMode) -> None:
    spec = SIZES["tiny"]
    h_or_kv = (3, spec.d_model) if mode.value.startswith("h") else (3, 2, spec.n_kv_heads, spec.head_dim)
    stored = encode(mode, np.random.default_rng(0).standard_normal(h_or_kv, np.float32))
    fields = fields_of(mode, spec)
    assert [(name, x.dtype, x.shape[1:]) for name, x in stored.items()] == [(f.name, f.dtype, f.shape) for f in fields]
    assert decode(mode, stored).shape == h_or_kv and decode(mode, stored).dtype == np.float32


def test_int8_by_hand() -> None:
    stored = encode(CacheMode.INT8, np.array([[127.0, -127.0, 0.49, 0.5, 1.5, -3.0], [0, 0, 0, 0, 0, 0]]))
    assert stored["scales"].tolist() == [[1.0], [2.0**-17]]
    assert stored["levels"].tolist() == [[127, -127, 0, 0, 2, -3], [0] * 6]  # halves go to the even level
    assert decode(CacheMode.INT8, stored).tolist() == [[127, -127, 0, 0, 2, -3], [0] * 6]


def test_int8_levels_are_taken_with_the_rounded_scale() -> None:
    """12.85 / 127 = 0.10118 is 0.10120 in fp16: the largest level is 126.98, and 6.4 is 63.2 of them."""
    stored = encode(CacheMode.INT8, np.array([12.85, 6.4]))
    scale = float(stored["scales"][0])
    assert scale == float(np.float16(12.85 / 127)) != 12.85 / 127
    assert stored["levels"].tolist() == [127, round(6.4 / scale)]


def test_groups_by_hand() -> None:
    x = np.zeros((1, 2 * GROUP), np.float32)
    x[0, :GROUP] = np.arange(GROUP) * 0.25 - 1  # −1 … 14.75
    x[0, GROUP:] = 7.5
    stored = encode(CacheMode.H_INT4, x)
    assert stored["minima"].tolist() == [[-1.0, 7.5]]
    step = float(stored["scales"][0, 0])
    assert step == float(np.float16(15.75 / 15))
    assert float(stored["scales"][0, 1]) == float(np.float16(7.5 / 2048 / 15)), "no finer than fp16 is at 7.5"
    low, high = stored["levels"][0, : GROUP // 2] & 15, stored["levels"][0, : GROUP // 2] >> 4
    assert [*low, *high] == [round(0.25 * i / step) for i in range(GROUP)]
    assert not stored["levels"][0, GROUP // 2 :].any()
    read = decode(CacheMode.H_INT4, stored)[0]
    np.testing.assert_array_equal(read[:GROUP], -1 + np.float32(step) * np.array([*low, *high]))
    np.testing.assert_array_equal(read[GROUP:], 7.5)


@pytest.mark.parametrize("mode", [CacheMode.INT8, *GROUPED, CacheMode.H_FP16])
@pytest.mark.parametrize("value", [0.0, 65504.0, -65504.0, 0.1, -(2.0**-24), 1e-30])
def test_constant_vectors_are_as_fp16_has_them(mode: CacheMode, value: float) -> None:
    read = decode(mode, encode(mode, np.full((1, GROUP), value, np.float32)))
    # int8 has 127 levels for a magnitude: off by half a fp16 rounding of the scale, or by 2^-18 where there is no
    # scale so small.
    allowed = abs(value) * 2**-11 + 2**-18 if mode is CacheMode.INT8 else 0
    assert np.abs(read - np.float32(np.float16(value))).max() <= allowed


@pytest.mark.parametrize("mode", [CacheMode.INT8, *GROUPED, CacheMode.H_FP16])
def test_huge_values_stay_finite(mode: CacheMode) -> None:
    huge = np.array([65503.0, 65519.0, 65520.0, -65536.0, 1e30, -np.inf, np.inf, -65504.0] * (GROUP // 8), np.float32)
    read = decode(mode, encode(mode, huge))
    assert np.isfinite(read).all()
    # A scale is rounded by 2^-12 of itself: levels · scale may go so far beyond.
    assert np.abs(read).max() <= LARGEST * (1 + 2 * 2**-11)
    np.testing.assert_allclose(read, np.clip(huge, -LARGEST, LARGEST), rtol=0, atol=0.51 * 131008 / 15)


@given(vectors())
def test_int8_error_is_half_a_level(x: np.ndarray) -> None:
    stored = encode(CacheMode.INT8, x)
    clipped, scales = np.clip(x, -LARGEST, LARGEST).astype(np.float64), stored["scales"].astype(np.float64)
    assert np.abs(stored["levels"].astype(int)).max() <= 127
    # The quotient that is rounded to a level has an error of 2^-24 of itself, at most 127.5.
    assert (np.abs(decode(CacheMode.INT8, stored) - clipped) <= scales * (0.5 + 127.5 * 2**-24)).all()
    # And a level is 1/127 of the largest magnitude, but for the rounding of the scale and its least value.
    largest = np.abs(clipped).max(axis=-1, keepdims=True)
    assert (scales <= np.maximum(largest / 127 * (1 + 2**-8), 2**-17)).all()


@pytest.mark.parametrize("mode", GROUPED)
@given(x=vectors())
def test_error_of_groups_is_half_a_level_and_the_rounding_of_the_minimum(mode: CacheMode, x: np.ndarray) -> None:
    most = GROUPED[mode]
    stored = encode(mode, x)
    clipped = np.clip(x, -LARGEST, LARGEST).astype(np.float64).reshape(2, 2, GROUP)
    scales, read = stored["scales"].astype(np.float64), decode(mode, stored).reshape(2, 2, GROUP).astype(np.float64)
    low, high = clipped.min(axis=-1), clipped.max(axis=-1)
    # float32 adds: the difference from the minimum, its quotient, and the sum that is read each round by 2^-24.
    float32 = 2**-24 * (4 * np.maximum(np.abs(low), np.abs(high)) + 2 * most * scales)
    allowed = scales / 2 + rounding(low) + float32
    assert (np.abs(read - clipped) <= allowed[..., None]).all()
    coarsest = np.maximum(np.maximum(high - low, np.abs(low) * 2**-11 * (1 + 2**-10) + 2**-24), most * 2**-16) / most
    assert (scales <= coarsest * (1 + 2**-8)).all()


@pytest.mark.parametrize("mode", CacheMode)
@given(x=vectors())
def test_what_was_read_is_stored_as_it_was(mode: CacheMode, x: np.ndarray) -> None:
    x = np.clip(x, -LARGEST / 2, LARGEST / 2)  # so that nothing that is read is clipped
    stored = encode(mode, x)
    assert equal(encode(mode, decode(mode, stored)), stored)


def test_a_token_is_stored_alike_in_any_company() -> None:
    x = np.random.default_rng(1).standard_normal((5, 4 * GROUP), np.float32) * 3
    for mode in CacheMode:
        whole = encode(mode, x)
        for i in range(len(x)):
            assert equal(encode(mode, x[i]), {name: rows[i] for name, rows in whole.items()})


def test_h_modes_are_refused_where_they_save_nothing() -> None:
    shared = replace(SIZES["407m"], n_kv_heads=8)
    for mode in (CacheMode.H_FP16, CacheMode.H_INT8, CacheMode.H_INT4):
        check_mode(mode, SIZES["407m"])
        check_mode(mode, replace(SIZES["407m"], n_heads=18, n_kv_heads=9))
        with pytest.raises(InvalidArgument, match=r"2048 values .* 2 · n_kv_heads · head_dim = 2048, .* use int8"):
            check_mode(mode, shared)
    for mode in (CacheMode.FP16, CacheMode.INT8):
        check_mode(mode, shared)


def test_groups_must_divide_the_model() -> None:
    odd = replace(SIZES["tiny"], d_model=100)
    for mode in GROUPED:
        with pytest.raises(InvalidArgument, match=r"groups of 64 channels; this model's d_model = 100 .* use h-fp16"):
            check_mode(mode, odd)
    check_mode(CacheMode.H_FP16, odd)
