"""The .tinyloop file: round trips, identity, and every way in which a file can be wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from tinyloop_service.engine.spec import SIZES, ModelSpec, Quant
from tinyloop_service.engine.weights import (
    Fp16Linear,
    Int4Linear,
    ModelWeights,
    inspect_model,
    quantize_rtn,
    quantize_tensors,
    random_model,
    read_model,
    write_model,
)
from tinyloop_service.errors import ModelFileError

TINY = SIZES["tiny"]
SMALL = replace(
    TINY, vocab_size=48, d_model=64, n_heads=2, n_kv_heads=1, head_dim=32, d_ff=96, post_blocks=1, quant=Quant(4, 32)
)
SPECS = {
    "int4": SMALL,
    "fp16": replace(SMALL, quant=None),
    "sandwich": replace(SMALL, norm_placement="sandwich"),
    "tied": replace(SMALL, quant=None, tie_embeddings=True),
    "tied-int4-head": replace(SMALL, tie_embeddings=True),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "good.tinyloop"
    write_model(path, random_model(SMALL, tokenizer=b'{"version": "1.0"}'))
    return path


def rewritten(good: Path, target: Path, change: Callable[[dict[str, Any], dict[str, str]], None]) -> Path:
    """A well-formed safetensors file with `change` made to its tensors and metadata; model_id is left as it was."""
    tensors, metadata = {k: v.copy() for k, v in load_file(good).items()}, dict(header_of(good)["__metadata__"])
    change(tensors, metadata)
    save_file(tensors, target, metadata)
    return target


def header_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length])


def with_header(good: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    data = good.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    target.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return target


# --- INT4


def test_low_nibble_is_the_even_input() -> None:
    linear = Int4Linear(np.array([[0x1F, 0x80]], np.uint8), np.array([[2.0]], np.float16))
    np.testing.assert_array_equal(linear.dequantize(), [[14, -14, -16, 0]])


@pytest.mark.parametrize("group", [128, 64, 32])
def test_round_to_nearest_is_within_half_a_step(group: int) -> None:
    weight = np.random.default_rng(0).standard_normal((19, 256)).astype(np.float32)
    linear = quantize_rtn(weight, group)
    assert linear.shape == weight.shape and linear.group_size == group
    # Half a step, and the fp16 rounding of the scale: 2^-11 of up to 7 steps.
    step = np.repeat(linear.scales.astype(np.float32), group, axis=1)
    assert (np.abs(linear.dequantize() - weight) <= step * (0.5 + 7 * 2**-11)).all()


def test_round_to_nearest_keeps_zeros_and_exact_values() -> None:
    weight = np.zeros((2, 32), np.float32)
    weight[1] = np.resize(np.arange(-7, 8), 32) * 0.25
    np.testing.assert_array_equal(quantize_rtn(weight, 32).dequantize(), weight)


def test_quantising_tensors_touches_linears_only() -> None:
    floats = dict(random_model(SPECS["fp16"]).tensors)
    weights = ModelWeights.from_tensors(SMALL, quantize_tensors(floats, Quant(4, 32)))
    assert isinstance(weights.head, Int4Linear) and isinstance(weights.pre[0].down, Int4Linear)
    np.testing.assert_array_equal(weights.embed, floats["embed.weight"])


# --- round trips and identity


@pytest.mark.parametrize("name", SPECS)
def test_write_and_read_give_the_same_model(name: str, tmp_path: Path) -> None:
    written = random_model(SPECS[name], 3, tokenizer=b"{}")
    write_model(tmp_path / "m.tinyloop", written)
    read = read_model(tmp_path / "m.tinyloop")
    assert (read.spec, read.model_id, read.provenance) == (written.spec, written.model_id, written.provenance)
    assert read.tokenizer == b"{}" and read.tensors.keys() == written.tensors.keys()
    for tensor, value in written.tensors.items():
        np.testing.assert_array_equal(read.tensors[tensor], value)
        assert not read.tensors[tensor].flags.writeable
    assert [path.name for path in tmp_path.iterdir()] == ["m.tinyloop"], "a temporary file was left behind"


def test_the_same_model_is_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_model(tmp_path / name, random_model(SMALL, tokenizer=b"{}"))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_the_safetensors_library_reads_our_file(good: Path) -> None:
    tensors = load_file(good)
    assert tensors["pre.0.attn.q.qweight"].shape == (64, 32)
    assert tensors["loop.0.mlp.down.scales"].shape == (64, 3)
    assert header_of(good)["__metadata__"]["format"] == "tinyloop"


def test_heads_of_tied_models() -> None:
    tied = random_model(SPECS["tied"])
    assert isinstance(tied.head, Fp16Linear) and tied.head.weight is tied.embed
    assert isinstance(random_model(SPECS["tied-int4-head"]).head, Int4Linear)


def test_a_quantised_model_may_keep_an_fp16_head() -> None:
    tensors = dict(random_model(SMALL).tensors)
    del tensors["head.qweight"], tensors["head.scales"]
    tensors["head.weight"] = np.ones((48, 64), np.float16)
    assert isinstance(ModelWeights.from_tensors(SMALL, tensors).head, Fp16Linear)


def test_model_id_follows_config_and_every_byte() -> None:
    base = random_model(SMALL)
    assert random_model(SMALL).model_id == base.model_id
    others = [random_model(SMALL, 1), random_model(SMALL, tokenizer=b"{}"), random_model(replace(SMALL, norm_eps=1e-6))]
    tensors = dict(base.tensors)
    tensors["norm.weight"] = tensors["norm.weight"].copy()
    tensors["norm.weight"][5] += 0.5
    others.append(ModelWeights.from_tensors(SMALL, tensors))
    assert len({base.model_id, *(other.model_id for other in others)}) == 5


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.tinyloop"
    write_model(path, random_model(SMALL))
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("tinyloop_service.engine.container._write", full)
    with pytest.raises(OSError, match="No space"):
        write_model(path, random_model(SMALL, 1))
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_replacing_a_file_does_not_disturb_who_has_it_open(tmp_path: Path) -> None:
    path = tmp_path / "m.tinyloop"
    first = random_model(SMALL)
    write_model(path, first)
    opened = read_model(path)
    write_model(path, random_model(SMALL, 1))
    np.testing.assert_array_equal(opened.embed, first.embed)
    assert read_model(path).model_id != opened.model_id


def test_summary(good: Path) -> None:
    summary = inspect_model(good)
    assert summary.spec == SMALL and summary.provenance == {"source": "random", "seed": 0}
    blocks = 4 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 2 * 64)
    assert summary.num_parameters == 2 * 48 * 64 + blocks + 64
    assert summary.bits_per_weight == 4 + 16 / 32
    assert summary.kv_bytes_1024 == 1024 * 32 * 7 * 4
    assert summary.part_bytes["tokenizer"] == 18 and sum(summary.part_bytes.values()) < summary.file_bytes


def test_parameters_of_a_tied_model_are_counted_once(tmp_path: Path) -> None:
    counts = []
    for name in ("tied", "tied-int4-head"):
        write_model(tmp_path / name, random_model(SPECS[name]))
        counts.append(inspect_model(tmp_path / name).num_parameters)
    assert counts[0] == counts[1]


def test_random_nibbles_have_mean_zero_and_sizes_are_known() -> None:
    linear = random_model("tiny").loop[0].gate
    assert isinstance(linear, Int4Linear)
    assert (linear.qweight & 15).min() >= 1 and (linear.qweight >> 4).min() >= 1
    assert abs(linear.dequantize().mean()) < 1e-3
    with pytest.raises(ValueError, match="tiny"):
        random_model("huge")


# --- files that are wrong


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 0.5, -1])
def test_truncated(good: Path, tmp_path: Path, keep: float) -> None:
    data = good.read_bytes()
    cut = int(len(data) * keep) if isinstance(keep, float) else keep
    (tmp_path / "m").write_bytes(data[:cut])
    with pytest.raises(ModelFileError):
        read_model(tmp_path / "m")


def test_trailing_bytes(good: Path, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(good.read_bytes() + b"\0\0")
    with pytest.raises(ModelFileError, match="are there"):
        read_model(tmp_path / "m")


@pytest.mark.parametrize("length", [2**64 - 1, 2**40, 17 << 20])
def test_hostile_header_length(good: Path, tmp_path: Path, length: int) -> None:
    (tmp_path / "m").write_bytes(struct.pack("<Q", length) + good.read_bytes()[8:])
    with pytest.raises(ModelFileError, match="header claims"):
        read_model(tmp_path / "m")


@pytest.mark.parametrize(
    "content", [b"\xff\xfe{}", b"[]", b"{" * 50_000, b'{"a": 1, "a": 1}', b'{"__metadata__": {"x": 1}}', b'{"t": null}']
)
def test_headers_that_are_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m").write_bytes(struct.pack("<Q", len(content)) + content)
    with pytest.raises(ModelFileError):
        read_model(tmp_path / "m")


def entry(header: dict[str, Any], **changes: Any) -> None:
    header["norm.weight"] |= changes


@pytest.mark.parametrize(
    "change",
    [
        lambda h: entry(h, data_offsets=[2**62, 2**62 + 128]),
        lambda h: entry(h, data_offsets=[-128, 0]),
        lambda h: entry(h, data_offsets=[0, 128]),  # over another tensor
        lambda h: entry(h, data_offsets=h["norm.weight"]["data_offsets"][::-1]),
        lambda h: entry(h, data_offsets=[0.0, 128.0]),
        lambda h: entry(h, shape=[65]),
        lambda h: entry(h, shape=[2**70, 0]),
        lambda h: entry(h, shape=[64, True]),
        lambda h: entry(h, dtype="F64"),
        lambda h: entry(h, dtype=["F16"]),
        lambda h: entry(h, extra=1),
        lambda h: h.pop("norm.weight"),
    ],
)
def test_hostile_entries(good: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    with pytest.raises(ModelFileError):
        read_model(with_header(good, tmp_path / "m", change))


def put(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, str]], None]:
    return lambda tensors, _: tensors.__setitem__(name, value)


def poison(name: str, value: float) -> Callable[[dict[str, Any], dict[str, str]], None]:
    return lambda tensors, _: tensors[name].reshape(-1).__setitem__(-1, value)


def meta(name: str, value: str) -> Callable[[dict[str, Any], dict[str, str]], None]:
    return lambda _, metadata: metadata.__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("norm.weight", np.ones(63, np.float16)), r"norm.weight is float16 \[63\], expected float16 \[64\]"),
        (put("norm.weight", np.ones(64, np.uint8)), "norm.weight is uint8"),
        (put("norm.weight", np.ones(64, np.float32)), "F32"),
        (put("pre.0.attn.q.bias", np.ones(64, np.float16)), "not of this config, first 'pre.0.attn.q.bias'"),
        (put("tokenizer", np.ones((2, 2), np.uint8)), "tokenizer"),
        (lambda t, _: t.pop("loop.0.mlp.up.scales"), "missing, first loop.0.mlp.up.scales"),
        (poison("pre.1.attn.o.scales", np.nan), "pre.1.attn.o.scales holds NaN"),
        (poison("loop.0.mlp_norm.weight", np.inf), "loop.0.mlp_norm.weight holds NaN or infinity"),
        (poison("embed.weight", -np.inf), "embed.weight"),
        (poison("norm.weight", 0.5), "changed after it was written"),
        (meta("format", "gguf"), "not a TinyLoop model"),
        (meta("version", "2"), "version '2', this release reads version 1"),
        (meta("config", "{}"), "lacks the keys"),
        (meta("provenance", "[1]"), "provenance"),
        (meta("provenance", "{"), "provenance"),
        (meta("model_id", "0" * 64), "changed after it was written"),
        (lambda _, m: m.pop("model_id"), "lacks model_id"),
        (lambda _, m: m.clear(), "not a TinyLoop model"),
    ],
)
def test_wrong_contents(
    good: Path, tmp_path: Path, change: Callable[[dict[str, Any], dict[str, str]], None], message: str
) -> None:
    with pytest.raises(ModelFileError, match=message):
        read_model(rewritten(good, tmp_path / "m", change))


def test_a_config_cannot_ask_for_endless_tensors(good: Path, tmp_path: Path) -> None:
    config = ModelSpec.from_json(header_of(good)["__metadata__"]["config"])
    many = json.loads(config.to_json()) | {"loop_blocks": 10**12}
    with pytest.raises(ModelFileError, match="loop_blocks"):
        read_model(rewritten(good, tmp_path / "m", meta("config", json.dumps(many))))


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_model(tmp_path / "none")


@given(position=st.integers(0, 4000), value=st.integers(0, 255))
def test_any_changed_byte_of_the_header_is_noticed_or_harmless(
    good: Path, tmp_path_factory: pytest.TempPathFactory, position: int, value: int
) -> None:
    data = bytearray(good.read_bytes())
    data[position] = value
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    path.write_bytes(data)
    try:
        read = read_model(path)
    except ModelFileError as error:
        assert "\n" not in str(error)
    else:
        assert read.model_id == read_model(good).model_id
