"""The graphs that hold weights: before attention, after it, norm and head.

    attend_in       x → rms → q, k, v → RoPE on q and k → q; k and v as stored, and as read from what is stored
                    where h is stored: x → rms → q → RoPE → q; x as stored
    keys_values     where h is stored: what is stored → h → rms → k, v → RoPE on k → k and v as read
    attend_out      x, attention → O → residual → rms → down(silu(gate) · up) → residual
    norm, head      the final norm; logits

In: a model's weights, the coding of what is stored.  Out: kernels over [rows, …] arrays.  Refuses to know about pages
and about what a row is.

A row's bits must not depend on how many rows there are.  MatMulNBits keeps that for even numbers of rows; a float32
product keeps it if it is batched at least as wide as the thread pool (no product is then cut up over threads) and does
not take the special kernel for one row, which a factor other than 1 avoids.  `selfcheck.py` puts it to the test.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.cache_modes import Stored
from tinyloop_service.engine.cpu.coding import Coding
from tinyloop_service.engine.cpu.runtime import F16, F32, I64, Array, Call, GraphBuilder, Kernel
from tinyloop_service.engine.spec import ModelSpec
from tinyloop_service.engine.tensors import BlockWeights, Int4Linear, Linear, ModelWeights

_FLOAT_BATCH = 16  # pieces of a float32 product; as many as threads if those are more
_FEWEST_POSITIONS = 128  # in a table of RoPE: ONNX Runtime refuses one that is shorter than the rows of a call


@dataclass(frozen=True, slots=True)
class BlockKernels:
    attend_in: Kernel
    keys_values: Kernel | None  # where h is stored
    attend_out: Kernel

    def inwards(self, x: Array, positions: Array, q: Array, stored: Stored, read: Array) -> list[Call]:
        """What computes q, stored and what is read of it from x."""
        inputs, outputs = {"x": x, "positions": positions}, {"q": q, **stored}
        if self.keys_values is None:
            return [self.attend_in.bind(inputs, outputs | {"read": read})]
        reading = self.keys_values.bind({**stored, "positions": positions}, {"read": read})
        return [self.attend_in.bind(inputs, outputs), reading]


class LayerCompiler:
    """Builds the kernels of one model."""

    def __init__(self, weights: ModelWeights, coding: Coding, *, accuracy_level: int, threads: int) -> None:
        self._weights, self._spec, self._coding = weights, weights.spec, coding
        self._accuracy_level, self._float_batch = accuracy_level, max(threads, _FLOAT_BATCH)
        self._cos, self._sin = rope_tables(weights.spec)

    def block(self, block: BlockWeights) -> BlockKernels:
        if self._coding.stores_h:
            return BlockKernels(self._attend_in_storing_h(block), self._keys_values(block), self._attend_out(block))
        return BlockKernels(self._attend_in(block), None, self._attend_out(block))

    def norm(self) -> Kernel:
        """x [rows, d_model] → y, the final norm."""
        g = GraphBuilder()
        x = g.input("x", F32, ["n", self._spec.d_model])
        g.output("y", self._norm(g, x, self._weights.norm), F32, ["n", self._spec.d_model])
        return g.build()

    def head(self, *, normed: bool) -> Kernel:
        """x [rows, d_model] → logits [rows, vocab_size]; `normed`: the final norm was applied before."""
        g = GraphBuilder()
        x = g.input("x", F32, ["n", self._spec.d_model])
        y = x if normed else self._norm(g, x, self._weights.norm)
        g.output("logits", self._linear(g, y, self._weights.head), F32, ["n", self._spec.vocab_size])
        return g.build()

    def _attend_in(self, block: BlockWeights) -> Kernel:
        """x, positions [1, rows] → q [rows, H, D]; stored; read [rows, 2, G, D], fp16."""
        spec, g = self._spec, GraphBuilder()
        x = g.input("x", F32, ["n", spec.d_model])
        qkv = self._linear(g, self._norm(g, x, block.attn_norm), block.q, block.k, block.v)
        qk, v = g.split(qkv, 1, spec.q_dim + spec.kv_dim, spec.kv_dim)
        q, k = g.split(self._rope(g, qk, spec.n_heads + spec.n_kv_heads), 1, spec.n_heads, spec.n_kv_heads)
        stored = self._coding.encode(g, self._joined(g, k, v))
        g.output("q", q, F32, ["n", spec.n_heads, spec.head_dim])
        self._read_out(g, self._coding.read(g, stored))
        self._coding.outputs(g, stored)
        return g.build()

    def _attend_in_storing_h(self, block: BlockWeights) -> Kernel:
        """x, positions [1, rows] → q [rows, H, D]; stored."""
        spec, g = self._spec, GraphBuilder()
        x = g.input("x", F32, ["n", spec.d_model])
        q = self._linear(g, self._norm(g, x, block.attn_norm), block.q)
        g.output("q", self._rope(g, q, spec.n_heads), F32, ["n", spec.n_heads, spec.head_dim])
        self._coding.outputs(g, self._coding.encode(g, x))
        return g.build()

    def _keys_values(self, block: BlockWeights) -> Kernel:
        """stored, positions [1, rows] → read [rows, 2, G, D], fp16."""
        spec, g = self._spec, GraphBuilder()
        h = self._coding.decode(g, self._coding.inputs(g, "n"))
        k, v = g.split(
            self._linear(g, self._norm(g, h, block.attn_norm), block.k, block.v), 1, spec.kv_dim, spec.kv_dim
        )
        joined = self._joined(g, self._rope(g, k, spec.n_kv_heads), v)
        self._read_out(g, self._coding.rounded(g, joined))
        return g.build()

    def _read_out(self, g: GraphBuilder, kv: str) -> None:
        g.output("read", kv, F16, ["n", 2, self._spec.n_kv_heads, self._spec.head_dim])

    def _rope(self, g: GraphBuilder, x: str, num_heads: int) -> str:
        """x [rows, heads·D], turned at the graph's `positions` → [rows, heads, D]."""
        spec = self._spec
        turned = g.contrib(
            "RotaryEmbedding",
            g.reshape(x, 1, -1, num_heads * spec.head_dim),
            g.input("positions", I64, [1, "n"]),
            g.constant(self._cos),
            g.constant(self._sin),
            num_heads=num_heads,
            interleaved=int(spec.rope_pairing == "interleaved"),
        )
        return g.reshape(turned, -1, num_heads, spec.head_dim)

    def _joined(self, g: GraphBuilder, k: str, v: str) -> str:
        """k and v, however shaped → [rows, 2, G, D]."""
        each = (-1, 1, self._spec.n_kv_heads, self._spec.head_dim)
        return g.op("Concat", g.reshape(k, *each), g.reshape(v, *each), axis=1)

    def _attend_out(self, block: BlockWeights) -> Kernel:
        """x, a [rows, H·D] → y [rows, d_model], the block's output."""
        spec, g = self._spec, GraphBuilder()
        x = g.input("x", F32, ["n", spec.d_model])
        attended = self._linear(g, g.input("a", F32, ["n", spec.q_dim]), block.o)
        if block.attn_post_norm is not None:
            attended = self._norm(g, attended, block.attn_post_norm)
        weight = g.constant(block.mlp_norm.astype(np.float32))
        normed, _, _, residual = g.contribs(
            "SkipSimplifiedLayerNormalization", x, attended, weight, num_outputs=4, epsilon=float(spec.norm_eps)
        )
        gate = g.contrib("QuickGelu", self._linear(g, normed, block.gate), alpha=1.0)  # x · sigmoid(x)
        down = self._linear(g, g.op("Mul", gate, self._linear(g, normed, block.up)), block.down)
        if block.mlp_post_norm is not None:
            down = self._norm(g, down, block.mlp_post_norm)
        g.output("y", g.op("Add", residual, down), F32, ["n", spec.d_model])
        return g.build()

    def _norm(self, g: GraphBuilder, x: str, weight: NDArray[np.float16]) -> str:
        scale = g.constant(weight.astype(np.float32))
        return g.op("SimplifiedLayerNormalization", x, scale, axis=-1, epsilon=float(self._spec.norm_eps))

    def _linear(self, g: GraphBuilder, x: str, *linears: Linear) -> str:
        """x [rows, in] → [rows, out]; several linears stand side by side along their outputs."""
        packed = [linear for linear in linears if isinstance(linear, Int4Linear)]
        if len(packed) == len(linears):
            return self._int4(g, x, packed)
        return self._float(g, x, np.concatenate([linear.dequantize() for linear in linears]))

    def _int4(self, g: GraphBuilder, x: str, linears: list[Int4Linear]) -> str:
        qweight = np.concatenate([linear.qweight for linear in linears])  # (out, in/2)
        scales = np.concatenate([linear.scales for linear in linears]).astype(np.float32)  # (out, in/group)
        num_out, num_groups = scales.shape
        return g.contrib(
            "MatMulNBits",
            x,
            g.constant(qweight.reshape(num_out, num_groups, -1)),
            g.constant(scales),
            K=qweight.shape[1] * 2,
            N=num_out,
            bits=4,
            block_size=linears[0].group_size,
            accuracy_level=self._accuracy_level,
        )

    def _float(self, g: GraphBuilder, x: str, weight: Array) -> str:
        """A float32 product in equal pieces of the outputs, the last filled up with zeros."""
        num_out, num_in = weight.shape
        pieces = self._float_batch
        width = -(-num_out // pieces)
        padded = np.zeros((pieces * width, num_in), np.float32)
        padded[:num_out] = weight * np.float32(0.5)  # exact; undone by alpha, which keeps off the one-row kernel
        columns = np.ascontiguousarray(padded.reshape(pieces, width, num_in).transpose(0, 2, 1))
        product = g.contrib("FusedMatMul", x, g.constant(columns), alpha=2.0)  # [pieces, rows, width]
        joined = g.reshape(g.transpose(product, 1, 0, 2), -1, pieces * width)
        if pieces * width == num_out:
            return joined
        return g.split(joined, 1, num_out, pieces * width - num_out)[0]


def rope_tables(spec: ModelSpec) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin of position · theta^(−2i/D), [max_seq_len or more, D/2]."""
    inverse = spec.rope_theta ** (-np.arange(0, spec.head_dim, 2) / spec.head_dim)
    angles = np.arange(max(spec.max_seq_len, _FEWEST_POSITIONS))[:, None] * inverse
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
