"""Servers of the demo model for all tests of the examples: one that is open, one that asks for TLS and a token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from certificates import Authority
from command_harness import Server, serving, tinyloop
from guarded import Guarded
from programs import PROGRAMS, Program


@pytest.fixture(scope="session", params=PROGRAMS, ids=lambda program: program.language)
def program(request: pytest.FixtureRequest) -> Program:
    """Each of them, if it is built; it comes before other fixtures, which start servers."""
    found: Program = request.param
    found.needs_building()
    return found


@pytest.fixture(scope="session")
def open_server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """`hog` can fill it: 340 MiB are little more than two rows of 2000 tokens at 16 loops take."""
    folder = tmp_path_factory.mktemp("guarded")
    authority = Authority.make("test")
    (folder / "tls.crt").write_bytes(authority.pem)
    cert, key = authority.issue("localhost").write(folder, "server")
    tokens = folder / "tokens.toml"
    for tenant in (*(program.language for program in PROGRAMS), "hog", "poor"):
        (folder / f"{tenant}.token").write_text(tinyloop("token", "new", tenant, "--add-to", tokens).out)
    tokens.write_text(f"{tokens.read_text()}\n[quotas.poor]\ntokens_per_s = 1\n")
    who = ("--tokens-file", tokens, "--tls-cert", cert, "--tls-key", key, "--metrics-listen", "127.0.0.1:0")
    with serving(*who, "--kv-memory", "340MiB", "--max-queue", "1") as server:
        yield Guarded(server, folder)
