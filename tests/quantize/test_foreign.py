"""GPTQ tensors as AutoGPTQ (v1) and GPTQModel (v2) write them: converted exactly, or refused in one sentence."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from fp16_models import SPECS
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tinyloop_service.engine.spec import ModelSpec, Quant
from tinyloop_service.engine.tensors import Fp16Linear, Int4Linear, ModelWeights
from tinyloop_service.engine.weights import random_model
from tinyloop_service.errors import ModelFileError
from tinyloop_service.quantize.foreign import convert_gptq

Tensors = dict[str, NDArray[Any]]
Version = Literal["v1", "v2"]

GROUP = 32
SPEC = replace(SPECS["sandwich"], quant=Quant(4, GROUP), post_blocks=1)
Q = "pre.0.attn.q"


def pack_rows(values: NDArray[np.int64]) -> NDArray[np.int32]:
    """(8·n, m) of 0…15 → int32 (n, m): eight rows a word, the first in the lowest bits, as the makers do it."""
    words = np.zeros((len(values) // 8, values.shape[1]), np.uint32)
    for row, value in enumerate(values):
        words[row // 8] |= (value << 4 * (row % 8)).astype(np.uint32)
    return words.view(np.int32)


def pack_zeros(zero: int, num_groups: int, num_out: int) -> NDArray[np.int32]:
    return pack_rows(np.full((num_out, num_groups), zero)).T.copy()


def foreign_linear(base: str, linear: Int4Linear, version: Version) -> Tensors:
    num_out, num_in = linear.shape
    levels = Int4Linear(linear.qweight, np.ones_like(linear.scales)).dequantize().astype(np.int64).T + 8  # (in, out)
    return {
        f"{base}.qweight": pack_rows(levels),
        f"{base}.qzeros": pack_zeros(7 if version == "v1" else 8, num_in // GROUP, num_out),
        f"{base}.scales": np.ascontiguousarray(linear.scales.T),
        f"{base}.g_idx": (np.arange(num_in) // GROUP).astype(np.int32),
    }


def foreign(weights: ModelWeights, version: Version = "v1") -> Tensors:
    tensors: Tensors = {}
    for name, value in weights.tensors.items():
        if name.endswith(".qweight"):
            base = name.removesuffix(".qweight")
            tensors |= foreign_linear(base, Int4Linear(value, weights.tensors[f"{base}.scales"]), version)
        elif name.endswith(".weight"):
            tensors[name] = value
    return tensors


def dequantized_by_the_makers_formula(tensors: Tensors, base: str, version: Version) -> NDArray[np.float32]:
    """(out, in): scales[g_idx] · (q − zero), zero = stored + 1 in v1."""
    words, zeros = (tensors[f"{base}.{part}"].view(np.uint32) for part in ("qweight", "qzeros"))
    num_in, num_out = len(words) * 8, words.shape[1]
    q = np.array([[words[i // 8, o] >> 4 * (i % 8) & 15 for o in range(num_out)] for i in range(num_in)], np.int64)
    z = np.array([[row[o // 8] >> 4 * (o % 8) & 15 for o in range(num_out)] for row in zeros], np.int64)
    groups = tensors[f"{base}.g_idx"]
    scales = tensors[f"{base}.scales"].astype(np.float32)
    values: NDArray[np.float32] = (scales[groups] * (q - z[groups] - (version == "v1"))).T.astype(np.float32)
    return values


@pytest.fixture
def save(tmp_path: Path) -> Callable[[Tensors], Path]:
    def saved(tensors: Tensors) -> Path:
        path = tmp_path / "gptq.safetensors"
        save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, path)
        return path

    return saved


Save = Callable[[Tensors], Path]


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("with_g_idx", [True, False])
def test_a_conversion_changes_no_bit(save: Save, version: Version, with_g_idx: bool) -> None:
    weights = random_model(SPEC, 3)
    tensors = foreign(weights, version)
    kept = {name: value for name, value in tensors.items() if with_g_idx or not name.endswith(".g_idx")}
    made = convert_gptq(save(kept), SPEC)
    assert made.model_id == weights.model_id, "the same tensors, byte for byte"
    for base in (Q, "loop.0.mlp.down", "post.0.attn.o", "head"):
        linear = Int4Linear(made.tensors[f"{base}.qweight"], made.tensors[f"{base}.scales"])
        expected = dequantized_by_the_makers_formula(tensors, base, version)
        np.testing.assert_array_equal(linear.dequantize(), expected)
    conversion = made.provenance["conversion"]
    assert conversion["layout"] == f"GPTQ {version}" and conversion["rounded_values"] == 0
    assert conversion["file"] == "gptq.safetensors" and len(conversion["sha256"]) == 64


def test_groups_in_another_order_are_put_in_order(save: Save) -> None:
    weights = random_model(SPEC, 3)
    tensors = foreign(weights)
    tensors[f"{Q}.g_idx"] = np.repeat([1, 0], GROUP).astype(np.int32)
    tensors[f"{Q}.scales"] = tensors[f"{Q}.scales"][::-1]
    assert convert_gptq(save(tensors), SPEC).model_id == weights.model_id


def test_all_levels_and_negative_scales_survive(save: Save) -> None:
    weights = random_model(SPEC, 3)
    tensors = foreign(weights)
    levels = np.arange(64 * 64).reshape(64, 64) % 16
    tensors[f"{Q}.qweight"] = pack_rows(levels)
    tensors[f"{Q}.scales"] = -tensors[f"{Q}.scales"]
    made = convert_gptq(save(tensors), SPEC)
    linear = Int4Linear(made.tensors[f"{Q}.qweight"], made.tensors[f"{Q}.scales"])
    np.testing.assert_array_equal(linear.dequantize(), dequantized_by_the_makers_formula(tensors, Q, "v1"))
    assert set(np.unique(levels)) == set(range(16))


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_may_stay_in_floats(save: Save, tied: bool) -> None:
    spec = replace(SPEC, tie_embeddings=tied)
    tensors = {name: value for name, value in foreign(random_model(spec)).items() if not name.startswith("head.")}
    if not tied:
        tensors["head.weight"] = np.ones((96, 64), np.float32)
    made = convert_gptq(save(tensors), spec)
    assert isinstance(made.head, Fp16Linear) and isinstance(made.loop[0].q, Int4Linear)


def test_a_model_of_floats_is_taken_for_a_config_without_quant(save: Save) -> None:
    spec = replace(SPEC, quant=None)
    weights = random_model(spec, 3, tokenizer=None)
    tensors = {name: value.astype(np.float32) for name, value in weights.tensors.items()}
    made = convert_gptq(save(tensors), spec, tokenizer=b"{}")
    assert made.tokenizer == b"{}" and made.provenance["conversion"]["layout"] == "floats"
    for name, value in weights.tensors.items():
        np.testing.assert_array_equal(made.tensors[name], value)


def as_bfloat16(values: NDArray[np.float32]) -> NDArray[np.float16]:
    """The bits of bf16 in the type that NumPy has; `named_bfloat16` then says what they are."""
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.float16)


def named_bfloat16(path: Path, name: str) -> Path:
    """The same file, with a tensor called BF16 in the header."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header[name]["dtype"] = "BF16"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return path


def test_bf16_and_fp32_become_fp16_and_what_is_rounded_is_counted(save: Save) -> None:
    weights = random_model(SPEC, 3)
    tensors = foreign(weights)
    norm = np.linspace(-2, 2, 64).astype(np.float32)
    tensors["pre.1.mlp_norm.weight"] = norm
    exact = np.ldexp(np.float32(1.0), np.arange(-24, 16)).astype(np.float32)  # all of bf16's powers that fp16 has
    values = np.concatenate([exact, -exact[:23], [np.float32(2.0**-30)]]).astype(np.float32)
    tensors["norm.weight"] = as_bfloat16(values)
    made = convert_gptq(named_bfloat16(save(tensors), "norm.weight"), SPEC)
    np.testing.assert_array_equal(made.norm, values.astype(np.float16))
    np.testing.assert_array_equal(made.pre[1].mlp_norm, norm.astype(np.float16))
    rounded = 1 + int((norm.astype(np.float16) != norm).sum())
    assert made.provenance["conversion"]["rounded_values"] == rounded > 10


def test_what_fp16_cannot_hold_is_refused(save: Save) -> None:
    tensors = foreign(random_model(SPEC))
    large = np.ones(64, np.float32)
    large[7] = 2.0**17
    tensors["norm.weight"] = as_bfloat16(large)
    with pytest.raises(ModelFileError, match=r"norm\.weight holds 131072, which fp16 cannot hold"):
        convert_gptq(named_bfloat16(save(tensors), "norm.weight"), SPEC)


def scattered(tensors: Tensors) -> None:
    tensors[f"{Q}.g_idx"] = np.random.default_rng(0).permutation(tensors[f"{Q}.g_idx"])


def asymmetric(tensors: Tensors) -> None:
    tensors[f"{Q}.qzeros"] = tensors[f"{Q}.qzeros"].copy()
    tensors[f"{Q}.qzeros"][1, 3] ^= 0x100


def change(part: str, made: Callable[[NDArray[Any]], NDArray[Any]], base: str = Q) -> Callable[[Tensors], None]:
    def changed(tensors: Tensors) -> None:
        tensors[f"{base}.{part}"] = made(tensors[f"{base}.{part}"])

    return changed


def drop(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: [tensors.pop(name), None][1]


def add(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: np.ones(4, np.float16)})


def as_floats(tensors: Tensors) -> None:
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        del tensors[f"{Q}.{part}"]
    tensors[f"{Q}.weight"] = np.ones((64, 64), np.float16)


def poisoned(value: float) -> Callable[[NDArray[Any]], NDArray[Any]]:
    return lambda array: np.where(np.arange(array.shape[-1]) == 5, np.float16(value), array)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (scattered, rf"{Q}\.g_idx scatters groups .* desc_act=False, or with static_groups=True"),
        (change("g_idx", lambda g: g + 1), rf"{Q}\.g_idx names groups outside 0 … 1"),
        (change("g_idx", lambda g: g[:-1]), rf"{Q}\.g_idx is int32 \[63\], expected int32 \[64\]"),
        (asymmetric, rf"{Q}\.qzeros holds the zeros \[6, 7\], .* asymmetric; quantise with sym=True"),
        (change("qzeros", lambda z: z * 0), rf"{Q}\.qzeros holds the zeros \[0\], expected 7 \(v1\) or 8 \(v2\)"),
        (
            change("qzeros", lambda z: pack_zeros(8, *z.shape[:1], 64)),
            "symmetric by v1, others by v2|by v2, others by v1",
        ),
        (change("qzeros", lambda z: z[:1]), rf"{Q}\.qzeros is int32 \[1, 8\], expected int32 \[2, 8\]"),
        (
            change("qweight", lambda q: np.tile(q, (2, 1))),
            rf"{Q}\.qweight is int32 \[16, 64\], which is 8 bits, expected 4",
        ),
        (change("qweight", lambda q: q[:6]), rf"{Q}\.qweight is int32 \[6, 64\], which is 3 bits, expected 4"),
        (change("qweight", lambda q: q.T[:5]), rf"{Q}\.qweight is int32 \[5, 8\], expected int32 \[8, 64\]"),
        (change("qweight", lambda q: q.astype(np.float32)), rf"{Q}\.qweight is float32 \[8, 64\], expected int32"),
        (change("scales", lambda s: s[:1]), r"its groups are of 64, the config's quant\.group_size is 32"),
        (change("scales", lambda s: s[:, :8]), rf"{Q}\.scales is float16 \[2, 8\], expected float16 \[2, 64\]"),
        (change("scales", lambda s: s.astype(np.float32)), rf"{Q}\.scales is float32 .* expected float16"),
        (change("scales", poisoned(np.inf)), rf"{Q}\.scales holds NaN or infinity"),
        (change("scales", poisoned(np.nan)), rf"{Q}\.scales holds NaN or infinity"),
        (change("weight", poisoned(np.nan), "norm"), r"norm\.weight holds NaN or infinity"),
        (change("weight", lambda w: w[:9], "norm"), r"norm\.weight is float16 \[9\], expected float16 \[64\]"),
        (
            change("weight", lambda w: w.astype(np.int32), "norm"),
            r"norm\.weight is int32 .* expected float16, bfloat16",
        ),
        (drop(f"{Q}.qzeros"), rf"1 tensors .* are missing, first {Q}\.qzeros"),
        (drop("embed.weight"), r"missing, first embed\.weight"),
        (as_floats, rf"missing, first {Q}\.qweight; it is there as floats: .* `tinyloop quantize`"),
        (add("pre.0.attn.q.bias"), r"1 tensors are not of this config, first 'pre\.0\.attn\.q\.bias'"),
        (add("pre.7.attn_norm.weight"), "1 tensors are not of this config"),
    ],
)
def test_what_cannot_be_converted_is_one_error(save: Save, wrong: Callable[[Tensors], None], message: str) -> None:
    tensors = foreign(random_model(SPEC))
    wrong(tensors)
    with pytest.raises(ModelFileError, match=message) as refused:
        convert_gptq(save(tensors), SPEC)
    assert str(refused.value).startswith("gptq.safetensors: ")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (replace(SPEC, quant=None), "the config's quant is null|it is missing|are missing"),
        (replace(SPEC, quant=Quant(4, 64), d_ff=128), "missing|expected int32"),
        (replace(SPEC, loop_blocks=2), r"missing, first loop\.1\.attn\.k\.qweight"),
        (replace(SPEC, vocab_size=100), "expected"),
    ],
)
def test_another_config_is_one_error(save: Save, spec: ModelSpec, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        convert_gptq(save(foreign(random_model(SPEC))), spec)


def test_a_file_that_is_none_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelFileError, match=r"bad\.safetensors is not a whole safetensors file"):
        convert_gptq(path, SPEC)
    save_file({"x": np.ones(4, np.float64)}, path)
    with pytest.raises(ModelFileError, match="dtype 'F64', expected F16 or BF16 or F32 or I32"):
        convert_gptq(path, SPEC)
