"""The oracle itself: identities that hold for any right forward pass, and hand-made cases for each switch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from switches import switches

from tinyloop_service.engine.cache_modes import decode, encode
from tinyloop_service.engine.cpu.runtime import use_threads
from tinyloop_service.engine.reference import Cache, Reference, rope, round_to_int8, visible
from tinyloop_service.engine.spec import SIZES, ModelSpec, Quant
from tinyloop_service.engine.weights import ModelWeights, random_model
from tinyloop_service.types import CacheMode, Sampling

BASE = replace(
    SIZES["tiny"], vocab_size=97, d_model=64, n_heads=4, n_kv_heads=4, head_dim=16, d_ff=96, quant=Quant(4, 32)
)
SPECS = {"pre": BASE, "fp16": replace(BASE, quant=None), **switches(BASE)}
TOKENS = np.random.default_rng(5).integers(0, BASE.vocab_size, 21).tolist()
# float64 rounds at 1e-16; through some 40 blocks of sums over ≤ 96 terms errors stay far below this.
EXACT = {"rtol": 0, "atol": 1e-10}


def reference(spec: ModelSpec, **options: Any) -> Reference:
    return Reference(random_model(spec, 1), np.float64, **options)


def with_tensors(weights: ModelWeights, spec: ModelSpec, **changes: np.ndarray) -> ModelWeights:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return ModelWeights.from_tensors(spec, {**weights.tensors, **named})


@pytest.mark.parametrize("loops", [1, 3])
@pytest.mark.parametrize("window", [0, 1, 6])
@pytest.mark.parametrize("name", SPECS)
def test_prefill_equals_decode_token_by_token(name: str, window: int, loops: int) -> None:
    model = reference(SPECS[name])
    whole = model.forward(TOKENS, model.new_cache(loops, window))
    cache = model.new_cache(loops, window)
    steps = np.concatenate([model.forward([token], cache) for token in TOKENS])
    np.testing.assert_allclose(steps, whole, **EXACT)
    assert cache.length == len(TOKENS) and len(cache.keys) == SPECS[name].cache_layers(loops)


@pytest.mark.parametrize("name", SPECS)
def test_float32_follows_float64(name: str) -> None:
    weights = random_model(SPECS[name], 1)
    logits = [Reference(weights, dtype) for dtype in (np.float32, np.float64)]
    low, high = (model.forward(TOKENS, model.new_cache(16)) for model in logits)
    assert low.dtype == np.float32 and high.dtype == np.float64
    # float32 rounds at 6e-8; 18 blocks and more amplify it, logits are of order one.
    np.testing.assert_allclose(low, high, rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", SPECS)
def test_activations_stay_of_order_one_over_16_loops(name: str) -> None:
    model = reference(SPECS[name])
    cache = model.new_cache(16)
    logits = model.forward(TOKENS, cache)
    assert 0.3 < logits.std() < 3
    for key, value in zip(cache.keys, cache.values, strict=True):
        assert 0.3 < key.std() < 3 and 0.3 < value.std() < 3
    assert len(set(logits.argmax(axis=1).tolist())) > 5, "every position predicts the same: activations collapsed"


def test_a_chunked_prefill_and_a_copied_cache_continue_alike() -> None:
    model = reference(SPECS["everything"])
    whole = model.forward(TOKENS, model.new_cache(2))
    cache = model.new_cache(2)
    model.forward(TOKENS[:8], cache)
    first, second = cache.copy(), cache.copy()
    np.testing.assert_allclose(model.forward(TOKENS[8:], first), whole[8:], **EXACT)
    np.testing.assert_allclose(model.forward(TOKENS[8:], second), whole[8:], **EXACT)
    assert cache.length == 8


@pytest.mark.parametrize("name", ["pre", "inject", "loop_norm", "sandwich"])
def test_a_deep_prefix_contains_every_shallower_one(name: str) -> None:
    model = reference(SPECS[name])
    deep, shallow = model.new_cache(5), model.new_cache(2)
    model.forward(TOKENS, deep)
    model.forward(TOKENS, shallow)
    for layer in range(SPECS[name].cache_layers(2)):
        np.testing.assert_array_equal(deep.keys[layer], shallow.keys[layer])
        np.testing.assert_array_equal(deep.values[layer], shallow.values[layer])


def test_depth_matters() -> None:
    model = reference(BASE)
    logits = [model.forward(TOKENS, model.new_cache(loops))[-1] for loops in (1, 2, 8)]
    assert np.abs(logits[0] - logits[1]).max() > 0.01 and np.abs(logits[1] - logits[2]).max() > 0.01


def test_grouped_queries_equal_repeated_heads() -> None:
    grouped = replace(SPECS["fp16"], n_kv_heads=2)
    weights = random_model(grouped, 1)
    repeated = {
        name: value.reshape(2, 16, 64).repeat(2, axis=0).reshape(64, 64)
        for name, value in weights.tensors.items()
        if name.endswith(("attn.k.weight", "attn.v.weight"))
    }
    full = ModelWeights.from_tensors(SPECS["fp16"], {**weights.tensors, **repeated})
    models = Reference(weights, np.float64), Reference(full, np.float64)
    np.testing.assert_allclose(*(model.forward(TOKENS, model.new_cache(2)) for model in models), **EXACT)


def test_a_window_reads_the_last_positions_only() -> None:
    assert visible(np.array([3]), 4, 2).tolist() == [[False, False, True, True]]
    assert visible(np.array([1, 2]), 3, 0).tolist() == [[True, True, False], [True, True, True]]
    model = reference(replace(BASE, pre_blocks=1, max_loops=1, default_loops=1))
    others = [(t + 1) % 97 for t in TOKENS[:10]] + TOKENS[10:]
    ends = [model.forward(tokens, model.new_cache(1, 4))[-1] for tokens in (TOKENS, others)]
    # Two layers of window 4 see 2·3 tokens back: positions 14 … 20 of 21.
    np.testing.assert_array_equal(*ends)
    wide = [model.forward(tokens, model.new_cache(1, 12))[-1] for tokens in (TOKENS, others)]
    assert np.abs(wide[0] - wide[1]).max() > 1e-3


def test_a_window_as_wide_as_the_text_is_no_window() -> None:
    model = reference(BASE)
    np.testing.assert_array_equal(
        model.forward(TOKENS, model.new_cache(2, len(TOKENS))), model.forward(TOKENS, model.new_cache(2, 0))
    )


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_rope_turns_pairs_and_scores_depend_on_distance_only(pairing: Any) -> None:
    spec = replace(BASE, rope_pairing=pairing)
    x = np.zeros((1, 1, 16))
    x[0, 0, 0] = 1
    partner = 8 if pairing == "half" else 1
    turned = rope(x, np.array([2]), spec)[0, 0]
    assert turned[0] == pytest.approx(np.cos(2)) and turned[partner] == pytest.approx(np.sin(2))
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 16))
    scores = [(rope(q, np.array([a]), spec) * rope(k, np.array([b]), spec)).sum() for a, b in ((9, 4), (1005, 1000))]
    assert scores[0] == pytest.approx(scores[1], abs=1e-9)


def test_the_final_norm_is_applied_once() -> None:
    """With loop_norm at one loop and no post block, the loop's norm and the final one are the same."""
    weights = random_model(BASE, 1)
    normed = ModelWeights.from_tensors(replace(BASE, loop_norm=True), weights.tensors)
    models = Reference(weights, np.float64), Reference(normed, np.float64)
    one = [model.forward(TOKENS, model.new_cache(1)) for model in models]
    np.testing.assert_array_equal(*one)
    two = [model.forward(TOKENS, model.new_cache(2)) for model in models]
    assert np.abs(two[0] - two[1]).max() > 1e-2


def test_loop_norm_feeds_the_post_blocks_and_the_final_norm_follows_them() -> None:
    """A post block that adds nothing leaves norm(norm(x)), not norm(x)."""
    spec = replace(SPECS["fp16"], loop_norm=True, post_blocks=1)
    silent = {f"post.0.{n}.weight": np.zeros(s, np.float16) for n, s in (("attn.o", (64, 64)), ("mlp.down", (64, 96)))}
    weights = random_model(spec, 1)
    weights = ModelWeights.from_tensors(spec, {**weights.tensors, **silent})
    model = Reference(weights, np.float64)
    once = Reference(
        ModelWeights.from_tensors(
            replace(spec, post_blocks=0), {k: v for k, v in weights.tensors.items() if not k.startswith("post")}
        ),
        np.float64,
    )
    head = weights.head.dequantize().astype(np.float64)  # (97, 64), so the state can be solved for
    x = np.linalg.lstsq(head, once.forward(TOKENS, once.new_cache(1)).T)[0].T
    twice = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + spec.norm_eps) * weights.norm.astype(np.float64)
    np.testing.assert_allclose(model.forward(TOKENS, model.new_cache(1)), twice @ head.T, rtol=0, atol=1e-8)


def silent_blocks(spec: ModelSpec) -> ModelWeights:
    """Blocks that add nothing: what is left is embedding, injection and norms."""
    tensors = {
        name: np.zeros_like(value) if name.endswith(("attn.o.weight", "mlp.down.weight")) else value
        for name, value in random_model(spec, 1).tensors.items()
    }
    return ModelWeights.from_tensors(spec, tensors)


def test_injection_joins_every_loop_the_first_included() -> None:
    spec = replace(SPECS["fp16"], inject="add", loop_norm=True)
    weights = silent_blocks(spec)
    model = Reference(weights, np.float64)
    embedded, weight = weights.embed[TOKENS].astype(np.float64), weights.norm.astype(np.float64)
    x = embedded
    for _ in range(3):
        x = x + embedded
        x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + spec.norm_eps) * weight
    expected = x @ weights.head.dequantize().astype(np.float64).T
    np.testing.assert_allclose(model.forward(TOKENS, model.new_cache(3)), expected, **EXACT)


def test_sandwich_normalises_what_a_branch_adds() -> None:
    """Scaling a branch's output matrix changes nothing under a post norm (but for eps)."""
    spec = replace(SPECS["fp16"], norm_placement="sandwich", norm_eps=1e-12)
    weights = random_model(spec, 1)
    louder = {
        name: value * np.float16(4)
        for name, value in weights.tensors.items()
        if name.endswith(("attn.o.weight", "mlp.down.weight"))
    }
    models = (
        Reference(weights, np.float64),
        Reference(ModelWeights.from_tensors(spec, {**weights.tensors, **louder}), np.float64),
    )
    np.testing.assert_allclose(*(model.forward(TOKENS, model.new_cache(2)) for model in models), rtol=0, atol=1e-9)


@pytest.mark.parametrize("mode", [CacheMode.FP16, CacheMode.INT8])
def test_keys_and_values_are_read_as_stored(mode: CacheMode) -> None:
    model = reference(BASE, cache_mode=mode)
    cache = model.new_cache(2)
    model.forward(TOKENS, cache)
    for array in cache.keys + cache.values:
        np.testing.assert_array_equal(array, decode(mode, encode(mode, array)))


@pytest.mark.parametrize("mode", [CacheMode.H_FP16, CacheMode.H_INT8, CacheMode.H_INT4])
def test_keys_and_values_follow_from_the_stored_input(mode: CacheMode) -> None:
    """Of the block that comes first, whose input is known: with inject, the sum that enters it."""
    spec = replace(SPECS["no pre"], norm_placement="sandwich", loop_norm=True)
    model = reference(spec, cache_mode=mode)
    cache = model.new_cache(2)
    model.forward(TOKENS, cache)
    block = model.weights.loop[0]
    x = decode(mode, encode(mode, 2 * model.weights.embed[TOKENS].astype(np.float32))).astype(np.float64)
    y = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + spec.norm_eps) * block.attn_norm.astype(np.float64)
    k, v = (
        (y @ w.dequantize().astype(np.float64).T).reshape(len(TOKENS), 4, 16).transpose(1, 0, 2)
        for w in (block.k, block.v)
    )
    for kept, made in ((cache.keys[0], rope(k, np.arange(len(TOKENS)), spec)), (cache.values[0], v)):
        np.testing.assert_array_equal(kept, made.astype(np.float16))


# A last-bit difference may round to the neighbouring stored value, so equality cannot be as tight as in float64: a
# step is 2^-11 of a value in fp16, a hundredth of the largest in int8, a fifteenth of a group's range in h-int4; one
# or two of some thousand values take it.
@pytest.mark.parametrize(("mode", "tolerance"), [*zip(CacheMode, [5e-3, 2e-2, 5e-3, 2e-2, 0.1], strict=True)])
@pytest.mark.parametrize("name", ["pre", "everything"])
def test_modes_change_little_and_decode_like_prefill(name: str, mode: CacheMode, tolerance: float) -> None:
    model, exact = reference(SPECS[name], cache_mode=mode), reference(SPECS[name])
    whole, stepwise = model.forward(TOKENS, model.new_cache(2)), model.new_cache(2)
    steps = np.concatenate([model.forward([token], stepwise) for token in TOKENS])
    np.testing.assert_allclose(steps, whole, rtol=0, atol=tolerance)
    logits = exact.forward(TOKENS, exact.new_cache(2))
    lost = np.sqrt(np.mean((whole - logits) ** 2) / np.mean(logits**2))
    assert 1e-5 < lost < 0.5, "nothing was rounded, or more than any rounding explains"


@pytest.mark.parametrize("name", ["pre", "everything"])
def test_attention_in_int8_changes_little_and_decodes_like_prefill(name: str) -> None:
    """A q or a weight that falls to the next level moves logits no more than a K or V that does."""
    stored = reference(SPECS[name], cache_mode=CacheMode.INT8)
    model = replace(stored, attention="int8")
    whole, stepwise = model.forward(TOKENS, model.new_cache(2)), model.new_cache(2)
    steps = np.concatenate([model.forward([token], stepwise) for token in TOKENS])
    np.testing.assert_allclose(steps, whole, rtol=0, atol=2e-2)
    logits = stored.forward(TOKENS, stored.new_cache(2))
    lost = np.sqrt(np.mean((whole - logits) ** 2) / np.mean(logits**2))
    assert 1e-4 < lost < 2e-2, "nothing was rounded, or more than levels explain"


def test_int8_rounding() -> None:
    x = np.array([[127.0, 0.4, 0.6, -127.0, 0, 0, 0, 0, 1.0, 0.5, 0, -0.25]])
    rounded = round_to_int8(x, 4)
    np.testing.assert_allclose(rounded[0, :8], [127, 0, 1, -127, 0, 0, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(rounded[0, 8:], np.array([127, 64, 0, -32]) / 127, rtol=1e-6)
    noisy, exact = reference(BASE, activations="int8"), reference(BASE)
    error = noisy.forward(TOKENS, noisy.new_cache(8)) - exact.forward(TOKENS, exact.new_cache(8))
    assert 1e-4 < np.sqrt((error**2).mean()) < 0.1


def test_int8_rounding_is_that_of_matmulnbits_at_accuracy_level_4() -> None:
    """The emulation against the operator itself; what is left is the order of float32 sums."""
    onnx = pytest.importorskip("onnx")
    ort = pytest.importorskip("onnxruntime")
    linear = random_model(BASE, 1).pre[0].gate  # (96, 64), groups of 32
    blob = linear.qweight.reshape(96, 2, 16)
    constants = [onnx.numpy_helper.from_array(blob, "b"), onnx.numpy_helper.from_array(linear.scales.astype("f4"), "s")]
    attributes = {"K": 64, "N": 96, "bits": 4, "block_size": 32, "accuracy_level": 4}
    node = onnx.helper.make_node("MatMulNBits", ["a", "b", "s"], ["y"], domain="com.microsoft", **attributes)
    values = [
        onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [None, d]) for n, d in (("a", 64), ("y", 96))
    ]
    graph = onnx.helper.make_graph([node], "g", values[:1], values[1:], constants)
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.use_per_session_threads = not use_threads(2)  # a process has one pool or many, never both
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    (y,) = session.run(None, {"a": x})
    np.testing.assert_allclose(y, round_to_int8(x, 32) @ linear.dequantize().T, rtol=0, atol=1e-4)


def test_greedy_is_argmax_step_by_step_and_agrees_with_temperature_0() -> None:
    model = reference(BASE)
    steps = model.greedy(TOKENS, 8)
    tokens = list(TOKENS)
    for step in steps:
        logits = model.forward(tokens, model.new_cache())[-1]
        assert step.token == int(logits.argmax()) and step.margin > 0
        tokens.append(step.token)
    drawn = model.generate(TOKENS, 8, Sampling())
    assert [token for token, _ in drawn] == tokens[len(TOKENS) :]


def test_an_empty_cache_has_length_0() -> None:
    assert Cache(loops=2).length == 0
