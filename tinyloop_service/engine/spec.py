"""What a looped model is: every number and switch that its arithmetic depends on.

    ids → embedding → pre blocks → (loop blocks) × loops → post blocks → RMSNorm → head → logits

In: the `config` JSON of a `.tinyloop` file.  Out: a frozen, validated `ModelSpec`.  This file refuses to know about
arrays, files and engines; `tensors.py` turns a spec into the tensors it needs.

Cache layers, in order: pre block i is layer i; block j of loop t is layer pre + t·K + j; post block p is layer
pre + loops·K + p.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from tinyloop_service.errors import ModelFileError
from tinyloop_service.types import TokenIds

RopePairing = Literal["half", "interleaved"]  # dimension i turns with i + head_dim/2, or with its neighbour
NormPlacement = Literal["pre", "sandwich"]  # x += f(n1(x)), or x += n2(f(n1(x)))
Inject = Literal["none", "add"]  # "add": the pre blocks' output joins the input of every loop
BlockKind = Literal["pre", "loop", "post"]

GROUP_SIZES = (128, 64, 32)
_LARGEST = {"max_loops": 1024, "pre_blocks": 1024, "loop_blocks": 1024, "post_blocks": 1024}
_LARGEST |= {"max_seq_len": 1 << 18}  # no tensor of the file bears witness to it, and each block has a table of it
_POSITIVE = 1e-30, 1e30  # of rope_theta and norm_eps: what float32 holds
_LARGEST_SIZE = 1 << 24  # of everything else; far above any model, low enough that products of two fit 64 bits


@dataclass(frozen=True, slots=True)
class Quant:
    """Weight quantisation: `bits` per value, one scale for `group_size` neighbouring inputs."""

    bits: int = 4
    group_size: int = 128


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The config of a `.tinyloop` file; field names are its keys."""

    vocab_size: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    pre_blocks: int
    loop_blocks: int
    post_blocks: int
    default_loops: int
    max_loops: int
    max_seq_len: int
    rope_theta: float = 10000.0
    rope_pairing: RopePairing = "half"
    norm_eps: float = 1e-5
    norm_placement: NormPlacement = "pre"
    loop_norm: bool = False
    inject: Inject = "none"
    tie_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: TokenIds = ()
    quant: Quant | None = None

    def cache_layers(self, loops: int) -> int:
        """Layers of K/V that one token leaves behind at this depth."""
        return self.pre_blocks + loops * self.loop_blocks + self.post_blocks

    def schedule(self, loops: int) -> Iterator[tuple[int, BlockKind, int]]:
        """(cache layer, kind, index among the distinct blocks of that kind), in the order of computation."""
        order: list[tuple[BlockKind, int]] = [("pre", i) for i in range(self.pre_blocks)]
        order += [("loop", j) for _ in range(loops) for j in range(self.loop_blocks)]
        order += [("post", p) for p in range(self.post_blocks)]
        return ((layer, kind, index) for layer, (kind, index) in enumerate(order))

    @property
    def q_dim(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.n_kv_heads * self.head_dim

    def kv_bytes(self, num_tokens: int, loops: int) -> int:
        """fp16 K and V of `num_tokens` tokens, without the rounding to whole pages."""
        return num_tokens * self.kv_dim * self.cache_layers(loops) * 2 * 2

    def validate(self) -> ModelSpec:
        """This spec, or ModelFileError naming the first field that no model can have."""
        for name in _INTEGERS:
            _check_integer(name, getattr(self, name), 0 if name in ("pre_blocks", "post_blocks") else 1)
        for name in ("rope_theta", "norm_eps"):
            _check_positive(name, getattr(self, name))
        for name, allowed in _CHOICES.items():
            _require(getattr(self, name) in allowed, name, getattr(self, name), "one of " + ", ".join(allowed))
        for name in ("loop_norm", "tie_embeddings"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")
        self._validate_relations()
        self._validate_token_ids()
        if self.quant is not None:
            self._validate_quant(self.quant)
        return self

    def _validate_relations(self) -> None:
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even number, for RoPE turns pairs")
        divides = self.n_heads % self.n_kv_heads == 0
        _require(divides, "n_kv_heads", self.n_kv_heads, f"a divisor of n_heads = {self.n_heads}")
        _require(self.default_loops <= self.max_loops, "default_loops", self.default_loops, f"≤ {self.max_loops}")

    def _validate_token_ids(self) -> None:
        _require(isinstance(self.eos_token_ids, tuple), "eos_token_ids", self.eos_token_ids, "a list of token ids")
        named = [("eos_token_ids", token) for token in self.eos_token_ids]
        if self.bos_token_id is not None:
            named.append(("bos_token_id", self.bos_token_id))
        for name, token in named:
            inside = _is_int(token) and 0 <= token < self.vocab_size
            _require(inside, name, token, f"a token id, 0 ≤ id < vocab_size = {self.vocab_size}")

    def _validate_quant(self, quant: Quant) -> None:
        _require(_is_int(quant.bits) and quant.bits == 4, "quant.bits", quant.bits, "4")
        known = _is_int(quant.group_size) and quant.group_size in GROUP_SIZES
        _require(known, "quant.group_size", quant.group_size, "128, 64 or 32")
        for name, size in (("d_model", self.d_model), ("n_heads · head_dim", self.q_dim), ("d_ff", self.d_ff)):
            _require(size % quant.group_size == 0, name, size, f"a multiple of quant.group_size = {quant.group_size}")

    def to_json(self) -> str:
        """The canonical form: sorted keys, no spaces.  Part of what model_id is taken over."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> ModelSpec:
        """Parse and validate.  Every key must be there, and no other: ModelFileError."""
        config = _parse_object(text)
        _check_keys("config", config, {field.name for field in fields(cls)})
        eos, quant = config["eos_token_ids"], config["quant"]
        _require(isinstance(eos, list), "eos_token_ids", eos, "a list of token ids")
        config["eos_token_ids"] = tuple(eos)
        if quant is not None:
            _require(isinstance(quant, dict), "quant", quant, 'null or {"bits", "group_size"}')
            _check_keys("config quant", quant, {field.name for field in fields(Quant)})
            config["quant"] = Quant(**quant)
        return cls(**config).validate()


_INTEGERS = tuple(field.name for field in fields(ModelSpec) if field.type == "int")
_CHOICES = {
    "rope_pairing": get_args(RopePairing),
    "norm_placement": get_args(NormPlacement),
    "inject": get_args(Inject),
}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(holds: bool, name: str, given: object, expected: str) -> None:
    if not holds:
        raise ModelFileError(f"config {name} is {repr(given)[:80]}, expected {expected}")


def _check_integer(name: str, value: Any, least: int) -> None:
    most = _LARGEST.get(name, _LARGEST_SIZE)
    _require(_is_int(value) and least <= value <= most, name, value, f"an integer from {least} to {most}")


def _check_positive(name: str, value: Any) -> None:
    least, most = _POSITIVE
    number = _is_int(value) or isinstance(value, float)
    _require(number and least <= value <= most, name, value, f"a number from {least} to {most}")


def _check_keys(where: str, given: dict[str, Any], expected: set[str]) -> None:
    if unknown := sorted(given.keys() - expected):
        raise ModelFileError(f"{where} has unknown keys {str(unknown)[:200]}; a newer version may have written it")
    if missing := sorted(expected - given.keys()):
        raise ModelFileError(f"{where} lacks the keys {missing}")


def _parse_object(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"config is not JSON: {str(error)[:120]}") from None
    if not isinstance(parsed, dict):
        raise ModelFileError(f"config is a JSON {type(parsed).__name__}, expected an object")
    return parsed


SIZES: dict[str, ModelSpec] = {
    "407m": ModelSpec(
        vocab_size=50257,
        d_model=2048,
        n_heads=16,
        n_kv_heads=16,
        head_dim=128,
        d_ff=8192,
        pre_blocks=2,
        loop_blocks=1,
        post_blocks=0,
        default_loops=8,
        max_loops=16,
        max_seq_len=4096,
        quant=Quant(),
    ),
    "tiny": ModelSpec(
        vocab_size=512,
        d_model=256,
        n_heads=4,
        n_kv_heads=4,
        head_dim=64,
        d_ff=768,
        pre_blocks=2,
        loop_blocks=1,
        post_blocks=0,
        default_loops=4,
        max_loops=16,
        max_seq_len=2048,
        quant=Quant(),
    ),
}
