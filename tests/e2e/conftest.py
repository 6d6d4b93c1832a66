"""A tiny random model that takes text, and a server of it, for all tests of the command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from byte_tokenizer import byte_tokenizer
from command_harness import Server, serving, tinyloop


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
