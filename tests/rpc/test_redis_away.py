"""What holds while Redis is away, before it is there, and when it comes back without its last changes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from redis_server import running_redis
from replicas_harness import OTHER, PROMPT, client_of, expected, generated, two, until_generates
from rpc_harness import Served, collect, ids, reason_of, until

from tinyloop_service.errors import PrefixNotFound
from tinyloop_service.pb import generation_pb2 as g
from tinyloop_service.pb import prefix_pb2 as p
from tinyloop_service.registry import Changes
from tinyloop_service.registry.redis import RedisRegistry
from tinyloop_service.settings import NamesSettings
from tinyloop_service.types import PrefixState


async def test_while_redis_is_away_memory_serves_and_changes_fail(tmp_path: Path) -> None:
    with running_redis(tmp_path) as server:
        names = NamesSettings(registry=server.url)
        async with client_of(names=names) as (served, client):
            await client.create_prefix("p", PROMPT)
            server.kill()
            assert await generated(client, "p") == expected(PROMPT)
            assert (await client.get_prefix("p")).state is PrefixState.READY
            new, known = p.CreatePrefixRequest(prefix_id="new", input=ids(*OTHER)), "prefixes/p"
            for call in (
                served.prefixes.CreatePrefix(new),
                served.prefixes.CreatePrefix(p.CreatePrefixRequest(prefix_id="p", input=ids(*PROMPT), pinned=True)),
                served.prefixes.CreatePrefix(p.CreatePrefixRequest(prefix_id="child", input=ids(1), parent=known)),
                served.prefixes.UpdatePrefix(p.UpdatePrefixRequest(prefix=p.Prefix(name=known, pinned=True))),
                served.prefixes.DeletePrefix(p.DeletePrefixRequest(name=known)),
                served.prefixes.GetPrefix(p.GetPrefixRequest(name="prefixes/unknown")),
                served.prefixes.ListPrefixes(p.ListPrefixesRequest()),
                collect(served.generation.Generate(g.GenerateRequest(prefix="prefixes/unknown", input=ids(1)))),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert reason_of(caught.value) == ("UNAVAILABLE", "REGISTRY_UNAVAILABLE")
            assert await generated(client, "p") == expected(PROMPT)
            assert await client.generate(PROMPT, max_tokens=1), "prompts without a name need no registry"
            server.start()
            assert [(info.id, info.pinned, info.expire_time) for info in await client.list_prefixes()] == [
                ("p", False, None)
            ]
            await client.update_prefix("p", pinned=True)
            await client.create_prefix("new", OTHER)
            assert await generated(client, "new") == expected(OTHER)


async def test_what_redis_lost_is_served_by_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes back with older data, and more is changed than was lost before anybody looks."""
    looks, changes = asyncio.Event(), RedisRegistry.changes

    async def later(self: RedisRegistry, since: int | None) -> Changes:
        await looks.wait()
        return await changes(self, since)

    with running_redis(tmp_path) as server:
        async with two(NamesSettings(registry=server.url)) as r:
            kept = {name: (await r.a.create_prefix(name, PROMPT)).etag for name in ("again", "renewed")}
            for name in kept:
                await generated(r.b, name)
            older = await asyncio.to_thread(server.copy_data)
            await r.a.delete_prefix("again")
            for name in ("again", "new"):
                await r.a.create_prefix(name, OTHER)
                await until_generates(r.b, name, OTHER)
            await r.a.update_prefix("renewed", pinned=True)
            await until(lambda: any(info.pinned for info in r.served_b.scheduler.list_prefixes()))
            monkeypatch.setattr(RedisRegistry, "changes", later)
            server.kill()
            await asyncio.to_thread(server.start, older)
            for i in range(6):
                await r.a.create_prefix(f"more-{i}", OTHER)
            renewed = await r.a.update_prefix("renewed", ttl=5000)
            kept["renewed"] = renewed.etag
            looks.set()
            for served in (r.served_a, r.served_b):
                await until(lambda s=served: known(s) == kept)  # type: ignore[misc]
            for client in (r.a, r.b):
                assert await generated(client, "again") == expected(PROMPT)
                with pytest.raises(PrefixNotFound):
                    await client.get_prefix("new")
                found = await client.get_prefix("renewed")
                assert (found.etag, found.pinned, found.expire_time) == (renewed.etag, False, renewed.expire_time)


def known(served: Served) -> dict[str | None, str]:
    """Etags by name, but for those of `more`."""
    return {info.name: info.etag for info in served.scheduler.list_prefixes() if "more" not in (info.name or "")}


async def test_a_server_waits_for_a_redis_that_is_not_there_yet(tmp_path: Path) -> None:
    with running_redis(tmp_path) as server:
        server.kill()
        names = NamesSettings(registry=server.url)
        starting = asyncio.create_task(_first_words(names))
        await asyncio.sleep(0)
        await asyncio.to_thread(server.start)
        assert await starting == expected(PROMPT)


async def _first_words(names: NamesSettings) -> tuple[int, ...]:
    async with client_of(names=names) as (_, client):
        await client.create_prefix("p", PROMPT)
        return await generated(client, "p")
