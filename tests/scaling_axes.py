"""What tests/bench_scaling.py visits: an engine by hand, a scheduler with many prefixes, a server with many names.

Each has a method per axis: a point in, figures by name out.  It refuses to know which points, how often, and what
becomes of the figures.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import grpc

from tinyloop_service.app import App
from tinyloop_service.bench import prompt_tokens
from tinyloop_service.bench.direct import Direct
from tinyloop_service.engine.api import PAGE_TOKENS, Engine
from tinyloop_service.engine.fake import FAKE_LIMITS, FakeEngine
from tinyloop_service.engine.spec import SIZES
from tinyloop_service.loading import LoadedModel
from tinyloop_service.pb import generation_pb2, generation_pb2_grpc, input_pb2, prefix_pb2, prefix_pb2_grpc
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.settings import MOST_PREFIXES, SchedulerSettings, ServerSettings, Settings
from tinyloop_service.types import Completed, GenerationRequest, PrefixDefinition, Stops

PLANS = 4  # of decode steps, measured at every visit of a point, after one that is not
REQUESTS, NEW_TOKENS = 8, 16  # at once, with many prefixes in memory
CALLS = 50  # of each kind, with many names


class Alone:
    """Axes of an engine that is driven by hand."""

    def __init__(self, engine: Engine, prefix_len: int) -> None:
        self.limits = engine.limits
        self._engine = engine
        self._at_once = min(4, engine.limits.max_steps)
        self.room = (PLANS + 1) * self._at_once  # positions that the decode steps of one visit take
        self._prefix_len = min(prefix_len, engine.limits.max_seq_len - self.room)
        self._visit(Direct(engine, 1), PAGE_TOKENS, 1)  # what the first plans of a process take is no point's

    def _tokens(self, length: int) -> tuple[int, ...]:
        return prompt_tokens(self.limits.vocab_size, length)

    def possible(self, axis: str, asked: Sequence[int]) -> tuple[list[int], list[str]]:
        """Points of "prefix", "rows" or "loops" that model and memory allow, and why others are left out."""
        most_tokens = self.limits.max_seq_len - self.room
        highest = {"prefix": most_tokens, "rows": self.limits.max_rows, "loops": self.limits.max_loops}[axis]
        points = sorted({min(x, highest) for x in asked})
        shortened = [f"{x}: more than {highest}, which is in its place" for x in asked if x > highest]
        fitting = [x for x in points if self._fits(**{axis: x})]
        return fitting, shortened + [f"{x}: left out, its pages do not fit" for x in points if x not in fitting]

    def _fits(self, prefix: int | None = None, rows: int = 1, loops: int | None = None) -> bool:
        """Twice over, for forms that are read besides what is stored."""
        length = prefix or self._prefix_len
        own = self.limits.own_blocks(length, length + self.room)
        blocks = self.limits.own_blocks(0, length) + rows * own
        return 2 * blocks * self.limits.cache_layers(loops or self.limits.default_loops) <= self.limits.num_pages

    async def prefix(self, length: int) -> dict[str, float]:
        prefill, step = self._visit(Direct(self._engine, self.limits.default_loops), length, 1)
        return {"prefill, a token": prefill / length, "decode step, 1 row": step}

    async def rows(self, count: int) -> dict[str, float]:
        _, step = self._visit(Direct(self._engine, self.limits.default_loops), self._prefix_len, count)
        return {"decode step": step, "decode, a token": step / count}

    async def loops(self, loops: int) -> dict[str, float]:
        prefill, step = self._visit(Direct(self._engine, loops), self._prefix_len, 1)
        return {"prefill, a token": prefill / self._prefix_len, "decode step, 1 row": step}

    def _visit(self, direct: Direct, length: int, rows: int) -> tuple[float, float]:
        """Milliseconds of a prefill and of a decode step behind it."""
        prefill = direct.prefill(self._tokens(length))
        opened = direct.open_rows(length, rows, self.room)
        steps = [direct.decode(opened, self._at_once) for _ in range(PLANS + 1)][1:]
        direct.clear()
        return prefill, sum(steps) / PLANS


class Crowd:
    """More and more prefixes in memory, and requests off them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._made = 0
        self._turn = 0

    def possible(self, asked: Sequence[int]) -> tuple[list[int], list[str]]:
        """Numbers that memory allows, and why others are left out."""
        limits = self._scheduler.limits
        active = 3 * REQUESTS * limits.active_pages(0, PAGE_TOKENS, limits.default_loops)
        most = min(MOST_PREFIXES, (limits.num_pages - active) // limits.cache_layers(limits.default_loops))
        fitting = [count for count in asked if count <= most]
        return fitting, [f"{count}: left out, memory has room for {most}" for count in asked if count > most]

    async def prefixes(self, count: int) -> dict[str, float]:
        while self._made < count:
            await self._scheduler.create_prefix(PrefixDefinition(self._content(self._made)), name=f"p{self._made}")
            self._made += 1
        await self._seconds([0] * REQUESTS)
        one = await self._seconds([0] * REQUESTS)
        turns = [(self._turn + i) % count for i in range(REQUESTS)]  # whom no request has used for longest
        self._turn += REQUESTS
        many = await self._seconds(turns)
        per_token = 1e3 / (REQUESTS * NEW_TOKENS)
        return {"requests off one prefix": one * per_token, "requests off many": many * per_token}

    def _content(self, index: int) -> tuple[int, ...]:
        """One page, each another."""
        vocab_size = self._scheduler.limits.vocab_size
        return (index % vocab_size, index // vocab_size, *prompt_tokens(vocab_size, PAGE_TOKENS - 2))

    async def _seconds(self, prefixes: Sequence[int]) -> float:
        async def ask(prefix: int) -> None:
            asked = GenerationRequest(
                (1,), NEW_TOKENS, prefix=f"p{prefix}", stops=Stops(ignore_eos=True), want_text=False
            )
            async with self._scheduler.generate(asked) as stream:
                async for outputs in stream:
                    if any(isinstance(output, Completed) for output in outputs):
                        return

        began = time.perf_counter()
        await asyncio.gather(*map(ask, prefixes))
        return time.perf_counter() - began


class Names:
    """More and more names in a server, and calls to it; microseconds."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._prefixes: Any = prefix_pb2_grpc.PrefixServiceStub(channel)
        self._generation: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        self._made = 0

    async def names(self, count: int) -> dict[str, float]:
        while self._made < count:
            await self._create(self._made)
            self._made += 1
        known = [f"prefixes/n{index * count // CALLS}" for index in range(CALLS)]
        further = range(10**6, 10**6 + CALLS)
        page = prefix_pb2.ListPrefixesRequest(page_size=50)
        return {
            "create": await self._median(self._create, further),
            "get": await self._median(self._get, known),
            "list of 50": await self._median(lambda _: self._prefixes.ListPrefixes(page), known),
            "delete": await self._median(self._delete, further),
            "a token of a stream": await self._median(self._read, known) / NEW_TOKENS,
        }

    @staticmethod
    async def _median(call: Callable[[Any], Awaitable[Any]], arguments: Sequence[Any]) -> float:
        times = []
        for argument in arguments:
            began = time.perf_counter()
            await call(argument)
            times.append((time.perf_counter() - began) * 1e6)
        return median(times)

    async def _create(self, index: int) -> None:
        tokens = input_pb2.Tokens(ids=[1 + index % 500, 1 + index // 500 % 500, 1 + index // 250_000])
        request = prefix_pb2.CreatePrefixRequest(prefix_id=f"n{index}", input=input_pb2.Input(tokens=tokens))
        await self._prefixes.CreatePrefix(request)

    async def _get(self, name: str) -> None:
        await self._prefixes.GetPrefix(prefix_pb2.GetPrefixRequest(name=name))

    async def _delete(self, index: int) -> None:
        await self._prefixes.DeletePrefix(prefix_pb2.DeletePrefixRequest(name=f"prefixes/n{index}"))

    async def _read(self, name: str) -> None:
        asked = generation_pb2.GenerateRequest(prefix=name, max_tokens=NEW_TOKENS, ignore_eos=True, omit_text=True)
        async for _ in self._generation.Generate(asked):
            pass


@asynccontextmanager
async def fake_server() -> AsyncIterator[str]:
    """The address of a server in this process, whose engine computes nothing."""
    settings = Settings(server=ServerSettings(listen="127.0.0.1:0", health_listen=None))
    engine = FakeEngine(replace(FAKE_LIMITS, num_pages=60_000))
    app = App(settings, lambda: LoadedModel(engine, None, json.loads(SIZES["tiny"].to_json())))
    await app.start()
    try:
        await app.ready()
        yield app.address
    finally:
        await app.stop(grace_s=0.0)


@asynccontextmanager
async def scheduling(engine: Engine) -> AsyncIterator[Scheduler]:
    """Closes the engine."""
    scheduler = Scheduler(engine, SchedulerSettings())
    await scheduler.start()
    try:
        yield scheduler
    finally:
        await scheduler.close()
