"""A running scheduler on the fake engine, and how its tests wait and read."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from scheduler_driver import SMALL

from tinyloop_service.engine.api import Limits, Plan
from tinyloop_service.engine.fake import FakeEngine
from tinyloop_service.errors import (
    EngineFault,
)
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.scheduler.stream import Stream
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.types import (
    Delta,
    Output,
    PrefixInfo,
)

WIDE = dataclasses.replace(SMALL, max_rows=64, num_pages=2000)


@asynccontextmanager
async def running(
    limits: Limits = WIDE,
    *,
    gate: threading.Event | None = None,
    fault: Callable[[Plan], EngineFault | None] | None = None,
    settings: SchedulerSettings | None = None,
) -> AsyncIterator[Scheduler]:
    scheduler = Scheduler(FakeEngine(limits, strict=True, gate=gate, fault=fault), settings or SchedulerSettings())
    await scheduler.start()
    try:
        yield scheduler
    finally:
        if gate is not None:
            gate.set()
        await scheduler.close()


async def collect(stream: Stream) -> list[tuple[Output, ...]]:
    async with stream:
        return [outputs async for outputs in stream]


def ids(messages: list[tuple[Output, ...]], choice: int = 0) -> tuple[int, ...]:
    deltas = [o for outputs in messages for o in outputs if isinstance(o, Delta) and o.choice == choice]
    return tuple(token for delta in deltas for token in delta.token_ids)


async def last(infos: AsyncIterator[PrefixInfo]) -> PrefixInfo:
    return [info async for info in infos][-1]


async def until(condition: Callable[[], bool], pause_s: float = 0.0) -> None:
    for _ in range(1_000_000):
        if condition():
            return
        await asyncio.sleep(pause_s)
    raise AssertionError("it never came true")


def is_settled(scheduler: Scheduler) -> bool:
    """Everything that was asked for has ended."""
    load = scheduler.load()
    return not (load.rows_running or load.requests_waiting or load.pages_requests)
