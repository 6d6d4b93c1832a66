"""The looped network in torch, as it is trained: the arithmetic of `engine/reference.py`, without post blocks.

    ids → embedding → pre blocks → e;   x₀ = e;   xₜ = loop(xₜ₋₁ [+ e]) [normed];   logits = head(norm(xₜ)) at any t

In: a `ModelSpec` and token ids.  Out: the states after chosen depths, from one pass to the deepest of them.  With
`quantised` every linear is what INT4 rounding would make of it, and gradients pass straight through: training so
makes weights that lose little in the file.  This file refuses to know data, optimisers and files.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinyloop_service.engine.spec import ModelSpec

LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
NORMS = ("attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm")


class BlockParameters(nn.Module):
    """The master weights of one block, float32, with the shapes of the model file: linears (out, in)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        d, q, kv, ff = spec.d_model, spec.q_dim, spec.kv_dim, spec.d_ff
        shapes = dict(zip(LINEARS, ((q, d), (kv, d), (kv, d), (d, q), (ff, d), (ff, d), (d, ff)), strict=True))
        for name in NORMS[: 4 if spec.norm_placement == "sandwich" else 2]:
            self.register_parameter(name, nn.Parameter(torch.ones(d)))
        for name, shape in shapes.items():
            weight = torch.randn(shape) * shape[1] ** -0.5 * (0.2 if name in ("o", "down") else 1.0)
            self.register_parameter(name, nn.Parameter(weight))


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a step computes: weights rounded or not, in which type, with how much dropout."""

    dtype: torch.dtype = torch.float32
    quantised: bool = False
    dropout: float = 0.0


class Network(nn.Module):
    """A looped model; `spec.quant` gives the group size, `spec.tie_embeddings` the head."""

    def __init__(self, spec: ModelSpec, *, compiled: bool = False) -> None:
        if spec.post_blocks or spec.n_kv_heads != spec.n_heads or spec.rope_pairing != "half":
            raise ValueError("the training network has no post blocks, no grouped heads and RoPE pairing half")
        super().__init__()
        self.spec = spec
        self.embed = nn.Parameter(torch.randn(spec.vocab_size, spec.d_model) * 0.02)
        self.head = None if spec.tie_embeddings else nn.Parameter(torch.zeros(spec.vocab_size, spec.d_model))
        self.norm = nn.Parameter(torch.ones(spec.d_model))
        self.pre = nn.ModuleList(BlockParameters(spec) for _ in range(spec.pre_blocks))
        self.loop = nn.ModuleList(BlockParameters(spec) for _ in range(spec.loop_blocks))
        angles = torch.outer(torch.arange(spec.max_seq_len), _frequencies(spec))  # (positions, head_dim / 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._block = torch.compile(apply_block) if compiled else apply_block
        self._loss = torch.compile(token_loss) if compiled else token_loss
        self._round = torch.compile(fake_int4) if compiled else fake_int4

    def states(self, ids: Tensor, depths: Collection[int], recipe: Recipe) -> dict[int, Tensor]:
        """Normed states (batch, tokens, d_model) after each of `depths` loops, ready for the head."""
        spec = self.spec
        pre = [self._working(block, recipe) for block in self.pre]
        loop = [self._working(block, recipe) for block in self.loop]
        apply = self._block if self.training else apply_block  # evaluation meets many lengths: no compiling
        rope = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = F.dropout(F.embedding(ids, self.embed), recipe.dropout, recipe.dropout > 0)
        for weights in pre:
            x = apply(x, weights, rope, spec.n_heads, spec.norm_eps, recipe.dropout)
        injected = x
        found = {}
        for depth in range(1, max(depths) + 1):
            x = x + injected if spec.inject == "add" else x
            for weights in loop:
                x = apply(x, weights, rope, spec.n_heads, spec.norm_eps, recipe.dropout)
            normed = rms_norm(x, self.norm, spec.norm_eps) if spec.loop_norm or depth in depths else x
            x = normed if spec.loop_norm else x
            if depth in depths:
                found[depth] = normed
        return found

    def loss(self, state: Tensor, targets: Tensor, recipe: Recipe) -> Tensor:
        """Mean cross-entropy, nats a token, of a normed state against the next ids."""
        return self._loss(state, self._head(recipe), targets, "mean")

    def token_losses(self, state: Tensor, targets: Tensor, recipe: Recipe) -> Tensor:
        """Cross-entropy of each token, nats, flat."""
        return token_loss(state, self._head(recipe), targets, "none")

    def _head(self, recipe: Recipe) -> Tensor:
        return self._linear(self.embed if self.head is None else self.head, recipe)

    def _working(self, block: nn.Module, recipe: Recipe) -> dict[str, Tensor]:
        """The tensors a step multiplies with: made once, used by every loop."""
        named = dict(block.named_parameters())
        return {name: self._linear(p, recipe) if p.ndim == 2 else p for name, p in named.items()}

    def _linear(self, weight: Tensor, recipe: Recipe) -> Tensor:
        if recipe.quantised:
            assert self.spec.quant is not None
            weight = (self._round if self.training else fake_int4)(weight, self.spec.quant.group_size)
        return weight.to(recipe.dtype)


def _frequencies(spec: ModelSpec) -> Tensor:
    return spec.rope_theta ** (-torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim)


def apply_block(
    x: Tensor, w: dict[str, Tensor], rope: tuple[Tensor, Tensor], heads: int, eps: float, dropout: float
) -> Tensor:
    """x (batch, tokens, d_model) in float32 through one block; products in the weights' type."""
    y = rms_norm(x, w["attn_norm"], eps).to(w["q"].dtype)
    q, k, v = (F.linear(y, w[n]).unflatten(-1, (heads, -1)).transpose(1, 2) for n in "qkv")
    mixed = F.scaled_dot_product_attention(rotate(q, *rope), rotate(k, *rope), v, is_causal=True)
    out = F.linear(mixed.transpose(1, 2).flatten(2), w["o"])
    x = x + F.dropout(_post(out.float(), w.get("attn_post_norm"), eps), dropout, dropout > 0)
    y = rms_norm(x, w["mlp_norm"], eps).to(w["gate"].dtype)
    out = F.linear(F.silu(F.linear(y, w["gate"])) * F.linear(y, w["up"]), w["down"])
    return x + F.dropout(_post(out.float(), w.get("mlp_post_norm"), eps), dropout, dropout > 0)


def _post(out: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    return out if norm is None else rms_norm(out, norm, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE, pairing half: dimension i turns with i + head_dim/2.  x: (batch, heads, tokens, head_dim)."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def token_loss(state: Tensor, head: Tensor, targets: Tensor, reduction: str) -> Tensor:
    logits = F.linear(state.to(head.dtype), head).float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)


def fake_int4(weight: Tensor, group_size: int) -> Tensor:
    """The values `quantize_rtn` would store, with the gradient of the weight itself (straight through)."""
    grouped = weight.detach().unflatten(1, (-1, group_size))
    scales = (grouped.abs().amax(-1, keepdim=True) / 7).half().float()
    rounded = (grouped / torch.where(scales == 0, 1, scales)).round().clamp(-7, 7) * scales
    return weight + (rounded.flatten(1) - weight.detach())
