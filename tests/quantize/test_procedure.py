"""Which linears are rounded on which states, and what comes out: units, passes, heads, refusals, equal bytes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from fp16_models import BASE, SPECS, Recording, model, windows
from numpy.typing import NDArray

from tinyloop_service.engine.reference import Reference
from tinyloop_service.engine.spec import Quant
from tinyloop_service.engine.tensors import BLOCK_LINEARS, Fp16Linear, Int4Linear, ModelWeights, quantize_rtn
from tinyloop_service.engine.trajectory import INPUT_GROUPS
from tinyloop_service.engine.weights import random_model
from tinyloop_service.errors import InvalidArgument, ModelFileError
from tinyloop_service.quantize import procedure
from tinyloop_service.quantize.arrays import open_arrays
from tinyloop_service.quantize.gptq import Curvature, Rounded, prepare, quantize_gptq
from tinyloop_service.quantize.procedure import Quantized, Recipe, Unit, quantize_with_gptq, round_to_nearest, units
from tinyloop_service.quantize.record import quantized_model

RECIPE = Recipe(group_size=32, depth_weights=(1.0, 1.0, 1.0))
LENGTHS = (40, 40, 40, 24)  # two batches: windows of a batch are of one length
Linears = dict[str, Int4Linear]


def quantized(weights: ModelWeights, recipe: Recipe = RECIPE, lengths: tuple[int, ...] = LENGTHS) -> Quantized:
    calibration = windows(weights.spec, *lengths)
    return quantize_with_gptq(weights, calibration, recipe, open_arrays("cpu"), lambda done, total, stage: None)


@cache
def result(name: str, recipe: Recipe = RECIPE) -> Quantized:
    return quantized(model(name), recipe)


def linears(found: Quantized) -> Linears:
    bases = [name.removesuffix(".qweight") for name in found.tensors if name.endswith(".qweight")]
    return {base: Int4Linear(found.tensors[f"{base}.qweight"], found.tensors[f"{base}.scales"]) for base in bases}


# --- the order


def rounded_for(name: str, running: Linears, base: str) -> Int4Linear:
    """An original linear, rounded for what it reads in the reference while the `running` ones stand in for others."""
    weights = model(name)
    dense = {f"{other}.weight": linear.dequantize().astype(np.float16) for other, linear in running.items()}
    reference = Recording(ModelWeights.from_tensors(weights.spec, {**weights.tensors, **dense}), np.float64)
    read = reference.read_by(windows(weights.spec, *LENGTHS).windows, len(RECIPE.depth_weights))
    inputs = np.concatenate(read[base])
    return quantize_gptq(weights.tensors[f"{base}.weight"], prepare(inputs.T @ inputs, RECIPE.damping), 32).linear


def share_alike(one: Int4Linear, other: Int4Linear) -> float:
    """Hessians of float32 and float64 differ by 1e-6, and fp16 copies of INT4 values by a hundredth of a step: a level
    on the edge may fall the other way and take some of its row along."""
    return float((one.dequantize() == other.dequantize()).mean())


@pytest.mark.parametrize("name", ["everything", "group of 2"])
def test_each_pass_sees_what_quantised_units_and_the_pass_before_leave(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Int4Linear] = []

    def remember(weight: NDArray[np.float16], curvature: Curvature, group_size: int) -> Rounded:
        rounded = quantize_gptq(weight, curvature, group_size)
        made.append(rounded.linear)
        return rounded

    monkeypatch.setattr(procedure, "quantize_gptq", remember)
    quantized(model(name), replace(RECIPE, int4_head=False))
    in_order, earlier = iter(made), {}
    for unit in units(SPECS[name]):
        bases = [f"{base}.{linear}" for base in unit.bases for group in INPUT_GROUPS.values() for linear in group]
        first, second = ({base: next(in_order) for base in bases} for _ in range(2))
        for base in (bases[0], bases[-1]):
            assert share_alike(first[base], rounded_for(name, earlier, base)) > 0.95, f"pass 1 of {base}"
            assert share_alike(second[base], rounded_for(name, earlier | first, base)) > 0.95, f"pass 2 of {base}"
        if unit.kind == "loop":
            last = bases[-1]
            assert share_alike(second[last], rounded_for(name, earlier, last)) < 0.9, "the states hardly differ"
        earlier |= second
    assert next(in_order, None) is None


def test_units_are_blocks_and_the_loop_group_as_one() -> None:
    spec = replace(SPECS["group of 2"], pre_blocks=2)
    expected = [("pre", ("pre.0",)), ("pre", ("pre.1",)), ("loop", ("loop.0", "loop.1"))]
    expected += [("post", ("post.0",)), ("post", ("post.1",))]
    assert units(spec) == [Unit(kind, bases) for kind, bases in expected]


def test_the_head_reads_what_the_quantised_blocks_leave() -> None:
    found = linears(result("loop_norm+post"))
    head = found.pop("head")
    assert share_alike(head, rounded_for("loop_norm+post", found, "head")) > 0.95


def test_depth_weights_and_passes_matter() -> None:
    plain = linears(result("pre"))
    for recipe in (replace(RECIPE, depth_weights=(1.0, 1.0, 5.0)), replace(RECIPE, passes=1)):
        other = linears(result("pre", recipe))
        assert plain["loop.0.mlp.down"].qweight.tobytes() != other["loop.0.mlp.down"].qweight.tobytes()
    longer = linears(result("pre", replace(RECIPE, depth_weights=(1.0, 1.0, 1.0, 0.0))))
    assert longer["loop.0.mlp.down"].qweight.tobytes() == plain["loop.0.mlp.down"].qweight.tobytes()
    assert longer["head"].qweight.tobytes() != plain["head"].qweight.tobytes(), "the head is for the last depth"


def test_progress_runs_from_nothing_to_all_through_every_stage() -> None:
    seen: list[tuple[int, int, str]] = []
    calibration = windows(SPECS["group of 2"], 20, 20)
    arguments = (calibration, RECIPE, open_arrays("cpu"), lambda *progress: seen.append(progress))
    quantize_with_gptq(model("group of 2"), *arguments)
    shares = [done / total for done, total, _ in seen]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 1
    stages = list(dict.fromkeys(stage for _, _, stage in seen))
    assert stages[:3] == ["pre.0, pass 1 of 2", "pre.0, pass 1 of 2: rounding", "pre.0, pass 2 of 2"]
    assert "loop.0 … loop.1, quantised" in stages and stages[-1] == "head: rounding"


# --- what comes out


@pytest.mark.parametrize("name", SPECS)
def test_every_linear_is_int4_and_all_else_is_as_it_was(name: str) -> None:
    found, weights = result(name), model(name)
    made = ModelWeights.from_tensors(found.spec, found.tensors)
    assert made.spec == replace(weights.spec, quant=Quant(4, 32))
    for tensor, value in made.tensors.items():
        if tensor.endswith(".weight"):
            np.testing.assert_array_equal(value, weights.tensors[tensor])
    num_blocks = sum(len(unit.bases) for unit in units(weights.spec))
    assert len(linears(found)) == len(found.layers) == num_blocks * len(BLOCK_LINEARS) + 1
    assert [layer.name for layer in found.layers][-1] == "head"
    for layer in found.layers:
        assert 0 < layer.error < layer.rtn_error, layer
        assert layer.damping == RECIPE.damping
        assert len(layer.errors_by_pass) == (1 if layer.name == "head" else 2)
        assert layer.errors_by_pass[-1] == layer.error


@pytest.mark.parametrize("name", ["pre", "everything", "inject"])
def test_the_model_is_nearer_to_the_original_than_by_rounding_to_nearest(name: str) -> None:
    """On tokens that were not calibrated on; a thousand were, ten times as many as a linear has inputs."""
    weights = model(name)
    tokens = np.random.default_rng(9).integers(0, weights.spec.vocab_size, 60).tolist()

    def logits(spec_and_tensors: ModelWeights) -> NDArray[np.float64]:
        reference = Reference(spec_and_tensors, np.float64)
        return reference.forward(tokens, reference.new_cache(3))

    def distance(found: Quantized) -> float:
        return float(np.square(logits(ModelWeights.from_tensors(found.spec, found.tensors)) - exact).mean())

    exact = logits(weights)
    found = quantized(weights, lengths=(40,) * 25)
    assert distance(found) < 0.7 * distance(round_to_nearest(weights, RECIPE))


@pytest.mark.parametrize("method", ["gptq", "rtn"])
@pytest.mark.parametrize("tied", [False, True])
def test_an_fp16_head_stays(method: str, tied: bool) -> None:
    name = "tied" if tied else "pre"
    recipe = replace(RECIPE, int4_head=False)
    found = result(name, recipe) if method == "gptq" else round_to_nearest(model(name), recipe)
    made = ModelWeights.from_tensors(found.spec, found.tensors)
    assert isinstance(made.head, Fp16Linear) and "head" not in {layer.name for layer in found.layers}
    np.testing.assert_array_equal(made.head.weight, model(name).head.dequantize())
    assert ("head.weight" in made.tensors) == (not tied)


def test_rounding_to_nearest_is_quantize_rtn() -> None:
    found, weights = round_to_nearest(model("tied"), RECIPE), model("tied")
    for base, linear in linears(found).items():
        weight = weights.embed if base == "head" else weights.tensors[f"{base}.weight"]
        expected = quantize_rtn(weight, 32)
        np.testing.assert_array_equal(linear.qweight, expected.qweight)
        np.testing.assert_array_equal(linear.scales, expected.scales)
        [layer] = [layer for layer in found.layers if layer.name == base]
        lost = np.square(weight.astype(float) - linear.dequantize()).sum() / np.square(weight.astype(float)).sum()
        assert layer.rtn_error == layer.error == pytest.approx(lost, rel=1e-5)


def test_two_runs_write_the_same_bytes_and_say_the_same() -> None:
    runs = []
    for _ in range(2):
        found = quantized(model("everything"))
        calibration = windows(BASE, *LENGTHS)
        runs.append(quantized_model(model("everything"), found, RECIPE, calibration))
    assert runs[0].model_id == runs[1].model_id and runs[0].provenance == runs[1].provenance


def test_the_record_of_a_model_keeps_what_was_known_and_has_every_layer() -> None:
    calibration = windows(BASE, *LENGTHS)
    made = quantized_model(model("pre"), result("pre"), RECIPE, calibration)
    assert made.provenance["source"] == "random"
    record = made.provenance["quantization"]
    assert record["source_model_id"] == model("pre").model_id
    assert (record["method"], record["passes"], record["loops"], record["damping"]) == ("gptq", 2, 3, 0.01)
    assert record["calibration"] == calibration.provenance
    errors = [layer["error"] for layer in record["layers"]]
    assert len(errors) == 22 and record["mean_error"] == pytest.approx(np.mean(errors), rel=1e-4)


# --- Hessians with something to say, and refusals


def test_dead_inputs_and_retries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = model("pre")
    tensors = dict(weights.tensors)
    tensors["loop.0.mlp.up.weight"] = tensors["loop.0.mlp.up.weight"].copy()
    tensors["loop.0.mlp.up.weight"][:5] = 0  # five inputs of mlp.down are always zero
    real = np.linalg.cholesky
    calls = iter([True, *[False] * 100])

    def failing_once(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
        if next(calls):
            raise np.linalg.LinAlgError
        return real(matrix)

    monkeypatch.setattr(np.linalg, "cholesky", failing_once)
    weights = ModelWeights.from_tensors(weights.spec, tensors)
    found = quantized(weights, replace(RECIPE, passes=1), (40,) * 12)
    notes = {layer.name: layer.note for layer in found.layers if layer.note}
    assert notes.pop("loop.0.mlp.down") == "5 of 96 inputs always zero"
    assert set(notes) == {"pre.0.attn.q", "pre.0.attn.k", "pre.0.attn.v"}, "they share one Hessian"
    assert set(notes.values()) == {"Cholesky failed 1×, damping raised to 0.1"}


def test_too_little_text_for_a_layer_is_named() -> None:
    """144 tokens: the loop block reads them at each of three loops, others once."""
    notes = {layer.name: layer.note for layer in result("pre").layers}
    assert notes["pre.0.mlp.down"] == "overfits: 144 tokens for 96 inputs"
    assert notes["head"] == "overfits: 144 tokens for 64 inputs"
    assert not notes["loop.0.mlp.down"]


def test_a_hessian_that_stays_singular_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
        raise np.linalg.LinAlgError

    monkeypatch.setattr(np.linalg, "cholesky", failing)
    with pytest.raises(InvalidArgument, match=r"damping: pre\.0\.attn\.q: .* damping of 10 .* more calibration text"):
        quantized(model("pre"))


def test_activations_that_are_not_finite_are_refused() -> None:
    """The largest weights that fp16 has, one after the other: products of what they give leave float32."""
    weights = model("sandwich")
    tensors = dict(weights.tensors)
    tensors["pre.0.mlp_norm.weight"] = np.full(64, 60000, np.float16)
    for linear in ("mlp.gate", "mlp.up"):
        tensors[f"pre.0.{linear}.weight"] = np.full((96, 64), 60000, np.float16)
    with pytest.raises(ModelFileError, match=r"pre\.0\.mlp\.down: .* not finite"):
        quantized(ModelWeights.from_tensors(weights.spec, tensors))


@pytest.mark.parametrize("method", ["gptq", "rtn"])
@pytest.mark.parametrize(
    ("weights", "recipe", "message"),
    [
        (random_model("tiny"), RECIPE, "model: is INT4 already; give the fp16"),
        (model("pre"), replace(RECIPE, group_size=128), "group: 128 does not divide d_model = 64"),
        (model("pre"), replace(RECIPE, group_size=64), "group: 64 does not divide d_ff = 96"),
    ],
)
def test_what_cannot_be_quantised_is_refused(method: str, weights: ModelWeights, recipe: Recipe, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        quantized(weights, recipe) if method == "gptq" else round_to_nearest(weights, recipe)


@pytest.mark.parametrize("depth_weights", [(), (1.0,) * 9, (1.0, -1.0), (0.0, 0.0), (1.0, float("nan"))])
def test_depth_weights_that_are_no_trajectory_are_refused(depth_weights: tuple[float, ...]) -> None:
    with pytest.raises(InvalidArgument, match="depth_weights"):
        quantized(model("pre"), replace(RECIPE, depth_weights=depth_weights))
