"""Servers that share a registry, one client each, and what their names generate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rpc_harness import Served, expected_tokens, serving

from tinyloop_service.client import AsyncClient
from tinyloop_service.engine.fake import FAKE_LIMITS
from tinyloop_service.settings import NamesSettings

PROMPT = tuple(range(1, 201))
OTHER = tuple(range(200, 0, -1))


async def generated(client: AsyncClient, prefix: str, **options: Any) -> tuple[int, ...]:
    completion = await client.complete(prefix=prefix, suffix=(7,), max_tokens=5, ignore_eos=True, **options)
    return tuple(completion.token_ids)


def expected(prompt: tuple[int, ...], loops: int = FAKE_LIMITS.default_loops) -> tuple[int, ...]:
    return expected_tokens((*prompt, 7), 5, loops)


@asynccontextmanager
async def client_of(*args: Any, **options: Any) -> AsyncIterator[tuple[Served, AsyncClient]]:
    async with serving(*args, **options) as served, served.client() as client:
        yield served, client


@dataclass(frozen=True)
class Replicas:
    a: AsyncClient
    b: AsyncClient
    served_a: Served
    served_b: Served
    names: NamesSettings


@asynccontextmanager
async def two(names: NamesSettings, **options: Any) -> AsyncIterator[Replicas]:
    async with client_of(names=names, **options) as (sa, a), client_of(names=names, **options) as (sb, b):
        yield Replicas(a, b, sa, sb, names)


async def until_generates(client: AsyncClient, name: str, prompt: tuple[int, ...]) -> None:
    async with asyncio.timeout(20.0):
        while await generated(client, name) != expected(prompt):
            pass
