"""Tokens and TLS from the command line: made, checked, served with, called with."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from certificates import Authority
from command_harness import Server, serving, tinyloop

from tinyloop_service import Client, Tls


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of these tests run in this process, and read its environment."""
    for name in ("TOKEN", "TOKEN_FILE", "TLS", "TLS_CA", "CLIENT_CERT", "CLIENT_KEY"):
        monkeypatch.delenv(f"TINYLOOP_{name}", raising=False)


def new(folder: Path, tenant: str, *rights: str) -> Path:
    """A file with a new token, which is added to tokens.toml beside it."""
    options = [word for right in rights for word in ("--right", right)]
    path = folder / f"{tenant}.token"
    path.write_text(tinyloop("token", "new", tenant, *options, "--add-to", folder / "tokens.toml").out)
    return path


def test_tokens_are_made_added_and_checked(tmp_path: Path) -> None:
    acme, operators = new(tmp_path, "acme"), new(tmp_path, "operators", "admin")
    tokens = tmp_path / "tokens.toml"
    assert stat.S_IMODE(tokens.stat().st_mode) == 0o600
    assert acme.read_text().strip() not in tokens.read_text()
    tokens.chmod(0o640)
    tokens.write_text(tokens.read_text() + '[quotas.acme]\nprefix_bytes = "2GiB"\n')
    new(tmp_path, "acme", "generate")
    assert stat.S_IMODE(tokens.stat().st_mode) == 0o640, "a file that is there keeps its mode"
    listed = tinyloop("token", "check", tokens, "--json").json
    assert [(one["tenant"], one["rights"]) for one in listed] == [
        ("acme", ["generate"]),
        ("operators", ["admin"]),
        ("acme", ["build", "generate"]),
    ]
    assert [one["quota"]["prefix_bytes"] for one in listed] == [2**31, None, 2**31]
    [mine] = tinyloop("token", "check", tokens, "--token-file", operators, "--json").json
    assert mine["tenant"] == "operators"
    assert "prefix_bytes 2147483648" in tinyloop("token", "check", tokens).out
    stranger = tmp_path / "stranger"
    stranger.write_text("tl_" + "x" * 43)
    assert "is none of those" in tinyloop("token", "check", tokens, "--token-file", stranger, status=1).err


def test_a_token_without_a_file_prints_what_belongs_into_one(tmp_path: Path) -> None:
    done = tinyloop("token", "new", "acme")
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(done.err.split("\n\n", 1)[1])
    (tmp_path / "t").write_text(done.out)
    assert tinyloop("token", "check", tokens, "--token-file", tmp_path / "t", "--json").json[0]["tenant"] == "acme"
    made = tinyloop("token", "new", "acme", "--right", "admin", "--json").json
    assert made["sha256"] == hashlib.sha256(made["token"].encode()).hexdigest() and made["sha256"] in made["table"]


def test_a_token_from_elsewhere_is_hashed_if_it_is_long_enough() -> None:
    secret = "s" * 32
    expected = hashlib.sha256(secret.encode()).hexdigest()
    assert tinyloop("token", "hash", stdin=f"{secret}\n").out == f"{expected}\n"
    done = tinyloop("token", "hash", stdin="correct horse", status=1)
    assert "32 or more expected" in done.err and "horse" not in done.err


@pytest.mark.parametrize("tenant", ["", "two words", '"', "a" * 64])
def test_a_tenant_that_cannot_be_one_leaves_the_file_alone(tmp_path: Path, tenant: str) -> None:
    new(tmp_path, "acme")
    before = (tmp_path / "tokens.toml").read_bytes()
    done = tinyloop("token", "new", tenant, "--add-to", tmp_path / "tokens.toml", status=1)
    assert "tenant: expected" in done.err and done.out == ""
    assert (tmp_path / "tokens.toml").read_bytes() == before and len(list(tmp_path.iterdir())) == 2


def test_a_file_that_is_wrong_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text("[[token]]\ntenant = 3\n")
    for done in (
        tinyloop("token", "check", path, status=1),
        tinyloop("token", "new", "acme", "--add-to", path, status=1),
        tinyloop("serve", "--tokens-file", path, "--listen", "127.0.0.1:0", "--health-listen", "none", status=1),
    ):
        assert "tenant: expected" in done.err and "Traceback" not in done.err
    assert path.read_text() == "[[token]]\ntenant = 3\n"


@dataclass(frozen=True)
class Guarded:
    """A server that wants TLS, a client's certificate and a token; and the files of one caller."""

    server: Server
    folder: Path

    @property
    def tls(self) -> tuple[str | Path, ...]:
        paths = (self.folder / name for name in ("ca.pem", "me.pem", "me.key"))
        flags = ("--tls-ca", "--client-cert", "--client-key")
        return tuple(word for pair in zip(flags, paths, strict=True) for word in pair)


@pytest.fixture(scope="module")
def guarded(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    servers, clients = Authority.make("servers"), Authority.make("clients")
    (folder / "ca.pem").write_bytes(servers.pem)
    (folder / "clients.pem").write_bytes(clients.pem)
    cert, key = servers.issue("server").write(folder, "server")
    clients.issue("me").write(folder, "me")
    new(folder, "acme")
    new(folder, "reader", "generate")
    new(folder, "operators", "admin")
    identity = ("--tls-cert", cert, "--tls-key", key, "--tls-client-ca", folder / "clients.pem")
    with serving("--model", tiny, "--tokens-file", folder / "tokens.toml", *identity) as server:
        yield Guarded(server, folder)


def test_commands_call_with_a_token_over_tls(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    run, folder = guarded.server.run, guarded.folder
    mine = (*guarded.tls, "--token-file", folder / "acme.token")
    run("prefix", "create", "p", "--tokens", "1,2,3", *mine)
    assert run("generate", "--prefix", "p", "--ids", "--max-tokens", "3", *mine).out.strip()
    assert "p" in run("prefix", "list", *mine).out
    denied = run("prefix", "create", "q", "text", *guarded.tls, "--token-file", folder / "reader.token", status=1)
    assert "lacks the right 'build'" in denied.err
    nameless = run("generate", "text", *guarded.tls, status=1)
    assert "a token is needed" in nameless.err and "TINYLOOP_TOKEN" in nameless.err

    monkeypatch.setenv("TINYLOOP_TOKEN", (folder / "operators.token").read_text())
    for name, file in (("TLS_CA", "ca.pem"), ("CLIENT_CERT", "me.pem"), ("CLIENT_KEY", "me.key")):
        monkeypatch.setenv(f"TINYLOOP_{name}", str(folder / file))
    assert run("prefix", "list", "--json").json == [], "another tenant's"
    assert run("model", "--json").json["engine"] == "cpu"
    assert "p" in run("prefix", "list", "--token-file", folder / "acme.token").out, "the flag comes before the variable"
    assert run("top", "--once", "--interval", "0.1").out
    monkeypatch.setenv("TINYLOOP_TOKEN_FILE", str(folder / "acme.token"))
    assert "leave one of them out" in run("prefix", "list", status=2).err


def test_a_connection_that_cannot_be_says_what_may_be_missing(guarded: Guarded) -> None:
    done = guarded.server.run("model", "--timeout", "5", "--token-file", guarded.folder / "acme.token", status=1)
    assert "cannot be reached" in done.err and "--tls-ca" in done.err
    assert "both, or neither" in guarded.server.run("model", "--client-cert", "me.pem", status=2).err
    assert "No such file" in guarded.server.run("model", "--tls-ca", "/no/such/file", status=1).err
    assert "No such file" in guarded.server.run("model", "--token-file", "/no/such/file", status=1).err
    (guarded.folder / "two").write_text("tl_1\ntl_2\n")
    assert "two holds 2 words, one token expected" in (
        guarded.server.run("model", "--token-file", guarded.folder / "two", status=1).err
    )


def test_a_handshake_that_fails_says_why(guarded: Guarded, tiny: Path) -> None:
    run, folder = guarded.server.run, guarded.folder
    stranger = run("model", "--timeout", "9", "--tls-ca", folder / "clients.pem", status=1)
    assert "signed by none of those trusted" in stranger.err and "is it running" not in stranger.err
    assert "me.key holds no certificate in PEM" in run("model", "--tls-ca", folder / "me.key", status=1).err
    with serving("--model", tiny) as plain:
        spoken = plain.run("model", "--timeout", "9", "--tls-ca", folder / "ca.pem", status=1)
    assert "does not speak TLS" in spoken.err


def test_who_does_not_speak_tls_puts_nothing_into_the_log(guarded: Guarded) -> None:
    """gRPC's core would, in a form of its own, and its threads would wait for who reads it."""
    host, port = guarded.server.address.rsplit(":", 1)
    stderr = guarded.server.process.stderr
    assert stderr is not None
    with socket.create_connection((host, int(port)), timeout=20) as stranger, suppress(ConnectionResetError):
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        while stranger.recv(4096):
            pass
    os.set_blocking(stderr.fileno(), False)
    said = stderr.buffer.raw.read() or b""  # type: ignore[attr-defined]
    os.set_blocking(stderr.fileno(), True)
    assert b"andshake" not in said, said


def test_the_clients_do_the_same(guarded: Guarded) -> None:
    folder = guarded.folder
    tls = Tls(folder / "ca.pem", folder / "me.pem", folder / "me.key")
    with Client(guarded.server.address, tls=tls, token=(folder / "operators.token").read_text().strip()) as client:
        assert json.loads(json.dumps(client.config()))["default_loops"] == 4
        assert client.load().accepting
