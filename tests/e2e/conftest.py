"""A tiny random model that takes text, and a server of it, for all tests of the command.

The tokenizer has one token per byte; ids of 256 and above have no text.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from command_harness import Server, serving, tinyloop
from tokenizers import decoders, models, pre_tokenizers


def byte_tokenizer() -> bytes:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made.to_str().encode()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that takes text, written by `tinyloop init`."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "tokenizer.json").write_bytes(byte_tokenizer())
    path = folder / "tiny.tinyloop"
    tinyloop("init", "--size", "tiny", path, "--tokenizer", folder / "tokenizer.json")
    return path


@pytest.fixture(scope="session")
def server(tiny: Path) -> Iterator[Server]:
    """One server of the tiny model for all tests that leave it as they found it."""
    with serving("--model", tiny) as running:
        yield running
