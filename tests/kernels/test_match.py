"""The matcher binds sizes and fails in one sentence."""

from __future__ import annotations

import numpy as np
import pytest

from tinyloop_service.kernels.match import KernelArgumentError, match, require


def half(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float16)


def test_names_are_bound_wherever_they_stand_alone() -> None:
    sizes = match("op", {"D": 4}, scales=(half(2, 16), "float16", "K/128, N"), x=(half(3, 256), "float16", "R, K"))
    assert sizes == {"D": 4, "N": 16, "R": 3, "K": 256}


def test_an_absent_array_matches() -> None:
    assert match("op", x=(half(3), "float16", "R"), gain=(None, "float16", "D")) == {"R": 3}


@pytest.mark.parametrize(
    ("array", "pattern", "sentence"),
    [
        (half(16, 2048), "K/128, N", "op: a is (16, 2048), expected (K/128, N) = (32, 2048)"),
        (half(3, 5), "_, (H + 2*G)*D", "op: a is (3, 5), expected (_, (H + 2*G)*D) = (3, 6)"),
        (half(3), "R, K", "op: a is (3,), expected (R, K)"),
        (half(4, 8)[:, ::2], "_, _", "op: a (4, 4) is a strided view, expected contiguous"),
        (np.zeros(4, np.int32), "R", "op: a is int32, expected float16"),
        (half(7), "K/3", "op: a is (7,), expected (K/3) = (1365.33)"),
    ],
)
def test_one_sentence_says_given_and_expected(array: np.ndarray, pattern: str, sentence: str) -> None:
    with pytest.raises(KernelArgumentError) as caught:
        match("op", {"K": 4096, "N": 2048, "R": 3, "H": 2, "G": 2, "D": 1}, a=(array, "float16", pattern))
    assert str(caught.value) == sentence


def test_two_arrays_that_disagree() -> None:
    with pytest.raises(KernelArgumentError, match=r"op: b is \(5,\), expected \(R\) = \(3\)"):
        match("op", a=(half(3), "float16", "R"), b=(half(5), "float16", "R"))


def test_what_matched_is_remembered_by_all_it_depends_on() -> None:
    good = half(3, 4)
    for _ in range(2):
        sizes = match("op", {"K": 4}, x=(good, "float16", "R, K"))
        assert sizes == {"K": 4, "R": 3}
        sizes["R"] = 9  # the caller's own
    for known, array, dtype, pattern in [
        ({"K": 5}, good, "float16", "R, K"),
        ({"K": 4}, half(3, 5), "float16", "R, K"),
        ({"K": 4}, good.astype(np.float32), "float16", "R, K"),
        ({"K": 4}, good, "float32", "R, K"),
        ({"K": 4}, good, "float16", "R, K, N"),
        ({"K": 4}, half(3, 8)[:, ::2], "float16", "R, K"),
    ]:
        with pytest.raises(KernelArgumentError):
            match("op", known, x=(array, dtype, pattern))


def test_require() -> None:
    require("op", True, "never said")
    with pytest.raises(KernelArgumentError, match="op: D is 3"):
        require("op", False, "D is 3")
