"""Which replica a client asks: the header that proxies hash, and clients that hash by themselves."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from clients_harness import GREEDY, PROMPT
from rpc_harness import CONFIG, SERVER, Served, expected_tokens, serving, until

from tinyloop_service import errors
from tinyloop_service.app import App
from tinyloop_service.client import AsyncClient, Client, channel
from tinyloop_service.engine.fake import FakeEngine
from tinyloop_service.loading import LoadedModel
from tinyloop_service.observer import CallRecord
from tinyloop_service.rpc import boundary
from tinyloop_service.settings import Settings


async def test_the_routing_header_and_the_token_are_sent(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []
    enter = boundary.answering.__aenter__

    async def spy(self: boundary.answering) -> CallRecord:
        call = await enter(self)
        seen.append((call.method, dict(self._context.invocation_metadata())))
        return call

    monkeypatch.setattr(boundary.answering, "__aenter__", spy)
    async with served.client(token="secret") as client:
        await client.create_prefix("p", PROMPT)
        await client.complete(prefix="p", **GREEDY)
        [_ async for _ in client.stream(prefix="p", **GREEDY)]
        await client.get_prefix("p")
        await client.update_prefix("p", pinned=True)
        await client.delete_prefix("p")
        await client.generate(PROMPT, 1)
    assert all(headers["authorization"] == "Bearer secret" for _, headers in seen)
    assert [headers.get(channel.PREFIX_KEY) for _, headers in seen] == ["p"] * 6 + [None]


async def test_affinity_sends_all_of_one_prefix_to_one_replica() -> None:
    async with serving(FakeEngine(), replica="a") as first, serving(FakeEngine(), replica="b") as second:
        target = "ipv4:" + ",".join((first.address, second.address))
        async with AsyncClient(target, affinity=True, timeout=20) as client:
            for i in range(12):
                await client.create_prefix(f"p{i}", PROMPT)
                for _ in range(3):
                    assert (await client.complete(prefix=f"p{i}", **GREEDY)).usage.cached_tokens == len(PROMPT)
        held = [len(server.scheduler.list_prefixes()) for server in (first, second)]
        assert sum(held) == 12 and min(held) > 0, f"prefixes are not spread: {held}"
        async with AsyncClient(target, timeout=20) as client:
            replicas = {(await client.model()).replica for _ in range(20)}
        assert replicas == {"a", "b"}


async def test_affinity_goes_round_a_replica_that_drains_or_warms_up() -> None:
    gate, names = threading.Event(), [f"p{i}" for i in range(12)]

    def load() -> LoadedModel:
        gate.wait()
        return LoadedModel(FakeEngine(), None, CONFIG)

    late = App(Settings(server=SERVER), load)
    await late.start()
    try:
        async with serving(FakeEngine(step_s=0.002)) as first, serving() as second:
            target = "ipv4:" + ",".join((first.address, second.address, late.address))
            async with AsyncClient(target, affinity=True, timeout=30) as client:
                for name in names:
                    await client.create_prefix(name, PROMPT)
                held = [{info.name for info in server.scheduler.list_prefixes()} for server in (first, second)]
                assert all(held) and sum(map(len, held)) == 12, "both have some, who is not ready has none"
                stream = client.stream(prefix=held[0].pop(), max_tokens=500, ignore_eos=True)
                pieces = [await anext(stream)]
                stopping = asyncio.create_task(first.app.stop(grace_s=30.0))
                await until(lambda: not first.scheduler.load().accepting)
                for name in names:
                    await client.create_prefix(name, PROMPT)
                assert {info.name for info in second.scheduler.list_prefixes()} == set(names)
                pieces += [piece async for piece in stream]
                assert sum(len(piece.token_ids) for piece in pieces) == 500, "what ran there has finished"
                await stopping
                gate.set()
                await late.ready()
                async with asyncio.timeout(20):
                    while not late._backend.scheduler.list_prefixes():  # its names come home
                        await asyncio.gather(*(client.create_prefix(name, PROMPT) for name in names))
    finally:
        gate.set()
        await late.stop(0.0)


async def test_a_client_beyond_the_most_that_may_watch_health_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reaches the port may hold all watches; to any status but UNIMPLEMENTED gRPC would call nobody."""
    monkeypatch.setattr("tinyloop_service.rpc.health.MOST_WATCHES", 0)
    async with serving() as served, served.client(affinity=True, timeout=20) as client:
        assert (await client.complete(PROMPT, **GREEDY)).token_ids == expected_tokens(PROMPT, 6)


def test_affinity_says_when_grpc_is_told_not_to_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(channel._RING_HASH_SWITCH, "false")
    for kind in (Client, AsyncClient):
        with pytest.raises(errors.InvalidArgument, match="unset it, or set it to true") as caught:
            kind("127.0.0.1:1", affinity=True)
        assert caught.value.field == "affinity"
        kind("127.0.0.1:1")
    monkeypatch.delenv(channel._RING_HASH_SWITCH)
    Client("127.0.0.1:1", affinity=True).close()


async def test_replica_names_default_to_the_host(served: Served) -> None:
    app = App(Settings(server=replace(SERVER, replica=None)), lambda: LoadedModel(FakeEngine(), None, CONFIG))
    await app.start()
    await app.ready()
    async with AsyncClient(app.address) as client:
        assert (await client.model()).replica
    await app.stop(0.0)
