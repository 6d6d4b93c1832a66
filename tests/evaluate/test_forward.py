"""The fast forward against the reference: every switch of the spec, every depth from one pass, every rounding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small_models import SPECS, model

from tinyloop_service.engine import trajectory
from tinyloop_service.engine.reference import Reference
from tinyloop_service.engine.weights import ModelWeights
from tinyloop_service.evaluate.rounding import DenseModel, ModelForward, Rounding, RoundingTap, Stopped
from tinyloop_service.types import CacheMode

TOKENS = np.random.default_rng(5).integers(0, 256, 37)
DEPTHS = (1, 2, 5)
# Both are float32, with sums of ≤ 96 terms in other orders: some 1e-6 of logits of order one after 13 blocks.
CLOSE = {"rtol": 0, "atol": 5e-5}
# A rounding makes such a difference a whole step where a value falls on the other side of a boundary.  Few do, so what
# they move stays well below what the rounding itself does to the logits, which is what leaving it out would show; in
# root mean squares up to 0.29 here, where K or V alone left out would be some 0.7.  Loops breed such differences from
# those of the loop before: one flip at depth 2 was 0.53 at depth 5, on one processor of three.
FLIPPED = 0.5
BEFORE_FLIPS_BREED = (1, 2)
PLAIN = Rounding()
INT8 = Rounding(activations="int8")
STORED = Rounding(cache=CacheMode.INT8)
ATTENDED = Rounding(cache=CacheMode.INT8, attention="int8")


@pytest.fixture(autouse=True)
def several_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """37 tokens: four whole blocks and a part of one."""
    monkeypatch.setattr(trajectory, "QUERIES", 8)


def forward(weights: ModelWeights, rounding: Rounding = PLAIN) -> ModelForward:
    return ModelForward(DenseModel(weights), rounding)


def rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


@pytest.mark.parametrize("name", SPECS)
def test_logits_are_the_references_at_every_depth(name: str) -> None:
    run, reference = forward(model(name)).run(TOKENS, max(DEPTHS)), Reference(model(name))
    for depth in DEPTHS:
        logits = run.logits(depth)
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, reference.forward(TOKENS.tolist(), reference.new_cache(depth)), **CLOSE)


@pytest.mark.parametrize("name", [name for name in SPECS if name != "fp16"])
def test_int8_activations_are_the_references(name: str) -> None:
    plain, rounded = (forward(model(name), each).run(TOKENS, max(DEPTHS)) for each in (PLAIN, INT8))
    reference = Reference(model(name), activations="int8")
    for depth in BEFORE_FLIPS_BREED:
        expected, logits = reference.forward(TOKENS.tolist(), reference.new_cache(depth)), rounded.logits(depth)
        assert rms(logits - expected) < FLIPPED * rms(logits - plain.logits(depth))


def test_int8_activations_leave_fp16_linears_alone() -> None:
    plain, rounded = (forward(model("fp16"), each).run(TOKENS, 2).logits(2) for each in (PLAIN, INT8))
    np.testing.assert_array_equal(plain, rounded)


@pytest.mark.parametrize("name", SPECS)
def test_a_depth_from_one_pass_is_that_depth_run_alone(name: str) -> None:
    """Bit for bit: the same products in the same order."""
    run = forward(model(name)).run(TOKENS, max(DEPTHS))
    assert run.states.shape == (1 + max(DEPTHS), len(TOKENS), SPECS[name].d_model)
    for depth in DEPTHS:
        alone = forward(model(name)).run(TOKENS, depth)
        np.testing.assert_array_equal(run.states[: 1 + depth], alone.states)
        np.testing.assert_array_equal(run.logits(depth), alone.logits(depth))


@pytest.mark.parametrize("mode", CacheMode)
@pytest.mark.parametrize("name", SPECS)
def test_one_pass_is_a_second_half_off_a_cached_first_half_in_every_mode(name: str, mode: CacheMode) -> None:
    half = (len(TOKENS) + 1) // 2
    reference = Reference(model(name), cache_mode=mode)
    cache = reference.new_cache(3)
    expected = [reference.forward(tokens.tolist(), cache) for tokens in (TOKENS[:half], TOKENS[half:])]
    plain, rounded = (forward(model(name), each).run(TOKENS, 3).logits(3) for each in (PLAIN, Rounding(cache=mode)))
    assert rms(rounded - np.concatenate(expected)) < FLIPPED * rms(rounded - plain)


@pytest.mark.parametrize("name", SPECS)
def test_attended_in_int8_is_a_second_half_decoded_off_a_prompt(name: str) -> None:
    half = (len(TOKENS) + 1) // 2
    reference = Reference(model(name), cache_mode=CacheMode.INT8)
    cache = reference.new_cache(2)
    reference.forward(TOKENS[:half].tolist(), cache)
    expected = replace(reference, attention="int8").forward(TOKENS[half:].tolist(), cache)
    stored, attended = (forward(model(name), each).run(TOKENS, 2).logits(2) for each in (STORED, ATTENDED))
    np.testing.assert_array_equal(attended[:half], stored[:half])
    assert rms(attended[half:] - expected) < FLIPPED * rms(attended[half:] - stored[half:])


def test_a_window_of_one_token_has_no_second_half_to_attend() -> None:
    stored, attended = (forward(model("pre"), each).run(TOKENS[:1], 2).logits(2) for each in (STORED, ATTENDED))
    np.testing.assert_array_equal(attended, stored)


def test_a_pass_that_nobody_wants_ends_amid_its_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, it may take minutes with a large model, and who interrupts it would wait for them."""
    fast, blocks = forward(model("everything")), list[object]()

    def keeps_h(tap: RoundingTap, x: Any) -> Any:
        blocks.append(x)
        if len(blocks) == 3:
            fast.stopped.set()
        return x

    whole = fast.run(TOKENS, 5)
    monkeypatch.setattr(RoundingTap, "keeps_h", keeps_h)
    with pytest.raises(Stopped):
        fast.run(TOKENS, 5)
    assert len(blocks) == 3
    with pytest.raises(Stopped):
        whole.logits(5)
