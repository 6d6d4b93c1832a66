"""The shared registry: news of changes, and what happens when Redis goes away, refuses or forgets."""

from __future__ import annotations

import asyncio
import re
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from records import TENANT, record
from redis_server import RedisServer, running_redis

from tinyloop_service.errors import InvalidArgument, RegistryUnavailable, install
from tinyloop_service.registry import Realm, open_registry, redis

Registry = redis.RedisRegistry


@pytest.fixture
async def replicas(redis_server: RedisServer) -> AsyncIterator[tuple[Registry, Registry]]:
    realm = Realm(uuid.uuid4().hex, "fp16")
    both = (await Registry.open(redis_server.url, realm), await Registry.open(redis_server.url, realm))
    yield both
    for registry in both:
        await registry.close()


async def test_changes_are_told_from_a_position_on(replicas: tuple[Registry, Registry]) -> None:
    a, b = replicas
    first = record()
    await a.write(first, replaces=None)
    start = (await b.changes(None)).position
    assert (await b.changes(start)).etags == {}
    second, other = record(revision=2), record("other", tenant="")
    await a.write(second, replaces=first.etag)
    await a.write(other, replaces=None)
    await a.write(record("short-lived"), replaces=None)
    await a.remove(TENANT, "short-lived", etag=record("short-lived").etag)
    news = await b.changes(start)
    assert news.etags == {(TENANT, "genesis"): second.etag, ("", "other"): other.etag, (TENANT, "short-lived"): None}
    assert (await b.changes(news.position)).etags == {}


async def test_who_is_far_behind_is_told_to_look_at_everything(
    replicas: tuple[Registry, Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis, "MAX_LOG", 3)
    a, b = replicas
    await a.write(record("first"), replaces=None)
    start = (await b.changes(None)).position
    for i in range(3):
        await a.write(record(f"n{i}"), replaces=None)
    told = (await b.changes(start)).etags
    assert told is not None and len(told) == 3
    await a.write(record("n3"), replaces=None)
    assert (await b.changes(start)).etags is None


@pytest.mark.parametrize("num_lost", [1, 3, 5])
async def test_a_redis_that_lost_its_last_changes_is_not_taken_for_what_it_was(tmp_path: Path, num_lost: int) -> None:
    """Started with older data: however many changes are made since, nobody who saw a lost one is told that he has seen
    all but these."""
    with running_redis(tmp_path) as server:
        registry = await Registry.open(server.url, Realm("m", "fp16"))
        for i in range(3):
            await registry.write(record(f"kept-{i}"), replaces=None)
        kept = (await registry.changes(None)).position
        older = server.copy_data()
        seen = []
        for i in range(num_lost):
            await registry.write(record(f"lost-{i}"), replaces=None)
            seen.append((await registry.changes(None)).position)
        server.kill()
        server.start(older)
        for i in range(4):
            assert (await registry.changes(seen[-1])).etags is None
            await registry.write(record(f"new-{i}"), replaces=None)
        for position in seen:
            assert (await registry.changes(position)).etags is None
        told = (await registry.changes(kept)).etags
        assert told is not None and {name for _, name in told} == {f"new-{i}" for i in range(4)}
        await registry.close()


async def test_a_redis_that_was_emptied_is_not_taken_for_what_it_was(replicas: tuple[Registry, Registry]) -> None:
    a, b = replicas
    await a.write(record(), replaces=None)
    start = (await b.changes(None)).position
    await a._redis.delete(*a._keys)
    assert (await b.changes(start)) == redis.Changes(0, None)
    await a.write(record("another"), replaces=None)
    assert (await b.changes(start)).etags is None and (await b.changes(0)).etags is None


async def test_changes_have_an_order_although_the_clock_goes_back(replicas: tuple[Registry, Registry]) -> None:
    a, b = replicas
    await a.write(record("first"), replaces=None)
    (member,) = await a._redis.zrange(a._keys[4], 0, -1)
    ahead = 4 * 10**15  # µs, in the next century
    await a._redis.zadd(a._keys[4], {b"%d\0%s" % (ahead, member.partition(b"\0")[2]): ahead})
    for i in range(2):
        await a.write(record(f"n{i}"), replaces=None)
    news = await b.changes(ahead)
    assert news.position == ahead + 2 and news.etags is not None and len(news.etags) == 2


async def test_waiting_ends_with_the_news(replicas: tuple[Registry, Registry]) -> None:
    a, b = replicas
    await b.wait(0.01)  # from here on it listens
    waiting = asyncio.create_task(b.wait(60.0))
    await a.write(record(), replaces=None)
    async with asyncio.timeout(30.0):
        await waiting


async def test_a_redis_that_ends_is_unavailable_and_comes_back_with_its_names(tmp_path: Path) -> None:
    with running_redis(tmp_path) as server:
        registry = await Registry.open(server.url, Realm("m", "fp16"))
        await registry.wait(0.01)
        assert await registry.write(record(), replaces=None)
        server.kill()
        for call in (
            registry.read(TENANT, "genesis"),
            registry.write(record("new"), replaces=None),
            registry.remove(TENANT, "genesis", etag=record().etag),
            registry.page(TENANT, after="", limit=1),
            registry.changes(0),
            registry.purge(0),
        ):
            with pytest.raises(RegistryUnavailable):
                await call
        await registry.wait(0.01)  # does not mind
        with pytest.raises(RegistryUnavailable):
            await Registry.open(server.url, Realm("m", "fp16"))
        server.start()
        assert await registry.read(TENANT, "genesis") == record()
        assert await registry.read(TENANT, "new") is None
        assert await registry.write(record("new"), replaces=None)
        await registry.close()


async def test_without_the_package_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.delitem(sys.modules, "tinyloop_service.registry.redis")
    with pytest.raises(InvalidArgument, match=re.escape(install("redis"))):
        await open_registry("redis://127.0.0.1:1", Realm("m", "fp16"))


@pytest.mark.parametrize("url", ["redis://127.0.0.1:99999", "redis://host:notaport"])
async def test_an_address_that_cannot_be_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument):
        await open_registry(url, Realm("m", "fp16"))


async def test_a_redis_that_lets_nobody_in_is_refused_without_the_password(redis_server: RedisServer) -> None:
    url = redis_server.url.replace("redis://", "redis://user:very-secret@")
    with pytest.raises(InvalidArgument, match="Redis refuses") as caught:
        await open_registry(url, Realm("m", "fp16"))
    assert "very-secret" not in str(caught.value)
