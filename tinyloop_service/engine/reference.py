"""The model in plain NumPy: the oracle that engines are tested against, and the place to read what a looped model does.

In: `ModelWeights`, token ids, a `Cache`.  Out: logits, and K/V appended to the cache.  Any spec, any number of loops,
prefill and decode through the same code, float32 or float64.  Three roundings of real engines can be switched on, so
that they can be compared tightly:

    cache_mode           every K and V that is read is the one obtained from what this mode stores (`cache_modes.py`):
                         from K and V, or from the block's input h, then in fp16; queries and residuals come
                         from the exact input
    activations="int8"   before an INT4 linear, each group of inputs is rounded to 255 levels of its largest magnitude
    attention="int8"     q and the weights of attention are levels, as a GPU multiplies them with those of K and V for
                         tokens that are decoded (`int8_attention.py`); K and V are int8's, of cache_mode or given

Refuses to know about pages, batches, threads and speed: one sequence, a whole score matrix, weights as dense arrays.
Shapes: T new tokens, P positions in the cache (the new ones included), H heads, G K/V heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine import int8_attention
from tinyloop_service.engine.cache_modes import H_MODES, decode, encode
from tinyloop_service.engine.noise import uniform
from tinyloop_service.engine.rope import angles, turn
from tinyloop_service.engine.spec import ModelSpec
from tinyloop_service.engine.tensors import BlockWeights, Int4Linear, Linear, ModelWeights
from tinyloop_service.types import CacheMode, Sampling, TokenLogprob

Array = NDArray[Any]  # of the reference's dtype, unless said otherwise


@dataclass(slots=True)
class Cache:
    """The state of one sequence: per cache layer K and V of every position so far, [G, P, D]."""

    loops: int
    window: int = 0  # a token at p reads positions > p − window; 0: all
    keys: list[Array] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.keys[0].shape[1] if self.keys else 0

    def copy(self) -> Cache:
        """A sequence of its own from here on.  Arrays grow by being replaced, so they can be shared."""
        return Cache(self.loops, self.window, list(self.keys), list(self.values))

    def append(self, layer: int, key: Array, value: Array) -> tuple[Array, Array]:
        """Add [G, T, D] to a layer; all of its K and V."""
        if layer == len(self.keys):
            self.keys.append(key)
            self.values.append(value)
        else:
            self.keys[layer] = np.concatenate([self.keys[layer], key], axis=1)
            self.values[layer] = np.concatenate([self.values[layer], value], axis=1)
        return self.keys[layer], self.values[layer]


@dataclass(frozen=True)
class Reference:
    """The forward pass.  `dtype` is that of every activation and sum."""

    weights: ModelWeights
    dtype: type[np.float32] | type[np.float64] = np.float32
    cache_mode: Literal["exact"] | CacheMode = "exact"
    activations: Literal["exact", "int8"] = "exact"
    attention: Literal["exact", "int8"] = "exact"
    _dense_weights: dict[int, Array] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def spec(self) -> ModelSpec:
        return self.weights.spec

    def new_cache(self, loops: int | None = None, window: int = 0) -> Cache:
        return Cache(self.spec.default_loops if loops is None else loops, window)

    def forward(self, tokens: Sequence[int], cache: Cache) -> Array:
        """Append `tokens` to the sequence; the logits after each of them, (T, vocab_size)."""
        spec = self.spec
        positions = cache.length + np.arange(len(tokens))
        x = self.weights.embed[np.asarray(tokens)].astype(self.dtype)  # (T, d_model)
        injected: Array | float = 0.0
        for layer, kind, index in spec.schedule(cache.loops):
            loop, inner = divmod(layer - spec.pre_blocks, spec.loop_blocks)
            if kind == "loop" and inner == 0 and spec.inject == "add":
                injected = x if loop == 0 else injected
                x = x + injected
            x = self._block(self.weights.block(kind, index), x, positions, cache, layer)
            if kind == "loop" and inner == spec.loop_blocks - 1 and spec.loop_norm:
                x = self._norm(x, self.weights.norm)
        if not (spec.loop_norm and spec.post_blocks == 0):  # then the last loop's norm was the final one
            x = self._norm(x, self.weights.norm)
        return self._linear(x, self.weights.head)

    def _block(self, block: BlockWeights, x: Array, positions: Array, cache: Cache, layer: int) -> Array:
        attended = self._attention(block, x, positions, cache, layer)
        x = x + self._norm(attended, block.attn_post_norm)
        y = self._norm(x, block.mlp_norm)
        gated = silu(self._linear(y, block.gate)) * self._linear(y, block.up)  # (T, d_ff)
        return x + self._norm(self._linear(gated, block.down), block.mlp_post_norm)

    def _attention(self, block: BlockWeights, x: Array, positions: Array, cache: Cache, layer: int) -> Array:
        spec, y = self.spec, self._norm(x, block.attn_norm)
        q = rope(self._heads(y, block.q, spec.n_heads), positions, spec)  # (H, T, D)
        keys, values = cache.append(layer, *self._keys_and_values(block, x, y, positions))  # (G, P, D)
        repeat = spec.n_heads // spec.n_kv_heads  # query heads h·repeat … share K/V head h
        keys, values = np.repeat(keys, repeat, axis=0), np.repeat(values, repeat, axis=0)  # (H, P, D)
        attend = int8_attention.attend if self.attention == "int8" else attend_exactly
        mixed = attend(q, keys, values, visible(positions, keys.shape[1], cache.window))  # (H, T, D)
        return self._linear(mixed.transpose(1, 0, 2).reshape(len(positions), -1), block.o)

    def _keys_and_values(self, block: BlockWeights, x: Array, y: Array, positions: Array) -> tuple[Array, Array]:
        """K and V of the new tokens, (G, T, D) each, as they are read.  x is the block's input, y its norm."""
        h_is_stored = self.cache_mode in H_MODES
        if h_is_stored:
            y = self._norm(self._as_read(x), block.attn_norm)
        k = rope(self._heads(y, block.k, self.spec.n_kv_heads), positions, self.spec)
        v = self._heads(y, block.v, self.spec.n_kv_heads)
        if h_is_stored:  # what engines make of h they keep in fp16
            return k.astype(np.float16).astype(self.dtype), v.astype(np.float16).astype(self.dtype)
        return self._as_read(k), self._as_read(v)

    def _heads(self, y: Array, linear: Linear, num_heads: int) -> Array:
        return self._linear(y, linear).reshape(len(y), num_heads, -1).transpose(1, 0, 2)

    def _as_read(self, x: Array) -> Array:
        """x after it was stored and read back."""
        if self.cache_mode == "exact":
            return x
        mode = CacheMode(self.cache_mode)
        return decode(mode, encode(mode, x)).astype(self.dtype)

    def _norm(self, x: Array, weight: Array | None) -> Array:
        """RMSNorm; without a weight (the post norms of placement "pre") x itself."""
        if weight is None:
            return x
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        normed: Array = x / np.sqrt(mean_square + self.dtype(self.spec.norm_eps)) * weight.astype(self.dtype)
        return normed

    def _linear(self, x: Array, linear: Linear) -> Array:
        if self.activations == "int8" and isinstance(linear, Int4Linear):
            x = round_to_int8(x, linear.group_size)
        product: Array = x @ self._dense(linear).T
        return product

    def _dense(self, linear: Linear) -> Array:
        if id(linear) not in self._dense_weights:
            self._dense_weights[id(linear)] = linear.dequantize().astype(self.dtype)
        return self._dense_weights[id(linear)]

    def greedy(
        self, prompt: Sequence[int], max_tokens: int, *, loops: int | None = None, window: int = 0
    ) -> list[GreedyStep]:
        """Prefill, then argmax token by token.  Does not stop at EOS."""
        cache = self.new_cache(loops, window)
        logits = self.forward(prompt, cache)[-1]
        steps = [GreedyStep.of(logits)]
        while len(steps) < max_tokens:
            logits = self.forward([steps[-1].token], cache)[-1]
            steps.append(GreedyStep.of(logits))
        return steps

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: Sampling,
        *,
        loops: int | None = None,
        window: int = 0,
    ) -> list[tuple[int, TokenLogprob | None]]:
        """Prefill, then `sample` token by token.  Does not stop at EOS."""
        cache = self.new_cache(loops, window)
        logits = self.forward(prompt, cache)[-1]
        tokens = list(prompt)
        steps = [sample(logits, sampling, set(tokens), len(tokens))]
        while len(steps) < max_tokens:
            tokens.append(steps[-1][0])
            logits = self.forward(tokens[-1:], cache)[-1]
            steps.append(sample(logits, sampling, set(tokens), len(tokens)))
        return steps


@dataclass(frozen=True, slots=True)
class GreedyStep:
    """The likeliest token, lowest id on ties, and how far its logit is above the runner-up's."""

    token: int
    margin: float

    @classmethod
    def of(cls, logits: Array) -> GreedyStep:
        first, second = np.argsort(-logits, kind="stable")[:2]
        return cls(int(first), float(logits[first] - logits[second]))


def silu(x: Array) -> Array:
    # exp may overflow where x is far below zero; the quotient is then the −0 it should be.
    with np.errstate(over="ignore"):
        result: Array = x / (1 + np.exp(-x))
    return result


def attend_exactly(q: Array, keys: Array, values: Array, visible: NDArray[np.bool_]) -> Array:
    """q (H, T, D) over keys and values (H, P, D), of which query t reads those that are visible[t] → (H, T, D)."""
    scores = q @ keys.transpose(0, 2, 1) * q.dtype.type(q.shape[-1] ** -0.5)  # (H, T, P)
    mixed: Array = softmax(np.where(visible, scores, -np.inf)) @ values
    return mixed


def softmax(scores: Array) -> Array:
    """Over the last axis; −inf is an exact zero, and every token sees at least itself."""
    weights: Array = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def visible(positions: Array, num_keys: int, window: int) -> NDArray[np.bool_]:
    """(T, P): may the token at positions[t] read position p?"""
    distance = positions[:, None] - np.arange(num_keys)[None, :]
    return (distance >= 0) & ((distance < window) if window else True)


def rope(x: Array, positions: Array, spec: ModelSpec) -> Array:
    """Turn pair i of every head by position · theta^(−2i/D).  x: (heads, T, D)."""
    turned: Array = turn(x, *angles(positions, spec, x.dtype), spec)
    return turned


def round_to_int8(x: Array, group_size: int) -> Array:
    """x with every group of neighbouring inputs as round(x · 127/m) · m/127, m its largest magnitude, in float32."""
    groups = x.astype(np.float32).reshape(len(x), -1, group_size)
    largest = np.abs(groups).max(axis=2, keepdims=True)
    inverse = np.float32(127) / np.where(largest == 0, np.float32(1), largest)
    levels = np.rint(groups * inverse)
    rounded: Array = levels * (largest / np.float32(127))
    return rounded.reshape(x.shape).astype(x.dtype)


def sample(logits: Array, sampling: Sampling, seen: set[int], position: int) -> tuple[int, TokenLogprob | None]:
    """One token by the book: every step over the whole vocabulary, everything sorted.

    seen: every token of the prompt and generated so far; position: absolute, of the token to be drawn.
    """
    raw = logits.astype(np.float64)  # (vocab_size,)
    scores = raw.copy()
    for token in seen if sampling.repetition_penalty != 1 else ():
        penalty = sampling.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token, addend in sampling.logit_bias:
        scores[token] += addend
    scores = scores.astype(np.float32).astype(np.float64)
    token = int(np.argmax(scores)) if sampling.temperature == 0 else _draw(scores, sampling, position)
    if not sampling.logprobs:
        return token, None
    logprobs = raw - raw.max() - np.log(np.exp(raw - raw.max()).sum())
    top = np.argsort(-raw, kind="stable")[: sampling.logprobs]
    return token, TokenLogprob(float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in top))


def _draw(scores: Array, sampling: Sampling, position: int) -> int:
    order = np.argsort(-scores, kind="stable")  # most likely first, then lowest id
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((scores - scores.max()) / sampling.temperature)
    if sampling.top_k:
        order = order[: sampling.top_k]
    before = np.cumsum(weights[order]) - weights[order]  # of everything likelier
    if sampling.top_p < 1:
        order = order[before < sampling.top_p * weights[order].sum()]
    order = order[weights[order] >= sampling.min_p * weights[order[0]]]
    cumulative = np.cumsum(weights[order])
    target = uniform(sampling.seed, sampling.choice, position) * cumulative[-1]
    return int(order[min(int(np.searchsorted(cumulative, target, side="right")), len(order) - 1)])
