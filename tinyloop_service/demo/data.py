"""From documents to token windows: the byte-level BPE, the token stream, and what one training step sees.

A *stream* is every document as BOS, its tokens, EOS, one after the other; dictionary entries come in
groups of one to eight, so that the model meets both an entry that ends and one that another follows.  A *window*
is BOS and then `seq_len` tokens from the start of some line: what a prompt looks like to the served model.  In:
documents.  Out: arrays of ids.  This file refuses to know networks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tinyloop_service.demo.corpus import Document

BOS, EOS = "<|bos|>", "<|eos|>"  # ids 0 and 1
BOS_ID, EOS_ID = 0, 1
Ids = NDArray[np.int32]


def train_tokenizer(documents: Sequence[Document], vocab_size: int) -> Tokenizer:
    """Byte-level BPE: any bytes can be encoded, and decoding gives them back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((d.text for d in documents), trainer)
    return tokenizer


def group_entries(documents: Sequence[Document], seed: int) -> list[str]:
    """Texts to train on: books whole, runs of neighbouring dictionary entries joined by an empty line."""
    rng = np.random.default_rng(seed)
    texts: list[str] = []
    room, source = 0, ""
    for document in documents:
        if room and document.source == source:
            texts[-1] += "\n\n" + document.text
            room -= 1
            continue
        texts.append(document.text)
        source = document.source
        entry = source in ("jargon", "devil")
        room = int(rng.integers(1, 8)) if entry and rng.random() < 0.5 else 0
    return texts


@dataclass(frozen=True, slots=True)
class Stream:
    """All text as ids, and where a window may begin: the first token of a line."""

    ids: Ids
    starts: NDArray[np.int64]


def encode_stream(tokenizer: Tokenizer, texts: Sequence[str], dropout: float = 0.0) -> Stream:
    """Encode `texts`; with `dropout` BPE merges are skipped at random, so each call cuts words another way."""
    lines = [line for text in texts for line in (BOS + text + EOS).splitlines(keepends=True)]
    tokenizer.model.dropout = dropout or None
    ids = np.concatenate([np.array(e.ids, np.int32) for e in tokenizer.encode_batch_fast(lines)])
    tokenizer.model.dropout = None
    newline = [i for i in range(tokenizer.get_vocab_size()) if tokenizer.decode([i]).endswith("\n")]
    return Stream(ids, np.flatnonzero(np.isin(ids, [BOS_ID, *newline])) + 1)


def epoch_windows(stream: Stream, seq_len: int, rng: np.random.Generator) -> Iterator[Ids]:
    """One pass in random order, shifted by a random phase.  Each window: (seq_len + 1,), inputs and targets."""
    wanted = np.arange(rng.integers(seq_len), len(stream.ids) - 2 * seq_len, seq_len)
    starts = stream.starts[np.searchsorted(stream.starts, wanted)]
    for start in rng.permutation(starts):
        if start + seq_len <= len(stream.ids):
            yield np.concatenate(([BOS_ID], stream.ids[start : start + seq_len])).astype(np.int32)


def batches(streams: Sequence[Stream], seq_len: int, batch: int, rng: np.random.Generator) -> Iterator[Ids]:
    """Endless batches (batch, seq_len + 1); each epoch takes the next stream."""
    rows: list[Ids] = []
    epoch = 0
    while True:
        for window in epoch_windows(streams[epoch % len(streams)], seq_len, rng):
            rows.append(window)
            if len(rows) == batch:
                yield np.stack(rows)
                rows = []
        epoch += 1


def held_out_windows(tokenizer: Tokenizer, text: str, window: int) -> list[Ids]:
    """`text` cut into pieces of at most `window` tokens, BOS before each: every token is predicted once."""
    ids = np.array(tokenizer.encode(text).ids, np.int32)
    return [np.concatenate(([BOS_ID], ids[i : i + window])).astype(np.int32) for i in range(0, len(ids), window)]
