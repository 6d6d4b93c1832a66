"""The arithmetic, on models that are tables of numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tinyloop_service.evaluate.score import Quality, Sums, measure_quality, score_window, sum_up
from tinyloop_service.evaluate.windows import Span, Window

# Three targets of 1, 2 and 4 bytes; a vocabulary of four.
WINDOW = Window(np.array([9, 0, 1]), np.array([0, 1, 2]), np.array([1, 2, 4]))


@dataclass(frozen=True)
class Table:
    """Probabilities per depth and token, and states; depth 2 is asked for after depth 1."""

    probabilities: dict[int, list[list[float]]]
    states: Any

    def run(self, tokens: Any, loops: int) -> Table:
        assert tokens.tolist() == WINDOW.inputs.tolist() and loops == 2
        return self

    def logits(self, depth: int) -> Any:
        return np.log(np.array(self.probabilities[depth], np.float32)) + 7  # softmax knows no offset


UNIFORM = [[0.25, 0.25, 0.25, 0.25]] * 3
SHARP = [[0.5, 0.25, 0.125, 0.125], [0.125, 0.125, 0.5, 0.25], [0.25, 0.125, 0.5, 0.125]]
REFERENCE = Table({1: SHARP, 2: SHARP}, np.tile(np.array([3.0, 4.0], np.float32), (3, 3, 1)))
# States: equal before the loops, a tenth of the length off after loop 1, two tokens of three wholly off after loop 2.
OTHER = Table(
    {1: UNIFORM, 2: SHARP},
    np.array([[[3, 4]] * 3, [[3, 4.5]] * 3, [[0, 0], [6, 8], [3, 4]]], np.float32),
)


def sums(model: Table, span: Span = "all") -> Sums:
    scores = [score_window(each, WINDOW, (1, 2)) for each in (model, REFERENCE)]
    return sum_up(*scores, WINDOW, span)


def quality(model: Table, span: Span = "all") -> Quality:
    return measure_quality([sums(model, span)], [sums(REFERENCE, span)])


def test_bits_are_counted_over_tokens_and_divided_by_bytes() -> None:
    found = quality(OTHER)
    assert (found.num_tokens, found.num_bytes) == (3, 7)
    # Depth 1: 2 bits a token.  Depth 2: targets at 1/2, 1/8, 1/2: 1 + 3 + 1 bits.
    # float32 logits round at 1e-7.
    assert found.bits_per_byte == pytest.approx((6 / 7, 5 / 7), abs=1e-6)
    assert found.added_bits == pytest.approx((1 / 7, 0), abs=1e-6)


def test_agreement_counts_likeliest_tokens_the_lowest_on_ties() -> None:
    # UNIFORM's likeliest is 0, thrice; SHARP's are 0, 2, 2.
    assert quality(OTHER).agreement == pytest.approx((1 / 3, 1))
    assert quality(REFERENCE).agreement == (1, 1)


def test_distance_is_relative_to_the_references_state_and_a_mean_over_tokens() -> None:
    assert quality(OTHER).distance == pytest.approx((0, 0.1, 2 / 3))
    assert quality(REFERENCE).distance == (0, 0, 0)


def test_states_of_another_width_have_no_distance() -> None:
    wide = Table(OTHER.probabilities, np.zeros((3, 3, 5), np.float32))
    found = quality(wide)
    assert found.distance is None
    assert found.agreement == pytest.approx((1 / 3, 1))


def test_the_second_half_has_its_own_tokens_bytes_and_states() -> None:
    found = quality(OTHER, "second half")
    assert (found.num_tokens, found.num_bytes) == (1, 4)
    assert found.bits_per_byte == pytest.approx((2 / 4, 1 / 4), abs=1e-6)
    assert found.agreement == (0, 1)
    assert found.distance == pytest.approx((0, 0.1, 0))


def test_improbable_targets_cost_what_they_should() -> None:
    """A probability far below what float32 can hold after a softmax."""
    logits = np.array([[300.0, 0, 0, 0], [0, 0, 0, 300.0], [0, 0, 0, 0]])
    table = Table({1: [], 2: []}, REFERENCE.states)
    object.__setattr__(table, "logits", lambda depth: logits.astype(np.float32))
    score = score_window(table, WINDOW, (1, 2))
    assert score.nats[0] == pytest.approx([0, 300, math.log(4)])


def window_sums(bits: float, num_bytes: int) -> Sums:
    return Sums(num_bytes, num_bytes, np.array([bits * math.log(2)]), np.array([0]), None)


def test_windows_add_up_and_give_the_error_of_a_difference() -> None:
    row = [window_sums(3, 2), window_sums(2, 4)]
    reference = [window_sums(1, 2), window_sums(1, 4)]
    found = measure_quality(row, reference)
    assert found.bits_per_byte == pytest.approx((5 / 6,))
    assert found.added_bits == pytest.approx((3 / 6,))
    # Added: 2 bits on 2 bytes, 1 on 4; a ratio of 1/2, so residuals 2 − 1 and 1 − 2; √(2/1 · (1 + 1)) / 6.
    assert found.added_bits_error == pytest.approx((2 / 6,))


def test_equal_ratios_have_no_error_and_one_window_knows_none() -> None:
    row, reference = [window_sums(2, 2), window_sums(4, 4)], [window_sums(1, 2), window_sums(2, 4)]
    assert measure_quality(row, reference).added_bits_error == pytest.approx((0,))
    assert measure_quality(row[:1], reference[:1]).added_bits_error is None
