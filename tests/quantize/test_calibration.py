"""Calibration files: text by the model's tokenizer, lists of ids, and everything that is neither."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fp16_models import BASE

from tinyloop_service.demo import MODEL_PATH
from tinyloop_service.engine.tensors import ModelWeights
from tinyloop_service.engine.weights import random_model, read_model
from tinyloop_service.errors import InvalidArgument
from tinyloop_service.quantize.calibration import Calibration, Wanted, read_calibration
from tinyloop_service.text import Tokenizer

WANTED = Wanted(num_windows=6, window_tokens=32, seed=1)
LINES = "".join(f"In the {n}th year of the king there was a famine in the land.\n" for n in range(120))
IDS = [list(range(40)), [1, 2, 3], list(range(90))]

demo = read_model(MODEL_PATH)
no_tokenizer = random_model(BASE)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str | bytes], Path]:
    def written(name: str, content: str | bytes) -> Path:
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return tmp_path / name

    return written


Write = Callable[[str, "str | bytes"], Path]


def test_windows_of_a_text_are_bos_and_then_from_the_start_of_a_line(write: Write) -> None:
    path = write("train.txt", LINES)
    found = read_calibration(path, demo, WANTED)
    assert demo.tokenizer is not None
    tokenizer = Tokenizer(demo.tokenizer, demo.spec.bos_token_id)
    whole = tokenizer.encode(LINES, bos=False)
    assert [len(window) for window in found.windows] == [32] * 6
    for window in found.windows:
        assert window[0] == demo.spec.bos_token_id
        text = tokenizer.decode(window[1:].tolist())
        assert text in LINES and LINES[LINES.index(text) - 1] in "\n"
        assert any(whole[i : i + 31] == tuple(window[1:].tolist()) for i in range(len(whole)))
    assert found.provenance == {
        "file": "train.txt",
        "sha256": hashlib.sha256(LINES.encode()).hexdigest(),
        "windows": 6,
        "tokens": 192,
        "window_tokens": 32,
        "seed": 1,
    }


def same(one: Calibration, other: Calibration) -> bool:
    return [w.tolist() for w in one.windows] == [w.tolist() for w in other.windows]


def test_the_seed_chooses_the_windows(write: Write) -> None:
    path = write("train.txt", LINES)
    first, again = (read_calibration(path, demo, WANTED) for _ in range(2))
    assert same(first, again)
    assert not same(first, read_calibration(path, demo, replace(WANTED, seed=2)))
    everything = read_calibration(path, demo, replace(WANTED, num_windows=10_000))
    starts = [tuple(window.tolist()) for window in everything.windows]
    assert len(starts) == len(set(starts)) > 20, "windows that are there twice"


@pytest.mark.parametrize("text", ["x" * 400, "one two three\n" + "word " * 300], ids=["no line", "one line break"])
def test_a_text_without_lines_is_cut_anywhere(write: Write, text: str) -> None:
    found = read_calibration(write("t.txt", text), demo, replace(WANTED, window_tokens=8))
    assert [len(window) for window in found.windows] == [8] * 6


def test_a_text_of_exactly_one_window_is_enough(write: Write) -> None:
    assert demo.tokenizer is not None
    num_tokens = len(Tokenizer(demo.tokenizer).encode(LINES[:200], bos=False))
    path = write("t.txt", LINES[:200])
    found = read_calibration(path, demo, replace(WANTED, window_tokens=num_tokens + 1))
    assert len(found.windows) == 1 and len(found.windows[0]) == num_tokens + 1
    with pytest.raises(InvalidArgument, match=f"has {num_tokens} tokens, one window takes {num_tokens + 1}"):
        read_calibration(path, demo, replace(WANTED, window_tokens=num_tokens + 2))


def test_without_bos_windows_have_none(write: Write) -> None:
    spec = replace(demo.spec, bos_token_id=None)
    found = read_calibration(write("t.txt", LINES), replace(demo, spec=spec), WANTED)
    assert demo.tokenizer is not None
    texts = [Tokenizer(demo.tokenizer).decode(window.tolist()) for window in found.windows]
    assert all(text.startswith("In the") for text in texts)


@pytest.mark.parametrize("weights", [no_tokenizer, demo], ids=["no tokenizer", "tokenizer"])
def test_ids_are_taken_as_they_are_and_cut_where_too_long(write: Write, weights: ModelWeights) -> None:
    found = read_calibration(write("ids.json", json.dumps(IDS)), weights, replace(WANTED, num_windows=100))
    pieces = [row[i : i + 32] for row in IDS for i in range(0, len(row), 32)]
    assert sorted(window.tolist() for window in found.windows) == sorted(pieces)
    assert [len(window) for window in found.windows] == sorted(map(len, pieces))
    assert found.num_tokens == found.provenance["tokens"] == 133


def test_batches_are_windows_of_one_length_up_to_a_number_of_tokens(write: Write) -> None:
    rows = [[n] * length for n, length in enumerate((5, 5, 5, 5, 5, 9, 9, 30))]
    found = read_calibration(write("ids.json", json.dumps(rows)), no_tokenizer, replace(WANTED, num_windows=8))
    assert [batch.shape for batch in found.batches(16)] == [(3, 5), (2, 5), (1, 9), (1, 9), (1, 30)]
    assert sorted(np.concatenate([batch[:, 0] for batch in found.batches(16)]).tolist()) == list(range(8))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.txt", "", "t.txt: is empty, one window takes 31: give more text, or smaller windows"),
        ("t.txt", "In the beginning", "has 3 tokens, one window takes 31"),
        ("t.txt", b"caf\xe9 au lait", r"not UTF-8 text \(byte 3\)"),
        ("t.json", LINES, "is not JSON .* another suffix"),
        ("t.json", "[" * 100_000, "is not JSON"),
        ("t.json", "", "is not JSON"),
        ("t.json", '{"ids": [1]}', "expected a list of non-empty lists"),
        ("t.json", "[]", "expected a list of non-empty lists"),
        ("t.json", "[[1, 2], []]", "expected a list of non-empty lists"),
        ("t.json", "[1, 2]", "expected a list of non-empty lists"),
        ("t.json", '[[1, 2], [3, "4"]]', "list 1 holds 4, expected token ids"),
        ("t.json", "[[1, 2], [3, true]]", "list 1 holds True, expected token ids"),
        ("t.json", "[[1, 2.0]]", "list 0 holds 2.0, expected token ids"),
        ("t.json", json.dumps([[1, 10**30]]), "list 0 holds 1000000.*, expected token ids"),
        ("t.json", json.dumps([[1] * 40, [4096]]), "holds the id 4096, expected ids of the vocabulary, 0 ≤ id < 4096"),
        ("t.json", json.dumps([[1] * 40, [-1]]), "holds the id -1, expected ids of the vocabulary"),
        ("t.json", "[[1, 2, 3], [4]]", "has 4 tokens, one window takes 32"),
    ],
)
def test_what_is_no_calibration_is_refused(write: Write, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as refused:
        read_calibration(write(name, content), demo, WANTED)
    assert refused.value.field == "calibration"


def test_text_for_a_model_without_tokenizer_is_refused_with_the_way_out(write: Write) -> None:
    with pytest.raises(InvalidArgument, match=r"no tokenizer .* \.json file, a list of lists of token ids"):
        read_calibration(write("t.txt", LINES), no_tokenizer, WANTED)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(write: Write) -> None:
    small = replace(demo, spec=replace(demo.spec, vocab_size=300))
    with pytest.raises(InvalidArgument, match="0 ≤ id < 300"):
        read_calibration(write("t.txt", LINES), small, WANTED)


@pytest.mark.parametrize("window_tokens", [1, 2049])
def test_windows_must_fit_the_model(write: Write, window_tokens: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"window_tokens: is {window_tokens}, expected 2 to 2048"):
        read_calibration(write("t.txt", LINES), demo, replace(WANTED, window_tokens=window_tokens))
