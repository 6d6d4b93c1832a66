"""The tensors of a model: linear layers in fp16 or INT4, blocks, and the table of names, dtypes and shapes.

In: a `ModelSpec` and named arrays.  Out: `ModelWeights`, complete and checked, or one ModelFileError.  This file
refuses to know where the arrays come from (`weights.py`) and how an engine repacks them.

INT4, symmetric, one fp16 scale for `group` neighbouring inputs of one output:

    qweight[o, i // 2]   low nibble: even i, high nibble: odd i          uint8  [out, in/2]
    weight[o, i] = (nibble − 8) · scales[o, i // group]                  fp16   [out, in/group]
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.spec import BlockKind, ModelSpec, Quant
from tinyloop_service.errors import ModelFileError

Array = NDArray[Any]
Tensors = Mapping[str, Array]

BLOCK_LINEARS = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")
BLOCK_NORMS = ("attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm")  # the last two: sandwich only
TOKENIZER = "tokenizer"
_CHECK_ELEMENTS = 1 << 20  # per step of the search for values that are not finite: bounds its scratch memory


@dataclass(frozen=True, slots=True)
class Fp16Linear:
    """y = x · weightᵀ."""

    weight: NDArray[np.float16]  # (out, in)

    @property
    def shape(self) -> tuple[int, int]:
        num_out, num_in = self.weight.shape
        return num_out, num_in

    def dequantize(self) -> NDArray[np.float32]:
        """The weights as float32 (out, in)."""
        return self.weight.astype(np.float32)


@dataclass(frozen=True, slots=True)
class Int4Linear:
    """y = x · ((nibble − 8) · scale)ᵀ; the layout is drawn above."""

    qweight: NDArray[np.uint8]  # (out, in/2)
    scales: NDArray[np.float16]  # (out, in/group)

    @property
    def shape(self) -> tuple[int, int]:
        num_out, num_bytes = self.qweight.shape
        return num_out, num_bytes * 2

    @property
    def group_size(self) -> int:
        return self.shape[1] // int(self.scales.shape[1])

    def dequantize(self) -> NDArray[np.float32]:
        """The weights as float32 (out, in)."""
        values = np.empty(self.shape, np.float32)
        values[:, 0::2] = self.qweight & 15
        values[:, 1::2] = self.qweight >> 4
        values -= 8
        grouped = values.reshape(self.shape[0], -1, self.group_size)  # (out, in/group, group)
        grouped *= self.scales.astype(np.float32)[:, :, None]
        return values


Linear = Fp16Linear | Int4Linear


def quantize_rtn(weight: Array, group_size: int) -> Int4Linear:
    """Round to nearest, each group scaled so that its largest magnitude becomes ±7.

    weight: (out, in), any float; `group_size` divides in.  Nibbles 1…15, so a group's mean carries no bias.
    """
    num_out, num_in = weight.shape
    if num_in % group_size:
        raise ValueError(f"quantize_rtn: weight is {weight.shape}, expected in to be a multiple of {group_size}")
    grouped = np.asarray(weight, np.float32).reshape(num_out, -1, group_size)
    scales = (np.abs(grouped).max(axis=2) / 7).astype(np.float16)
    divisor = np.where(scales == 0, 1, scales).astype(np.float32)[:, :, None]
    nibbles = (np.clip(np.rint(grouped / divisor), -7, 7) + 8).astype(np.uint8).reshape(num_out, num_in)
    return Int4Linear(pack_nibbles(nibbles), scales)


def pack_nibbles(nibbles: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(out, in) of 0…15 → qweight (out, in/2)."""
    packed = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    return packed.astype(np.uint8, copy=False)


def quantize_tensors(tensors: Tensors, quant: Quant) -> dict[str, Array]:
    """Named float tensors with every block linear and the head (where there is one) as INT4, all else as fp16."""
    result: dict[str, Array] = {}
    for name, value in tensors.items():
        base = name.removesuffix(".weight")
        if base == "head" or base.endswith(BLOCK_LINEARS):
            result |= linear_tensors(base, quantize_rtn(value, quant.group_size))
        else:
            result[name] = np.asarray(value, np.float16)
    return result


def linear_tensors(base: str, linear: Linear) -> dict[str, Array]:
    if isinstance(linear, Fp16Linear):
        return {f"{base}.weight": linear.weight}
    return {f"{base}.qweight": linear.qweight, f"{base}.scales": linear.scales}


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """One distinct block.  Norms are fp16 (d_model,); the post norms are there for norm_placement "sandwich" only."""

    attn_norm: NDArray[np.float16]
    mlp_norm: NDArray[np.float16]
    attn_post_norm: NDArray[np.float16] | None
    mlp_post_norm: NDArray[np.float16] | None
    q: Linear  # (n_heads · head_dim, d_model)
    k: Linear  # (n_kv_heads · head_dim, d_model)
    v: Linear
    o: Linear  # (d_model, n_heads · head_dim)
    gate: Linear  # (d_ff, d_model)
    up: Linear
    down: Linear  # (d_model, d_ff)


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """A whole model.  Arrays are read-only views, of a mapped file where it was read from one."""

    spec: ModelSpec
    model_id: str  # SHA-256, hex, over the config and every tensor
    embed: NDArray[np.float16]  # (vocab_size, d_model)
    norm: NDArray[np.float16]  # (d_model,)
    head: Linear  # (vocab_size, d_model); tied: over `embed` itself, or a quantised copy of it
    pre: tuple[BlockWeights, ...]
    loop: tuple[BlockWeights, ...]
    post: tuple[BlockWeights, ...]
    tokenizer: bytes | None  # a Hugging Face tokenizer.json
    provenance: dict[str, Any]
    tensors: dict[str, Array]  # the same arrays under their names in the file

    def block(self, kind: BlockKind, index: int) -> BlockWeights:
        return {"pre": self.pre, "loop": self.loop, "post": self.post}[kind][index]

    @classmethod
    def from_tensors(
        cls,
        spec: ModelSpec,
        tensors: Tensors,
        *,
        tokenizer: bytes | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> ModelWeights:
        """Check spec, names, dtypes, shapes and finiteness, compute model_id, assemble.  Raises ModelFileError."""
        spec.validate()
        named = dict(tensors)
        if tokenizer is not None:
            named[TOKENIZER] = np.frombuffer(tokenizer, np.uint8)
        check_tensors(spec, named)
        model_id = compute_model_id(spec, named)
        token_bytes = named[TOKENIZER].tobytes() if TOKENIZER in named else None
        groups = {kind: tuple(_blocks(spec, named, kind)) for kind in ("pre", "loop", "post")}
        has_head = any(name.startswith("head.") for name in named)
        return cls(
            spec=spec,
            model_id=model_id,
            embed=named["embed.weight"],
            norm=named["norm.weight"],
            head=_linear(named, "head") if has_head else Fp16Linear(named["embed.weight"]),
            pre=groups["pre"],
            loop=groups["loop"],
            post=groups["post"],
            tokenizer=token_bytes,
            provenance=dict(provenance or {}),
            tensors=named,
        )


def with_fp16_blocks(weights: ModelWeights) -> ModelWeights:
    """The same model with the linears of its blocks as fp16, rounded once; the head stays as it is."""

    def rounded(linear: Linear) -> Linear:
        return Fp16Linear(linear.dequantize().astype(np.float16)) if isinstance(linear, Int4Linear) else linear

    def widened(block: BlockWeights) -> BlockWeights:
        q, k, v, o = (rounded(linear) for linear in (block.q, block.k, block.v, block.o))
        gate, up, down = (rounded(linear) for linear in (block.gate, block.up, block.down))
        return replace(block, q=q, k=k, v=v, o=o, gate=gate, up=up, down=down)

    groups = {kind: tuple(map(widened, getattr(weights, kind))) for kind in ("pre", "loop", "post")}
    return replace(weights, pre=groups["pre"], loop=groups["loop"], post=groups["post"])


def _linear(tensors: Tensors, base: str) -> Linear:
    if f"{base}.weight" in tensors:
        return Fp16Linear(tensors[f"{base}.weight"])
    return Int4Linear(tensors[f"{base}.qweight"], tensors[f"{base}.scales"])


def _blocks(spec: ModelSpec, tensors: Tensors, kind: str) -> Iterator[BlockWeights]:
    for i in range(getattr(spec, f"{kind}_blocks")):
        base = f"{kind}.{i}"
        attn_norm, mlp_norm, attn_post, mlp_post = (tensors.get(f"{base}.{name}.weight") for name in BLOCK_NORMS)
        assert attn_norm is not None and mlp_norm is not None, "check_tensors passed"
        linears = [_linear(tensors, f"{base}.{name}") for name in BLOCK_LINEARS]
        yield BlockWeights(attn_norm, mlp_norm, attn_post, mlp_post, *linears)


def compute_model_id(spec: ModelSpec, tensors: Tensors) -> str:
    """SHA-256 over the canonical config, then every tensor's name, dtype, shape and bytes, by name."""
    digest = hashlib.sha256(spec.to_json().encode())
    for name in sorted(tensors):
        value = np.ascontiguousarray(tensors[name])
        digest.update(f"\n{name} {value.dtype.name} {list(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


TensorForm = tuple[type[np.generic], tuple[int, ...]]


def block_linear_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """(out, in) of a block's seven linears, by their names in the file."""
    d, q, kv, ff = spec.d_model, spec.q_dim, spec.kv_dim, spec.d_ff
    return dict(zip(BLOCK_LINEARS, ((q, d), (kv, d), (kv, d), (d, q), (ff, d), (ff, d), (d, ff)), strict=True))


def expected_tensors(spec: ModelSpec, *, quantised_head: bool) -> dict[str, TensorForm]:
    """Name → (dtype, shape) of everything but the tokenizer.  A tied model without a quantised head has no head."""
    vector: TensorForm = (np.float16, (spec.d_model,))
    table: dict[str, TensorForm] = {
        "embed.weight": (np.float16, (spec.vocab_size, spec.d_model)),
        "norm.weight": vector,
    }
    if quantised_head or not spec.tie_embeddings:
        table |= _linear_forms("head", (spec.vocab_size, spec.d_model), spec.quant if quantised_head else None)
    norms = BLOCK_NORMS if spec.norm_placement == "sandwich" else BLOCK_NORMS[:2]
    for kind, count in (("pre", spec.pre_blocks), ("loop", spec.loop_blocks), ("post", spec.post_blocks)):
        for base in (f"{kind}.{i}" for i in range(count)):
            table |= {f"{base}.{name}.weight": vector for name in norms}
            for name, shape in block_linear_shapes(spec).items():
                table |= _linear_forms(f"{base}.{name}", shape, spec.quant)
    return table


def _linear_forms(base: str, shape: tuple[int, int], quant: Quant | None) -> dict[str, TensorForm]:
    num_out, num_in = shape
    if quant is None:
        return {f"{base}.weight": (np.float16, shape)}
    return {
        f"{base}.qweight": (np.uint8, (num_out, num_in // 2)),
        f"{base}.scales": (np.float16, (num_out, num_in // quant.group_size)),
    }


def check_tensors(spec: ModelSpec, tensors: Tensors) -> None:
    """ModelFileError unless `tensors` is exactly what `spec` needs, and every number in it finite."""
    quantised_head = spec.quant is not None and "head.qweight" in tensors
    expected = expected_tensors(spec, quantised_head=quantised_head)
    if missing := sorted(expected.keys() - tensors.keys()):
        raise ModelFileError(f"{len(missing)} tensors that the config asks for are missing, first {missing[0]}")
    if unexpected := sorted(tensors.keys() - expected.keys() - {TOKENIZER}):
        raise ModelFileError(f"{len(unexpected)} tensors are not of this config, first {unexpected[0][:80]!r}")
    for name, (dtype, shape) in expected.items():
        given = tensors[name]
        if given.dtype != dtype or given.shape != shape:
            wanted = f"{np.dtype(dtype).name} {list(shape)}"
            raise ModelFileError(f"tensor {name} is {given.dtype.name} {list(given.shape)}, expected {wanted}")
    tokenizer = tensors.get(TOKENIZER)
    if tokenizer is not None and (tokenizer.dtype != np.uint8 or tokenizer.ndim != 1):
        raise ModelFileError(f"tensor tokenizer is {tokenizer.dtype.name} {list(tokenizer.shape)}, expected uint8 [n]")
    _check_finite(expected, tensors)


def _check_finite(expected: Mapping[str, TensorForm], tensors: Tensors) -> None:
    for name, (dtype, _) in expected.items():
        if dtype is not np.float16:
            continue
        flat = tensors[name].reshape(-1)
        for start in range(0, flat.size, _CHECK_ELEMENTS):
            if not np.isfinite(flat[start : start + _CHECK_ELEMENTS]).all():
                raise ModelFileError(f"tensor {name} holds NaN or infinity")
