"""What must come through a proxy as it was said: statuses and their details, cancels, deadlines, pieces as they come.

The server is in this process, so that it can be looked at: one for all tests, with an engine that stands still while
its gate is closed.  Of the pods that the proxies are told of it is the first; there is a second for one test, and the
third does not exist.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
import structlog
from google.rpc import error_details_pb2, status_pb2
from name_server import name_server
from processes import pod_address, pod_records, running_envoy, running_haproxy
from redis_server import free_port
from rpc_harness import Served, byte_tokenizer, collect, expected_tokens, field_of, ids, reason_of, serving, until

from tinyloop_service import errors
from tinyloop_service.client import AsyncClient
from tinyloop_service.client.channel import PREFIX_KEY
from tinyloop_service.engine.fake import FakeEngine
from tinyloop_service.observer import CallRecord
from tinyloop_service.pb import generation_pb2 as g
from tinyloop_service.pb import generation_pb2_grpc, model_pb2, model_pb2_grpc, prefix_pb2_grpc
from tinyloop_service.pb import prefix_pb2 as p
from tinyloop_service.rpc import boundary
from tinyloop_service.rpc.status import DETAILS_KEY, PUSHBACK_KEY
from tinyloop_service.settings import SchedulerSettings

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROXIES = ("envoy", "haproxy")
NO_RETRIES = (("grpc.enable_retries", 0),)
PROMPT = (1, 2, 3)
LONG = 1900  # tokens
QUEUE = 120


@dataclass(frozen=True)
class Proxied:
    """A server, and how it is reached through a proxy."""

    proxy: str
    target: str
    served: Served
    gate: threading.Event
    channel: grpc.aio.Channel

    @property
    def generation(self) -> Any:
        return generation_pb2_grpc.GenerationServiceStub(self.channel)

    @property
    def prefixes(self) -> Any:
        return prefix_pb2_grpc.PrefixServiceStub(self.channel)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Where the proxies listen, and where pods have to."""
    port = free_port()
    with ExitStack() as stack:
        names = stack.enter_context(name_server(pod_records(2)))
        envoy = stack.enter_context(running_envoy(tmp_path_factory.mktemp("envoy"), port, names))
        haproxy = stack.enter_context(running_haproxy(port, names))
        pods = {"first": f"{pod_address(0)}:{port}", "second": f"{pod_address(1)}:{port}"}
        yield {"envoy": envoy, "haproxy": haproxy, **pods}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(targets: dict[str, str]) -> AsyncIterator[tuple[Served, threading.Event]]:
    gate = threading.Event()
    settings = SchedulerSettings(max_queue=QUEUE)
    engine = FakeEngine(gate=gate, step_s=0.001)
    async with serving(engine, scheduler=settings, tokenizer=byte_tokenizer(), listen=targets["first"]) as served:
        yield served, gate


@pytest_asyncio.fixture(loop_scope="module", params=PROXIES)
async def proxied(
    request: pytest.FixtureRequest, targets: dict[str, str], server: tuple[Served, threading.Event]
) -> AsyncIterator[Proxied]:
    """The proxy knows that the server is ready.  The gate is open, before and after."""
    served, gate = server
    gate.set()
    async with grpc.aio.insecure_channel(targets[request.param], NO_RETRIES) as channel:
        await until_answered(channel)
        yield Proxied(request.param, targets[request.param], served, gate, channel)
        gate.set()
        await served.settled()


@pytest.fixture(autouse=True)
def logs() -> Iterator[Any]:
    with structlog.testing.capture_logs() as captured:
        yield captured


async def replica_of(channel: grpc.aio.Channel, prefix: str) -> str:
    """Who answers for a prefix."""
    get = model_pb2_grpc.ModelServiceStub(channel).GetModel
    answer = await get(model_pb2.GetModelRequest(), metadata=((PREFIX_KEY, prefix),))
    return str(answer.replica)


async def until_answered(channel: grpc.aio.Channel) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                await replica_of(channel, "any")
                return
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                await asyncio.sleep(0.05)


def request(*tokens: int, max_tokens: int = LONG) -> g.GenerateRequest:
    return g.GenerateRequest(input=ids(*(tokens or PROMPT)), max_tokens=max_tokens, ignore_eos=True)


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (collect(call) if hasattr(call, "__aiter__") else call)
    return caught.value


async def test_statuses_come_with_their_details(proxied: Proxied) -> None:
    wrong = await refusal(proxied.generation.Generate(request(max_tokens=-1)))
    assert reason_of(wrong)[0] == "INVALID_ARGUMENT" and field_of(wrong) == "max_tokens"
    get, mine = proxied.prefixes.GetPrefix, (("x-request-id", "mine"),)
    missing = await refusal(get(p.GetPrefixRequest(name="prefixes/nobody"), metadata=mine))
    assert reason_of(missing) == ("NOT_FOUND", "PREFIX_NOT_FOUND")
    assert dict(missing.trailing_metadata())["x-request-id"] == "mine"


async def test_a_connection_has_many_streams_and_a_full_queue_says_when_to_come_back(proxied: Proxied) -> None:
    proxied.gate.clear()
    generate = proxied.generation.Generate
    waiting = [asyncio.ensure_future(collect(generate(request(1, 2, max_tokens=2)))) for _ in range(QUEUE + 80)]
    await until(lambda: any(call.done() for call in waiting))
    full = await refusal(generate(request()))
    assert reason_of(full) == ("UNAVAILABLE", "QUEUE_FULL")
    retry, trailers = error_details_pb2.RetryInfo(), dict(full.trailing_metadata())
    assert any(detail.Unpack(retry) for detail in status_pb2.Status.FromString(trailers[DETAILS_KEY]).details)
    assert int(trailers[PUSHBACK_KEY]) == retry.retry_delay.ToMilliseconds() > 0
    assert proxied.served.num_open() >= QUEUE
    proxied.gate.set()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_cancels_and_deadlines_reach_the_server(
    proxied: Proxied, logs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float | None] = []
    enter = boundary.answering.__aenter__

    async def spy(self: boundary.answering) -> CallRecord:
        limits.append(self._context.time_remaining())
        return await enter(self)

    async def cancelled(count: int) -> None:
        await until(lambda: sum(log["event"] == "cancelled" for log in logs) == count)

    monkeypatch.setattr(boundary.answering, "__aenter__", spy)
    stubs = proxied.generation
    proxied.gate.clear()
    silent = stubs.Generate(request())
    await until(lambda: len(limits) == 1)
    silent.cancel()
    await cancelled(1)
    unary = stubs.GenerateUnary(g.GenerateUnaryRequest(generation=request()), timeout=1000)
    await until(lambda: len(limits) == 2)
    unary.cancel()
    await cancelled(2)
    assert limits[0] is None and 900 < (limits[1] or 0) < 1100, "rounded on its way"
    late = await refusal(stubs.Generate(request(), timeout=0.3))
    assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await cancelled(3)
    proxied.gate.set()
    begun = stubs.Generate(request())
    await begun.read()
    begun.cancel()
    await cancelled(4)


async def test_pieces_come_as_they_are_made(proxied: Proxied) -> None:
    stream = proxied.generation.Generate(request())
    assert (await stream.read()).WhichOneof("output") == "started"
    seen = list((await stream.read()).delta.token_ids)
    proxied.gate.clear()
    assert proxied.served.num_open() == 1 and len(seen) < LONG, "the first come while the last are not made yet"
    proxied.gate.set()
    while (message := await stream.read()) is not grpc.aio.EOF:
        seen += message.delta.token_ids
    assert tuple(seen) == expected_tokens(PROMPT, LONG)


async def test_large_messages_come_through_both_ways(proxied: Proxied) -> None:
    async with AsyncClient(proxied.target) as client:
        completion = await client.complete((1, 2), max_tokens=500, logprobs=20, ignore_eos=True)
        assert len(completion.choices[0].logprobs) == 500
        with pytest.raises(errors.SequenceTooLong, match="1000000"):
            await client.create_prefix("long", np.full(10**6, 300))  # 2 MB on the wire
        with pytest.raises((errors.InvalidArgument, errors.Unavailable)) as refused:
            await client.create_prefix("huge", "a" * (17 * 2**20))
        assert "too large" in str(refused.value) or proxied.proxy == "haproxy", "it hangs up on who still talks"


async def test_a_replica_that_drains_gets_no_new_calls_and_finishes_its_streams(
    proxied: Proxied, targets: dict[str, str]
) -> None:
    own = {"listen": targets["second"], "replica": "second", "drain_pause_s": 60.0}
    async with serving(FakeEngine(step_s=0.005), **own) as second:
        number = 0
        async with asyncio.timeout(30):
            while await replica_of(proxied.channel, f"p{number}") != "second":  # known soon after its start
                number += 1
        by_prefix = ((PREFIX_KEY, f"p{number}"),)
        streaming = asyncio.ensure_future(collect(proxied.generation.Generate(request(), metadata=by_prefix)))
        await until(lambda: second.num_open() == 1)
        stopping = asyncio.create_task(second.app.stop(grace_s=30.0))
        async with asyncio.timeout(30):
            while await replica_of(proxied.channel, f"p{number}") == "second":  # none of these is refused
                pass
        assert {await replica_of(proxied.channel, f"p{i}") for i in range(number + 20)} == {"replica-0"}
        assert sum(len(message.delta.token_ids) for message in await streaming) == LONG
        second.app.hurry()
        await stopping
