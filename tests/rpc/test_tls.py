"""TLS and mutual TLS on real sockets: who gets in, and certificates that are replaced while the server serves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rpc_harness import Served, collect, expected_tokens, ids, serving, until
from tenants_harness import A, write_tokens

from tinyloop_service import Client, Tls, errors
from tinyloop_service.client import AsyncClient
from tinyloop_service.client.channel import TlsChoice, credentials
from tinyloop_service.engine.fake import FakeEngine
from tinyloop_service.pb import generation_pb2 as g
from tinyloop_service.pb import generation_pb2_grpc, model_pb2, model_pb2_grpc
from tinyloop_service.rpc.fronts import fleet


@cache
def authority(name: str) -> Authority:
    return Authority.make(name)


@dataclass(frozen=True)
class Files:
    """Of a server, and of who calls it."""

    folder: Path

    def write(self, name: str, content: bytes) -> str:
        """Replaced in one step, as a mounted secret is."""
        new = self.folder / f"{name}.new"
        new.write_bytes(content)
        return str(new.rename(self.folder / name))

    def server(self, signer: str, *, client_ca: str | None = None) -> dict[str, str]:
        """Settings of a server whose certificate `signer` signed."""
        pair = authority(signer).issue("server")
        paths = {"tls_cert": self.write("tls.crt", pair.cert), "tls_key": self.write("tls.key", pair.key)}
        if client_ca:
            paths["tls_client_ca"] = self.write("clients.crt", authority(client_ca).pem)
        return paths

    def swapped(self) -> dict[str, str]:
        return {"tls_cert": str(self.folder / "tls.key"), "tls_key": str(self.folder / "tls.crt")}

    def both(self) -> str:
        """Certificate and key in one file."""
        return self.write("both.pem", b"".join((self.folder / name).read_bytes() for name in ("tls.key", "tls.crt")))

    def ca(self, name: str) -> str:
        return self.write(f"ca-{name}.crt", authority(name).pem)

    def client(self, ca: str, signer: str) -> Tls:
        cert, key = authority(signer).issue("client").write(self.folder, f"client-{signer}")
        return Tls(self.ca(ca), cert, key)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@asynccontextmanager
async def tls_serving(settings: dict[str, str], *arguments: Any, **options: Any) -> AsyncIterator[Served]:
    async with serving(*arguments, **settings, **options) as served:
        yield served


async def gets_in(served: Served, tls: TlsChoice) -> bool:
    """With a connection of its own, so that there is a handshake; as the clients do it, but without trying again."""
    secrets, once = credentials(tls), (("grpc.enable_retries", 0),)
    made = grpc.aio.secure_channel(served.address, secrets, once) if secrets else None
    async with made or grpc.aio.insecure_channel(served.address, once) as channel:
        try:
            await model_pb2_grpc.ModelServiceStub(channel).GetModel(model_pb2.GetModelRequest(), timeout=20)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE, error
            return False
    return True


async def test_the_clients_know_the_server_by_its_authority(files: Files) -> None:
    async with tls_serving(files.server("one")) as served:
        assert await gets_in(served, files.ca("one"))
        assert await gets_in(served, Tls(ca=files.ca("one")))
        assert await gets_in(served, grpc.ssl_channel_credentials(authority("one").pem))
        for stranger in (files.ca("two"), True, None):
            assert not await gets_in(served, stranger)

        async with AsyncClient(served.address, tls=Tls(files.ca("one"))) as client:
            assert (await client.model()).replica == "replica-0"

        def work() -> list[int]:
            with Client(served.address, tls=files.ca("one")) as client:
                return client.generate((1, 2), 5, ignore_eos=True)

        assert await asyncio.to_thread(work) == [1, 2, *expected_tokens((1, 2), 5)]


async def test_callers_show_a_certificate_where_one_is_asked_for(files: Files) -> None:
    settings = files.server("one", client_ca="two")
    async with tls_serving(settings) as served:
        assert await gets_in(served, files.client(ca="one", signer="two"))
        assert not await gets_in(served, files.client(ca="one", signer="one"))
        assert not await gets_in(served, files.ca("one"))


async def test_tokens_are_asked_for_behind_tls_too_and_health_is_plain(files: Files, tmp_path: Path) -> None:
    settings = {**files.server("one"), "tokens_file": str(write_tokens(tmp_path / "tokens.toml"))}
    async with tls_serving(settings, health_listen="127.0.0.1:0") as served:
        async with AsyncClient(served.address, tls=files.ca("one"), token=A) as client:
            await client.model()
        async with AsyncClient(served.address, tls=files.ca("one")) as client:
            with pytest.raises(errors.Unauthenticated):
                await client.model()
        async with grpc.aio.insecure_channel(served.app.health_address) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_new_certificate_is_used_at_the_next_handshake_and_streams_go_on(files: Files) -> None:
    gate = threading.Event()
    async with tls_serving(files.server("one"), FakeEngine(gate=gate)) as served:
        trusted = grpc.ssl_channel_credentials(authority("one").pem)
        async with grpc.aio.secure_channel(served.address, trusted) as channel:
            request = g.GenerateRequest(input=ids(1, 2), max_tokens=9, ignore_eos=True)
            running = asyncio.create_task(collect(generation_pb2_grpc.GenerationServiceStub(channel).Generate(request)))
            await until(lambda: served.num_open() == 1)
            files.server("two")
            assert await gets_in(served, files.ca("two")) and not await gets_in(served, files.ca("one"))
            gate.set()
            messages = await running
        assert tuple(t for m in messages for t in m.delta.token_ids) == expected_tokens((1, 2), 9)


async def test_another_authority_of_clients_counts_from_the_next_handshake_on(files: Files) -> None:
    async with tls_serving(files.server("one", client_ca="two")) as served:
        assert await gets_in(served, files.client(ca="one", signer="two"))
        files.write("clients.crt", authority("three").pem)
        assert await gets_in(served, files.client(ca="one", signer="three"))
        assert not await gets_in(served, files.client(ca="one", signer="two"))
        files.write("clients.crt", authority("two").pem + authority("three").pem)
        for signer in ("two", "three"):
            assert await gets_in(served, files.client(ca="one", signer=signer)), "a bundle, while they change over"


async def test_half_a_change_changes_nothing_and_is_logged_once(files: Files, quiet_logs: list[dict[str, Any]]) -> None:
    async with tls_serving(files.server("one", client_ca="two"), grpc_processes=0) as served:  # its log is looked at
        caller = files.client(ca="one", signer="two")
        fresh, cert = authority("three").issue("server"), (files.folder / "tls.crt").read_bytes()
        for field, change in (
            ("tls_key", lambda: files.write("tls.crt", fresh.cert)),
            ("tls_cert", lambda: files.write("tls.crt", b"")),
            ("tls_cert", lambda: (files.folder / "tls.crt").unlink()),
            ("tls_client_ca", lambda: (files.write("tls.crt", cert), files.write("clients.crt", b"no certificate"))),
        ):
            quiet_logs.clear()
            change()
            assert await gets_in(served, caller) and await gets_in(served, caller)
            stays = [line["error"] for line in quiet_logs if line["event"] == "the old certificate stays"]
            assert len(stays) == 1 and stays[0].startswith(f"{field}: "), stays
        files.write("clients.crt", authority("two").pem)
        files.write("tls.key", fresh.key)
        files.write("tls.crt", fresh.cert)
        assert await gets_in(served, files.client(ca="three", signer="two"))
        assert "PRIVATE" not in str(quiet_logs)


async def test_a_front_that_starts_amid_a_change_has_the_last_pair_that_fitted(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_LOOK_EVERY_S", 0.05)
    async with tls_serving(files.server("one"), grpc_processes=1) as served:
        fleet_of = served.app._server
        assert isinstance(fleet_of, fleet.Fronts) and fleet_of._certificates is not None

        async def is_served_by_another(signer: str) -> bool:
            (front,) = fleet_of._fronts.values()
            assert front._process is not None
            front._process.kill()
            await until(lambda: fleet_of._fronts not in ({0: front}, {}))
            return await gets_in(served, files.ca(signer))

        fresh = authority("three").issue("server")
        files.write("tls.crt", fresh.cert)
        assert await is_served_by_another("one")
        files.server("two")
        await until(lambda: fleet_of._certificates.last.cert == (files.folder / "tls.crt").read_bytes())
        (files.folder / "tls.key").unlink()
        assert await is_served_by_another("two")
        files.write("tls.key", fresh.cert)
        files.write("tls.crt", fresh.key)
        assert await is_served_by_another("two"), "gRPC takes each file by itself"
        files.write("tls.key", fresh.key)
        files.write("tls.crt", fresh.cert)
        assert await gets_in(served, files.ca("three")), "what it was given does not keep it from reading"
        assert await is_served_by_another("three")


async def test_a_file_of_both_serves_as_either(files: Files) -> None:
    files.server("one")
    async with tls_serving({"tls_cert": files.both(), "tls_key": files.both()}) as served:
        assert await gets_in(served, files.ca("one"))


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (lambda files: {"tls_cert": "/no/such/file"}, "tls_cert"),
        (lambda files: {"tls_key": "/no/such/file"}, "tls_key"),
        (lambda files: {"tls_client_ca": "/no/such/file"}, "tls_client_ca"),
        (lambda files: {"tls_cert": files.write("x", b"")}, "tls_cert"),
        (lambda files: {"tls_cert": files.ca("one")}, "tls_key"),
        (lambda files: {"tls_key": files.write("x", authority("one").issue("x").key)}, "tls_key"),
        (lambda files: {"tls_key": files.write("x", authority("one").issue("x", password=b"secret").key)}, "tls_key"),
        (lambda files: files.swapped(), "tls_cert"),
        (lambda files: {"tls_cert": files.both(), "tls_key": files.write("x", b"")}, "tls_key"),
        (lambda files: {"tls_client_ca": files.write("x", b"")}, "tls_client_ca"),
        (lambda files: {"tls_client_ca": files.write("x", "ü".encode())}, "tls_client_ca"),
    ],
)
async def test_files_that_cannot_be_used_end_the_start(
    files: Files, spoil: Callable[[Files], dict[str, str]], field: str
) -> None:
    settings = {**files.server("one", client_ca="two"), **spoil(files)}
    with pytest.raises(errors.InvalidArgument) as caught:
        async with tls_serving(settings):
            pass
    assert caught.value.field == field and "PRIVATE" not in str(caught.value)


def test_half_a_client_certificate_is_refused() -> None:
    with pytest.raises(errors.InvalidArgument, match="one of cert and key"):
        Tls(cert="me.pem")
    with pytest.raises(OSError):
        Client("127.0.0.1:1", tls=Tls(ca="/no/such/file"))


@pytest.mark.parametrize("token", ["", "two words", "new\nline", "ü", b"bytes", " tl_1", "tl_1\n"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_repeated(token: Any) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(errors.InvalidArgument) as caught:
            kind("127.0.0.1:1", token=token)
        assert caught.value.field == "token" and (len(token) < 3 or str(token) not in str(caught.value))
