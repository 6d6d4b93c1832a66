"""The load of a soak: workers that call one server in every way, and a ledger of what they were told.

Each worker draws what it does from its own seed: creates with parents, windows, pins and short lives; streams that are
read to their end, slowly, or not at all; deadlines; deletes under use.  The ledger keeps every answer, whole or as far
as it came, by recipe, and counts every status; one that is not documented is wrong at once.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.field_mask_pb2 import FieldMask
from rpc_harness import reason_of
from soak_work import Answer, Definition, Recipe, tokens

from tinyloop_service.pb import generation_pb2 as g
from tinyloop_service.pb import generation_pb2_grpc, model_pb2, model_pb2_grpc, prefix_pb2_grpc
from tinyloop_service.pb import prefix_pb2 as p
from tinyloop_service.rpc.status import DETAILS_KEY, TABLE

SLOW_MESSAGES = 8  # that a slow reader waits after
HANGS_S = 120.0  # without a deadline of its own nothing takes longer
DOCUMENTED = {(code.name, cls.reason) for cls, code in TABLE.items() if code is not grpc.StatusCode.INTERNAL}
_OF_CALLERS = {grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED}  # gRPC says them without our details


@dataclass
class Ledger:
    """What came of everything."""

    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)  # by what was done and how it ended
    whole: defaultdict[Recipe, Counter[Answer]] = field(default_factory=lambda: defaultdict(Counter))
    parts: defaultdict[Recipe, Counter[Answer]] = field(default_factory=lambda: defaultdict(Counter))
    wrong: list[str] = field(default_factory=list)

    def answered(self, recipe: Recipe, answer: Answer) -> None:
        (self.whole if answer.is_whole else self.parts)[recipe][answer] += 1

    @property
    def num_whole(self) -> int:
        return sum(counter.total() for counter in self.whole.values())

    @property
    def num_parts(self) -> int:
        return sum(counter.total() for counter in self.parts.values())


@dataclass
class Load:
    """Workers on one channel."""

    channel: grpc.aio.Channel
    definitions: list[Definition]
    recipes: list[Recipe]
    ledger: Ledger
    ending: bool = False
    may_go: asyncio.Event = field(default_factory=asyncio.Event)  # cleared: workers wait before their next call
    num_busy: int = 0

    def __post_init__(self) -> None:
        self.prefixes: Any = prefix_pb2_grpc.PrefixServiceStub(self.channel)
        self.generation: Any = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.model: Any = model_pb2_grpc.ModelServiceStub(self.channel)
        self.may_go.set()

    async def work(self, seed: int) -> None:
        """One worker, until the load is ending."""
        rng = random.Random(seed)
        deeds, weights = zip(*DEEDS.items(), strict=True)
        while True:
            await self.may_go.wait()
            if self.ending:
                return
            self.num_busy += 1
            deed = rng.choices(deeds, weights)[0]
            name = deed.__name__.strip("_").replace("_", " ")
            try:
                async with asyncio.timeout(HANGS_S):
                    await self._counted(name, deed(self, rng))
            except TimeoutError:
                self.ledger.wrong.append(f"{name}: no end after {HANGS_S:.0f} s")
            finally:
                self.num_busy -= 1

    async def _counted(self, name: str, deed: Awaitable[None]) -> None:
        try:
            await deed
            status = "OK"
        except grpc.aio.AioRpcError as error:
            status = self._status(name, error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the time limit above, not a call of ours
                raise
            status = "CANCELLED"
        self.ledger.statuses[name, status] += 1

    def _status(self, name: str, error: grpc.aio.AioRpcError) -> str:
        if DETAILS_KEY not in dict(error.trailing_metadata() or ()):
            if error.code() not in _OF_CALLERS:
                self.ledger.wrong.append(f"{name}: {error.code()} {error.details()!r} is documented nowhere")
            return error.code().name
        found = reason_of(error)
        if found not in DOCUMENTED:
            self.ledger.wrong.append(f"{name}: {found} {error.details()!r} is documented nowhere")
        return "/".join(dict.fromkeys(found))

    # ---- generating

    async def stream(self, recipe: Recipe, *, pause_s: float = 0.0, timeout_s: float | None = None) -> None:
        """Read to its end; what came counts, however it ends."""
        answer = Answer.empty(recipe)
        call = self.generation.Generate(recipe.request, timeout=timeout_s)
        try:
            num_pauses = SLOW_MESSAGES if pause_s else 0
            async for message in call:
                answer.read(message)
                if num_pauses:
                    num_pauses -= 1
                    await asyncio.sleep(pause_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND and recipe.definition is not None:
                await self._make(recipe.definition, random.Random(0))
            raise
        finally:
            self.ledger.answered(recipe, answer)

    async def _make(self, definition: Definition, rng: random.Random) -> None:
        """See that it is there, and all that it hangs from, for as long as it lasts."""
        for member in definition.chain():
            with suppress(grpc.aio.AioRpcError):
                await self.prefixes.CreatePrefix(_creation(member, rng))

    def __hash__(self) -> int:
        return id(self)


def _creation(definition: Definition, rng: random.Random) -> p.CreatePrefixRequest:
    request = p.CreatePrefixRequest(prefix_id=definition.name, input=tokens(definition.own))
    if definition.parent is not None:
        request.parent = f"prefixes/{definition.parent.name}"
    else:
        request.loops, request.cache_window = definition.loops, definition.window
    if rng.random() < 0.5:
        request.ttl.FromMilliseconds(rng.choice([50, 500, 3000, 20000]))
    request.pinned = rng.random() < 0.1
    return request


# ---- what a worker may do


async def _stream(load: Load, rng: random.Random) -> None:
    await load.stream(rng.choice(load.recipes))


async def _unary(load: Load, rng: random.Random) -> None:
    recipe = rng.choice(load.recipes)
    completion = await load.generation.GenerateUnary(g.GenerateUnaryRequest(generation=recipe.request))
    load.ledger.answered(recipe, Answer.of(completion))


async def _stream_that_creates(load: Load, rng: random.Random) -> None:
    recipe = rng.choice([recipe for recipe in load.recipes if recipe.definition is not None])
    assert recipe.definition is not None
    request, missing = g.GenerateRequest(), _creation(recipe.definition, rng)
    request.CopyFrom(recipe.request)
    missing.prefix_id = ""
    request.create_if_missing.CopyFrom(missing)
    answer = Answer.empty(recipe)
    try:
        async for message in load.generation.Generate(request):
            answer.read(message)
    finally:
        load.ledger.answered(recipe, answer)


async def _slow_reader(load: Load, rng: random.Random) -> None:
    await load.stream(rng.choice(load.recipes), pause_s=rng.uniform(0.05, 0.3))


async def _deadline(load: Load, rng: random.Random) -> None:
    await load.stream(rng.choice(load.recipes), timeout_s=rng.choice([0.001, 0.01, 0.05, 0.2]))


async def _cancel(load: Load, rng: random.Random) -> None:
    recipe = rng.choice(load.recipes)
    reading = asyncio.ensure_future(load.stream(recipe))
    await asyncio.wait([reading], timeout=rng.choice([0.0, 0.005, 0.03, 0.1, 0.4]))
    reading.cancel()
    await reading


async def _create(load: Load, rng: random.Random) -> None:
    definition = rng.choice(load.definitions)
    await load.prefixes.CreatePrefix(_creation(definition, rng))


async def _create_and_leave(load: Load, rng: random.Random) -> None:
    call = load.prefixes.CreatePrefix(_creation(rng.choice(load.definitions), rng))
    waiting = asyncio.ensure_future(call)
    await asyncio.wait([waiting], timeout=rng.choice([0.0, 0.01, 0.05]))
    call.cancel()
    await waiting


async def _delete(load: Load, rng: random.Random) -> None:
    await load.prefixes.DeletePrefix(p.DeletePrefixRequest(name=f"prefixes/{rng.choice(load.definitions).name}"))


async def _update(load: Load, rng: random.Random) -> None:
    request = p.UpdatePrefixRequest(update_mask=FieldMask(paths=["ttl", "pinned"]))
    request.prefix.name = f"prefixes/{rng.choice(load.definitions).name}"
    request.prefix.ttl.FromMilliseconds(rng.choice([100, 2000, 60000]))
    request.prefix.pinned = rng.random() < 0.2
    await load.prefixes.UpdatePrefix(request)


async def _list(load: Load, rng: random.Random) -> None:
    await load.prefixes.ListPrefixes(p.ListPrefixesRequest(page_size=rng.choice([0, 3])))


async def _watch(load: Load, rng: random.Random) -> None:
    call = load.prefixes.WatchPrefix(p.WatchPrefixRequest(name=f"prefixes/{rng.choice(load.definitions).name}"))
    await call.read()
    call.cancel()


async def _look(load: Load, rng: random.Random) -> None:
    await load.prefixes.GetPrefix(p.GetPrefixRequest(name=f"prefixes/{rng.choice(load.definitions).name}"))
    await load.model.GetLoad(model_pb2.GetLoadRequest())


DEEDS: dict[Callable[[Load, random.Random], Awaitable[None]], int] = {
    _stream: 36, _unary: 10, _stream_that_creates: 10, _slow_reader: 4, _deadline: 6, _cancel: 12, _create: 8,
    _create_and_leave: 2, _delete: 4, _update: 3, _list: 2, _watch: 1, _look: 2,
}  # fmt: skip
