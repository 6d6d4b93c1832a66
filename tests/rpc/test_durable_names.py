"""Names that last: one server and the next on a file, several on one Redis."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from redis_server import RedisServer
from replicas_harness import OTHER, PROMPT, Replicas, client_of, expected, generated, two, until_generates
from rpc_harness import until

from tinyloop_service.client import AsyncClient
from tinyloop_service.engine.fake import FAKE_LIMITS, FakeEngine
from tinyloop_service.errors import (
    EngineFault,
    EtagMismatch,
    PrefixDamaged,
    PrefixExists,
    PrefixExpired,
    PrefixNotFound,
)
from tinyloop_service.registry import Changes, mirror
from tinyloop_service.registry.redis import RedisRegistry
from tinyloop_service.settings import NamesSettings, SchedulerSettings
from tinyloop_service.types import PrefixState


def sqlite(path: Path) -> NamesSettings:
    return NamesSettings(registry=f"sqlite:///{path}/names.db")


# ---- one server and the next


async def test_names_outlive_the_server_and_are_built_once_on_first_use(tmp_path: Path) -> None:
    async with client_of(names=sqlite(tmp_path)) as (_, client):
        created = await client.create_prefix("p", PROMPT, loops=3, ttl=1000, pinned=True)
        await client.create_prefix("gone", PROMPT)
        await client.delete_prefix("gone")
        await client.create_prefix("changed", PROMPT)
        changed = await client.update_prefix("changed", pinned=True)
    async with client_of(names=sqlite(tmp_path)) as (served, client):
        assert [(info.id, info.state) for info in await client.list_prefixes()] == [
            ("changed", PrefixState.EVICTED),
            ("p", PrefixState.EVICTED),
        ]
        found = await client.get_prefix("p")
        for field in ("uid", "etag", "expire_time", "pinned", "loops", "content_sha256", "create_time"):
            assert getattr(found, field) == getattr(created, field), field
        assert (await client.get_prefix("changed")).etag == changed.etag
        with pytest.raises(PrefixNotFound):
            await client.get_prefix("gone")
        answers = await asyncio.gather(*(generated(client, "p") for _ in range(8)))
        assert answers == [expected(PROMPT, 3)] * 8
        assert served.engine.tokens_prefilled == len(PROMPT) + 8
        again = await client.create_prefix("p", PROMPT, loops=3)
        assert again.uid == created.uid and again.expire_time is None


async def test_a_child_outlives_the_server_without_its_parent_s_name(tmp_path: Path) -> None:
    async with client_of(names=sqlite(tmp_path)) as (_, client):
        await client.create_prefix("mother", PROMPT)
        first = [await client.create_prefix(name, (7, 8, i), parent="mother") for i, name in enumerate("ab")]
        await client.delete_prefix("mother")
    async with client_of(names=sqlite(tmp_path)) as (served, client):
        for i, name in enumerate("ab"):
            assert await generated(client, name) == expected((*PROMPT, 7, 8, i))
        assert served.engine.tokens_prefilled == len(PROMPT) + 2 * (3 + 1), "the mother's pages are shared again"
        now = [await client.get_prefix(name) for name in "ab"]
        assert [info.shared_bytes for info in now] == [info.shared_bytes for info in first]
        assert [info.content_sha256 for info in now] == [info.content_sha256 for info in first]
        with pytest.raises(PrefixNotFound):
            await client.get_prefix("mother")


async def test_what_expired_while_no_server_ran_has_expired(tmp_path: Path) -> None:
    async with client_of(names=sqlite(tmp_path)) as (_, client):
        await client.create_prefix("p", PROMPT, ttl=0.2)
        created = await client.get_prefix("p")
    assert created.expire_time is not None
    await until(lambda: time.time() > created.expire_time.timestamp())  # type: ignore[union-attr]
    async with client_of(names=sqlite(tmp_path)) as (_, client):
        assert await client.list_prefixes() == []
        with pytest.raises(PrefixExpired):
            await generated(client, "p")
        assert (await client.create_prefix("p", OTHER)).uid != created.uid
        assert await generated(client, "p") == expected(OTHER)


async def test_another_model_has_names_of_its_own(tmp_path: Path) -> None:
    async with client_of(names=sqlite(tmp_path)) as (_, client):
        first = await client.create_prefix("p", PROMPT)
    other = FakeEngine(replace(FAKE_LIMITS, model_id="requantised"))
    async with client_of(other, names=sqlite(tmp_path)) as (_, client):
        with pytest.raises(PrefixNotFound):
            await generated(client, "p")
        assert await client.list_prefixes() == []
        await client.create_prefix("p", OTHER)
    async with client_of(names=sqlite(tmp_path)) as (_, client):
        assert (await client.get_prefix("p")).uid == first.uid
        assert await generated(client, "p") == expected(PROMPT)


async def test_an_abandoned_create_leaves_no_name_behind(tmp_path: Path) -> None:
    gate = threading.Event()
    async with client_of(FakeEngine(gate=gate), names=sqlite(tmp_path)) as (served, client):
        creating = asyncio.create_task(client.create_prefix("p", PROMPT))
        await until(lambda: served.scheduler.load().prefixes_building == 1)
        creating.cancel()
        await until(lambda: served.scheduler.load().prefixes_building == 0)
        with pytest.raises(PrefixNotFound):
            await client.get_prefix("p")
        gate.set()
        assert await client.list_prefixes() == []
        await client.create_prefix("p", OTHER)
    async with client_of(names=sqlite(tmp_path)) as (_, client):
        assert [info.id for info in await client.list_prefixes()] == ["p"]
        assert await generated(client, "p") == expected(OTHER)


async def test_a_create_that_is_refused_after_its_claim_takes_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_of(names=sqlite(tmp_path)) as (served, client):
        kept = await client.create_prefix("kept", PROMPT)

        def refuse(*args: Any, **kwargs: Any) -> str:
            raise EngineFault("of the test, between claim and build")

        with monkeypatch.context() as patch:
            patch.setattr(served.scheduler.catalog, "create", refuse)
            for name in ("new", "kept"):
                with pytest.raises(EngineFault):
                    await client.create_prefix(name, PROMPT, pinned=True)
        assert [(info.id, info.etag, info.pinned) for info in await client.list_prefixes()] == [
            ("kept", kept.etag, False)
        ]


# ---- replicas


_DATABASES: Iterator[int] = itertools.count()


@pytest.fixture
def shared(redis_server: RedisServer) -> Iterator[NamesSettings]:
    """A database of one's own in the Redis of all tests."""
    url = f"{redis_server.url.rpartition('/')[0]}/{next(_DATABASES) % 16}"
    with redis.Redis.from_url(url) as database:
        database.flushdb()
    yield NamesSettings(registry=url)


@pytest.fixture
async def replicas(shared: NamesSettings) -> AsyncIterator[Replicas]:
    async with two(shared) as both:
        yield both


async def test_a_name_made_at_one_replica_is_used_at_another_and_built_once(replicas: Replicas) -> None:
    r = replicas
    await r.a.create_prefix("mother", PROMPT)
    created = await r.a.create_prefix("p", (7, 8), parent="mother")
    answers = await asyncio.gather(*(generated(r.b, "p") for _ in range(8)))
    assert answers == [expected((*PROMPT, 7, 8))] * 8
    assert r.served_b.engine.tokens_prefilled == len(PROMPT) + 2 + 8
    found = await r.b.get_prefix("p")
    assert (found.uid, found.etag, found.state) == (created.uid, created.etag, PrefixState.READY)
    assert [info.id for info in await r.b.list_prefixes()] == ["mother", "p"]
    assert (await r.b.create_prefix("p", (7, 8), parent="mother")).uid == created.uid
    with pytest.raises(PrefixExists):
        await r.b.create_prefix("p", OTHER)


async def test_a_change_at_one_replica_reaches_the_others(replicas: Replicas) -> None:
    r = replicas
    await r.a.create_prefix("p", PROMPT)
    old = await r.b.get_prefix("p")
    new = await r.a.update_prefix("p", pinned=True, ttl=500)
    with pytest.raises(EtagMismatch):
        await r.b.update_prefix("p", pinned=False, etag=old.etag)
    with pytest.raises(EtagMismatch):
        await r.b.delete_prefix("p", etag=old.etag)
    seen = await r.b.update_prefix("p", pinned=False, etag=new.etag)
    assert seen.expire_time == new.expire_time and not seen.pinned
    await r.b.delete_prefix("p")
    await until(lambda: not r.served_a.scheduler.list_prefixes())
    with pytest.raises(PrefixNotFound):
        await generated(r.a, "p")


@pytest.mark.parametrize("with_news", [True, False], ids=["pub/sub", "poll alone"])
async def test_a_name_made_again_elsewhere_is_never_served_old_later_than_a_second(
    shared: NamesSettings, monkeypatch: pytest.MonkeyPatch, with_news: bool
) -> None:
    async def no_news(self: RedisRegistry, limit_s: float) -> None:
        await asyncio.sleep(limit_s)

    if not with_news:
        monkeypatch.setattr(RedisRegistry, "wait", no_news)
    prompts = (PROMPT, OTHER)
    async with two(shared) as r:
        await r.a.create_prefix("p", PROMPT)
        assert await generated(r.b, "p") == expected(PROMPT)
        for turn in range(1, 4):
            await r.a.delete_prefix("p")
            await r.a.create_prefix("p", prompts[turn % 2])
            answered_s, asked_s = time.monotonic(), 0.0
            while True:
                asked_s = time.monotonic()
                answer = await generated(r.b, "p")
                if answer == expected(prompts[turn % 2]):
                    break
                assert answer == expected(prompts[1 - turn % 2])
                assert asked_s < answered_s + 1.0, f"old after {asked_s - answered_s:.2f} s"
        await until(lambda: r.served_b.scheduler.load().prefixes_ready == 1)


async def test_a_use_waits_for_a_look_that_is_new_enough(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    r, looking, looks, asked = replicas, asyncio.Event(), asyncio.Event(), asyncio.Event()
    await r.a.create_prefix("p", PROMPT)
    await generated(r.b, "p")
    changes, fresh = RedisRegistry.changes, mirror.Mirror._fresh

    async def slow(self: RedisRegistry, since: int | None) -> Any:
        if self is r.served_b.app._names._registry:  # type: ignore[union-attr]
            looking.set()
            await looks.wait()
        return await changes(self, since)

    async def seen(self: mirror.Mirror) -> None:
        asked.set()
        await fresh(self)

    monkeypatch.setattr(RedisRegistry, "changes", slow)
    await looking.wait()
    monkeypatch.setattr(mirror, "MAX_AGE_S", 0.0)  # what was seen before the change is too old
    await r.a.delete_prefix("p")
    monkeypatch.setattr(mirror.Mirror, "_fresh", seen)
    use = asyncio.create_task(generated(r.b, "p"))
    await asked.wait()
    assert await r.b.generate((1, 2), max_tokens=1), "others are served meanwhile"
    assert not use.done()
    monkeypatch.setattr(mirror, "MAX_AGE_S", 1000.0)
    looks.set()
    with pytest.raises(PrefixNotFound):
        await use


async def test_who_is_far_behind_looks_at_every_name(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    r = replicas
    for name in ("same", "other", "gone"):
        await r.a.create_prefix(name, PROMPT)
        await generated(r.b, name)
    changes = RedisRegistry.changes

    async def too_many(self: RedisRegistry, since: int | None) -> Changes:
        return Changes((await changes(self, since)).position, None)

    monkeypatch.setattr(RedisRegistry, "changes", too_many)
    await r.a.delete_prefix("gone")
    await r.a.delete_prefix("other")
    await until(lambda: [info.name for info in r.served_b.scheduler.list_prefixes()] == ["same"])
    await r.a.create_prefix("other", OTHER)
    assert await generated(r.b, "other") == expected(OTHER)


async def test_of_two_creates_at_two_replicas_one_wins(replicas: Replicas) -> None:
    r = replicas
    for i in range(5):
        rivals = (r.a.create_prefix(f"p{i}", PROMPT), r.b.create_prefix(f"p{i}", OTHER))
        results = await asyncio.gather(*rivals, return_exceptions=True)
        assert sorted(type(result).__name__ for result in results) == ["Prefix", "PrefixExists"]
        won = PROMPT if isinstance(results[1], PrefixExists) else OTHER
        assert await generated(r.a, f"p{i}") == await generated(r.b, f"p{i}") == expected(won)
        same = await asyncio.gather(r.a.create_prefix(f"q{i}", PROMPT), r.b.create_prefix(f"q{i}", PROMPT))
        assert same[0].uid == same[1].uid


async def test_a_build_that_fails_here_is_built_there(shared: NamesSettings) -> None:
    broken = FakeEngine(fault=lambda plan: EngineFault("of the test") if plan.prefill else None)
    async with client_of(broken, names=shared) as (_, a), client_of(names=shared) as (_, b):
        with pytest.raises(EngineFault):
            await a.create_prefix("p", PROMPT)
        assert (await a.get_prefix("p")).state is PrefixState.FAILED
        assert await generated(b, "p") == expected(PROMPT)
        with pytest.raises(EngineFault):
            await a.create_prefix("p", OTHER)  # FAILED is replaced, for everybody
        await until_generates(b, "p", OTHER)


async def test_a_replica_with_less_memory_serves_a_pinned_name(shared: NamesSettings) -> None:
    small = FakeEngine(replace(FAKE_LIMITS, num_pages=40))
    tight = SchedulerSettings(pin_fraction=0.1)
    async with client_of(names=shared) as (_, a), client_of(small, names=shared, scheduler=tight) as (_, b):
        await a.create_prefix("p", PROMPT, pinned=True)
        assert await generated(b, "p") == expected(PROMPT)
        assert not (await b.get_prefix("p")).pinned
        renewed = await b.update_prefix("p", ttl=100)
        assert not renewed.pinned
        found = [info for info in await a.list_prefixes() if info.expire_time == renewed.expire_time]
        await until_pinned(a, renewed.etag)
        assert found == [] or found[0].pinned


async def until_pinned(client: AsyncClient, etag: str) -> None:
    """The renewal did not unpin it where it is pinned."""
    async with asyncio.timeout(20.0):
        while (found := await client.get_prefix("p")).etag != etag:
            pass
    assert found.pinned


async def test_a_damaged_record_is_named_and_harms_no_other(replicas: Replicas) -> None:
    r = replicas
    await r.a.create_prefix("good", PROMPT)
    await r.a.create_prefix("p", PROMPT)
    with redis.Redis.from_url(r.names.registry) as database:
        (records,) = database.keys("*:records")
        database.hset(records, "\0p", b"{}")
    with pytest.raises(PrefixDamaged):
        await generated(r.b, "p")
    assert [info.id for info in await r.b.list_prefixes()] == ["good"]
    assert await generated(r.b, "good") == expected(PROMPT)
