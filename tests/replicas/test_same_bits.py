"""The demo model behind Envoy: a replica that holds a prefix is killed, another gives the same answers, bit for bit."""

from __future__ import annotations

import asyncio
from pathlib import Path

from name_server import name_server
from processes import DEMO, pod_records, running_envoy, running_replicas
from redis_server import running_redis

from tinyloop_service import errors
from tinyloop_service.client import AsyncClient
from tinyloop_service.types import PrefixState

PROMPT = "In the beginning God created the heaven and the earth. And the earth was without form, and void;"
SUFFIXES = (" and darkness", " And God said", "")


async def test_answers_are_the_same_bits_after_a_kill(tmp_path: Path) -> None:
    with (
        running_redis(tmp_path) as redis,
        name_server(pod_records(2)) as names,
        running_replicas(2, redis.url, DEMO) as replicas,
        running_envoy(tmp_path, replicas[0].port, names) as target,
    ):
        async with AsyncClient(target, timeout=60) as client:
            async with asyncio.timeout(30):
                while await _seen(client) != {replica.name for replica in replicas}:
                    pass
            await client.create_prefix("genesis", PROMPT)
            [home] = [replica for replica in replicas if await _holds(replica.address)]
            [other] = [replica for replica in replicas if replica is not home]
            before = await _answers(client)
            assert not await _holds(other.address)
            home.kill()
            assert await _answers(client) == before
            assert await _holds(other.address)


async def _seen(client: AsyncClient) -> set[str]:
    try:
        return {(await client.model()).replica for _ in range(8)}
    except errors.Unavailable:  # the proxy starts
        await asyncio.sleep(0.05)
        return set()


async def _holds(address: str) -> bool:
    async with AsyncClient(address, timeout=60) as client:
        return (await client.get_prefix("genesis")).state is PrefixState.READY


async def _answers(client: AsyncClient) -> list[object]:
    """Ids, log-probabilities and texts."""
    asked = (client.complete(prefix="genesis", suffix=suffix, max_tokens=12, logprobs=5) for suffix in SUFFIXES)
    return [(c.token_ids, c.logprobs, c.text) for c in await asyncio.gather(*asked)]
