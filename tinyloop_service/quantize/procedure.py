"""The order of things: which linears are rounded when, and on which states.

    unit:  pre.0 │ pre.1 │ … │ loop.0 … loop.K−1 over all loops │ post.0 │ … │ head

A unit sees the states that the quantised units before it leave.  Pass 1 runs it with its own weights, collects the
Hessians of its linears and rounds all of them; pass 2 runs it again with what pass 1 gave, so that a loop block meets
the inputs that its own rounding causes at every later loop, and rounds the *original* weights for those.  Then the
states go on through the quantised unit.

Hessians of a loop block are sums over all loops of the whole trajectory, weighted per depth, since one set of weights
serves them all.  The head sees the states after the last of the loops.

In: a model in fp16, windows, a `Recipe`.  Out: `Quantized`.  Held in memory: the states of all windows (tokens ·
d_model · 4 bytes), the Hessians of one unit, one batch of activations.  Refuses to know files and terminals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.spec import BlockKind, ModelSpec, Quant
from tinyloop_service.engine.tensors import BLOCK_LINEARS, Int4Linear, ModelWeights, linear_tensors, quantize_rtn
from tinyloop_service.engine.trajectory import INPUT_GROUPS, NO_TAP, Array, Tap, Trajectory, dense_block
from tinyloop_service.errors import InvalidArgument, ModelFileError
from tinyloop_service.quantize.arrays import Arrays
from tinyloop_service.quantize.calibration import Calibration
from tinyloop_service.quantize.gptq import Curvature, NotPositiveDefinite, prepare, quantize_gptq
from tinyloop_service.quantize.hessians import Hessians

OVERFITTED = 4  # tokens an input, below which a small error says little about other text

Report = Callable[[int, int, str], None]  # how much is done, of how much, and what is being done now


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to quantise, whatever the model."""

    group_size: int = 128
    int4_head: bool = True
    depth_weights: tuple[float, ...] = ()  # of GPTQ, one per loop of the trajectory
    passes: int = 2
    damping: float = 0.01  # share of a Hessian's mean diagonal


@dataclass(frozen=True, slots=True)
class Layer:
    """What became of one linear.  GPTQ's errors are relative errors of its outputs, see gptq.py; RTN's alone, without
    calibration, of its weights."""

    name: str
    rtn_error: float
    error: float
    errors_by_pass: tuple[float, ...] = ()
    damping: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Quantized:
    spec: ModelSpec
    tensors: dict[str, NDArray[Any]]  # by their names in the file, tokenizer included
    layers: tuple[Layer, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """Blocks that are rounded together."""

    kind: BlockKind
    bases: tuple[str, ...]  # "pre.0", or "loop.0", "loop.1", …

    @property
    def name(self) -> str:
        return self.bases[0] if len(self.bases) == 1 else f"{self.bases[0]} … {self.bases[-1]}"


def units(spec: ModelSpec) -> list[Unit]:
    pre = [Unit("pre", (f"pre.{i}",)) for i in range(spec.pre_blocks)]
    post = [Unit("post", (f"post.{i}",)) for i in range(spec.post_blocks)]
    return [*pre, Unit("loop", tuple(f"loop.{j}" for j in range(spec.loop_blocks))), *post]


def quantized_spec(weights: ModelWeights, recipe: Recipe) -> ModelSpec:
    """The config of the result; InvalidArgument where there can be none."""
    spec = weights.spec
    if spec.quant is not None or isinstance(weights.head, Int4Linear):
        raise InvalidArgument("model", "is INT4 already; give the fp16 model that it was made from")
    sizes = {"d_model": spec.d_model, "n_heads · head_dim": spec.q_dim, "d_ff": spec.d_ff}
    for name, size in sizes.items():
        if size % recipe.group_size:
            raise InvalidArgument("group", f"{recipe.group_size} does not divide {name} = {size}; take 64 or 32")
    return replace(spec, quant=Quant(4, recipe.group_size)).validate()


def check_recipe(spec: ModelSpec, recipe: Recipe) -> None:
    """Of GPTQ: InvalidArgument for depth weights that are no trajectory."""
    given = recipe.depth_weights
    if not 1 <= len(given) <= spec.max_loops:
        raise InvalidArgument("depth_weights", f"are {len(given)}, expected one per loop, 1 to {spec.max_loops}")
    if not all(np.isfinite(given)) or min(given) < 0 or max(given) == 0:
        raise InvalidArgument("depth_weights", "expected finite numbers ≥ 0, one of them above 0")


def round_to_nearest(weights: ModelWeights, recipe: Recipe) -> Quantized:
    """Every linear on its own, without calibration."""
    spec = quantized_spec(weights, recipe)
    bases = [base for unit in units(spec) for base in unit.bases]
    names = [f"{base}.{name}" for base in bases for name in BLOCK_LINEARS] + ["head"] * recipe.int4_head
    linears, layers = {}, []
    for name in names:
        weight = _original(weights, name).astype(np.float32)
        linears[name] = quantize_rtn(weight, recipe.group_size)
        lost = np.square(weight - linears[name].dequantize(), dtype=np.float64).sum()
        error = float(lost / (np.square(weight, dtype=np.float64).sum() or 1.0))
        layers.append(Layer(name, error, error))
    return Quantized(spec, _with_linears(weights, linears), tuple(layers))


def quantize_with_gptq(
    weights: ModelWeights, calibration: Calibration, recipe: Recipe, arrays: Arrays, report: Report
) -> Quantized:
    """Raises InvalidArgument as above, ModelFileError where a model's activations are not finite numbers."""
    spec = quantized_spec(weights, recipe)
    check_recipe(spec, recipe)
    with np.errstate(over="ignore", invalid="ignore"):  # looked for in the Hessians
        run = _Run(weights, calibration, recipe, arrays, report)
        for unit in units(spec):
            run.quantize_unit(unit)
        if recipe.int4_head:
            run.quantize_head()
    return Quantized(spec, _with_linears(weights, run.linears), tuple(run.layers))


def _original(weights: ModelWeights, name: str) -> NDArray[np.float16]:
    """fp16 (out, in); the head of a tied model is its embedding."""
    if name == "head" and "head.weight" not in weights.tensors:
        return weights.embed
    original: NDArray[np.float16] = weights.tensors[f"{name}.weight"]
    return original


def _with_linears(weights: ModelWeights, linears: Mapping[str, Int4Linear]) -> dict[str, NDArray[Any]]:
    kept = {name: value for name, value in weights.tensors.items() if name.removesuffix(".weight") not in linears}
    for name, linear in linears.items():
        kept |= linear_tensors(name, linear)
    return kept


class _Run:
    """The states of all windows on their way through the units, and what has been rounded."""

    def __init__(
        self, weights: ModelWeights, calibration: Calibration, recipe: Recipe, arrays: Arrays, report: Report
    ) -> None:
        self._weights, self._recipe, self._arrays = weights, recipe, arrays
        self._trajectory = Trajectory(weights.spec, arrays.xp, self._dense(weights.norm))
        embed = weights.embed
        self._states = [self._dense(embed[ids]) for ids in calibration.batches(arrays.batch_tokens)]
        self._num_tokens = calibration.num_tokens
        self._progress = _Progress(weights.spec, recipe, len(self._states), report)
        self.linears: dict[str, Int4Linear] = {}
        self.layers: list[Layer] = []

    def quantize_unit(self, unit: Unit) -> None:
        parts = [self._weights.block(unit.kind, int(base.split(".")[1])) for base in unit.bases]
        blocks = [dense_block(part, self._arrays.xp) for part in parts]
        errors: dict[str, tuple[float, ...]] = {}
        layers: list[Layer] = []
        for number in range(1, self._recipe.passes + 1):
            stage = f"{unit.name}, pass {number} of {self._recipe.passes}"
            hessians = Hessians(self._arrays)
            for states in self._batches(unit, stage):
                self._forward(unit, states, blocks, hessians)
            self._progress.say(f"{stage}: rounding")
            layers = list(self._round_blocks(unit, hessians, blocks, errors))
            errors = {layer.name: layer.errors_by_pass for layer in layers}
        self.layers += layers
        if unit != units(self._weights.spec)[-1] or self._recipe.int4_head:
            for index, states in enumerate(self._batches(unit, f"{unit.name}, quantised")):
                self._states[index] = self._forward(unit, states, blocks, None)

    def quantize_head(self) -> None:
        hessians = Hessians(self._arrays)
        for states in self._states:
            inputs = self._trajectory.head_input(states)
            hessians.add((0, "head"), inputs.reshape(-1, inputs.shape[-1]))
        self._progress.say("head: rounding")
        curvature = self._prepare("head", hessians.take((0, "head")))
        self.layers.append(self._round("head", curvature, self._num_tokens, ()))

    def _batches(self, unit: Unit, stage: str) -> Iterator[Array]:
        for states in self._states:
            self._progress.say(stage)
            yield states
            self._progress.done(unit)

    def _forward(self, unit: Unit, states: Array, blocks: list[dict[str, Array]], hessians: Hessians | None) -> Array:
        """States after the unit."""

        def tap(weight: float) -> Tap:
            return hessians.collector(weight) if hessians is not None else NO_TAP

        if unit.kind != "loop":
            return self._trajectory.blocks(states, blocks, tap(1.0))
        loops = self._trajectory.loops(states, blocks, map(tap, self._recipe.depth_weights))
        return deque(loops, maxlen=1).pop()  # holds one state at a time

    def _round_blocks(
        self,
        unit: Unit,
        hessians: Hessians,
        blocks: list[dict[str, Array]],
        errors: Mapping[str, tuple[float, ...]],
    ) -> Iterator[Layer]:
        """Round every linear of the unit for these inputs, and put what became of it into `blocks`."""
        counted = np.count_nonzero(self._recipe.depth_weights) if unit.kind == "loop" else 1
        for index, base in enumerate(unit.bases):
            for group, names in INPUT_GROUPS.items():
                curvature = self._prepare(f"{base}.{names[0]}", hessians.take((index, group)))
                for name in names:
                    full = f"{base}.{name}"
                    yield self._round(full, curvature, self._num_tokens * int(counted), errors.get(full, ()))
                    blocks[index][name] = self._dense(self.linears[full].dequantize())

    def _prepare(self, name: str, hessian: NDArray[np.float64]) -> Curvature:
        if not np.isfinite(hessian).all():
            raise ModelFileError(
                f"{name}: on this text its inputs are too large or not finite; there is nothing to round for"
            )
        try:
            return prepare(hessian, self._recipe.damping)
        except NotPositiveDefinite as error:
            raise InvalidArgument("damping", f"{name}: {error}; give more calibration text or more damping") from None

    def _round(self, name: str, curvature: Curvature, num_rows: int, errors: tuple[float, ...]) -> Layer:
        """num_rows: inputs that the Hessian is the sum of."""
        rounded = quantize_gptq(_original(self._weights, name), curvature, self._recipe.group_size)
        self.linears[name] = rounded.linear
        by_pass = (*errors, rounded.error)
        notes = "; ".join(_notes(curvature, num_rows))
        return Layer(name, rounded.rtn_error, rounded.error, by_pass, curvature.damping, notes)

    def _dense(self, array: NDArray[Any]) -> Array:
        return self._arrays.to_device(array.astype(np.float32))


def _notes(curvature: Curvature, num_rows: int) -> Iterator[str]:
    num_in = len(curvature.order)
    if curvature.num_retries:
        yield f"Cholesky failed {curvature.num_retries}×, damping raised to {curvature.damping:g}"
    if curvature.num_dead:
        yield f"{curvature.num_dead} of {num_in} inputs always zero"
    if num_rows < OVERFITTED * num_in:
        yield f"overfits: {num_rows} tokens for {num_in} inputs"


class _Progress:
    """Work is counted in blocks applied to batches."""

    def __init__(self, spec: ModelSpec, recipe: Recipe, num_batches: int, report: Report) -> None:
        self._report = report
        self._loops = len(recipe.depth_weights)
        applied = sum(self._cost(unit) for unit in units(spec))
        self._total = applied * num_batches * (recipe.passes + 1)
        self._done = 0

    def _cost(self, unit: Unit) -> int:
        return len(unit.bases) * (self._loops if unit.kind == "loop" else 1)

    def say(self, words: str) -> None:
        self._report(self._done, self._total, words)

    def done(self, unit: Unit) -> None:
        self._done += self._cost(unit)
