"""The fast forward against the reference: every switch of the spec, every depth from one pass, every rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from small_models import SPECS, model

from tinyloop_service.engine.reference import Reference
from tinyloop_service.engine.weights import ModelWeights
from tinyloop_service.evaluate import forward as module
from tinyloop_service.evaluate.forward import CACHE_ROUNDINGS, CacheRounding, DenseModel, ModelForward, Rounding
from tinyloop_service.types import CacheMode

TOKENS = np.random.default_rng(5).integers(0, 256, 37)
DEPTHS = (1, 2, 5)
# Both are float32, with sums of ≤ 96 terms in other orders: some 1e-6 of logits of order one after 13 blocks.
CLOSE = {"rtol": 0, "atol": 5e-5}
# A rounding makes such a difference a whole step where a value falls on the other side of a boundary.  Few do, so what
# they move stays well below what the rounding itself does to the logits, which is what leaving it out would show; in
# root mean squares up to an eighth here, where K or V alone left out would be some 0.7.
FLIPPED = 0.4
PLAIN = Rounding()
INT8 = Rounding(activations="int8")
FP16_CACHE = Rounding(cache=CacheMode.FP16)


@pytest.fixture(autouse=True)
def several_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """37 tokens: four whole blocks and a part of one."""
    monkeypatch.setattr(module, "QUERIES", 8)


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


@pytest.mark.parametrize(("rounding", "options"), [(INT8, {"activations": "int8"}), (FP16_CACHE, {"kv": "fp16"})])
@pytest.mark.parametrize("name", SPECS.keys() - {"fp16"})
def test_roundings_are_the_references(name: str, rounding: Rounding, options: dict[str, Any]) -> None:
    plain, rounded = (forward(model(name), each).run(TOKENS, max(DEPTHS)) for each in (PLAIN, rounding))
    reference = Reference(model(name), **options)
    for depth in DEPTHS:
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


@pytest.mark.parametrize("name", SPECS)
def test_a_second_half_off_a_cached_first_half_is_one_pass_with_the_caches_rounding(name: str) -> None:
    half = (len(TOKENS) + 1) // 2
    reference = Reference(model(name), kv="fp16")
    cache = reference.new_cache(2)
    reference.forward(TOKENS[:half].tolist(), cache)
    expected = reference.forward(TOKENS[half:].tolist(), cache)
    plain, rounded = (forward(model(name), each).run(TOKENS, 2).logits(2)[half:] for each in (PLAIN, FP16_CACHE))
    assert rms(rounded - expected) < FLIPPED * rms(rounded - plain)


@pytest.mark.parametrize("stores", ["kv", "h"])
@pytest.mark.parametrize("name", ["pre", "gqa", "everything"])
def test_every_key_and_value_is_made_of_what_is_stored(name: str, stores: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that stores zeros, of K and V or of the input they are projected from, silences attention; queries and
    the stream itself it leaves alone."""
    monkeypatch.setitem(CACHE_ROUNDINGS, CacheMode.H_INT4, CacheRounding(stores, np.zeros_like))
    weights = model(name)
    silent = {
        key: np.zeros_like(value) if key.endswith(("attn.o.scales", "attn.o.weight")) else value
        for key, value in weights.tensors.items()
    }
    expected = forward(ModelWeights.from_tensors(weights.spec, silent)).run(TOKENS, 3)
    found = forward(weights, Rounding(cache=CacheMode.H_INT4)).run(TOKENS, 3)
    np.testing.assert_array_equal(found.logits(3), expected.logits(3))


@pytest.mark.parametrize("stores", ["kv", "h"])
def test_a_cache_that_stores_all_of_it_changes_nothing(stores: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CACHE_ROUNDINGS, CacheMode.H_INT4, CacheRounding(stores, np.copy))
    plain, rounded = (
        forward(model("everything"), Rounding(cache=mode)).run(TOKENS, 3).logits(3) for mode in (None, CacheMode.H_INT4)
    )
    np.testing.assert_array_equal(plain, rounded)
