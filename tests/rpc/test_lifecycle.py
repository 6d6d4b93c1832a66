"""From the first byte to the last page: warm-up, health, refusals at capacity, drain."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from rpc_harness import CONFIG, SERVER, Served, collect, expected_tokens, ids, reason_of, refusal, serving, until
from server_process import NO_RETRIES, NOT_SERVING, SERVING, health

from tinyloop_service.app import App
from tinyloop_service.engine.api import Plan
from tinyloop_service.engine.fake import FakeEngine
from tinyloop_service.errors import EngineFault, InvalidArgument, ModelFileError
from tinyloop_service.loading import LoadedModel
from tinyloop_service.pb import generation_pb2 as g
from tinyloop_service.pb import generation_pb2_grpc, model_pb2, model_pb2_grpc, prefix_pb2_grpc
from tinyloop_service.pb import prefix_pb2 as p
from tinyloop_service.rpc.health import READY_SERVICE
from tinyloop_service.rpc.server import SERVICES
from tinyloop_service.rpc.status import DETAILS_KEY
from tinyloop_service.settings import NamesSettings, SchedulerSettings, Settings
from tinyloop_service.snapshots import Written

WITH_HEALTH = replace(SERVER, health_listen="127.0.0.1:0")


def request(*tokens: int, max_tokens: int = 50) -> g.GenerateRequest:
    return g.GenerateRequest(input=ids(*(tokens or (1, 2))), max_tokens=max_tokens, ignore_eos=True)


async def test_a_server_listens_while_it_warms_up() -> None:
    gate = threading.Event()

    def load() -> LoadedModel:
        gate.wait()
        return LoadedModel(FakeEngine(), None, CONFIG)

    app = App(Settings(server=WITH_HEALTH), load)
    await app.start()
    try:
        assert await health(app.health_address, "") == SERVING
        assert await health(app.health_address) == NOT_SERVING
        async with grpc.aio.insecure_channel(app.address, NO_RETRIES) as channel:
            generation = generation_pb2_grpc.GenerationServiceStub(channel)
            for call in (
                model_pb2_grpc.ModelServiceStub(channel).GetModel(model_pb2.GetModelRequest()),
                generation.Generate(request()),
                generation.GenerateUnary(g.GenerateUnaryRequest(generation=request())),
            ):
                error = await refusal(call)
                assert reason_of(error) == ("UNAVAILABLE", "WARMING_UP")
                assert int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
            gate.set()
            await app.ready()
            assert await health(app.health_address) == SERVING
            assert await collect(generation.Generate(request()))
    finally:
        gate.set()
        await app.stop(0.0)


async def test_a_server_may_be_stopped_while_it_warms_up() -> None:
    gate, engine = threading.Event(), FakeEngine()

    def load() -> LoadedModel:
        gate.wait()
        return LoadedModel(engine, None, CONFIG)

    app = App(Settings(server=SERVER), load)
    await app.start()
    await app.stop(0.0)
    gate.set()
    await until(lambda: engine.is_closed)


async def test_what_loading_raises_reaches_whoever_waits() -> None:
    def load() -> LoadedModel:
        raise ModelFileError("truncated")

    app = App(Settings(server=SERVER), load)
    await app.start()
    with pytest.raises(ModelFileError, match="truncated"):
        await app.ready()
    await app.stop(0.0)
    with pytest.raises(ModelFileError, match="truncated"):
        await App(Settings(server=SERVER), load).run()


async def test_an_address_that_is_taken_is_refused_by_its_setting(served: Served) -> None:
    app = App(Settings(server=replace(SERVER, listen=served.address)), lambda: LoadedModel(FakeEngine(), None, CONFIG))
    with pytest.raises(InvalidArgument, match="already in use; choose another port") as caught:
        await app.start()
    assert caught.value.field == "listen"


async def test_a_server_listens_on_a_unix_socket(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/tinyloop.sock"
    async with serving(listen=address, grpc_processes=0) as served:
        assert served.address == address
        assert await collect(served.generation.Generate(request()))
    with pytest.raises(InvalidArgument):
        async with serving(listen=f"unix:{tmp_path}/no/such/folder/s.sock", grpc_processes=0):
            pass


async def test_reflection_is_there_when_asked_for_and_only_then() -> None:
    async def services(served: Served) -> set[str]:
        stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        answers = await collect(stub.ServerReflectionInfo(asked))
        return {service.name for service in answers[0].list_services_response.service}

    async with serving(reflection=True) as served:
        assert set(SERVICES) <= await services(served)
    async with serving() as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await services(served)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_full_queue_says_when_to_come_back() -> None:
    gate = threading.Event()
    engine = FakeEngine(gate=gate)
    async with serving(engine, scheduler=SchedulerSettings(max_queue=2)) as served:
        running = []

        async def refused() -> grpc.aio.AioRpcError:
            while True:
                call = served.generation.Generate(request())
                reading = asyncio.ensure_future(call.read())
                running.append(reading)
                before = served.num_open()
                while not reading.done() and served.num_open() == before:  # noqa: ASYNC110, either may come
                    await asyncio.sleep(0)
                if reading.done():
                    return await refusal(reading)

        async with grpc.aio.insecure_channel(served.address, NO_RETRIES) as channel:
            served = replace(served, channel=channel)
            error = await refused()
            assert reason_of(error) == ("UNAVAILABLE", "QUEUE_FULL")
            status = status_pb2.Status.FromString(dict(error.trailing_metadata())[DETAILS_KEY])
            retry = error_details_pb2.RetryInfo()
            assert any(detail.Unpack(retry) for detail in status.details) and retry.retry_delay.ToNanoseconds() > 0
            gate.set()
            await asyncio.gather(*running, return_exceptions=True)


async def test_health_list_and_get_answer_while_a_long_build_runs() -> None:
    gate = threading.Event()
    async with serving(FakeEngine(gate=gate), health_listen="127.0.0.1:0") as served:
        await served.prefixes.CreatePrefix(
            p.CreatePrefixRequest(prefix_id="long", input=ids(*range(1, 400)), build_async=True)
        )
        async with asyncio.timeout(5):  # the engine stands still all the while: whoever waits for it never answers
            assert await health(served.app.health_address) == SERVING
            listed = await served.prefixes.ListPrefixes(p.ListPrefixesRequest())
            got = await served.prefixes.GetPrefix(p.GetPrefixRequest(name="prefixes/long"))
            await served.model.GetLoad(model_pb2.GetLoadRequest())
        assert listed.prefixes[0].state == got.state == p.PREFIX_STATE_BUILDING
        gate.set()


async def test_drain_refuses_what_is_new_and_finishes_what_runs() -> None:
    gate = threading.Event()
    async with serving(FakeEngine(gate=gate), health_listen="127.0.0.1:0") as served:
        running = asyncio.create_task(collect(served.generation.Generate(request(5, 6))))
        await until(lambda: served.num_open() == 1)
        stopping = asyncio.create_task(served.app.stop(grace_s=30.0))
        await until(lambda: not served.scheduler.load().accepting)
        assert await health(served.app.health_address) == NOT_SERVING
        assert await health(served.app.health_address, "") == SERVING
        async with grpc.aio.insecure_channel(served.address, NO_RETRIES) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            assert reason_of(await refusal(stub.Generate(request()))) == ("UNAVAILABLE", "DRAINING")
        gate.set()
        messages = await running
        await stopping
        assert tuple(t for m in messages for t in m.delta.token_ids) == expected_tokens((5, 6), 50)
        assert served.engine.is_closed


async def test_a_call_that_comes_while_a_drained_server_closes_is_told_to_try_another() -> None:
    gate = threading.Event()
    async with (
        serving(FakeEngine(gate=gate)) as served,
        grpc.aio.insecure_channel(served.address, NO_RETRIES) as channel,
    ):
        running = asyncio.create_task(refusal(served.generation.Generate(request(5, 6))))
        await until(lambda: served.num_open() == 1)
        stopping = asyncio.create_task(served.app.stop(grace_s=0.0))
        assert reason_of(await running) == ("UNAVAILABLE", "MODEL_CLOSED")  # its step goes on, which keeps the server
        for new in (
            generation_pb2_grpc.GenerationServiceStub(channel).Generate(request()),
            prefix_pb2_grpc.PrefixServiceStub(channel).CreatePrefix(p.CreatePrefixRequest(input=ids(1))),
            prefix_pb2_grpc.PrefixServiceStub(channel).GetPrefix(p.GetPrefixRequest(name="prefixes/p")),
        ):
            assert reason_of(await refusal(new)) == ("UNAVAILABLE", "DRAINING")
        gate.set()
        await stopping


@pytest.mark.parametrize("grace_s", [0.0, 30.0])
async def test_calls_that_nobody_has_looked_at_when_a_server_ends_are_told_to_try_another(grace_s: float) -> None:
    """gRPC would end them as CANCELLED, as if their callers had asked for it."""
    async with (
        serving() as served,
        grpc.aio.insecure_channel(served.address, NO_RETRIES) as channel,
    ):
        load = model_pb2_grpc.ModelServiceStub(channel).GetLoad
        await load(model_pb2.GetLoadRequest())
        calls = [load(model_pb2.GetLoadRequest()) for _ in range(200)]
        await served.app.stop(grace_s=grace_s)
        for call in calls:
            if (code := await call.code()) is not grpc.StatusCode.OK:
                assert (code.name, reason_of(await refusal(call))[1]) == ("UNAVAILABLE", "DRAINING")


async def test_health_is_watched_where_calls_are_served_and_no_watch_holds_a_server_up() -> None:
    gate = threading.Event()
    async with serving(FakeEngine(gate=gate)) as served:
        running = asyncio.create_task(collect(served.generation.Generate(request(5, 6))))
        await until(lambda: served.num_open() == 1)
        stub = health_pb2_grpc.HealthStub(served.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=READY_SERVICE))
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="nobody's"))
        assert (await watch.read()).status == SERVING
        assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        stopping = asyncio.create_task(served.app.stop(grace_s=30.0))
        assert (await watch.read()).status == NOT_SERVING
        assert not running.done()
        gate.set()
        await asyncio.gather(running, stopping)
        for ended in (watch, unknown):  # by the server; after its last seconds of patience it would have cut them off
            assert await ended.read() is grpc.aio.EOF and await ended.code() is grpc.StatusCode.OK


@pytest.mark.parametrize(("files", "most"), [(16, 4), (100, 27)], ids=["fewer than it needs", "few"])
async def test_connections_that_stay_leave_room_for_health_and_files(
    files: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (files, files))

    def connect(address: str) -> tuple[list[socket.socket], int]:
        host, _, port = address.rpartition(":")
        connections = [socket.create_connection((host, int(port)), timeout=20) for _ in range(40)]
        answered = 0
        for connection in connections:
            with suppress(ConnectionError):  # refused, as is a silent end
                answered += bool(connection.recv(1))
        return connections, answered

    async with serving(health_listen="127.0.0.1:0", grpc_processes=0) as served:  # a front has files of its own
        connections, answered = await asyncio.to_thread(connect, served.address)
        assert 1 <= answered <= most
        assert await health(served.app.health_address) == SERVING
        for connection in connections:
            connection.close()
        async with asyncio.timeout(20):
            while await asyncio.to_thread(_is_refused, served.address):
                pass


def _is_refused(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            model_pb2_grpc.ModelServiceStub(channel).GetLoad(model_pb2.GetLoadRequest())
        except grpc.RpcError:
            return True
        return False


async def test_an_old_connection_is_replaced_under_running_streams() -> None:
    async with serving(FakeEngine(step_s=0.005), max_connection_age_s=0.1) as served:
        stream = asyncio.create_task(collect(served.generation.Generate(request(7, max_tokens=400))))
        await until(lambda: served.num_open() == 1)
        while not stream.done():
            await served.model.GetLoad(model_pb2.GetLoadRequest())
        assert tuple(t for m in await stream for t in m.delta.token_ids) == expected_tokens((7,), 400)


async def test_a_fault_of_one_step_leaves_others_alone() -> None:
    def fault(plan: Plan) -> EngineFault | None:
        doomed = any(opened.sampling and opened.sampling.seed == 13 for opened in plan.open)
        return EngineFault("private text of a kernel") if doomed else None

    async with serving(FakeEngine(fault=fault)) as served:
        bad = request(3, 4)
        bad.seed = 13
        error = await refusal(served.generation.Generate(bad))
        assert reason_of(error) == ("INTERNAL", "ENGINE_FAULT") and "private" not in str(error)
        assert await collect(served.generation.Generate(request()))
        await served.settled()


async def test_watches_of_health_have_an_end_and_one_that_ends_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reaches the port may watch, without a token."""
    monkeypatch.setattr("tinyloop_service.rpc.health.MOST_WATCHES", 2)
    async with serving() as served:
        watch = health_pb2_grpc.HealthStub(served.channel).Watch
        asked = health_pb2.HealthCheckRequest(service=READY_SERVICE)
        kept = [watch(asked), watch(asked)]
        assert [(await one.read()).status for one in kept] == [SERVING, SERVING]
        assert await watch(asked).code() is grpc.StatusCode.UNIMPLEMENTED
        assert await health(served.address) == SERVING
        kept.pop().cancel()
        async with asyncio.timeout(20):
            while len(kept) == 1:
                again = watch(asked)
                with suppress(grpc.aio.AioRpcError):  # the server has not heard of the cancel yet
                    await again.read()
                    kept.append(again)
        for one in kept:
            one.cancel()


async def test_an_engine_that_fails_to_close_takes_no_last_message_along(quiet_logs: list[dict[str, Any]]) -> None:
    class Broken(FakeEngine):
        def close(self) -> None:
            raise RuntimeError("the driver is gone")

    async with serving(Broken(step_s=0.002)) as served:
        running = asyncio.create_task(refusal(served.generation.Generate(request(5, 6, max_tokens=2000))))
        await until(lambda: served.num_open() == 1)
        await served.app.stop(grace_s=0.0)
        assert reason_of(await running) == ("UNAVAILABLE", "MODEL_CLOSED")
    assert any(line["event"] == "the engine failed to close" for line in quiet_logs)


async def test_a_disk_that_stands_still_holds_nobody_up_who_hurries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, disk = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def stalled(*_: object) -> Written:
        loop.call_soon_threadsafe(begun.set)
        disk.wait()
        return Written(None)

    monkeypatch.setattr("tinyloop_service.snapshots.SnapshotFiles.write", stalled)
    try:
        async with serving(names=NamesSettings(snapshot_dir=str(tmp_path))) as served:
            await served.client().create_prefix("p", range(1, 100))
            await begun.wait()
            stopping = asyncio.create_task(served.app.stop(grace_s=5.0))
            await until(lambda: served.engine.is_closed)
            assert not stopping.done(), "what is being written is finished"
            served.app.hurry()
            await asyncio.wait_for(stopping, 20)
            assert served.app.still_computes, "the process does not wait for its thread"
    finally:
        disk.set()
