"""How a process that serves ends: by signals, early, late and many; by a lost device."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import grpc
import pytest
from kept_signals import kept_signals
from rpc_harness import CONFIG, SERVER, collect, expected_tokens, ids, reason_of, refusal
from server_process import NO_RETRIES, SERVING, ServerProcess, health, server_process

from tinyloop_service.app import App, run_process
from tinyloop_service.engine.fake import FakeEngine
from tinyloop_service.errors import DeviceLost
from tinyloop_service.loading import LoadedModel
from tinyloop_service.pb import generation_pb2 as g
from tinyloop_service.pb import generation_pb2_grpc, model_pb2, model_pb2_grpc, prefix_pb2_grpc
from tinyloop_service.pb import prefix_pb2 as p
from tinyloop_service.settings import Settings

WITH_HEALTH = replace(SERVER, health_listen="127.0.0.1:0")


def request(*tokens: int, max_tokens: int = 50) -> g.GenerateRequest:
    return g.GenerateRequest(input=ids(*(tokens or (1, 2))), max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture
def signals() -> Iterator[None]:
    with kept_signals():
        yield


@pytest.mark.usefixtures("signals")
async def test_a_lost_device_ends_the_server_with_status_1() -> None:
    lost = [False]
    engine = FakeEngine(fault=lambda plan: DeviceLost("private") if lost[0] else None)
    app = App(Settings(server=WITH_HEALTH), lambda: LoadedModel(engine, None, CONFIG))
    ready = asyncio.Event()
    running = asyncio.create_task(app.run(lambda app: ready.set()))
    await ready.wait()
    lost[0] = True
    async with grpc.aio.insecure_channel(app.address, NO_RETRIES) as channel:
        error = await refusal(generation_pb2_grpc.GenerationServiceStub(channel).Generate(request()))
        assert error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE) and "private" not in str(error)
    async with asyncio.timeout(20):
        assert await running == 1


@pytest.mark.usefixtures("signals")
def test_a_process_that_serves_looks_no_more_through_what_was_there_when_it_was_ready() -> None:
    frozen = []

    def end(app: App) -> None:
        frozen.append(gc.get_freeze_count())
        os.kill(os.getpid(), signal.SIGTERM)

    before = gc.get_freeze_count()
    app = App(Settings(server=replace(SERVER, drain_pause_s=0.0)), lambda: LoadedModel(FakeEngine(), None, CONFIG))
    try:
        with pytest.raises(SystemExit) as ended:
            run_process(app, end)
    finally:
        gc.unfreeze()
    assert ended.value.code == 0 and frozen[0] > before + 1000


async def running(channel: grpc.aio.Channel, rows: int) -> None:
    """Wait until so many rows run."""
    load = model_pb2_grpc.ModelServiceStub(channel).GetLoad
    while (await load(model_pb2.GetLoadRequest())).rows_running < rows:
        pass


async def told_to_end(server: ServerProcess) -> None:
    """SIGTERM, and wait until it says that it is not ready."""
    server.process.send_signal(signal.SIGTERM)
    while await health(server.health_address) == SERVING:
        pass


async def test_sigterm_under_load_finishes_running_streams_and_exits_0() -> None:
    """T23."""
    async with server_process(step_s=0.02, drain_grace_s=60) as server:
        async with grpc.aio.insecure_channel(server.address, NO_RETRIES) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            calls = [stub.Generate(request(i, max_tokens=40)) for i in range(1, 9)]
            streams = [asyncio.create_task(collect(call)) for call in calls]
            await running(channel, 8)
            await told_to_end(server)
            create = prefix_pb2_grpc.PrefixServiceStub(channel).CreatePrefix(p.CreatePrefixRequest(input=ids(1)))
            for new in (stub.Generate(request()), create):
                assert reason_of(await refusal(new)) == ("UNAVAILABLE", "DRAINING")
            for i, messages in enumerate(await asyncio.gather(*streams), 1):
                assert tuple(t for m in messages for t in m.delta.token_ids) == expected_tokens((i,), 40)
        async with asyncio.timeout(30):
            _, log = await server.process.communicate()
        assert server.process.returncode == 0
        lines = [json.loads(line) for line in log.decode().splitlines()]
        answered = [line for line in lines if line["event"] == "answered" and line["method"] == "Generate"]
        assert len(answered) == 8 and len({line["request_id"] for line in answered}) == 8
        assert lines[-1]["event"] == "stopped"


async def test_signals_that_keep_coming_do_not_end_the_process_in_their_own_way() -> None:
    async with server_process() as server:
        async with asyncio.timeout(30):
            while server.process.returncode is None:
                with suppress(ProcessLookupError):  # its own method polls first, and may take the status away
                    os.kill(server.process.pid, signal.SIGTERM)
                await asyncio.sleep(0.001)
        _, log = await server.process.communicate()
        events = [json.loads(line)["event"] for line in log.decode().splitlines()]
        assert server.process.returncode in (0, 1) and "stopped" in events


async def test_a_second_signal_does_not_wait_for_running_streams() -> None:
    async with (
        server_process(step_s=0.2, drain_grace_s=3600) as server,
        grpc.aio.insecure_channel(server.address, NO_RETRIES) as channel,
    ):
        stream = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request(max_tokens=2000))
        await stream.read()
        await told_to_end(server)
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await server.process.wait() == 1
        assert await stream.code() is not grpc.StatusCode.OK


async def test_a_step_that_never_ends_does_not_keep_the_process_after_a_second_signal() -> None:
    async with (
        server_process(step_s=3600, drain_grace_s=3600) as server,
        grpc.aio.insecure_channel(server.address, NO_RETRIES) as channel,
    ):
        stream = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request())
        await running(channel, 1)
        await told_to_end(server)
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await server.process.wait() == 1
        await refusal(stream)


async def test_a_signal_while_the_model_loads_ends_the_process_with_0() -> None:
    async with server_process(load_s=3600, drain_grace_s=3600) as server:
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            _, log = await server.process.communicate()
        assert server.process.returncode == 0 and json.loads(log.decode().splitlines()[-1])["event"] == "stopped"
