"""Every token is predicted once, and the bytes of windows are those of the text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tokenizers
from byte_tokenizer import byte_tokenizer
from small_models import TEXT
from tokenizers import decoders, models, normalizers, pre_tokenizers

from tinyloop_service.errors import InvalidArgument
from tinyloop_service.evaluate.windows import NamedText, Window, cut_windows
from tinyloop_service.text import Tokenizer

BOS = 256


def ids(text: str) -> list[int]:
    return list(Tokenizer(byte_tokenizer()).encode(text, bos=False))


@pytest.mark.parametrize("window_tokens", [2, 7, 1000])
@pytest.mark.parametrize("bos", [BOS, None])
def test_every_token_is_predicted_once_from_what_precedes_it(bos: int | None, window_tokens: int) -> None:
    windows = cut_windows(TEXT, Tokenizer(byte_tokenizer(), bos), window_tokens)
    expected = ids(TEXT.text)
    first = 0 if bos is not None else 1  # without a BOS nothing precedes the first token
    assert [token for window in windows for token in window.targets.tolist()] == expected[first:]
    at = first
    for window in windows:
        before = bos if bos is not None else expected[at - 1]
        assert window.inputs.tolist() == [before, *expected[at : at + len(window.inputs) - 1]]
        assert 1 <= len(window.targets) == len(window.inputs) == len(window.token_bytes) <= window_tokens
        at += len(window.targets)
    total = sum(int(window.token_bytes.sum()) for window in windows)
    assert total == len(TEXT.text.encode()) - first


def test_the_bytes_are_the_texts_even_where_the_tokenizer_changes_it() -> None:
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[]))
    made.normalizer = normalizers.Replace("lie down", "lie")
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    made.decoder = decoders.ByteLevel()
    windows = cut_windows(TEXT, Tokenizer(made.to_str().encode(), BOS), 50)
    assert sum(int(window.token_bytes.sum()) for window in windows) == len(TEXT.text.encode())


@pytest.mark.parametrize(("length", "begin"), [(1, 1), (2, 1), (5, 3), (6, 3)])
def test_the_second_half_is_what_a_request_predicts_after_its_prefix(length: int, begin: int) -> None:
    window = Window(*[np.arange(length)] * 3)
    assert window.targets[window.span("second half")].tolist() == list(range(begin, length))
    assert window.targets[window.span("all")].tolist() == list(range(length))


@pytest.mark.parametrize(("text", "bos", "given"), [("", BOS, 0), ("", None, 0), ("a", BOS, 1), ("ab", None, 1)])
def test_a_text_without_two_tokens_is_refused(text: str, bos: Any, given: int) -> None:
    with pytest.raises(InvalidArgument, match=f"text: empty.txt has {given} tokens to predict, expected at least 2"):
        cut_windows(NamedText("empty.txt", text), Tokenizer(byte_tokenizer(), bos), 8)
