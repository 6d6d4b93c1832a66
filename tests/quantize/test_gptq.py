"""The solver on one linear: against brute force on tiny sizes, and at every Hessian that a model may come with."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from tinyloop_service.engine.tensors import Int4Linear, quantize_rtn
from tinyloop_service.quantize import gptq
from tinyloop_service.quantize.gptq import MAX_RETRIES, NotPositiveDefinite, choose_scales, prepare, quantize_gptq

Array = NDArray[np.float64]
ALL_LEVELS = np.arange(-8, 8)


def correlated(num_in: int, seed: int = 0, tokens: int = 4096) -> Array:
    """The Hessian of inputs that share directions and differ in size, as activations do."""
    rng = np.random.default_rng(seed)
    mixing = rng.standard_normal((num_in, num_in)) * np.exp(rng.standard_normal(num_in))
    inputs = rng.standard_normal((tokens, num_in // 4 + 1)) @ mixing[: num_in // 4 + 1]
    inputs += 0.3 * rng.standard_normal((tokens, num_in))
    return inputs.T @ inputs


def random_weight(num_out: int, num_in: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, 7]).standard_normal((num_out, num_in))


def levels_of(linear: Int4Linear) -> NDArray[np.int64]:
    unscaled = Int4Linear(linear.qweight, np.ones_like(linear.scales))
    return unscaled.dequantize().astype(np.int64)


def steps_of(linear: Int4Linear) -> Array:
    return np.repeat(linear.scales.astype(np.float64), linear.group_size, axis=1)


def loss(weight: Array, linear: Int4Linear, hessian: Array) -> float:
    difference = weight - linear.dequantize()
    return float(np.trace(difference @ hessian @ difference.T))


# --- what is computed


def test_every_level_is_the_best_one_if_later_inputs_could_be_anything() -> None:
    """The definition of GPTQ, by brute force: earlier columns are fixed, later ones solved for as real numbers."""
    weight, hessian = random_weight(3, 6), correlated(6)
    curvature = prepare(hessian, 0.01)
    linear = quantize_gptq(weight, curvature, 6).linear
    damped = hessian + 0.01 * np.diag(hessian).mean() * np.eye(6)
    order, steps, levels = curvature.order, steps_of(linear), levels_of(linear)
    assert (np.diff(np.diag(hessian)[order]) <= 0).all(), "act-order: the largest inputs first"
    for row, place in product(range(3), range(6)):
        known, later = order[: place + 1], order[place + 1 :]
        costs = []
        for level in ALL_LEVELS:
            chosen = levels[row].copy()
            chosen[order[place]] = level
            difference = (weight[row] - chosen * steps[row])[known]
            # min over what is left of the later columns: the Schur complement of their part.
            reduced = damped[np.ix_(known, known)]
            if len(later):
                cross = damped[np.ix_(known, later)]
                reduced = reduced - cross @ np.linalg.solve(damped[np.ix_(later, later)], cross.T)
            costs.append(difference @ reduced @ difference)
        assert levels[row, order[place]] == ALL_LEVELS[np.argmin(costs)], (row, place)


def test_independent_inputs_get_the_optimum_of_all_levels() -> None:
    weight, hessian = random_weight(2, 4), np.diag([3.0, 0.5, 7.0, 1.0])
    linear = quantize_gptq(weight, prepare(hessian, 0.01), 4).linear
    choices = np.array(list(product(ALL_LEVELS, repeat=4)))
    for row, scale in enumerate(linear.scales[:, 0].astype(np.float64)):
        differences = choices * scale - weight[row]
        best = (differences**2 @ np.diag(hessian)).min()
        found = loss(
            weight[row : row + 1], Int4Linear(linear.qweight[row : row + 1], linear.scales[row : row + 1]), hessian
        )
        # The file's values are float32: 2^-24 of a weight, in a square of a difference of about a tenth of one.
        assert found == pytest.approx(best, rel=1e-5)


def test_correlated_inputs_come_near_the_optimum_of_all_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPTQ is greedy, so it may miss the optimum of 16^4 choices; rounding to nearest misses it by much more."""
    monkeypatch.setattr(gptq, "choose_scales", lambda weight, *_: np.ones((len(weight), 1), np.float16))
    hessian = np.ones((4, 4)) + np.diag([0.02, 0.03, 0.04, 0.05])  # all inputs nearly alike
    choices = np.array(list(product(ALL_LEVELS, repeat=4)))
    weight = np.random.default_rng(0).uniform(-6, 6, (24, 4))
    found = weight - quantize_gptq(weight, prepare(hessian, 1e-9), 4).linear.dequantize()
    nearest = weight - np.rint(weight)
    ours, rounded = (np.einsum("ri,ij,rj->r", error, hessian, error) for error in (found, nearest))
    best = np.array([(((choices - row) @ hessian) * (choices - row)).sum(axis=1).min() for row in weight])
    assert (ours >= best * (1 - 1e-5)).all(), "better than brute force: the loss is wrong"
    assert ours.sum() < 1.1 * best.sum() and ours.sum() < 0.5 * rounded.sum()


@pytest.mark.parametrize("group", [128, 64, 32])
def test_better_than_rounding_to_nearest_and_says_by_how_much(group: int) -> None:
    weight, hessian = random_weight(48, 384), correlated(384)
    found = quantize_gptq(weight, prepare(hessian, 0.01), group)
    whole = np.trace(weight @ hessian @ weight.T)
    assert found.error == pytest.approx(loss(weight, found.linear, hessian) / whole, rel=1e-9)
    assert found.rtn_error == pytest.approx(loss(weight, quantize_rtn(weight, group), hessian) / whole, rel=1e-9)
    # A quarter of the directions carry nearly all of these inputs, so most of the error can be moved out of them.
    assert found.error < 0.3 * found.rtn_error


def test_an_input_s_importance_is_what_its_error_costs_once_later_ones_have_made_up() -> None:
    hessian = correlated(12)
    curvature = prepare(hessian, 0.01)
    damped = hessian + 0.01 * np.diag(hessian).mean() * np.eye(12)
    for place, index in enumerate(curvature.order):
        rest = curvature.order[place:]
        assert curvature.importance[index] == pytest.approx(1 / np.linalg.inv(damped[np.ix_(rest, rest)])[0, 0])


# --- scales


def test_scales_are_the_cheapest_candidate_and_never_cost_more_than_max_over_7() -> None:
    weight, importance = random_weight(40, 128), np.exp(np.random.default_rng(1).standard_normal(128))
    scales = choose_scales(weight, importance, 32)

    def cost(candidates: NDArray[np.float16]) -> Array:
        step = np.repeat(candidates.astype(np.float64), 32, axis=1)
        nearest = np.clip(np.rint(weight / step), -8, 7) * step
        return (((weight - nearest) ** 2) * importance).reshape(40, 4, 32).sum(axis=2)

    largest = np.abs(weight.reshape(40, 4, 32)).max(axis=2)
    ours, plain = cost(scales), cost((largest / 7).astype(np.float16))
    # Rounding ties in the quotient may fall either way between a signed and an unsigned scale: 1e-12 is for sums.
    assert (ours <= plain * (1 + 1e-12)).all() and ours.sum() < 0.9 * plain.sum()


def test_a_scale_s_sign_lets_the_largest_weight_have_level_minus_8() -> None:
    weight = np.array([[8.0, -7, 3, 1], [-8, 7, -3, -1]])
    found = quantize_gptq(weight, prepare(np.eye(4), 0.01), 4)
    np.testing.assert_array_equal(found.linear.dequantize(), weight)
    assert found.linear.scales[:, 0].tolist() == [-1, 1] and found.error == 0


def test_groups_of_zeros_stay_zeros() -> None:
    weight = random_weight(5, 64)
    weight[:, 32:] = 0
    weight[2] = 0
    found = quantize_gptq(weight, prepare(correlated(64), 0.01), 32)
    values = found.linear.dequantize()
    assert (values[:, 32:] == 0).all() and (values[2] == 0).all() and np.isfinite(values).all()


# --- layout


def test_the_order_of_rounding_does_not_show_in_the_layout() -> None:
    """Inputs of a group shuffled, with the Hessian: the same result, shuffled.  Scales stay with neighbours."""
    weight, hessian = random_weight(24, 128), correlated(128)
    rng = np.random.default_rng(3)
    shuffle = np.concatenate([start + rng.permutation(32) for start in range(0, 128, 32)])
    plain = quantize_gptq(weight, prepare(hessian, 0.01), 32).linear
    curvature = prepare(hessian[np.ix_(shuffle, shuffle)], 0.01)
    shuffled = quantize_gptq(weight[:, shuffle], curvature, 32).linear
    assert not (np.diff(curvature.order) > 0).all(), (
        "the inputs are rounded in the order of the file: nothing is tested"
    )
    np.testing.assert_array_equal(shuffled.scales, plain.scales)
    np.testing.assert_array_equal(levels_of(shuffled), levels_of(plain)[:, shuffle])


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in another order differ by 1e-16, so a level would change only with odds of about 1e-13."""
    weight, hessian = random_weight(16, 320), correlated(320)
    found = quantize_gptq(weight, prepare(hessian, 0.01), 32).linear
    monkeypatch.setattr(gptq, "BLOCK", 1000)
    whole = quantize_gptq(weight, prepare(hessian, 0.01), 32).linear
    np.testing.assert_array_equal(found.qweight, whole.qweight)


def test_all_sixteen_levels_are_used_and_two_runs_agree() -> None:
    weight, hessian = random_weight(64, 128), correlated(128)
    found, again = (quantize_gptq(weight, prepare(hessian, 0.01), 128).linear for _ in range(2))
    assert set(np.unique(levels_of(found)).tolist()) == set(ALL_LEVELS.tolist())
    assert found.qweight.tobytes() == again.qweight.tobytes() and found.scales.tobytes() == again.scales.tobytes()


# --- Hessians as they come


def test_dead_inputs_are_rounded_to_nearest_and_move_no_other() -> None:
    dead = np.array([3, 40, 41, 90])
    hessian = correlated(128)
    hessian[dead] = hessian[:, dead] = 0
    weight = random_weight(16, 128)
    curvature = prepare(hessian, 0.01)
    found = quantize_gptq(weight, curvature, 32).linear
    assert curvature.num_dead == 4
    nearest = np.clip(np.rint(weight / steps_of(found)), -8, 7)
    np.testing.assert_array_equal(levels_of(found)[:, dead], nearest[:, dead])
    # The same scales, other weights at the dead inputs: all else stays.
    scales = found.scales
    changed = weight.copy()
    changed[:, dead] *= 0.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gptq, "choose_scales", lambda *_: scales)
        other = quantize_gptq(changed, curvature, 32).linear
    alive = np.setdiff1d(np.arange(128), dead)
    np.testing.assert_array_equal(levels_of(other)[:, alive], levels_of(found)[:, alive])
    assert (levels_of(other)[:, dead] != levels_of(found)[:, dead]).any()


def test_without_any_input_it_is_rounding_to_nearest() -> None:
    weight = random_weight(8, 64)
    curvature = prepare(np.zeros((64, 64)), 0.01)
    found = quantize_gptq(weight, curvature, 32)
    assert curvature.num_dead == 64 and (found.error, found.rtn_error) == (0, 0)
    np.testing.assert_array_equal(levels_of(found.linear), np.clip(np.rint(weight / steps_of(found.linear)), -8, 7))


def test_fewer_tokens_than_inputs() -> None:
    """A singular Hessian: eight tokens, 128 inputs.  Their outputs can be kept nearly exactly."""
    inputs = np.random.default_rng(4).standard_normal((8, 128))
    curvature = prepare(inputs.T @ inputs, 0.01)
    found = quantize_gptq(random_weight(32, 128), curvature, 32)
    assert curvature.num_retries == 0
    assert found.error < 0.01 * found.rtn_error


def test_a_failed_factorisation_is_retried_with_ten_times_the_damping() -> None:
    """One eigenvalue is −0.05 of the mean diagonal: a damping of 0.01 is too little, 0.1 is enough."""
    basis, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((16, 16)))
    hessian = basis @ np.diag([-0.05, *np.ones(14), 2.05]) @ basis.T
    assert np.diag(hessian).mean() == pytest.approx(1)
    curvature = prepare(hessian, 0.01)
    assert (curvature.num_retries, curvature.damping) == (1, pytest.approx(0.1))
    assert np.isfinite(quantize_gptq(random_weight(4, 16), curvature, 16).linear.dequantize()).all()


def test_what_no_damping_helps_is_one_error() -> None:
    with pytest.raises(NotPositiveDefinite, match=f"damping of {0.01 * 10**MAX_RETRIES:g} of"):
        prepare(np.diag([100.0, -60, *np.ones(6)]), 0.01)  # 10 of a mean of 5.75 is not enough


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_hessian_that_is_not_finite_is_refused(value: float) -> None:
    hessian = np.eye(4)
    hessian[1, 2] = hessian[2, 1] = value
    with pytest.raises(ValueError, match="NaN or infinity"):
        prepare(hessian, 0.01)
