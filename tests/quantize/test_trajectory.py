"""The batched forward against the reference, switch by switch, and Hessians against what the reference's linears read.

Tolerance: both sides are float32 with sums in another order, so values of order one differ by some 2^-24 · √terms a
block; through at most 2 + 2·4 + 2 blocks, each of which may amplify what came in, that stays far below 1e-3.  A wrong
switch, position or mask changes logits by their own size.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from fp16_models import SPECS, Recording, model, windows
from numpy.typing import NDArray

from tinyloop_service.engine import trajectory as module
from tinyloop_service.engine.reference import Reference
from tinyloop_service.engine.tensors import ModelWeights
from tinyloop_service.engine.trajectory import INPUT_GROUPS, Block, Trajectory, dense_block
from tinyloop_service.errors import InvalidArgument
from tinyloop_service.quantize.arrays import Arrays, open_arrays
from tinyloop_service.quantize.hessians import Hessians

LOOPS = 4


@pytest.fixture(autouse=True)
def several_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUERIES", 8)


def blocks(weights: ModelWeights, kind: str, arrays: Arrays) -> list[Block]:
    return [dense_block(block, arrays.xp) for block in getattr(weights, kind)]


def run(weights: ModelWeights, ids: NDArray[np.int64], arrays: Arrays, hessians: list[Hessians]) -> NDArray[np.float32]:
    """(windows, tokens) → what the head reads; the first of `hessians` collects pre blocks, then loops, then post."""
    trajectory = Trajectory(weights.spec, arrays.xp, arrays.to_device(weights.norm.astype(np.float32)))
    pre, loop, post = (h.collector(1.0) for h in hessians)
    x = arrays.to_device(weights.embed[ids].astype(np.float32))
    x = trajectory.blocks(x, blocks(weights, "pre", arrays), pre)
    *_, x = trajectory.loops(x, blocks(weights, "loop", arrays), [loop] * LOOPS)
    x = trajectory.blocks(x, blocks(weights, "post", arrays), post)
    result: NDArray[np.float32] = arrays.to_host(trajectory.head_input(x))
    return result


@pytest.mark.parametrize("name", SPECS)
def test_a_batch_of_windows_is_the_reference_window_by_window(name: str) -> None:
    weights, arrays = model(name), open_arrays("cpu")
    ids = np.random.default_rng(2).integers(0, weights.spec.vocab_size, (3, 21))
    states = run(weights, ids, arrays, [Hessians(arrays) for _ in range(3)])
    assert states.dtype == np.float32
    logits = states @ weights.head.dequantize().T
    reference = Reference(weights)
    for window, row in zip(logits, ids.tolist(), strict=True):
        np.testing.assert_allclose(window, reference.forward(row, reference.new_cache(LOOPS)), rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", SPECS)
def test_hessians_are_sums_over_all_that_the_reference_s_linears_read(name: str) -> None:
    """Of a loop block: over all loops.  Relative to the largest entry, as for values of order one above."""
    weights, arrays = model(name), open_arrays("cpu")
    ids = windows(weights.spec, 19, 19).windows
    hessians = {kind: Hessians(arrays) for kind in ("pre", "loop", "post")}
    run(weights, np.stack(ids), arrays, list(hessians.values()))
    read = Recording(weights, np.float64).read_by(ids, LOOPS)
    compared = 0
    for kind, found in hessians.items():
        for index in range(len(getattr(weights, kind))):
            for group, names in INPUT_GROUPS.items():
                hessian = found.take((index, group))
                assert hessian.dtype == np.float64
                for linear in names:
                    inputs = np.concatenate(read[f"{kind}.{index}.{linear}"])
                    assert len(inputs) == 2 * 19 * (LOOPS if kind == "loop" else 1)
                    expected = inputs.T @ inputs
                    np.testing.assert_allclose(hessian, expected, rtol=0, atol=1e-3 * np.abs(expected).max())
                    compared += 1
    assert compared == len(read) - 1, "all linears but the head"


def test_depths_count_by_their_weights() -> None:
    weights, arrays = model("everything"), open_arrays("cpu")
    ids = windows(weights.spec, 17).windows
    hessians = Hessians(arrays)
    trajectory = Trajectory(weights.spec, np, weights.norm.astype(np.float32))
    x = trajectory.blocks(weights.embed[np.stack(ids)].astype(np.float32), blocks(weights, "pre", arrays))
    states = trajectory.loops(x, blocks(weights, "loop", arrays), [hessians.collector(w) for w in (0.5, 0.0, 2.0)])
    assert len(list(states)) == 3
    read = Recording(weights, np.float64).read_by(ids, 3)
    for index in range(2):
        first, _, third = read[f"loop.{index}.mlp.down"]
        expected = 0.5 * first.T @ first + 2.0 * third.T @ third
        found = hessians.take((index, "down"))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3 * np.abs(expected).max())


def test_numbers_far_from_one_overflow_nowhere() -> None:
    """Warnings are errors here: silu and softmax must take what a wild model gives them."""
    weights, arrays = model("pre"), open_arrays("cpu")
    wild = {
        name: np.clip(value * 300.0, -60000, 60000).astype(np.float16) if name.startswith("pre.") else value
        for name, value in weights.tensors.items()
    }
    ids = windows(weights.spec, 9).windows
    states = run(ModelWeights.from_tensors(weights.spec, wild), np.stack(ids), arrays, [Hessians(arrays)] * 3)
    assert np.isfinite(states).all()


FUNCTIONS = ("asarray", "empty_like", "exp", "full", "sqrt", "triu")
VALUES = ("float32", "float64", "inf")


def test_another_array_module_needs_a_dozen_functions_that_cupy_has() -> None:
    """NumPy under another name, with those functions only, so that a GPU can stand in for it."""
    few = SimpleNamespace(**{name: getattr(np, name) for name in (*FUNCTIONS, *VALUES)}, asnumpy=np.array)
    weights = model("everything")
    ids = np.stack(windows(weights.spec, 12, 12).windows)
    sums, sums_few = ([Hessians(arrays)] * 3 for arrays in (open_arrays("cpu"), Arrays(few, "few", 64)))
    states, states_few = run(weights, ids, sums[0].arrays, sums), run(weights, ids, sums_few[0].arrays, sums_few)
    np.testing.assert_array_equal(states_few, states)
    np.testing.assert_array_equal(sums_few[0].take((0, "down")), sums[0].take((0, "down")))


def test_without_cupy_auto_is_the_cpu_and_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert open_arrays("auto") == open_arrays("cpu")
    with pytest.raises(InvalidArgument, match=r"device: cuda cannot be used \(.*cupy.*\); install CuPy .* or take cpu"):
        open_arrays("cuda")


@pytest.mark.gpu
def test_a_gpu_collects_the_same() -> None:
    weights = model("everything")
    ids = np.stack(windows(weights.spec, 33, 33).windows)
    results = []
    for arrays in (open_arrays("cpu"), open_arrays("cuda")):
        hessians = [Hessians(arrays) for _ in range(3)]
        states = run(weights, ids, arrays, hessians)
        results.append((states, *(h.take((0, group)) for h in hessians for group in INPUT_GROUPS)))
    for ours, theirs in zip(*results, strict=True):
        assert type(theirs) is np.ndarray
        np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-3 * np.abs(ours).max())
