"""What every registry does, seen on all three: compare-and-set, listing, purging, realms."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from records import TENANT, record

from tinyloop_service.registry import Realm, Registry, open_registry

Opening = Callable[[Realm], Awaitable[Registry]]
REALM = Realm("a-model", "fp16")


@pytest.fixture(params=["memory", "sqlite", "redis"])
async def opening(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Opening]:
    """Opens registries of one place; they are closed in the end."""
    url, salt = request.param, uuid.uuid4().hex
    if url == "sqlite":
        url = f"sqlite:///{tmp_path}/names.db"
    elif url == "redis":
        url = request.getfixturevalue("redis_server").url
    async with AsyncExitStack() as stack:

        async def open_one(realm: Realm) -> Registry:
            found = await open_registry(url, replace(realm, model_id=realm.model_id + salt))
            stack.push_async_callback(found.close)
            return found

        yield open_one


@pytest.fixture
async def registry(opening: Opening) -> Registry:
    return await opening(REALM)


async def test_a_record_comes_back_as_it_was(registry: Registry) -> None:
    assert await registry.read(TENANT, "genesis") is None
    for written in (record(), record("bare", tokens=(0,), ancestors=(), pinned=False, expire_time_ns=2**62)):
        assert await registry.write(written, replaces=None)
        assert await registry.read(TENANT, written.name) == written
    assert await registry.read("another tenant", "genesis") is None


async def test_a_write_is_made_only_over_the_expected_record(registry: Registry) -> None:
    first, second = record(), record(revision=2, pinned=False)
    assert not await registry.write(second, replaces=first.etag), "there is nothing to replace yet"
    assert await registry.write(first, replaces=None)
    assert not await registry.write(second, replaces=None), "the name is taken"
    assert not await registry.write(second, replaces=record(uid="other").etag)
    assert await registry.read(TENANT, "genesis") == first
    assert await registry.write(second, replaces=first.etag)
    assert await registry.read(TENANT, "genesis") == second


async def test_a_removal_is_made_only_of_the_expected_record(registry: Registry) -> None:
    first, second = record(), record(revision=2)
    assert not await registry.remove(TENANT, "genesis", etag=first.etag)
    await registry.write(first, replaces=None)
    await registry.write(second, replaces=first.etag)
    assert not await registry.remove(TENANT, "genesis", etag=first.etag)
    assert await registry.read(TENANT, "genesis") == second
    assert await registry.remove(TENANT, "genesis", etag=second.etag)
    assert await registry.read(TENANT, "genesis") is None
    assert await registry.page(TENANT, after="", limit=10) == []
    assert await registry.write(first, replaces=None), "the name is free again"


async def test_one_of_many_at_once_wins(registry: Registry) -> None:
    rivals = [record(uid=f"uid-{i}") for i in range(20)]
    won = await asyncio.gather(*(registry.write(rival, replaces=None) for rival in rivals))
    assert sum(won) == 1
    assert await registry.read(TENANT, "genesis") == rivals[won.index(True)]


async def test_pages_are_in_the_order_of_names(registry: Registry) -> None:
    names = sorted(["a", "a-1", "a.b", "b", "z9", *(f"n{i:03}" for i in range(30))])
    for name in reversed(names):
        await registry.write(record(name), replaces=None)
    for tenant in ("", "acm", "acme2"):  # neighbours, who are told nothing
        await registry.write(record("x", tenant=tenant), replaces=None)
    assert [r.name for r in await registry.page(TENANT, after="", limit=100)] == names
    assert [r.name for r in await registry.page(TENANT, after="a", limit=3)] == names[1:4]
    assert [r.name for r in await registry.page(TENANT, after="a1", limit=1)] == ["b"]
    assert [r.name for r in await registry.page("", after="", limit=100)] == ["x"]
    assert await registry.page(TENANT, after="z9", limit=3) == []


async def test_purging_takes_what_expired_long_ago(registry: Registry) -> None:
    ms = 10**6  # what Redis tells apart
    for name, time_ns in (("old", 5 * ms), ("due", 7 * ms), ("later", 9 * ms), ("never", None)):
        await registry.write(record(name, expire_time_ns=time_ns), replaces=None)
    await registry.write(record("renewed", expire_time_ns=6 * ms), replaces=None)
    renewed = record("renewed", revision=2)
    await registry.write(renewed, replaces=record("renewed").etag)
    await registry.purge(7 * ms)
    left = await registry.page(TENANT, after="", limit=10)
    assert [found.name for found in left] == ["later", "never", "renewed"]
    assert await registry.read(TENANT, "old") is None
    assert await registry.write(record("old"), replaces=None)


async def test_realms_do_not_see_each_other(opening: Opening) -> None:
    mine = await opening(REALM)
    await mine.write(record(), replaces=None)
    if not mine.is_shared:
        await mine.close()  # a file is one process's
    for other in (replace(REALM, model_id="another"), replace(REALM, cache_mode="int8")):
        theirs = await opening(other)
        assert await theirs.read(TENANT, "genesis") is None
        assert await theirs.page(TENANT, after="", limit=10) == []
        assert await theirs.write(record(uid="theirs"), replaces=None)
        if not theirs.is_shared:
            await theirs.close()
