"""A model's forward pass over whole windows, float32 and fast: what bits per byte are computed from.

In: a model and a window of token ids.  Out: the state after every loop, and the logits at any depth, from one pass to
the deepest: loop i of a token depends only on loops ≤ i of tokens up to it.  Every activation and sum is float32;
`Rounding` switches on one rounding of an engine at a time:

    activations="int8"   inputs of INT4 linears, as the CPU engine rounds them
    cache                every K and V that is read, a token's own included, is the one obtained from what a cache
                         mode stores; so a second half off a cached first half is what one pass over both computes

Equal to `engine/reference.py`, which tests hold it to; faster because attention goes by blocks of queries and leaves
out the keys that come after them.  Refuses to know about texts, scores, pages and sliding windows.
Shapes: T tokens, H heads, G K/V heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.cache_modes import H_MODES, decode, encode
from tinyloop_service.engine.reference import rope, round_to_int8
from tinyloop_service.engine.tensors import BlockWeights, Int4Linear, Linear, ModelWeights
from tinyloop_service.evaluate.windows import Ids
from tinyloop_service.types import CacheMode

Floats = NDArray[np.float32]

QUERIES = 256  # queries of one head at once: their scores stay in a core's cache


@dataclass(frozen=True, slots=True)
class Rounding:
    """What is rounded besides the weights in the file; nothing by default."""

    activations: Literal["float32", "int8"] = "float32"
    cache: CacheMode | None = None  # None: K and V stay float32

    def as_read(self, x: Floats) -> Floats:
        """What a cache gives back of K, V or h, each (…, values of a token)."""
        return x if self.cache is None else decode(self.cache, encode(self.cache, x))


class DenseModel:
    """A model with its linears multiplied out to float32: four bytes a weight.  Forwards and threads may share one."""

    def __init__(self, weights: ModelWeights) -> None:
        self.weights = weights
        blocks = (*weights.pre, *weights.loop, *weights.post)
        parts = (getattr(block, field.name) for block in blocks for field in fields(block))
        linears = [weights.head, *(part for part in parts if isinstance(part, Linear))]
        self._matrices = {id(linear): linear.dequantize() for linear in linears}

    def matrix(self, linear: Linear) -> Floats:
        """(out, in)."""
        return self._matrices[id(linear)]


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

    def run(self, tokens: Ids, loops: int) -> ModelRun:
        """Through the loop `loops` times.  tokens: (T,), a sequence from its first position on."""
        weights, spec = self.model.weights, self.model.weights.spec
        x = weights.embed[tokens].astype(np.float32)  # (T, d_model)
        for block in weights.pre:
            x = self._block(block, x)
        states = np.empty((1 + loops, *x.shape), np.float32)
        states[0] = injected = x
        for loop in range(1, 1 + loops):
            if spec.inject == "add":
                x = x + injected
            for block in weights.loop:
                x = self._block(block, x)
            if spec.loop_norm:
                x = self._norm(x, weights.norm)
            states[loop] = x
        return ModelRun(self, states)

    def logits(self, state: Floats) -> Floats:
        """From the state after the last loop to (T, vocab_size)."""
        weights, spec = self.model.weights, self.model.weights.spec
        for block in weights.post:
            state = self._block(block, state)
        if not (spec.loop_norm and spec.post_blocks == 0):  # then the last loop's norm was the final one
            state = self._norm(state, weights.norm)
        return self._linear(state, weights.head)

    def _block(self, block: BlockWeights, x: Floats) -> Floats:
        x = x + self._norm(self._attention(block, x), block.attn_post_norm)
        y = self._norm(x, block.mlp_norm)
        gated = gate(self._linear(y, block.gate), self._linear(y, block.up))  # (T, d_ff)
        x += self._norm(self._linear(gated, block.down), block.mlp_post_norm)
        return x

    def _attention(self, block: BlockWeights, x: Floats) -> Floats:
        spec, positions = self.model.weights.spec, np.arange(len(x))
        y = stored = self._norm(x, block.attn_norm)
        h_is_stored = self.rounding.cache in H_MODES
        if h_is_stored:
            stored = self._norm(self.rounding.as_read(x), block.attn_norm)
        q = rope(self._heads(y, block.q, spec.n_heads), positions, spec)  # (H, T, D)
        k = rope(self._heads(stored, block.k, spec.n_kv_heads), positions, spec)  # (G, T, D)
        v = self._heads(stored, block.v, spec.n_kv_heads)
        if not h_is_stored:
            k, v = self.rounding.as_read(k), self.rounding.as_read(v)
        return self._linear(attend(q * np.float32(spec.head_dim**-0.5), k, v), block.o)

    def _heads(self, y: Floats, linear: Linear, num_heads: int) -> Floats:
        return self._linear(y, linear).reshape(len(y), num_heads, -1).transpose(1, 0, 2)

    def _norm(self, x: Floats, weight: NDArray[np.float16] | None) -> Floats:
        """RMSNorm; without a weight (the post norms of placement "pre") x itself."""
        if weight is None:
            return x
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        normed: Floats = x / np.sqrt(mean_square + np.float32(self.model.weights.spec.norm_eps))
        normed *= weight.astype(np.float32)
        return normed

    def _linear(self, x: Floats, linear: Linear) -> Floats:
        if self.rounding.activations == "int8" and isinstance(linear, Int4Linear):
            x = round_to_int8(x, linear.group_size)
        product: Floats = x @ self.model.matrix(linear).T
        return product


def gate(x: Floats, up: Floats) -> Floats:
    """silu(x) · up, in the memory of x."""
    with np.errstate(over="ignore"):  # far below zero exp overflows, and the quotient is the −0 it should be
        divisor = np.exp(-x)
    divisor += 1
    x /= divisor
    x *= up
    return x


def attend(q: Floats, k: Floats, v: Floats) -> Floats:
    """Causal attention of scaled queries, (H, T, D), over K and V, (G, T, D): (T, H·D)."""
    num_heads, num_tokens, head_dim = q.shape
    repeat = num_heads // len(k)  # query heads h·repeat … share K/V head h
    mixed = np.empty((num_tokens, num_heads, head_dim), np.float32)
    later = np.triu(np.ones((QUERIES, QUERIES), bool), 1)  # of a block's own keys, those after each query
    for head in range(num_heads):
        keys, values = k[head // repeat], v[head // repeat]
        for begin in range(0, num_tokens, QUERIES):
            end = min(begin + QUERIES, num_tokens)
            scores = q[head, begin:end] @ keys[:end].T  # (queries, keys up to the last of them)
            scores[:, begin:][later[: end - begin, : end - begin]] = -np.inf
            scores -= scores.max(axis=1, keepdims=True)
            np.exp(scores, out=scores)
            mixed[begin:end, head] = (scores @ values[:end]) / scores.sum(axis=1, keepdims=True)
    return mixed.reshape(num_tokens, -1)
