"""Leaving in every state: by cancel, deadline or lost connection, unary and stream; pages come back, nobody hangs."""

from __future__ import annotations

import asyncio
import gc
import resource
import threading
from typing import Any

import grpc
import pytest
from grpc._cython.cygrpc import ExecuteBatchError  # type: ignore[import-untyped]
from rpc_harness import Served, collect, expected_tokens, ids, reason_of, serving, until

from tinyloop_service.engine.fake import FakeEngine
from tinyloop_service.observe.metrics import Metrics
from tinyloop_service.pb import generation_pb2 as g
from tinyloop_service.pb import generation_pb2_grpc
from tinyloop_service.pb import prefix_pb2 as p
from tinyloop_service.rpc.creation import PrefixCreator
from tinyloop_service.rpc.generation_service import GenerationService

Gated = tuple[Served, threading.Event]
PROMPT = tuple(range(1, 300))


def request(*tokens: int, max_tokens: int = 500, **fields: Any) -> g.GenerateRequest:
    return g.GenerateRequest(input=ids(*(tokens or PROMPT)), max_tokens=max_tokens, ignore_eos=True, **fields)


def start(served: Served, kind: str, message: g.GenerateRequest, **options: Any) -> Any:
    if kind == "stream":
        return served.generation.Generate(message, **options)
    return served.generation.GenerateUnary(g.GenerateUnaryRequest(generation=message), **options)


async def ended(call: Any) -> grpc.StatusCode:
    async with asyncio.timeout(20):
        return await call.code()


@pytest.mark.parametrize("kind", ["stream", "unary"])
async def test_cancel_while_prefilling_behind_a_standing_engine(gated: Gated, kind: str) -> None:
    served, gate = gated
    call = start(served, kind, request())
    await until(lambda: served.num_open() == 1)
    call.cancel()
    assert await ended(call) is grpc.StatusCode.CANCELLED
    await until(lambda: served.num_open() == 0)
    gate.set()
    await served.settled()


@pytest.mark.parametrize("kind", ["stream", "unary"])
async def test_cancel_while_queued(kind: str) -> None:
    gate = threading.Event()
    engine = FakeEngine(gate=gate)
    async with serving(engine) as served:
        first = [served.generation.Generate(request(i)) for i in range(1, engine.limits.max_rows + 1)]
        reads = [asyncio.ensure_future(call.read()) for call in first]
        await until(lambda: served.num_open() == engine.limits.max_rows)
        late = start(served, kind, request(7))
        await until(lambda: served.scheduler.load().requests_waiting > 0)
        await until(lambda: served.num_open() == engine.limits.max_rows + 1)
        late.cancel()
        assert await ended(late) is grpc.StatusCode.CANCELLED
        await until(lambda: served.num_open() == engine.limits.max_rows)
        for call in first:
            call.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
        await until(lambda: served.num_open() == 0)
        gate.set()
        await served.settled()


@pytest.mark.parametrize("kind", ["stream", "unary"])
async def test_cancel_while_decoding(kind: str) -> None:
    async with serving(FakeEngine(step_s=0.002)) as served:
        call = start(served, kind, request(1, 2, 3, max_tokens=2000))
        if kind == "stream":
            while (await call.read()).WhichOneof("output") != "delta":
                pass
        else:
            await until(lambda: served.scheduler.counters.generated > 3)
        call.cancel()
        assert await ended(call) is grpc.StatusCode.CANCELLED
        await served.settled()
        assert served.scheduler.counters.generated < 2000, "it went on to the end"


async def test_cancel_while_finishing(served: Served) -> None:
    calls = [served.generation.Generate(request(1, 2, i, max_tokens=3)) for i in range(1, 40)]

    async def leave_at_the_end(call: Any) -> None:
        while message := await call.read():
            if message.WhichOneof("output") == "completed":
                break
        call.cancel()

    await asyncio.gather(*map(leave_at_the_end, calls))
    await served.settled()
    assert served.scheduler.load().pages_free == served.scheduler.load().pages_total


async def test_the_last_waiter_takes_the_build_along_and_others_do_not(gated: Gated) -> None:
    served, gate = gated
    create = p.CreatePrefixRequest(prefix_id="p", input=ids(*PROMPT))
    first, second = served.prefixes.CreatePrefix(create), served.prefixes.CreatePrefix(create)
    waiting = [asyncio.ensure_future(call) for call in (first, second)]
    await until(lambda: served.scheduler.load().prefixes_building == 1)
    await asyncio.sleep(0)
    first.cancel()
    assert await ended(first) is grpc.StatusCode.CANCELLED
    gate.set()
    assert (await second).state == p.PREFIX_STATE_READY
    gate.clear()
    lonely = served.prefixes.CreatePrefix(p.CreatePrefixRequest(prefix_id="q", input=ids(*PROMPT)))
    waiting.append(asyncio.ensure_future(lonely))
    await until(lambda: served.scheduler.load().prefixes_building == 1)
    lonely.cancel()
    await until(lambda: served.scheduler.load().prefixes_building == 0)
    gate.set()
    await asyncio.gather(*waiting, return_exceptions=True)
    await served.settled()


@pytest.mark.parametrize("kind", ["stream", "unary"])
async def test_a_deadline_is_a_cancel(gated: Gated, kind: str) -> None:
    served, gate = gated
    call = start(served, kind, request(), timeout=0.2)
    assert await ended(call) is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: served.num_open() == 0)
    gate.set()
    await served.settled()


async def test_a_lost_connection_is_a_cancel(gated: Gated) -> None:
    served, gate = gated
    channel = grpc.aio.insecure_channel(served.address)
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    calls = [stub.Generate(request(i)) for i in range(1, 9)]
    reads = [asyncio.ensure_future(call.read()) for call in calls]
    await until(lambda: served.num_open() == 8)
    await channel.close()
    await until(lambda: served.num_open() == 0)
    gate.set()
    await asyncio.gather(*reads, return_exceptions=True)
    await served.settled()


async def test_a_stray_cancel_of_our_own_is_a_status_not_a_hang(served: Served, monkeypatch: Any) -> None:
    async def cancelled(*args: Any, **kwargs: Any) -> None:
        raise asyncio.CancelledError("inner")

    monkeypatch.setattr(served.app._backend.names, "create", cancelled)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(10):
            await served.prefixes.CreatePrefix(p.CreatePrefixRequest(prefix_id="p", input=ids(1)))
    assert reason_of(caught.value) == ("INTERNAL", "INTERNAL") and "inner" not in str(caught.value)


async def test_an_unforeseen_error_says_nothing_of_itself(
    served: Served, monkeypatch: Any, quiet_logs: list[dict[str, Any]]
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("private")

    monkeypatch.setattr(served.scheduler, "generate", broken)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(served.generation.Generate(request(1)))
    assert reason_of(caught.value) == ("INTERNAL", "INTERNAL") and "private" not in str(caught.value)
    failures = [log for log in quiet_logs if log["event"] == "failed"]
    assert len(failures) == 1 and isinstance(failures[0]["exc_info"], ZeroDivisionError)


async def test_a_stopped_reader_gets_fewer_larger_messages_and_others_keep_their_speed() -> None:
    small_window = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
    async with serving() as served, grpc.aio.insecure_channel(served.address, small_window) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        slow = stub.Generate(request(9, 9, max_tokens=1000, n=8, logprobs=20))
        assert (await slow.read()).WhichOneof("output") == "started"  # and then nothing is read for a while
        quick = await collect(served.generation.Generate(request(1, 2, max_tokens=200)))
        assert sum(len(message.delta.token_ids) for message in quick) == 200
        await until(lambda: served.num_open() == 0)  # the slow one is decoded to its end all the same
        received: dict[int, list[int]] = {choice: [] for choice in range(8)}
        largest = 0
        while message := await slow.read():
            received[message.delta.choice] += message.delta.token_ids
            largest = max(largest, len(message.delta.token_ids))
        assert all(tuple(tokens) == expected_tokens((9, 9), 1000) for tokens in received.values())
        assert largest > 2 * served.engine.limits.max_steps, "nothing was coalesced while the reader stood still"


async def test_a_thousand_cancelled_streams_leave_nothing_behind(
    served: Served, quiet_logs: list[dict[str, Any]]
) -> None:
    async def cancel_one(number: int) -> None:
        call = served.generation.Generate(request(1 + number % 500, 2, 3, max_tokens=1000))
        await call.read()
        call.cancel()
        assert await ended(call) is grpc.StatusCode.CANCELLED

    async def cancel_many(count: int) -> None:
        for begin in range(0, count, 40):
            await asyncio.gather(*(cancel_one(begin + i) for i in range(40)))
        await served.settled()
        gc.collect()

    await cancel_many(200)
    assert {log["event"] for log in quiet_logs} <= {"listening", "ready", "answered", "cancelled"}
    quiet_logs.clear()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    grown_objects = []
    while min(grown_objects, default=2000) >= 2000 and len(grown_objects) < 2:  # an import is as many, but once
        objects = len(gc.get_objects())
        await cancel_many(1000)
        grown_objects.append(len(gc.get_objects()) - objects)
    assert {log["event"] for log in quiet_logs} <= {"answered", "cancelled"}
    quiet_logs.clear()
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert min(grown_objects) < 2000, "about an object or two stays for each cancelled stream"
    assert grown_kib < 20 * 1024, f"1000 cancelled streams left {grown_kib} KiB behind"
    load = served.scheduler.load()
    assert load.pages_free == load.pages_total


class _LeftContext:
    """Of a call whose caller has just left: gRPC takes no more of it."""

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def set_trailing_metadata(self, trailers: object) -> None: ...

    async def write(self, message: object) -> None:
        raise ExecuteBatchError("execute_batch", ())

    async def abort(self, *status: object) -> None:
        raise AssertionError(f"there is nobody to tell {status}")


async def test_a_caller_that_leaves_while_an_answer_is_written_is_no_fault_of_ours(
    quiet_logs: list[dict[str, Any]],
) -> None:
    async with serving(metrics_listen="127.0.0.1:0") as served:
        metrics: Metrics = served.app._observation._metrics
        service = GenerationService(served.app._backend, PrefixCreator(served.app._backend))
        with pytest.raises(grpc.aio.InternalError):
            await service.Generate(request(), _LeftContext())  # type: ignore[arg-type]
        await until(lambda: sum(count for (method, _), count in metrics.calls.items() if method == "Generate") == 1)
        assert metrics.calls["Generate", "CANCELLED"] == 1
        await served.settled()
    assert [log["event"] for log in quiet_logs if log.get("method") == "Generate"] == ["cancelled"]
