"""A text as windows of tokens, such that every token is predicted once.

    BOS  t₁ … t_N−1  →  t₁ … t_N        BOS  t_N+1 …  →  t_N+1 …        (inputs → targets, N = window_tokens)

A model without a BOS reads the window's preceding token in its place; the text's very first token then stands
before everything and is not predicted, nor are its bytes counted.  In: text and a tokenizer.  Out: `Window`s.
Refuses a text of fewer than two predicted tokens: there would be no second half to score.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.errors import InvalidArgument
from tinyloop_service.text import Tokenizer

Ids = NDArray[np.int64]
Span = Literal["all", "second half"]  # of every window


@dataclass(frozen=True, slots=True)
class NamedText:
    """A text that is cut into windows on its own."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Window:
    """inputs, targets: (T,); token_bytes: (T,), the UTF-8 bytes that each target stands for."""

    inputs: Ids
    targets: Ids
    token_bytes: NDArray[np.int64]

    def span(self, span: Span) -> slice:
        """Which targets are scored: all, or those that a request predicts whose prefix is the first half."""
        return slice(None) if span == "all" else second_half(len(self.targets))


def second_half(num_tokens: int) -> slice:
    """Of a window, what comes after the prefix; its first token is what a request begins with."""
    return slice((num_tokens + 1) // 2, None)


def cut_windows(text: NamedText, tokenizer: Tokenizer, window_tokens: int) -> list[Window]:
    """Windows of at most `window_tokens` targets.  Their bytes add up to the text's."""
    bos = tokenizer.bos_token_id
    ids = np.array(tokenizer.encode(text.text, bos=False), np.int64)
    token_bytes = np.array([len(tokenizer.token_bytes(token)) for token in ids.tolist()], np.int64)
    token_bytes[-1:] += len(text.text.encode()) - token_bytes.sum()  # what a tokenizer adds or normalises away
    first = 0 if bos is not None else 1
    if len(ids) - first < 2:
        num_tokens = max(0, len(ids) - first)
        raise InvalidArgument("text", f"{text.name} has {num_tokens} tokens to predict, expected at least 2")
    windows: list[Window] = []
    for begin in range(first, len(ids), window_tokens):
        targets = ids[begin : begin + window_tokens]
        before = ids[begin - 1] if bos is None else bos
        inputs = np.concatenate(([before], targets[:-1]))
        windows.append(Window(inputs, targets, token_bytes[begin : begin + window_tokens]))
    return windows
