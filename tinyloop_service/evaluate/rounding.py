"""One model with one rounding: whole windows through `engine/trajectory.py`, and the logits at any depth.

Every activation and sum is float32; `Rounding` switches on one rounding of an engine at a time:

    activations="int8"   inputs of INT4 linears, as the CPU engine rounds them
    cache                every K and V that is read, a token's own included, is the one obtained from what a cache
                         mode stores; so a second half off a cached first half is what one pass over both computes
    attention="int8"     with a cache of int8: tokens of the second half are attended by levels of q and of weights, as
                         a GPU attends those that it decodes

In: a model and a window of token ids.  Out: the state after every loop, and logits, from one pass to the deepest.
Once nobody wants it any more, a pass ends before its next linear, by `Stopped`.  Refuses to know about texts and
scores.  Shapes: T tokens.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.cache_modes import H_MODES, decode, encode
from tinyloop_service.engine.int8_attention import attend
from tinyloop_service.engine.reference import round_to_int8, visible
from tinyloop_service.engine.spec import Quant
from tinyloop_service.engine.tensors import Int4Linear, ModelWeights
from tinyloop_service.engine.trajectory import Tap, Trajectory, dense_block
from tinyloop_service.evaluate.windows import Ids, second_half
from tinyloop_service.types import CacheMode

Floats = NDArray[np.float32]


class Stopped(Exception):
    """The result is not wanted any more."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """What is rounded besides the weights in the file; nothing by default."""

    activations: Literal["float32", "int8"] = "float32"
    cache: CacheMode | None = None  # None: K and V stay float32
    attention: Literal["float32", "int8"] = "float32"


@dataclass(frozen=True, slots=True)
class RoundingTap(Tap):
    """A rounding on its way through a model of that `quant`."""

    rounding: Rounding
    quant: Quant | None
    stopped: threading.Event

    def reads(self, index: int, group: str, x: Floats) -> Floats:
        self.check_wanted()
        if self.rounding.activations == "float32" or self.quant is None:
            return x
        return round_to_int8(x, self.quant.group_size)

    def keeps_h(self, x: Floats) -> Floats:
        return self._as_read(x) if self.rounding.cache in H_MODES else x

    def keeps_kv(self, x: Floats) -> Floats:
        if self.rounding.cache in H_MODES:  # what engines make of h they keep in fp16
            return x.astype(np.float16).astype(x.dtype)
        return self._as_read(x)

    def mixes(self, mixed: Floats, q: Floats, k: Floats, v: Floats) -> Floats:
        if self.rounding.attention == "float32":
            return mixed
        num_tokens, repeat = q.shape[-2], q.shape[-3] // k.shape[-3]  # query heads h·repeat … share K/V head h
        decoded = second_half(num_tokens)
        seen = visible(np.arange(num_tokens)[decoded], num_tokens, window=0)
        for head in range(q.shape[-3]):  # one at a time, which bounds the memory of scores
            keys, values = (x[..., head // repeat, :, :] for x in (k, v))
            mixed[..., head, decoded, :] = attend(q[..., head, decoded, :], keys, values, seen)
        return mixed

    def check_wanted(self) -> None:
        if self.stopped.is_set():
            raise Stopped

    def _as_read(self, x: Floats) -> Floats:
        mode = self.rounding.cache
        return x if mode is None else decode(mode, encode(mode, x))


class DenseModel:
    """A model with its linears multiplied out to float32: four bytes a weight.  Forwards and threads may share one."""

    def __init__(self, weights: ModelWeights) -> None:
        self.weights = weights
        self.trajectory = Trajectory(weights.spec, np, weights.norm.astype(np.float32))
        groups = (weights.pre, weights.loop, weights.post)
        self.pre, self.loop, self.post = ([dense_block(block, np) for block in group] for group in groups)
        self.head = weights.head.dequantize()  # (vocab_size, d_model)


@dataclass(frozen=True, slots=True)
class ModelRun:
    """One window, computed."""

    forward: ModelForward
    states: Floats  # (1 + loops, T, d_model): what enters the first loop, then the state after each

    def logits(self, depth: int) -> Floats:
        """After each token, had the model `depth` loops, 1 … loops: (T, vocab_size), a new array."""
        return self.forward.logits(self.states[depth])


@dataclass(frozen=True, slots=True)
class ModelForward:
    """The forward pass of one model with one rounding."""

    model: DenseModel
    rounding: Rounding = Rounding()
    stopped: threading.Event = field(default_factory=threading.Event)  # set by any thread: not wanted any more

    @property
    def tap(self) -> RoundingTap:
        return RoundingTap(self.rounding, self.model.weights.spec.quant, self.stopped)

    def run(self, tokens: Ids, loops: int) -> ModelRun:
        """Through the loop `loops` times.  tokens: (T,), a sequence from its first position on.  Raises Stopped."""
        model, tap = self.model, self.tap
        x = model.trajectory.blocks(model.weights.embed[tokens].astype(np.float32), model.pre, tap)
        return ModelRun(self, np.stack([x, *model.trajectory.loops(x, model.loop, [tap] * loops)]))

    def logits(self, state: Floats) -> Floats:
        """From the state after the last loop to (T, vocab_size).  Raises Stopped."""
        model, tap = self.model, self.tap
        tap.check_wanted()
        state = model.trajectory.head_input(model.trajectory.blocks(state, model.post, tap))
        if isinstance(model.weights.head, Int4Linear):
            state = tap.reads(0, "head", state)
        logits: Floats = state @ model.head.T
        return logits
