"""The forward pass over many windows of text at once, in float32, with the inputs of its linears given out.

    (windows, tokens) ids → embedding → pre blocks → (loop blocks) × loops → post blocks → norm

In: a spec, blocks as dense arrays, states (B, T, d_model).  Out: states, and for whoever collects them the inputs of
the four groups of linears of a block (`INPUT_GROUPS`): linears of one group read the same numbers.  Arrays are those
of `xp`: NumPy's or CuPy's.  Refuses to know about caches, decoding, INT4 and Hessians.  `engine/reference.py` says the
same of one sequence, and the tests compare.

Shapes: B windows, T tokens, H heads, G K/V heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinyloop_service.engine.spec import ModelSpec

Array = Any  # of `xp`, float32 unless said otherwise
Block = Mapping[str, Array]  # names of BLOCK_LINEARS and BLOCK_NORMS → weights, float32; post norms may be missing
Collect = Callable[[int, str, Array], None]  # index of a block in its group, name of an input group, (B·T, in)

INPUT_GROUPS = {
    "qkv": ("attn.q", "attn.k", "attn.v"),
    "o": ("attn.o",),
    "gate_up": ("mlp.gate", "mlp.up"),
    "down": ("mlp.down",),
}


def ignore(index: int, group: str, inputs: Array) -> None:
    """Collects nothing."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The arithmetic of one model.  `final_norm`: (d_model,)."""

    spec: ModelSpec
    xp: Any
    final_norm: Array

    def blocks(self, x: Array, blocks: Sequence[Block], collect: Collect = ignore) -> Array:
        """`blocks` one after the other."""
        for index, block in enumerate(blocks):
            x = self._block(x, block, index, collect)
        return x

    def loops(self, x: Array, blocks: Sequence[Block], collect: Sequence[Collect]) -> Array:
        """The loop group, once for each of `collect`; x is what the pre blocks leave."""
        injected = x
        for collect_depth in collect:
            if self.spec.inject == "add":
                x = x + injected
            x = self.blocks(x, blocks, collect_depth)
            if self.spec.loop_norm:
                x = self._norm(x, self.final_norm)
        return x

    def head_input(self, x: Array) -> Array:
        """What the head multiplies: x after the final norm, which the last loop's norm may have been."""
        if self.spec.loop_norm and self.spec.post_blocks == 0:
            return x
        return self._norm(x, self.final_norm)

    def _block(self, x: Array, block: Block, index: int, collect: Collect) -> Array:
        def linear(group: str, inputs: Array) -> list[Array]:
            flat = inputs.reshape(-1, inputs.shape[-1])
            collect(index, group, flat)
            return [(flat @ block[name].T).reshape(*inputs.shape[:-1], -1) for name in INPUT_GROUPS[group]]

        q, k, v = linear("qkv", self._norm(x, block["attn_norm"]))
        (attended,) = linear("o", self._attend(q, k, v))
        x = x + self._norm(attended, block.get("attn_post_norm"))
        gate, up = linear("gate_up", self._norm(x, block["mlp_norm"]))
        (down,) = linear("down", self._silu(gate) * up)
        return x + self._norm(down, block.get("mlp_post_norm"))

    def _attend(self, q: Array, k: Array, v: Array) -> Array:
        """Causal attention; (B, T, H·D), twice (B, T, G·D) → (B, T, H·D)."""
        xp, spec = self.xp, self.spec
        num_windows, num_tokens, _ = q.shape
        split = (num_windows, num_tokens, spec.n_kv_heads, -1, spec.head_dim)
        q, k, v = (array.reshape(split).transpose(0, 2, 3, 1, 4) for array in (q, k, v))  # (B, G, H/G or 1, T, D)
        q, k = self._rope(q), self._rope(k)
        scores = q @ k.swapaxes(3, 4)  # (B, G, H/G, T, T)
        scores *= xp.float32(spec.head_dim**-0.5)
        scores += xp.triu(xp.full((num_tokens, num_tokens), -xp.inf, xp.float32), 1)
        scores -= scores.max(axis=-1, keepdims=True)
        xp.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        return (scores @ v).transpose(0, 3, 1, 2, 4).reshape(num_windows, num_tokens, -1)

    def _rope(self, x: Array) -> Array:
        """Turn pair i of every head by position · theta^(−2i/D); x: (…, T, D)."""
        xp, spec = self.xp, self.spec
        half = spec.head_dim // 2
        frequencies = spec.rope_theta ** (-2.0 * xp.arange(half) / spec.head_dim)
        angle = xp.arange(x.shape[-2])[:, None] * frequencies  # (T, D/2), float64
        cos, sin = xp.cos(angle).astype(xp.float32), xp.sin(angle).astype(xp.float32)
        if spec.rope_pairing == "half":
            first, second = slice(0, half), slice(half, None)
        else:
            first, second = slice(0, None, 2), slice(1, None, 2)
        turned = xp.empty_like(x)
        turned[..., first] = x[..., first] * cos - x[..., second] * sin
        turned[..., second] = x[..., second] * cos + x[..., first] * sin
        return turned

    def _norm(self, x: Array, weight: Array | None) -> Array:
        """RMSNorm; without a weight (the post norms of placement "pre") x itself."""
        if weight is None:
            return x
        mean_square = (x * x).mean(axis=-1, keepdims=True)
        return x / self.xp.sqrt(mean_square + self.xp.float32(self.spec.norm_eps)) * weight

    def _silu(self, x: Array) -> Array:
        """x · sigmoid(x), by the hyperbolic tangent, which overflows nowhere."""
        half = self.xp.float32(0.5)
        return x * (self.xp.tanh(x * half) + 1) * half
