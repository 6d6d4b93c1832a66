"""The promise end to end: the scheduler on an engine with memory for a fraction of what is asked for.

Prefixes are evicted, deleted and made again while requests of every kind run side by side; what a request gets must be
what it gets alone on an engine with room for everything (T1, T2, T5, T6, T13, T14, T19).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
import tokenizers
from engines import Kind, fitted, make_engine, weights_of
from tokenizers import decoders, models

from tinyloop_service.completion import Completion, CompletionBuilder
from tinyloop_service.engine.cache_modes import page_bytes
from tinyloop_service.engine.spec import SIZES, Quant
from tinyloop_service.errors import OutOfMemory, PrefixNotFound
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.text import Tokenizer
from tinyloop_service.types import CacheMode, GenerationRequest, PrefixDefinition, Sampling, Stops, TokenIds

SPEC = replace(
    SIZES["tiny"], vocab_size=300, d_model=128, head_dim=32, d_ff=256, pre_blocks=1, default_loops=2, max_seq_len=512,
    quant=Quant(4, 64),
)  # fmt: skip
# Memory in fp16 pages.  On the CPU an active form takes two more for each page, whatever the page itself takes.
SCARCE = {
    ("cpu", CacheMode.FP16): 110, ("cpu", CacheMode.H_INT4): 80, ("cuda", CacheMode.FP16): 40,
    ("cuda", CacheMode.INT8): 21, ("cuda", CacheMode.H_INT4): 50,
}  # fmt: skip
PLENTY = 6000
SHAPES = {  # length, loops, window
    "a": (63, None, 0), "b": (64, 3, 0), "c": (65, None, 1), "d": (130, 1, 65), "e": (200, 2, 90), "f": (1, 4, 0),
}  # fmt: skip


def tokens(length: int, seed: int) -> TokenIds:
    return tuple((i * i * 7 + i * 13 + seed * 31) % 299 + 1 for i in range(length))


def letters() -> Tokenizer:
    """A token is a letter and a number, so that strings which begin with a number straddle tokens."""
    words = {f"{chr(ord('a') + i % 26)}{i // 26}": i for i in range(1, 300)}
    library = tokenizers.Tokenizer(models.BPE({"<eos>": 0, **words}, []))
    library.decoder = decoders.ByteLevel()
    return Tokenizer(library.to_str().encode())


@asynccontextmanager
async def scheduling(
    kind: Kind, mode: CacheMode, num_pages: int, settings: SchedulerSettings
) -> AsyncIterator[Scheduler]:
    spec = fitted(SPEC, kind, mode)
    memory = num_pages * page_bytes(CacheMode.FP16, spec)
    engine = make_engine(kind, weights_of(spec), kv_memory=memory, cache_mode=mode)
    scheduler = Scheduler(engine, settings, tokenizer=letters())
    await scheduler.start()
    try:
        yield scheduler
    finally:
        await scheduler.close()


def draw_request(pick: random.Random) -> GenerationRequest:
    prefix = pick.choice([*SHAPES, None])
    sampling = Sampling(
        temperature=pick.choice([0.0, 1.0, 1e-6]),
        top_k=pick.choice([0, 1, 50]),
        top_p=pick.choice([1.0, 0.9]),
        min_p=pick.choice([0.0, 0.05]),
        repetition_penalty=pick.choice([1.0, 1.3, 1000.0]),
        logit_bias=pick.choice([(), ((5, 1e6),), tuple((i, -1e6) for i in range(299)), ((7, 3.5), (9, -2.0))]),
        logprobs=pick.choice([0, 1, 20]),
        seed=pick.choice([0, 2**64 - 1, 7]),
    )
    stops = Stops(
        pick.choice([(), ((5,),), ((5, 5, 5), (5, 5)), tuple((i,) for i in range(100, 160))]),
        pick.choice([(), (), ("f0", "0f0f"), ("b0c", "b0", "0c0"), ("zz",)]),
        pick.choice([True, False]),
    )
    suffix = tokens(pick.choice([0, 1, 5, 64, 70]), pick.randrange(3)) or (() if prefix else (1,))
    return GenerationRequest(
        suffix,
        pick.choice([1, 2, 7, 20, 66]),
        prefix=prefix,
        cache_window=pick.choice([None, None, 0, 1] if prefix == "c" else [None, None, 0, 1, 10, 64]),
        sampling=sampling,
        stops=stops,
        n=pick.choice([1, 1, 2, 4]),
    )


async def complete(scheduler: Scheduler, request: GenerationRequest) -> Completion:
    builder = CompletionBuilder(request.n)
    async with scheduler.generate(request) as stream:
        async for outputs in stream:
            builder.add(outputs)
    return builder.completion()


def essence(completion: Completion) -> list[object]:
    """What must be alike to the bit; times and cached tokens differ."""
    choices = [(c.token_ids, c.logprobs, c.text, c.finish_reason) for c in completion.choices]
    return [choices, completion.usage.prompt_tokens, completion.usage.completion_tokens]


async def create(scheduler: Scheduler, name: str) -> None:
    length, loops, window = SHAPES[name]
    await scheduler.create_prefix(PrefixDefinition(tokens(length, ord(name)), loops, window), name=name)


async def use(scheduler: Scheduler, request: GenerationRequest, pick: random.Random) -> Completion:
    """Retry while others delete the name or memory is too small for this request; some give up halfway before."""
    if pick.random() < 0.3:
        leaver = asyncio.create_task(complete(scheduler, request))
        await asyncio.sleep(pick.random() / 50)
        leaver.cancel()
        await asyncio.wait([leaver])
    for _ in range(100):
        try:
            return await complete(scheduler, request)
        except PrefixNotFound:
            assert request.prefix is not None
            with suppress(PrefixNotFound):  # deleted again, while it was built
                await create(scheduler, request.prefix)
    raise AssertionError("the name was deleted a hundred times")


@pytest.mark.parametrize(
    ("kind", "mode", "seed"),
    [
        ("cpu", CacheMode.FP16, 1),
        ("cpu", CacheMode.FP16, 2),
        ("cpu", CacheMode.H_INT4, 2),
        pytest.param("cuda", CacheMode.FP16, 1, marks=pytest.mark.gpu),
        pytest.param("cuda", CacheMode.FP16, 2, marks=pytest.mark.gpu),
        pytest.param("cuda", CacheMode.H_INT4, 2, marks=pytest.mark.gpu),
        pytest.param("cuda", CacheMode.INT8, 2, marks=pytest.mark.gpu),
    ],
)
async def test_scarce_memory_and_company_change_nothing(kind: Kind, mode: CacheMode, seed: int) -> None:
    pick = random.Random(seed)
    requests = [draw_request(pick) for _ in range(40)]
    async with scheduling(kind, mode, PLENTY, SchedulerSettings(steps_per_plan=1, plans_in_flight=1)) as scheduler:
        for name in SHAPES:
            await create(scheduler, name)
        alone = [essence(await complete(scheduler, request)) for request in requests]
    async with scheduling(kind, mode, SCARCE[kind, mode], SchedulerSettings(max_prefixes=3)) as scheduler:

        async def one(index: int, random_source: random.Random) -> None:
            try:
                crowded = await use(scheduler, requests[index], random_source)
            except OutOfMemory:
                return
            assert essence(crowded) == alone[index], requests[index]
            served.append(index)
            if random_source.random() < 0.2 and (named := scheduler.list_prefixes()):
                scheduler.delete_prefix(random_source.choice(named).name or "")
            scheduler._core.check()

        served: list[int] = []
        async with asyncio.TaskGroup() as group:
            for index in range(len(requests)):
                group.create_task(one(index, random.Random(seed * 1000 + index)))
        assert len(served) > 25, "memory is too small for the test to say much"
        for info in scheduler.list_prefixes():
            scheduler.delete_prefix(info.name or "")
        load = scheduler.load()
        assert load.pages_free == load.pages_total and not load.rows_running
        scheduler._core.check()
