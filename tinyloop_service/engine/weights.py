"""Model files: read, write, inspect, and models with random weights.

A `.tinyloop` file is a safetensors file.  Metadata, all text:

    format = "tinyloop", version = "1", config = JSON of the ModelSpec, model_id = SHA-256, provenance = JSON

In: a path.  Out: `ModelWeights` over the mapped file, whole and checked (model_id too), or one ModelFileError that
says what is wrong.  `container.py` knows the bytes, `tensors.py` the tensors; engines repack what they get.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.container import read_container, write_container
from tinyloop_service.engine.spec import SIZES, ModelSpec
from tinyloop_service.engine.tensors import (
    BlockWeights,
    Fp16Linear,
    Int4Linear,
    Linear,
    ModelWeights,
    expected_tensors,
    quantize_rtn,
    quantize_tensors,
)
from tinyloop_service.errors import ModelFileError

__all__ = [
    "BlockWeights",
    "Fp16Linear",
    "Int4Linear",
    "Linear",
    "ModelSummary",
    "ModelWeights",
    "inspect_model",
    "quantize_rtn",
    "quantize_tensors",
    "random_model",
    "read_model",
    "write_model",
]

FORMAT = "tinyloop"
VERSION = "1"


def read_model(path: str | Path) -> ModelWeights:
    """Map and check a model file.  Raises ModelFileError, or OSError if it cannot be opened."""
    path = Path(path)
    metadata, tensors = read_container(path)
    try:
        spec, provenance = _parse_metadata(metadata)
        weights = ModelWeights.from_tensors(spec, tensors, provenance=provenance)
        if weights.model_id != metadata["model_id"]:
            raise ModelFileError(
                f"model_id is {metadata['model_id'][:64]!r}, the contents give {weights.model_id}: "
                "the file was changed after it was written"
            )
    except ModelFileError as error:
        raise ModelFileError(f"{path.name}: {error}") from None
    return weights


def write_model(path: str | Path, weights: ModelWeights) -> None:
    """Write `weights` to `path` atomically, over any file that is there."""
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "config": weights.spec.to_json(),
        "model_id": weights.model_id,
        "provenance": json.dumps(weights.provenance, sort_keys=True),
    }
    write_container(Path(path), weights.tensors, metadata)


def _parse_metadata(metadata: dict[str, str]) -> tuple[ModelSpec, dict[str, Any]]:
    if metadata.get("format") != FORMAT:
        raise ModelFileError("a safetensors file, but not a TinyLoop model (metadata format=tinyloop is missing)")
    if metadata.get("version") != VERSION:
        raise ModelFileError(f"file version {metadata.get('version', '')[:20]!r}, this release reads version {VERSION}")
    if missing := sorted({"config", "model_id"} - metadata.keys()):
        raise ModelFileError(f"metadata lacks {', '.join(missing)}")
    try:
        provenance = json.loads(metadata.get("provenance", "{}"))
    except (ValueError, RecursionError):
        raise ModelFileError("metadata provenance is not JSON") from None
    if not isinstance(provenance, dict):
        raise ModelFileError("metadata provenance is not a JSON object")
    return ModelSpec.from_json(metadata["config"]), provenance


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """What `tinyloop inspect` shows.  Bytes are those in the file; parameters count each weight once."""

    spec: ModelSpec
    model_id: str  # as found in the file, and verified
    provenance: dict[str, Any]
    file_bytes: int
    part_bytes: dict[str, int]  # embed, head, pre, loop, post, norm, tokenizer
    num_parameters: int  # a tied model's quantised head is not counted again
    bits_per_weight: float  # over the linears of the blocks and the head
    kv_bytes_1024: int  # fp16 K/V of 1024 tokens at default_loops


def inspect_model(path: str | Path) -> ModelSummary:
    """Read, verify and summarise a model file.  Errors as `read_model`."""
    weights = read_model(path)
    spec = weights.spec
    part_bytes = dict.fromkeys(("embed", "head", "pre", "loop", "post", "norm", "tokenizer"), 0)
    for name, value in weights.tensors.items():
        part_bytes[name.split(".")[0]] += value.nbytes
    linears = _linears(weights)
    linear_weights = sum(linear.shape[0] * linear.shape[1] for linear in linears)
    linear_bytes = sum(_linear_bytes(linear) for linear in linears)
    others = [value for name, value in weights.tensors.items() if "norm.weight" in name or name == "embed.weight"]
    tied_head = weights.head.shape[0] * weights.head.shape[1] if spec.tie_embeddings else 0
    return ModelSummary(
        spec=spec,
        model_id=weights.model_id,
        provenance=weights.provenance,
        file_bytes=Path(path).stat().st_size,
        part_bytes=part_bytes,
        num_parameters=linear_weights + sum(value.size for value in others) - tied_head,
        bits_per_weight=8 * linear_bytes / linear_weights,
        kv_bytes_1024=spec.kv_bytes(1024, spec.default_loops),
    )


def _linears(weights: ModelWeights) -> list[Linear]:
    blocks = weights.pre + weights.loop + weights.post
    return [weights.head, *(linear for b in blocks for linear in (b.q, b.k, b.v, b.o, b.gate, b.up, b.down))]


def _linear_bytes(linear: Linear) -> int:
    if isinstance(linear, Fp16Linear):
        return linear.weight.nbytes
    return linear.qweight.nbytes + linear.scales.nbytes


def random_model(size: str | ModelSpec, seed: int = 0, *, tokenizer: bytes | None = None) -> ModelWeights:
    """A model of a size of `SIZES`, or of any spec, with random weights.

    Activations stay of order one, and positions distinct, through any number of loops.  INT4 with a quantised head
    where the spec has `quant`, else fp16.  One (spec, seed), one model_id.
    """
    if isinstance(size, str):
        if size not in SIZES:
            raise ValueError(f"size is {size!r}, expected one of {', '.join(SIZES)}")
        spec = SIZES[size]
    else:
        spec = size.validate()
    forms = expected_tensors(spec, quantised_head=spec.quant is not None)
    tensors = {name: _random_tensor(spec, name, shape, seed) for name, (_, shape) in forms.items()}
    return ModelWeights.from_tensors(spec, tensors, tokenizer=tokenizer, provenance={"source": "random", "seed": seed})


def _random_tensor(spec: ModelSpec, name: str, shape: tuple[int, ...], seed: int) -> NDArray[Any]:
    """Each tensor has a stream of its own, whatever others there are."""
    rng = np.random.default_rng([seed, crc32(name.encode())])
    if name.endswith("norm.weight"):
        return np.asarray(1 + 0.1 * rng.standard_normal(shape), np.float16)
    if name.endswith(".qweight"):
        return np.take(_PACKED, rng.integers(0, _PACKED.size, shape, np.uint8))
    gain = next((gain for part, gain in _GAINS.items() if part in name), 1.0)
    if name.endswith(".scales"):
        assert spec.quant is not None
        num_in = shape[1] * spec.quant.group_size
        return np.asarray(gain * rng.uniform(0.8, 1.2, shape) / (_NIBBLE_STD * num_in**0.5), np.float16)
    result = np.empty(shape, np.float16)
    scale = 1.0 if name == "embed.weight" and not spec.tie_embeddings else gain * shape[1] ** -0.5
    for rows in np.array_split(result, max(1, result.size >> 20)):  # bounds the float32 scratch
        rows[:] = rng.standard_normal(rows.shape, np.float32) * np.float32(scale)
    return result


# Attention averages, and one block applied again and again is a power iteration: were the branches louder, positions
# would soon forget their tokens and all point the same way.
_GAINS = {".attn.o.": 0.3, ".mlp.down.": 0.5}
# Nibbles 1…15, of mean 8 and so of value 0: with 0…15 every weight would lean to −0.5 and activations collapse.
_NIBBLES = np.arange(1, 16, dtype=np.uint8)
_PACKED = (_NIBBLES[:, None] << 4 | _NIBBLES[None, :]).reshape(-1)  # every byte of two such nibbles
_NIBBLE_STD = float(np.std(_NIBBLES))
