"""Calibration: the windows of tokens whose activations GPTQ rounds for.

In: a file, a model's tokenizer and vocabulary.  Out: `Calibration`, windows of ids and what to write down about them.

    anything but .json   text, UTF-8, encoded by the model's own tokenizer.  A window is BOS (where the model has one)
                         and then tokens from the start of some line, as a prompt begins and as the demo was trained.
    .json                a list of lists of ids, taken as they are, cut where longer than a window: for models without
                         a tokenizer, and for text that was encoded elsewhere.

More windows than wanted are thinned out at random, by `seed`.  Refuses empty and tiny text, ids outside the
vocabulary, and windows longer than the model's sequences.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.weights import ModelWeights
from tinyloop_service.errors import InvalidArgument
from tinyloop_service.text import Tokenizer

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Wanted:
    """How much of a file to take."""

    num_windows: int
    window_tokens: int  # BOS included
    seed: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """Windows, shortest first; those of a text are all of one length."""

    windows: tuple[Ids, ...]
    provenance: dict[str, Any]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.windows))

    def batches(self, batch_tokens: int) -> Iterator[Ids]:
        """Neighbouring windows of one length, (windows, tokens), up to `batch_tokens` of them and at least one."""
        start = 0
        while start < len(self.windows):
            length = len(self.windows[start])
            most = self.windows[start : start + max(1, batch_tokens // length)]
            alike = [window for window in most if len(window) == length]
            yield np.stack(alike)
            start += len(alike)


def read_calibration(path: Path, weights: ModelWeights, wanted: Wanted) -> Calibration:
    """Raises InvalidArgument (of "calibration" or "window_tokens"), OSError if the file cannot be opened."""
    spec = weights.spec
    if not 2 <= wanted.window_tokens <= spec.max_seq_len:
        limits = f"is {wanted.window_tokens}, expected 2 to {spec.max_seq_len}, the model's longest sequence"
        raise InvalidArgument("window_tokens", limits)
    data = path.read_bytes()
    try:
        pieces = _id_pieces(data, wanted) if path.suffix == ".json" else _text_pieces(data, weights, wanted)
        _check_ids(pieces, wanted, spec.vocab_size)
    except InvalidArgument as error:
        raise InvalidArgument(error.field, f"{path.name}: {error.description}") from None
    windows = sorted(_thinned(pieces, wanted), key=len)
    provenance = {
        "file": path.name,
        "sha256": hashlib.sha256(data).hexdigest(),
        "windows": len(windows),
        "tokens": sum(map(len, windows)),
        "window_tokens": wanted.window_tokens,
        "seed": wanted.seed,
    }
    return Calibration(tuple(windows), provenance)


def _refused(message: str) -> InvalidArgument:
    return InvalidArgument("calibration", message)


def _text_pieces(data: bytes, weights: ModelWeights, wanted: Wanted) -> list[Ids]:
    """Windows that cover the text from a random phase on, each moved on to the next start of a line."""
    if weights.tokenizer is None:
        raise _refused("the model has no tokenizer to read text with; give a .json file, a list of lists of token ids")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise _refused(f"is not UTF-8 text (byte {error.start}), expected plain text") from None
    tokenizer = Tokenizer(weights.tokenizer, weights.spec.bos_token_id)
    ids = np.array(tokenizer.encode(text, bos=False), np.int64)
    head = tokenizer.encode("", bos=True)
    num_new = wanted.window_tokens - len(head)
    if len(ids) < num_new:
        raise _refused(_too_small(len(ids), num_new))
    last = len(ids) - num_new
    phase = int(np.random.default_rng(wanted.seed).integers(min(num_new, last + 1)))
    starts = np.minimum(_next_lines(ids, tokenizer)[phase : last + 1 : num_new], last)
    return [np.concatenate([np.array(head, np.int64), ids[s : s + num_new]]) for s in np.unique(starts)]


def _next_lines(ids: Ids, tokenizer: Tokenizer) -> Ids:
    """For every position the first one from there on that begins a line; its own where no line begins any more."""
    ends = np.array([tokenizer.token_bytes(token).endswith(b"\n") for token in range(int(ids.max()) + 1)])
    begins = np.concatenate([[True], ends[ids[:-1]]])
    positions = np.arange(len(ids))
    following = np.where(begins, positions, len(ids))
    following = np.minimum.accumulate(following[::-1])[::-1]
    result: Ids = np.where(following == len(ids), positions, following)
    return result


def _id_pieces(data: bytes, wanted: Wanted) -> list[Ids]:
    try:
        lists = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _refused(f"is not JSON ({str(error)[:100]}); a text needs another suffix than .json") from None
    if not isinstance(lists, list) or not lists or not all(isinstance(row, list) and row for row in lists):
        raise _refused("is JSON of another kind, expected a list of non-empty lists of token ids")
    for number, row in enumerate(lists):
        if wrong := [item for item in row if type(item) is not int or abs(item) >= 1 << 62]:
            raise _refused(f"list {number} holds {str(wrong[0])[:40]}, expected token ids only")
    size = wanted.window_tokens
    return [np.array(row[i : i + size], np.int64) for row in lists for i in range(0, len(row), size)]


def _thinned(pieces: Sequence[Ids], wanted: Wanted) -> list[Ids]:
    """`num_windows` of them, or all, in random order."""
    order = np.random.default_rng([wanted.seed, 1]).permutation(len(pieces))
    return [pieces[index] for index in order[: wanted.num_windows]]


def _check_ids(pieces: Sequence[Ids], wanted: Wanted, vocab_size: int) -> None:
    for piece in pieces:
        if outside := piece[(piece < 0) | (piece >= vocab_size)].tolist():
            raise _refused(f"holds the id {outside[0]}, expected ids of the vocabulary, 0 ≤ id < {vocab_size}")
    if (num_ids := sum(map(len, pieces))) < wanted.window_tokens:
        raise _refused(_too_small(num_ids, wanted.window_tokens))


def _too_small(num_tokens: int, needed: int) -> str:
    given = f"has {num_tokens} tokens" if num_tokens else "is empty"
    return f"{given}, one window takes {needed}: give more text, or smaller windows"
