"""`tinyloop quantize` and `convert`: from files to files, what they show, and that nothing is written when refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_harness import Done, tinyloop
from safetensors.numpy import save_file

from tinyloop_service import Model
from tinyloop_service.engine.reference import Reference
from tinyloop_service.engine.spec import SIZES
from tinyloop_service.engine.weights import Int4Linear, random_model, read_model, write_model
from tinyloop_service.types import CacheMode

SPEC = replace(SIZES["tiny"], d_model=128, n_heads=2, n_kv_heads=1, d_ff=256, max_seq_len=256, quant=None)
TEXT = "\n".join(f"{n} green bottles hanging on the wall, and if one should fall, {n - 1}." for n in range(99, 0, -1))
FEW = ("--windows", "6", "--window-tokens", "48")


@pytest.fixture(scope="module")
def folder(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An fp16 model with a tokenizer, one without, and text to calibrate on."""
    made = tmp_path_factory.mktemp("quantize")
    tokenizer = read_model(tiny).tokenizer
    write_model(made / "fp16.tinyloop", random_model(SPEC, 1, tokenizer=tokenizer))
    write_model(made / "mute.tinyloop", random_model(SPEC, 1))
    (made / "text.txt").write_text(TEXT)
    (made / "ids.json").write_text(json.dumps([list(range(i, i + 60)) for i in range(8)]))
    return made


@pytest.fixture(scope="module")
def by_gptq(folder: Path) -> Done:
    return tinyloop(
        "quantize", folder / "fp16.tinyloop", folder / "gptq.tinyloop",
        *("--method", "gptq", "--calibration", folder / "text.txt", *FEW),
    )  # fmt: skip


def test_a_row_for_every_layer_and_how_it_was_made(by_gptq: Done, folder: Path) -> None:
    lines = by_gptq.out.splitlines()
    assert lines[0].split() == ["layer", "RTN", "error", "GPTQ", "error", "of", "RTN", "damping", "note"]
    rows = [line.split() for line in lines[1 : lines.index("")]]
    assert len(rows) == 3 * 7 + 1 and rows[0][0] == "pre.0.attn.q" and rows[-1][0] == "head"
    assert all(float(row[3]) < float(row[1]) and row[5].endswith("×") and row[6] == "0.01" for row in rows)
    assert rows[0][7:] == ["overfits:", "288", "tokens", "for", "128", "inputs"]
    inspected = tinyloop("inspect", folder / "gptq.tinyloop")
    for shown in (by_gptq.out, inspected.out):
        assert "GPTQ, groups of 128, head in INT4, 2 passes, 4 loops, damping 0.01" in shown
        assert "text.txt (SHA-256" in shown and "288 tokens in 6 windows of up to 48" in shown
        assert "in the mean of 22 layers" in shown


def test_inspect_has_the_whole_table_for_scripts(by_gptq: Done, folder: Path) -> None:
    record = tinyloop("inspect", folder / "gptq.tinyloop", "--json").json["provenance"]["quantization"]
    assert record["source_model_id"] == read_model(folder / "fp16.tinyloop").model_id
    assert record["calibration"]["tokens"] == 288 and record["depth_weights"] == [1.0] * 4
    assert len(record["layers"]) == 22
    assert all(layer["error"] < layer["rtn_error"] for layer in record["layers"])


def test_the_model_runs_and_the_engine_computes_what_the_file_says(by_gptq: Done, folder: Path) -> None:
    """Log-probabilities of the CPU engine against the reference, both with int8 activations.

    Their logits differ by less than 5 percent of their spread in the mean square (see test_against_reference.py), and
    that spread is about one; so 20 of 3 × 512 values stay within 0.25.  A scale of the wrong sign, which only GPTQ
    writes, would move them by as much as their spread.
    """
    weights = read_model(folder / "gptq.tinyloop")
    assert isinstance(weights.loop[0].down, Int4Linear) and (weights.loop[0].down.scales < 0).any()
    prompt = list(range(40, 90))
    with Model(folder / "gptq.tinyloop", engine="cpu") as model:
        [choice] = model.complete(prompt, max_tokens=3, temperature=0.0, logprobs=20, ignore_eos=True).choices
    reference = Reference(weights, cache_mode=CacheMode.FP16, activations="int8")
    logits = reference.forward([*prompt, *choice.token_ids[:2]], reference.new_cache())[-3:]
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert 0.5 < logits.std() < 2
    for row, found in zip(expected, choice.logprobs, strict=True):
        ids, values = zip(*found.top, strict=True)
        np.testing.assert_allclose(values, row[list(ids)], rtol=0, atol=0.25)


def test_two_runs_write_the_same_bytes(by_gptq: Done, folder: Path, tmp_path: Path) -> None:
    arguments = ("--method", "gptq", "--calibration", folder / "text.txt", *FEW, "--json")
    facts = tinyloop("quantize", folder / "fp16.tinyloop", tmp_path / "again.tinyloop", *arguments).json
    assert (tmp_path / "again.tinyloop").read_bytes() == (folder / "gptq.tinyloop").read_bytes()
    assert facts["model_id"] == read_model(folder / "gptq.tinyloop").model_id
    assert facts["bytes"] == (tmp_path / "again.tinyloop").stat().st_size and facts["quantization"]["passes"] == 2


def test_ids_passes_depths_groups_and_a_head_in_fp16(folder: Path, tmp_path: Path) -> None:
    made = tmp_path / "m.tinyloop"
    arguments = ("--depth-weights", "1,0.5,2", "--passes", "1", "--group", "64", "--head", "fp16", "--damping", "0.05")
    ids = folder / "ids.json"
    tinyloop("quantize", folder / "mute.tinyloop", made, "--method", "gptq", "--calibration", ids, *FEW, *arguments)
    weights = read_model(made)
    assert weights.spec.quant is not None and weights.spec.quant.group_size == 64
    assert "head.weight" in weights.tensors
    shown = tinyloop("inspect", made).out
    assert "groups of 64, head in fp16, 1 pass, 3 loops weighted 1, 0.5, 2, damping 0.05" in shown


def test_rounding_to_nearest_takes_no_text(folder: Path, tmp_path: Path) -> None:
    made = tmp_path / "rtn.tinyloop"
    shown = tinyloop("quantize", folder / "fp16.tinyloop", made, "--method", "rtn").out
    assert shown.splitlines()[0].split() == ["layer", "RTN", "error"]
    assert "rounded to nearest, groups of 128, head in INT4" in shown and tinyloop("inspect", made).out
    tinyloop("quantize", folder / "fp16.tinyloop", made, "--method", "rtn", status=2)
    tinyloop("quantize", folder / "fp16.tinyloop", made, "--method", "rtn", "--force", "--head", "fp16")
    assert "head.weight" in read_model(made).tensors


@pytest.fixture
def untouched(folder: Path) -> Iterator[Path]:
    """The folder; fails if a test writes into it."""
    before = {path: path.read_bytes() for path in folder.iterdir()}
    yield folder
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("fp16.tinyloop out", "Missing option '--method'"),
        ("fp16.tinyloop out --method gptq", "needs --calibration FILE"),
        ("fp16.tinyloop out --method rtn --calibration text.txt", "takes no --calibration"),
        ("fp16.tinyloop out --method rtn --passes 2", "--passes is for --method gptq"),
        ("fp16.tinyloop out --method rtn --depth-weights 1,2", "--depth-weights is for --method gptq"),
        ("fp16.tinyloop out --method gptq --calibration none.txt", "does not exist"),
        ("none.tinyloop out --method rtn", "does not exist"),
        ("fp16.tinyloop nowhere/out --method rtn", "is no directory"),
        ("fp16.tinyloop text.txt --method rtn", "exists; give another path, or --force"),
        ("fp16.tinyloop fp16.tinyloop --method rtn --force", "is the input itself"),
        ("fp16.tinyloop out --method gptq --calibration text.txt --depth-weights one", "no list of numbers"),
        ("fp16.tinyloop out --method gptq --calibration text.txt --depth-weights ,", "no list of numbers"),
        ("fp16.tinyloop out --method gptq --calibration text.txt --loops 3 --depth-weights 1,1", "for each of 3 loops"),
        ("fp16.tinyloop out --method gptq --calibration text.txt --passes 0", "Invalid value for '--passes'"),
        ("fp16.tinyloop out --method gptq --calibration text.txt --damping 0", "Invalid value for '--damping'"),
        ("fp16.tinyloop out --method rtn --group 100", "Invalid value for '--group'"),
    ],
)
def test_wrong_usage_writes_nothing(
    untouched: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    monkeypatch.chdir(untouched)
    done = tinyloop("quantize", *arguments.split(), status=2)
    assert done.out == "" and message in " ".join(done.err.split())


@pytest.mark.parametrize(
    ("arguments", "content", "message"),
    [
        ("fp16.tinyloop out --method gptq --calibration input.txt", "", "input.txt: is empty"),
        (
            "fp16.tinyloop out --method gptq --calibration input.txt",
            "tiny",
            "input.txt: has 4 tokens, one window takes",
        ),
        ("mute.tinyloop out --method gptq --calibration input.txt", TEXT, "no tokenizer"),
        ("mute.tinyloop out --method gptq --calibration input.json", TEXT, "is not JSON"),
        ("mute.tinyloop out --method gptq --calibration input.json", json.dumps([[9] * 300, [512]]), "the id 512"),
        (
            "fp16.tinyloop out --method gptq --calibration input.txt --window-tokens 257",
            TEXT,
            "--window-tokens: is 257",
        ),
        (
            "fp16.tinyloop out --method gptq --calibration input.txt --loops 17 --windows 1",
            TEXT,
            "--depth-weights: are 17",
        ),
        ("int4.tinyloop out --method rtn", "", "model: is INT4 already"),
        ("input.txt out --method rtn", "GGUF" * 20, "input.txt is not a whole safetensors file"),
    ],
)
def test_what_is_refused_writes_nothing(
    tiny: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    content: str,
    message: str,
) -> None:
    for name in ("fp16.tinyloop", "mute.tinyloop"):
        (tmp_path / name).symlink_to(folder / name)
    (tmp_path / "int4.tinyloop").symlink_to(tiny)
    for name in ("input.txt", "input.json"):
        (tmp_path / name).write_text(content)
    before = set(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    done = tinyloop("quantize", *arguments.split(), status=1)
    assert done.out == "" and set(tmp_path.iterdir()) == before
    [line] = [line for line in done.err.splitlines() if "%" not in line]
    assert line.startswith("error: ") and message in line


def test_not_enough_memory_is_one_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError("Unable to allocate 40.0 GiB for an array")

    monkeypatch.setattr("tinyloop_service.quantize.procedure.quantize_with_gptq", exhausted)
    arguments = ("--method", "gptq", "--calibration", folder / "text.txt", *FEW)
    done = tinyloop("quantize", folder / "fp16.tinyloop", tmp_path / "out", *arguments, status=1)
    assert "Unable to allocate 40.0 GiB for an array; take fewer --windows" in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_provenance_of_another_kind_is_said_and_shown(tmp_path: Path) -> None:
    odd = replace(random_model(SPEC), provenance={"quantization": {"method": "awq"}, "conversion": 3})
    write_model(tmp_path / "odd.tinyloop", odd)
    assert "not as this release writes it" in tinyloop("inspect", tmp_path / "odd.tinyloop").out


# --- convert


@pytest.fixture
def foreign(folder: Path, tmp_path: Path) -> Path:
    """A folder with floats.safetensors and the config that they are of."""
    weights = read_model(folder / "mute.tinyloop")
    save_file({name: value.astype(np.float32) for name, value in weights.tensors.items()}, tmp_path / "f.safetensors")
    spec = tinyloop("inspect", folder / "mute.tinyloop", "--json").json["spec"]
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    return tmp_path


def test_converted_floats_can_be_quantised(foreign: Path, tiny: Path) -> None:
    tokenizer = read_model(tiny).tokenizer
    assert tokenizer is not None
    (foreign / "tokenizer.json").write_bytes(tokenizer)
    arguments = ("--config", foreign / "spec.json", "--tokenizer", foreign / "tokenizer.json")
    done = tinyloop("convert", foreign / "f.safetensors", foreign / "m.tinyloop", *arguments)
    assert "f.safetensors (SHA-256" in done.out and "floats" in done.out
    made = read_model(foreign / "m.tinyloop")
    assert made.tokenizer == tokenizer
    tinyloop("quantize", foreign / "m.tinyloop", foreign / "q.tinyloop", "--method", "rtn")
    shown = tinyloop("inspect", foreign / "q.tinyloop").out
    assert "converted" in shown and "rounded to nearest" in shown


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant": {"bits": 4, "group_size": 128}}, "it is there as floats"),
        ({"quant": {"bits": 8, "group_size": 128}}, "spec.json: config quant.bits is 8, expected 4"),
        ({"d_model": None}, "spec.json: config d_model is None"),
        ({"vocab_size": 513}, "f.safetensors: tensor embed.weight is float16 [512, 128], expected float16 [513, 128]"),
    ],
)
def test_a_refused_conversion_writes_nothing(foreign: Path, change: dict[str, object], message: str) -> None:
    spec = json.loads((foreign / "spec.json").read_text()) | change
    (foreign / "spec.json").write_text(json.dumps(spec))
    before = set(foreign.iterdir())
    done = tinyloop("convert", foreign / "f.safetensors", foreign / "m", "--config", foreign / "spec.json", status=1)
    assert done.out == "" and set(foreign.iterdir()) == before
    [line] = done.err.splitlines()
    assert line.startswith("error: ") and message in line


def test_convert_refuses_a_tokenizer_that_is_none(foreign: Path) -> None:
    (foreign / "t.json").write_text("{}")
    arguments = ("--config", foreign / "spec.json", "--tokenizer", foreign / "t.json")
    done = tinyloop("convert", foreign / "f.safetensors", foreign / "m", *arguments, status=1)
    assert "tokenizer" in done.err and not (foreign / "m").exists()
    tinyloop("convert", foreign / "f.safetensors", foreign / "f.safetensors", *arguments[:2], "--force", status=2)
