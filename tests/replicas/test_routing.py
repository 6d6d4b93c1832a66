"""Three replicas on one Redis, reached in three ways: through Envoy, through HAProxy, by the client's own ring hash.

Each way has names of its own.  Where a name is built is what its replica says: READY there, EVICTED elsewhere.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from name_server import name_server
from processes import DOMAIN, Replica, pod_records, running_envoy, running_haproxy, running_replicas
from redis_server import running_redis
from rpc_harness import expected_tokens

from tinyloop_service import errors
from tinyloop_service.cli import main
from tinyloop_service.client import AsyncClient
from tinyloop_service.types import PrefixState

WAYS = ("envoy", "haproxy", "ring")
LENGTH, SUFFIX = 80, (7,)
Homes = dict[str, set[str]]  # names by the replica where they are built


@dataclass(frozen=True)
class Topology:
    replicas: list[Replica]
    targets: dict[str, str]  # by way

    def client(self, way: str) -> AsyncClient:
        return AsyncClient(self.targets[way], affinity=way == "ring", timeout=60)

    async def homes(self, way: str) -> Homes:
        """Of the living."""
        living = [replica for replica in self.replicas if replica.process is not None]
        return dict(zip([r.name for r in living], [await _built(r, f"{way}-") for r in living], strict=True))


async def _built(replica: Replica, prefix: str) -> set[str]:
    async with AsyncClient(replica.address, timeout=60) as client:
        found = await client.list_prefixes()
    return {info.id for info in found if info.id.startswith(prefix) and info.state is PrefixState.READY}


@pytest.fixture(scope="module")
def topology(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    with ExitStack() as stack:
        redis = stack.enter_context(running_redis(tmp_path_factory.mktemp("redis")))
        names = stack.enter_context(name_server(pod_records(3)))
        replicas = stack.enter_context(running_replicas(3, redis.url))
        port = replicas[0].port
        targets = {
            "envoy": stack.enter_context(running_envoy(tmp_path_factory.mktemp("envoy"), port, names)),
            "haproxy": stack.enter_context(running_haproxy(port, names)),
            "ring": f"dns://127.0.0.1:{names}/{DOMAIN}:{port}",
        }
        found = Topology(replicas, targets)
        asyncio.run(_all_are_seen(found))
        yield found


async def _all_are_seen(topology: Topology) -> None:
    """Each way knows each replica."""

    async def seen(way: str) -> None:
        seen: set[str] = set()
        async with topology.client(way) as client, asyncio.timeout(30):
            while len(seen) < 3:
                try:
                    seen.add((await client.model()).replica)
                except errors.Unavailable:  # the proxy starts
                    await asyncio.sleep(0.05)

    await asyncio.gather(*map(seen, WAYS))


def prompt_of(name: str) -> tuple[int, ...]:
    number = int(name.rpartition("-")[2])
    return tuple(1 + (number + i) % 500 for i in range(LENGTH))


async def answers(client: AsyncClient, name: str, num_tokens: int = 4) -> bool:
    """Whether it is answered as it must be."""
    completion = await client.complete(prefix=name, suffix=SUFFIX, max_tokens=num_tokens, ignore_eos=True)
    return completion.token_ids == expected_tokens((*prompt_of(name), *SUFFIX), num_tokens)


def names_of(way: str) -> list[str]:
    return [f"{way}-{i}" for i in range(40)]


async def placed(topology: Topology, client: AsyncClient, way: str) -> Homes:
    for name in names_of(way):
        await client.create_prefix(name, prompt_of(name))
    return await topology.homes(way)


@pytest.mark.parametrize("way", WAYS)
async def test_names_are_spread_and_stay(topology: Topology, way: str) -> None:
    async with topology.client(way) as client:
        homes = await placed(topology, client, way)
        for name in names_of(way):
            assert await answers(client, name)
        handle = await client.build_prefix_cache(prompt_of("0"))
        for _ in range(3):  # its id is the client's choice, so that its use goes where it was built
            assert (await client.complete(prefix=handle, suffix=SUFFIX)).usage.cached_tokens == LENGTH
        assert sorted(map(len, [await _built(r, handle.id) for r in topology.replicas])) == [0, 0, 1]
    assert sum(map(len, homes.values())) == 40, "a name is built at one replica"
    assert min(map(len, homes.values())) >= 4, "and they are spread"
    assert await topology.homes(way) == homes, "uses went where it was built"


async def test_a_killed_replica_s_names_move_at_once_and_come_home(topology: Topology) -> None:
    clients = {way: topology.client(way) for way in WAYS}
    try:
        homes = await asyncio.gather(*(placed(topology, clients[way], way) for way in WAYS))
        before = dict(zip(WAYS, homes, strict=True))
        victim = topology.replicas[1]
        broken = {way: min(before[way][victim.name]) for way in WAYS}
        streams = {way: clients[way].stream(prefix=broken[way], max_tokens=1900, ignore_eos=True) for way in WAYS}
        for stream in streams.values():
            await anext(stream)
        asked = [asyncio.create_task(answers(clients[way], broken[way], 1900)) for way in ("envoy", "ring")]
        async with asyncio.timeout(30):
            while await _num_rows(victim) < len([*streams, *asked]):
                pass
        victim.kill()
        await asyncio.gather(*(_moves(topology, clients[way], way, before[way], victim.name) for way in WAYS))
        for stream in streams.values():  # of which the caller has a part
            with pytest.raises(errors.Unavailable):
                [delta async for delta in stream]
        assert all(await asyncio.gather(*asked)), "of which nobody had seen anything"
        victim.start()
        await asyncio.to_thread(victim.wait)
        await asyncio.gather(*(_comes_home(clients[way], way, before[way][victim.name], victim) for way in WAYS))
    finally:
        await asyncio.gather(*(client.close() for client in clients.values()))


async def _moves(topology: Topology, client: AsyncClient, way: str, before: Homes, victim: str) -> None:
    for name in sorted(before[victim]):
        assert await answers(client, name), way
    after = await topology.homes(way)
    assert all(before[replica] <= names for replica, names in after.items()), f"{way}: all others stay"
    moved = [name for replica, names in after.items() for name in names - before[replica]]
    assert sorted(moved) == sorted(before[victim]), f"{way}: each is built again, and once"


async def _comes_home(client: AsyncClient, way: str, its_own: set[str], victim: Replica) -> None:
    async with asyncio.timeout(30):
        while (found := await _built(victim, f"{way}-")) != its_own:
            assert found < its_own, f"{way}: others came too"
            for name in names_of(way):
                assert await answers(client, name), way


def test_commands_hash_too(topology: Topology) -> None:
    """Each is a process's first call: without the ring they would be as likely to go elsewhere."""

    def command(*arguments: str) -> None:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--target", topology.targets["ring"], "--affinity"])
        assert not ended.value.code

    for i in range(8):
        command("prefix", "create", f"command-{i}", "--tokens", "5,6,7")
        command("generate", "--prefix", f"command-{i}", "--tokens", "8", "--max-tokens", "2", "--ids")
    homes = asyncio.run(topology.homes("command"))
    assert sum(map(len, homes.values())) == 8 and len([names for names in homes.values() if names]) > 1


@pytest.mark.parametrize("way", WAYS)
async def test_a_hot_prefix_spills_over_to_a_second_replica(topology: Topology, way: str) -> None:
    """Nobody has more than 1.5 times the mean where a proxy counts; a client's ring does not."""
    num_streams = 12 if way == "ring" else 60
    async with topology.client(way) as client:
        await client.create_prefix(f"{way}-100", prompt_of("100"))
        streams = [client.stream(prefix=f"{way}-100", max_tokens=1900, ignore_eos=True) for _ in range(num_streams)]
        await asyncio.gather(*map(anext, streams))
        running = Counter({r.name: await _num_rows(r) for r in topology.replicas})
        await asyncio.gather(*(stream.aclose() for stream in streams))  # type: ignore[attr-defined]
    running = +running
    assert running.total() == num_streams, running
    assert len(running) == (1 if way == "ring" else 2), running
    assert way == "ring" or max(running.values()) <= 32, running


async def _num_rows(replica: Replica) -> int:
    async with AsyncClient(replica.address, timeout=60) as client:
        load = await client.load()
    return load.rows_running + load.requests_waiting
