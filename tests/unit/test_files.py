"""Files that an operator names never keep the server waiting: what is no regular file is refused, by its name."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tinyloop_service.engine.weights import read_model
from tinyloop_service.files import read_file
from tinyloop_service.registry.prefix_file import read_prefixes
from tinyloop_service.rpc.tls import server_credentials
from tinyloop_service.rpc.tokens import TokensFile, hash_token
from tinyloop_service.settings import ServerSettings


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """Nobody writes to it: whoever waits for that waits for ever."""
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def test_links_to_a_regular_file_are_followed(tmp_path: Path) -> None:
    """As Kubernetes mounts a Secret: the key links into ..data, and that to a directory that is replaced as a whole."""
    (tmp_path / "..2024").mkdir()
    (tmp_path / "..2024" / "tokens.toml").write_bytes(b"content")
    (tmp_path / "..data").symlink_to("..2024")
    (tmp_path / "tokens.toml").symlink_to("..data/tokens.toml")
    assert read_file(tmp_path / "tokens.toml") == b"content"


def test_what_is_no_regular_file_is_refused(fifo: Path) -> None:
    link = fifo.with_name("link")
    link.symlink_to(fifo)
    for path, said in (
        (fifo, "is no regular file"),
        (link, "is no regular file"),
        (Path("/dev/zero"), "is no regular file"),
        (fifo.parent, "Is a directory"),
        (fifo.with_name("none"), "No such file"),
    ):
        with pytest.raises(OSError) as caught:
            read_file(path)
        assert said in (caught.value.strerror or "") and caught.value.filename == str(path)


def credentials(cert: Path) -> object:
    return server_credentials(replace(ServerSettings(), tls_cert=str(cert), tls_key=str(cert)))


def prefixes_beside(file: Path) -> object:
    path = file.with_name("prefixes.toml")
    path.write_text(f'[[prefix]]\nid = "p"\nfile = "{file.name}"\n')
    return read_prefixes(path)


@pytest.mark.parametrize("read", [TokensFile, credentials, read_prefixes, prefixes_beside, read_model])
def test_no_file_of_a_server_s_settings_makes_it_wait(fifo: Path, read: Callable[[Path], object]) -> None:
    with pytest.raises((OSError, ValueError), match="is no regular file"):
        read(fifo)


def test_tokens_that_became_a_fifo_stay_as_they_were_and_are_read_again_after(fifo: Path) -> None:
    path = fifo.with_name("tokens.toml")
    write(path, "first")
    file = TokensFile(path)
    fifo.rename(path)
    assert asyncio.run(file._look()) is None and file.tokens.caller("first") is not None
    path.unlink()
    write(path, "second")
    now = asyncio.run(file._look())
    assert now is not None and now.caller("second") is not None and now.caller("first") is None


def write(path: Path, token: str) -> None:
    path.write_text(f'[[token]]\ntenant = "a"\nsha256 = "{hash_token(token)}"\nrights = ["generate"]\n')
