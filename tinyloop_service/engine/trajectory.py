"""The forward pass over whole windows of text, dense and in float32, with taps where numbers are read and kept.

    (…, T) ids → embedding → pre blocks → (loop blocks) × loops → post blocks → norm

In: a spec, blocks as dense arrays, states (…, T, d_model), every window from its first position on.  Out: states, those
after each loop one by one: loop i of a token depends only on loops ≤ i of tokens up to it.  A `Tap` sees or replaces
what linears read, what a cache keeps and what attention makes of it: Hessians are summed and roundings switched on by
one.  Arrays are those of `xp`, NumPy's or CuPy's.

Equal to `engine/reference.py`, which tests hold it to; faster because attention goes by blocks of queries and leaves
out the keys that come after them, which also bounds its memory.  Refuses to know about pages, sliding windows,
decoding, INT4, embeddings and heads.

Shapes: … windows side by side or none, T tokens, H heads, G K/V heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinyloop_service.engine.rope import angles, turn
from tinyloop_service.engine.spec import ModelSpec
from tinyloop_service.engine.tensors import BLOCK_LINEARS, BLOCK_NORMS, BlockWeights

Array = Any  # of `xp`, float32
Block = Mapping[str, Array]  # names of BLOCK_LINEARS and BLOCK_NORMS → weights; post norms may be missing

INPUT_GROUPS = {
    "qkv": ("attn.q", "attn.k", "attn.v"),
    "o": ("attn.o",),
    "gate_up": ("mlp.gate", "mlp.up"),
    "down": ("mlp.down",),
}
QUERIES = 256  # of one head at once: their scores stay in a core's cache


class Tap:
    """Given numbers on their way, says with which to go on; this one leaves all of them as they are."""

    def reads(self, index: int, group: str, x: Array) -> Array:
        """x: (tokens of all windows, in), what the linears of `group` read in block `index` of those that are run."""
        return x

    def keeps_h(self, x: Array) -> Array:
        """x: (…, T, d_model), a block's input, as K and V come from it; q and the residual come from x itself."""
        return x

    def keeps_kv(self, x: Array) -> Array:
        """x: (…, G, T, D), K (turned) or V, as every query reads them."""
        return x

    def mixes(self, mixed: Array, q: Array, k: Array, v: Array) -> Array:
        """mixed: (…, H, T, D), what q (…, H, T, D), turned, makes of k and v (…, G, T, D) as they are read."""
        return mixed


NO_TAP = Tap()


def dense_block(block: BlockWeights, xp: Any) -> dict[str, Array]:
    """A block of a model file, INT4 multiplied out: four bytes a weight."""
    linears = {name: getattr(block, name.split(".")[1]).dequantize() for name in BLOCK_LINEARS}
    norms = {name: norm.astype(np.float32) for name in BLOCK_NORMS if (norm := getattr(block, name)) is not None}
    return {name: xp.asarray(weight) for name, weight in {**linears, **norms}.items()}


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The arithmetic of one model.  `final_norm`: (d_model,).  Threads may share one."""

    spec: ModelSpec
    xp: Any
    final_norm: Array

    def blocks(self, x: Array, blocks: Sequence[Block], tap: Tap = NO_TAP) -> Array:
        """`blocks` one after the other."""
        for index, block in enumerate(blocks):
            x = self._block(x, block, index, tap)
        return x

    def loops(self, x: Array, blocks: Sequence[Block], taps: Iterable[Tap]) -> Iterator[Array]:
        """The state after the loop group, once for each of `taps`; x is what the pre blocks leave."""
        injected = x
        for tap in taps:
            if self.spec.inject == "add":
                x = x + injected
            x = self.blocks(x, blocks, tap)
            if self.spec.loop_norm:
                x = self._norm(x, self.final_norm)
            yield x

    def head_input(self, x: Array) -> Array:
        """What the head multiplies: x after the final norm, which the last loop's norm may have been."""
        if self.spec.loop_norm and self.spec.post_blocks == 0:
            return x
        return self._norm(x, self.final_norm)

    def _block(self, x: Array, block: Block, index: int, tap: Tap) -> Array:
        leading = x.shape[:-1]

        def read(group: str, inputs: Array) -> Array:
            return tap.reads(index, group, inputs.reshape(-1, inputs.shape[-1]))

        def linear(name: str, inputs: Array) -> Array:
            return (inputs @ block[name].T).reshape(*leading, -1)

        y = y_kept = read("qkv", self._norm(x, block["attn_norm"]))
        if (kept := tap.keeps_h(x)) is not x:
            y_kept = read("qkv", self._norm(kept, block["attn_norm"]))
        attended = self._attend(linear("attn.q", y), linear("attn.k", y_kept), linear("attn.v", y_kept), tap)
        x = x + self._norm(linear("attn.o", read("o", attended)), block.get("attn_post_norm"))
        y = read("gate_up", self._norm(x, block["mlp_norm"]))
        gated = gate(linear("mlp.gate", y), linear("mlp.up", y), self.xp)  # (…, T, d_ff)
        x += self._norm(linear("mlp.down", read("down", gated)), block.get("mlp_post_norm"))
        return x

    def _attend(self, q: Array, k: Array, v: Array, tap: Tap) -> Array:
        """Causal attention; (…, T, H·D), twice (…, T, G·D) → (…, T, H·D)."""
        xp, spec, shape = self.xp, self.spec, q.shape
        q, k, v = (x.reshape(*shape[:-1], -1, spec.head_dim).swapaxes(-3, -2) for x in (q, k, v))  # (…, H or G, T, D)
        cos, sin = (xp.asarray(table) for table in angles(np.arange(shape[-2]), spec, np.float32))
        q, k = (turn(x, cos, sin, spec, xp) for x in (q, k))
        k, v = tap.keeps_kv(k), tap.keeps_kv(v)
        mixed = tap.mixes(self._mix(q, k, v), q, k, v)
        return mixed.swapaxes(-3, -2).reshape(shape)

    def _mix(self, q: Array, k: Array, v: Array) -> Array:
        """Softmax of q kᵀ over keys up to the query's own, times v; (…, H, T, D), twice (…, G, T, D) → (…, H, T, D)."""
        xp, repeat = self.xp, self.spec.n_heads // self.spec.n_kv_heads  # query heads h·repeat … share K/V head h
        q = q * xp.float32(self.spec.head_dim**-0.5)
        mixed = xp.empty_like(q)
        later = xp.triu(xp.full((QUERIES, QUERIES), -xp.inf, xp.float32), 1)  # of a block's own keys
        for head in range(self.spec.n_heads):
            keys, values = k[..., head // repeat, :, :], v[..., head // repeat, :, :]
            for begin in range(0, q.shape[-2], QUERIES):
                end = min(begin + QUERIES, q.shape[-2])
                scores = q[..., head, begin:end, :] @ keys[..., :end, :].swapaxes(-2, -1)  # (…, queries, keys)
                scores[..., begin:] += later[: end - begin, : end - begin]
                scores -= scores.max(axis=-1, keepdims=True)
                xp.exp(scores, out=scores)
                mixed[..., head, begin:end, :] = scores @ values[..., :end, :] / scores.sum(axis=-1, keepdims=True)
        return mixed

    def _norm(self, x: Array, weight: Array | None) -> Array:
        """RMSNorm; without a weight (the post norms of placement "pre") x itself."""
        if weight is None:
            return x
        mean_square = (x * x).mean(axis=-1, keepdims=True)
        return x / self.xp.sqrt(mean_square + self.xp.float32(self.spec.norm_eps)) * weight


def gate(x: Array, up: Array, xp: Any) -> Array:
    """silu(x) · up, in the memory of x."""
    with np.errstate(over="ignore"):  # far below zero exp overflows, and the quotient is the −0 it should be
        divisor = xp.exp(-x)
    divisor += 1
    x /= divisor
    x *= up
    return x
