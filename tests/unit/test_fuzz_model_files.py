"""Some of the files of `tests/fuzz_model_files.py`, what it found once, and that it sees what it is there to see."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer
from fuzz_model_files import Draft, FileFuzzer, fuzz, good

from tinyloop_service.text import Tokenizer

INPUTS = 100  # the command reads 100 000


def test_no_file_is_refused_by_anything_but_one_clear_error() -> None:
    outcomes = fuzz(INPUTS, 0, engine_every=10**9)
    assert outcomes["refused"] + outcomes["read"] == INPUTS and outcomes["refused"] and outcomes["read"]


def configured(**values: Any) -> Draft:
    draft = good(0)
    draft.metadata["config"] = json.dumps(json.loads(draft.metadata["config"]) | values)
    return draft


def with_tokenizer(change: Callable[[dict[str, Any]], object]) -> Draft:
    draft, parsed = good(0), json.loads(byte_tokenizer())
    change(parsed)
    draft.tensors["tokenizer"] = np.frombuffer(json.dumps(parsed).encode(), np.uint8).copy()
    return draft


@pytest.mark.parametrize(
    ("draft", "outcome"),
    [
        (lambda: good(0), "read"),
        (lambda: good(1), "read"),
        (lambda: configured(norm_eps=1, rope_theta=10000), "read"),
        (lambda: configured(norm_eps=10**400), "refused"),
        (lambda: configured(rope_theta=10**400), "refused"),
        (lambda: configured(max_seq_len=2**24), "refused"),
        (lambda: with_tokenizer(lambda parsed: parsed["model"]["vocab"].__setitem__("zz", 2**31)), "read"),
        (lambda: with_tokenizer(lambda parsed: parsed["model"]["vocab"].__setitem__("zz", 2**32)), "refused"),
    ],
)
def test_what_was_found_once(tmp_path: Path, draft: Callable[[], Draft], outcome: str) -> None:
    fuzzer = FileFuzzer(tmp_path / "m", engine_every=1)
    fuzzer.read(draft().to_bytes())
    assert fuzzer.outcomes[outcome] == 1 and fuzzer.outcomes["made an engine of"] == (outcome == "read")


def test_what_must_not_be_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fuzzer = FileFuzzer(tmp_path / "m", engine_every=10**9)
    monkeypatch.setattr(Tokenizer, "__init__", lambda self, *args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        fuzzer.read(good(0).to_bytes())
    monkeypatch.undo()
    monkeypatch.setattr("fuzz_model_files.MOST_GROWTH_BYTES", -1)
    with pytest.raises(AssertionError, match="of memory"):
        for _ in range(50):
            fuzzer.read(b"")
