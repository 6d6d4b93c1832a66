"""Arguments at and beyond their bounds: what Model, the clients and the server all say."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from tinyloop_service import arguments
from tinyloop_service.errors import InvalidArgument

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0}, {"temperature": 1e-6}, {"top_p": 1}, {"top_p": 1e-9}, {"top_k": 0}, {"top_k": 1},
        {"top_k": 513}, {"top_k": 10**9}, {"max_tokens": 1}, {"max_tokens": 2**31}, {"seed": 0},
        {"seed": 2**64 - 1}, {"logprobs": 0}, {"logprobs": 20}, {"min_p": 0}, {"min_p": 1}, {"n": 16},
        {"loops": None}, {"loops": 1}, {"cache_window": 0}, {"cache_window": None}, {"temperature": np.float32(0.5)},
        {"max_tokens": np.int64(5)}, {"logit_bias": dict.fromkeys(range(300), 1.0)}, {"stop_sequences": []},
        {"stop_sequences": ["a", [1], np.array([2, 3])]}, {"stop_token_ids": (1, 2)},
    ],
)  # fmt: skip
def test_what_is_allowed(given: dict[str, Any]) -> None:
    arguments.parameters(**given, vocab_size=512, max_loops=16)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"temperature": NAN}, "temperature"), ({"temperature": INF}, "temperature"),
        ({"temperature": -0.1}, "temperature"), ({"temperature": "hot"}, "temperature"),
        ({"temperature": None}, "temperature"), ({"top_p": 0}, "top_p"), ({"top_p": 1.0001}, "top_p"),
        ({"top_p": NAN}, "top_p"), ({"top_k": -1}, "top_k"), ({"top_k": 1.5}, "top_k"), ({"top_k": True}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -(2**31)}, "max_tokens"),
        ({"max_tokens": 2**63}, "max_tokens"), ({"max_tokens": 10**10000}, "max_tokens"), ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"), ({"logprobs": 21}, "logprobs"), ({"logprobs": -1}, "logprobs"),
        ({"min_p": 1.1}, "min_p"), ({"min_p": NAN}, "min_p"), ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": INF}, "repetition_penalty"), ({"n": 0}, "n"), ({"n": 17}, "n"), ({"loops": 0}, "loops"),
        ({"loops": 17}, "loops"), ({"cache_window": -1}, "cache_window"),
        ({"logit_bias": {512: 1.0}}, "logit_bias[512]"), ({"logit_bias": [(1, 2.0)]}, "logit_bias"),
        ({"ignore_eos": "no"}, "ignore_eos"), ({"ignore_eos": np.zeros(2)}, "ignore_eos"),
        ({"stop_sequences": np.array(3)}, "stop_sequences"),
        ({"logit_bias": {1: NAN}}, "logit_bias[1]"), ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "logit_bias"),
        ({"stop_sequences": "END"}, "stop_sequences"), ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": [[]]}, "stop_sequences[0]"), ({"stop_sequences": [[1], [-1]]}, "stop_sequences[1][0]"),
        ({"stop_sequences": [[2**31]]}, "stop_sequences[0][0]"), ({"stop_sequences": [5]}, "stop_sequences[0]"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences"), ({"stop_sequences": ["x" * 1025]}, "stop_sequences[0]"),
        ({"stop_token_ids": [512]}, "stop_token_ids[0]"), ({"stop_sequences": ["\ud800"]}, "stop_sequences[0]"),
    ],
)  # fmt: skip
def test_what_is_refused_and_by_which_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        arguments.parameters(**given, vocab_size=512, max_loops=16)
    assert caught.value.field == field and isinstance(caught.value, ValueError)
    assert str(caught.value).startswith(f"{field}: ") and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "prompt", [(1, 2), [1, 2], range(1, 3), np.array([1, 2]), np.array([1, 2], np.uint16), iter([1, 2])]
)
def test_any_sequence_of_integers_is_a_prompt(prompt: Any) -> None:
    ids = arguments.prompt(prompt, vocab_size=512)
    assert ids == (1, 2) and all(type(token) is int for token in ids)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ((), "prompt"), ("", "prompt"), ([-1], "prompt[0]"), ([1, 512], "prompt[1]"), ([2**31], "prompt[0]"),
        ([1.0], "prompt[0]"), (np.array([1.0]), "prompt[0]"), (np.zeros((1, 2), int), "prompt"),
        (np.array(3), "prompt"), (5, "prompt"), (None, "prompt"), (b"ab", "prompt"), ({1: 2}, "prompt"),
        ({1}, "prompt"),
        ([True], "prompt[0]"), (["a"], "prompt[0]"), ("a\udc00", "prompt"),
    ],
)  # fmt: skip
def test_what_is_no_prompt(prompt: Any, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        arguments.prompt(prompt, vocab_size=512)
    assert caught.value.field == field


def test_a_copy_is_taken() -> None:
    prompt = [1, 2, 3]
    ids = arguments.prompt(prompt)
    prompt[0] = 9
    assert ids == (1, 2, 3)


def test_without_a_seed_one_is_drawn() -> None:
    assert arguments.parameters().sampling.seed != arguments.parameters().sampling.seed


@pytest.mark.parametrize(
    ("ttl", "ns"), [(None, None), (1, 10**9), (0.5, 5 * 10**8), (timedelta(minutes=1), 60 * 10**9)]
)
def test_ttls(ttl: Any, ns: int | None) -> None:
    assert arguments.ttl_ns(ttl) == ns


@pytest.mark.parametrize("ttl", [0, -1, NAN, INF, 1e12, "1h", timedelta(0), True])
def test_ttls_out_of_bounds(ttl: Any) -> None:
    with pytest.raises(InvalidArgument):
        arguments.ttl_ns(ttl)
