"""Clients of servers that are not ready, full, slow or gone; and the ends of streams, calls, clients and processes."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from clients_harness import GREEDY, PROMPT, in_thread
from forks import forked
from rpc_harness import CONFIG, SERVER, Served, expected_tokens, serving, until

from tinyloop_service import errors
from tinyloop_service.app import App
from tinyloop_service.client import AsyncClient, Client
from tinyloop_service.engine.fake import FakeEngine
from tinyloop_service.loading import LoadedModel
from tinyloop_service.pb import generation_pb2 as g
from tinyloop_service.settings import SchedulerSettings, Settings


async def test_a_client_waits_for_a_server_that_warms_up(quiet_logs: list[dict[str, Any]]) -> None:
    gate = threading.Event()

    def load() -> LoadedModel:
        gate.wait()
        return LoadedModel(FakeEngine(), None, CONFIG)

    app = App(Settings(server=SERVER), load)
    await app.start()
    try:
        async with AsyncClient(app.address, timeout=30) as client:
            call = asyncio.create_task(client.complete(PROMPT, **GREEDY))
            streaming = asyncio.create_task(anext(client.stream(PROMPT, **GREEDY)))
            await until(lambda: sum(log["event"] == "refused" for log in quiet_logs) >= 2)
            gate.set()
            assert (await call).token_ids == expected_tokens(PROMPT, 6)
            assert (await streaming).token_ids
    finally:
        gate.set()
        await app.stop(0.0)


async def test_a_full_server_is_waited_for() -> None:
    engine = FakeEngine(step_s=0.001)
    async with serving(engine, scheduler=SchedulerSettings(max_queue=4)) as served, served.client(timeout=60) as client:
        results = await asyncio.gather(
            *(client.complete((1, i), max_tokens=20, ignore_eos=True) for i in range(1, 120)), return_exceptions=True
        )
        done = [result for result in results if not isinstance(result, BaseException)]
        assert all(isinstance(r, errors.QueueFull) for r in results if isinstance(r, BaseException))
        assert len(done) > 64


async def test_a_stream_that_has_begun_is_not_retried() -> None:
    engine = FakeEngine(step_s=0.005)
    async with serving(engine) as served, served.client() as client:
        stream = client.stream(PROMPT, max_tokens=1900, ignore_eos=True)
        assert (await anext(stream)).token_ids
        stopping = asyncio.create_task(served.app.stop(grace_s=0.0))
        with pytest.raises(errors.Unavailable):
            [_ async for _ in stream]
        await stopping
        assert engine.tokens_prefilled == len(PROMPT), "the request was sent a second time"


async def test_leaving_a_stream_cancels_it() -> None:
    async with serving(FakeEngine(step_s=0.002)) as served:
        async with served.client() as client:
            stream = client.stream(PROMPT, max_tokens=1900, ignore_eos=True)
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
            await served.settled()

        def work(client: Client) -> None:
            stream = client.stream(PROMPT, max_tokens=1900, ignore_eos=True)
            next(stream)
            stream.close()
            assert list(stream) == []
            abandoned = client.stream(PROMPT, max_tokens=1900, ignore_eos=True)
            next(abandoned)
            del abandoned
            gc.collect()
            while client.load().rows_running:
                pass

        await in_thread(served, work)


async def test_timeouts_are_timeout_errors(gated: tuple[Served, threading.Event]) -> None:
    served, gate = gated
    async with served.client(timeout=0.1) as client:
        with pytest.raises(TimeoutError):
            await client.complete(PROMPT)
        with pytest.raises(errors.DeadlineExceeded):
            [_ async for _ in client.stream(PROMPT)]

    def work(client: Client) -> None:
        with pytest.raises(TimeoutError):
            client.generate(PROMPT)
        with pytest.raises(TimeoutError):
            client.stream(PROMPT)

    await in_thread(served, work, timeout=0.1)
    gate.set()
    await served.settled()


async def test_a_server_that_is_not_there() -> None:
    async with AsyncClient("127.0.0.1:1", timeout=20) as client:
        with pytest.raises(errors.Unavailable, match="cannot be reached"):
            await client.delete_prefix("p")  # a method that is not retried


async def test_a_stream_that_breaks_says_that_it_was_there() -> None:
    """What its caller has is no answer of a server that cannot be reached, and none that has not begun."""
    ends = iter([grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED] * 2)

    async def answer(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> AsyncIterator[bytes]:
        yield g.GenerateResponse(started=g.Started()).SerializeToString()
        yield g.GenerateResponse(delta=g.Delta(token_ids=[1])).SerializeToString()
        await context.abort(next(ends), "Socket closed")

    server = grpc.aio.server()
    methods = {"Generate": grpc.unary_stream_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("tinyloop.v1.GenerationService", methods),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    lost, late = "^the connection to the server was lost: Socket closed", "ran out before the answer was complete"

    def work() -> None:
        with Client(address, timeout=20) as client:
            for error, words in ((errors.Unavailable, lost), (errors.DeadlineExceeded, late)):
                with pytest.raises(error, match=words):
                    list(client.stream(PROMPT))

    async with AsyncClient(address, timeout=20) as client:
        for error, words in ((errors.Unavailable, lost), (errors.DeadlineExceeded, late)):
            with pytest.raises(error, match=words):
                [_ async for _ in client.stream(PROMPT)]
    await asyncio.to_thread(work)
    await server.stop(None)


async def test_calls_that_a_closing_server_has_not_taken_are_sent_again_or_say_so() -> None:
    """gRPC ends them as CANCELLED, which nobody here has asked for."""
    calls: Counter[str] = Counter()

    async def answer(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        calls["all"] += 1
        if calls["all"] % 2:
            await context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")
        return b""

    server = grpc.aio.server()
    methods = {name: grpc.unary_unary_rpc_method_handler(answer) for name in ("GetLoad", "DeletePrefix")}
    for service in ("ModelService", "PrefixService"):
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(f"tinyloop.v1.{service}", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncClient(f"127.0.0.1:{port}", timeout=20) as client:
        await client.load()
        assert calls["all"] == 2
        with pytest.raises(errors.Unavailable, match="may be closing"):
            await client.delete_prefix("p")  # a method that is not sent twice
        assert calls["all"] == 3
    await server.stop(None)


async def test_a_closed_client_says_so(served: Served) -> None:
    client = served.client()
    await client.close()
    with pytest.raises(RuntimeError, match="closed"):
        await client.load()
    with pytest.raises(errors.ModelClosed):
        [_ async for _ in client.stream(PROMPT)]

    def work() -> None:
        blocking = Client(served.address)
        blocking.close()
        blocking.close()
        for call in (blocking.load, lambda: blocking.stream(PROMPT), lambda: blocking.watch_prefix("p")):
            with pytest.raises(RuntimeError, match="closed"):
                call()

    await asyncio.to_thread(work)


async def test_closing_ends_calls_that_wait(gated: tuple[Served, threading.Event]) -> None:
    served, gate = gated
    client = Client(served.address)
    calls = [asyncio.create_task(asyncio.to_thread(client.complete, PROMPT)) for _ in range(3)]
    await until(lambda: served.num_open() == 3)
    await asyncio.to_thread(client.close)
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, errors.ModelClosed)
    gate.set()
    await served.settled()


async def test_a_forked_process_is_told_to_make_its_own_client(served: Served) -> None:
    client = Client(served.address)
    handle = await asyncio.to_thread(client.build_prefix_cache, PROMPT)

    def child() -> int:
        with pytest.raises(errors.ModelClosed, match="before this process was forked"):
            client.complete(prefix=handle)
        client.close()
        return 5

    assert forked(child) == 5
    assert (await asyncio.to_thread(client.complete, prefix=handle, **GREEDY)).usage.cached_tokens == len(PROMPT)
    await asyncio.to_thread(client.close)
