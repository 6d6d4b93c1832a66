"""A server that falls back to the CPU, where processes that speak gRPC are none by default, takes over from them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority
from fronts_harness import (
    OWN_CONNECTION,
    fronts_of,
    living,
    pid_of,
    request,
    served_model,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rpc_harness import CONFIG, SERVER, collect, expected_tokens, refusal, serving, until
from server_process import NOT_SERVING, SERVING

from tinyloop_service import app as app_module
from tinyloop_service.app import App
from tinyloop_service.engine.fake import FakeEngine
from tinyloop_service.loading import LoadedModel
from tinyloop_service.pb import generation_pb2_grpc
from tinyloop_service.rpc.addresses import _try_bind
from tinyloop_service.rpc.fronts import fleet
from tinyloop_service.rpc.health import READY_SERVICE
from tinyloop_service.rpc.tokens import hash_token
from tinyloop_service.settings import Settings


@pytest.fixture
def beside_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default there are two here; the fake engine is none of a GPU's."""
    monkeypatch.setattr(app_module, "_GPU_DRIVER", tmp_path)
    monkeypatch.setattr(app_module, "usable_cores", lambda: 8)
    monkeypatch.setattr(app_module, "_FRONTS", 2)


@asynccontextmanager
async def falling_back(**server: Any) -> AsyncIterator[tuple[App, set[int], threading.Event]]:
    """A server that takes over from its fronts, of those process ids, once the event is set."""
    loaded = threading.Event()

    def load() -> LoadedModel:
        assert loaded.wait(20)
        return LoadedModel(FakeEngine(), None, CONFIG)

    app = App(Settings(server=replace(SERVER, grpc_processes=None, **server)), load)
    await app.start()
    try:
        yield app, {pid_of(front) for front in app._server._fronts.values()}, loaded  # type: ignore[union-attr]
    finally:
        loaded.set()
        await app.stop(0.0)


@pytest.mark.parametrize("secured", [False, True])
async def test_a_server_that_falls_back_to_the_cpu_listens_itself(
    secured: bool, tmp_path: Path, beside_gpu: None
) -> None:
    """Who was connected meanwhile comes back by himself."""
    path, ca = tmp_path / "tokens.toml", Authority.make("ours")
    path.write_text(f'[[token]]\ntenant = "a"\nsha256 = "{hash_token("tl_x")}"\nrights = ["generate"]\n')
    cert, key = ca.issue("server").write(tmp_path, "server")
    more = {"tokens_file": str(path), "tls_cert": str(cert), "tls_key": str(key)} if secured else {}
    secrets, mine = grpc.ssl_channel_credentials(ca.pem), (("authorization", "Bearer tl_x"),)
    async with falling_back(metrics_listen="127.0.0.1:0", **more) as (app, fronts, loaded):
        assert len(living(fronts)) == 2
        made = grpc.aio.secure_channel(app.address, secrets, OWN_CONNECTION) if secured else None
        async with made or grpc.aio.insecure_channel(app.address, OWN_CONNECTION) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=READY_SERVICE))
            assert (await watch.read()).status == NOT_SERVING
            loaded.set()
            await app.ready()
            await until(lambda: not living(fronts))
            generate = generation_pb2_grpc.GenerationServiceStub(channel).Generate
            messages = await collect(generate(request(5), metadata=mine, wait_for_ready=True))
            assert tuple(t for m in messages for t in m.delta.token_ids) == expected_tokens((5,), 20)
            if secured:
                assert (await refusal(generate(request(5)))).code() is grpc.StatusCode.UNAUTHENTICATED
        assert app._health._states[READY_SERVICE] == SERVING
        metrics = app._observation.snapshot().metrics
        assert not metrics.fronts and not any(metrics.front_restarts.values())
    _try_bind(app.address)  # is free again


async def test_fronts_that_hang_do_not_keep_connections_from_who_takes_over(
    beside_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel gives them their share as long as they live, and whoever gets there waits for their end."""
    monkeypatch.setattr(fleet, "_END_S", 3600.0)  # for those that have calls worth waiting for
    async with falling_back() as (app, fronts, loaded):
        for pid in fronts:
            os.kill(pid, signal.SIGSTOP)
        loaded.set()
        await app.ready()
        await until(lambda: not living(fronts))
        async with grpc.aio.insecure_channel(app.address, OWN_CONNECTION) as channel:
            assert (await served_model(channel)).replica == "replica-0"


async def test_who_takes_over_has_the_certificate_that_was_in_force_last(
    tmp_path: Path, beside_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_LOOK_EVERY_S", 0.05)
    cert, key = Authority.make("old").issue("server").write(tmp_path, "server")
    ca = Authority.make("new")
    async with falling_back(tls_cert=str(cert), tls_key=str(key)) as (app, fronts, loaded):
        ca.issue("server").write(tmp_path, "server")
        server: Any = app._server
        await until(lambda: server._certificates.last.cert == cert.read_bytes())
        key.unlink()
        loaded.set()
        await app.ready()
        await until(lambda: not living(fronts))
        async with grpc.aio.secure_channel(app.address, grpc.ssl_channel_credentials(ca.pem)) as channel:
            assert (await served_model(channel)).replica == "replica-0"


@pytest.mark.parametrize(("engine", "given"), [("cuda", None), ("fake", 2)])
async def test_fronts_beside_a_gpu_or_that_were_asked_for_stay(
    engine: str, given: int | None, beside_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "name", engine)
    async with serving(grpc_processes=given) as served:
        assert len(fronts_of(served)) == 2
        assert (await served_model(served.channel)).replica == "replica-0"
