"""In process and over gRPC, cold and warm, alone and together: the same tokens and the same log-probability bits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from command_harness import Server

from tinyloop_service import AsyncClient, Client, Completion, Model

PREFIX = tuple(3 * i % 500 for i in range(1, 151))
SUFFIXES = [(7, 8, 9), (11,), (), tuple(range(40, 110))]
SAMPLING = {"max_tokens": 10, "temperature": 0.9, "seed": 5, "logprobs": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tiny: Path) -> Iterator[Model]:
    with Model(tiny, kv_memory=256 * 2**20) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with Client(server.address) as made:
        yield made


def result(completion: Completion) -> object:
    """All but how long it took and what it was spared."""
    return [(c.token_ids, c.text, c.finish_reason, c.logprobs) for c in completion.choices], completion.seed


@pytest.fixture(scope="module")
def cold(model: Model) -> list[object]:
    """Each prompt in one piece, one after the other."""
    return [result(model.complete(PREFIX + suffix, **SAMPLING)) for suffix in SUFFIXES]


def test_in_process_from_a_prefix(model: Model, cold: list[object]) -> None:
    prefix = model.build_prefix_cache(PREFIX)
    assert [result(c) for c in model.complete_batch(prefix, SUFFIXES, **SAMPLING)] == cold
    assert [result(model.complete(prefix=prefix, suffix=suffix, **SAMPLING)) for suffix in SUFFIXES] == cold


def test_in_process_from_many_threads(model: Model, cold: list[object]) -> None:
    prefix = model.build_prefix_cache(np.array(PREFIX))
    with ThreadPoolExecutor(8) as pool:
        work = [pool.submit(model.complete, prefix=prefix, suffix=suffix, **SAMPLING) for suffix in SUFFIXES * 2]
        assert [result(w.result()) for w in work] == cold * 2


def test_over_grpc(client: Client, cold: list[object]) -> None:
    assert [result(client.complete(PREFIX + suffix, **SAMPLING)) for suffix in SUFFIXES] == cold
    prefix = client.build_prefix_cache(PREFIX)
    assert [result(c) for c in client.complete_batch(prefix, SUFFIXES, **SAMPLING)] == cold


async def test_over_grpc_all_at_once(server: Server, cold: list[object]) -> None:
    async with AsyncClient(server.address) as client:
        await client.create_prefix("shared", PREFIX)
        work = [client.complete(prefix="shared", suffix=suffix, **SAMPLING) for suffix in SUFFIXES * 4]
        assert [result(c) for c in await asyncio.gather(*work)] == cold * 4
        await client.delete_prefix("shared")


def test_ids_are_prefix_suffix_and_new(model: Model, client: Client) -> None:
    common = {"max_tokens": 6, "suffix": (7, 8, 9), "ignore_eos": True}
    here = model.generate_from_prefix_cache(model.build_prefix_cache(PREFIX), **common)
    there = client.generate_from_prefix_cache(client.build_prefix_cache(PREFIX), **common)
    assert here == there
    assert tuple(here[:-6]) == (*PREFIX, 7, 8, 9)
    assert here == model.generate((*PREFIX, 7, 8, 9), 6, ignore_eos=True)


def test_text_has_the_same_ids_everywhere(model: Model, client: Client) -> None:
    assert model.generate("Grüße", 4, seed=1) == client.generate("Grüße", 4, seed=1)


def test_config_is_the_file_s_everywhere(model: Model, client: Client) -> None:
    assert model.config() == client.config()


@pytest.mark.parametrize(
    "call",
    [
        lambda api, prefix: api.generate([512]),
        lambda api, prefix: api.generate([1], loops=99),
        lambda api, prefix: api.generate([1] * 2048, 1),
        lambda api, prefix: api.generate_from_prefix_cache(prefix, loops=5),
        lambda api, prefix: api.complete([1], top_p=1.0001),
        lambda api, prefix: api.complete([1], suffix=[2]),
        lambda api, prefix: api.complete_batch(prefix, [[600]]),
        lambda api, prefix: api.stream([1], max_tokens=2**31),
    ],
)
def test_refusals_are_the_same(model: Model, client: Client, call: object) -> None:
    refusals = []
    for api in (model, client):
        prefix = api.build_prefix_cache(PREFIX)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call(api, prefix)  # type: ignore[operator]
        refusals.append((type(caught.value), str(caught.value)))
    assert refusals[0] == refusals[1]
