"""Watches a server while it is under load: what GetLoad says, four times a second, as one line a second.

In: a service.  Out: samples, and of them the `Second`s of a result.  A sample that fails is left out; whether a server
answers at all is for its requests to say.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from tinyloop_service.bench.service import Service
from tinyloop_service.errors import TinyLoopError
from tinyloop_service.load.driver import sleep_until
from tinyloop_service.load.results import Second
from tinyloop_service.types import Load

PERIOD_NS = 250_000_000
SETTLE_S = 5.0  # for pages of requests that have ended to come back

Sample = tuple[int, Load]  # when it was asked for


@dataclass(slots=True)
class Watch:
    """Samples of one phase."""

    service: Service
    samples: list[Sample] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Generated, of the last second or what there is of it."""
        recent = self.samples[-5:]
        if len(recent) < 2:
            return 0.0
        (before_ns, before), (now_ns, now) = recent[0], recent[-1]
        return _gained(before, now, lambda load: load.generated_tokens) / (now_ns - before_ns) * 1e9

    async def run(self, show: Callable[[Load], None] = lambda load: None) -> None:
        """Until it is cancelled."""
        due_ns = time.monotonic_ns()
        while True:
            if (load := await peek(self.service)) is not None:
                self.samples.append((due_ns, load))
                show(load)
            due_ns = max(due_ns + PERIOD_NS, time.monotonic_ns())
            await sleep_until(due_ns)


async def peek(service: Service) -> Load | None:
    try:
        async with asyncio.timeout(SETTLE_S):  # a server that has gone silent does not refuse
            return await service.load()
    except (TinyLoopError, TimeoutError):
        return None


async def settled_pages(service: Service, baseline: int) -> int:
    """Pages that requests hold once they are back at `baseline`, or when that has taken too long; -1: no answer."""
    pages, deadline_ns = -1, time.monotonic_ns() + round(SETTLE_S * 1e9)
    while pages != baseline and time.monotonic_ns() < deadline_ns:
        if (load := await peek(service)) is not None:
            pages = load.pages_requests
        await asyncio.sleep(0.02)
    return pages


def seconds(samples: Sequence[Sample], start_ns: int, offset_s: float = 0.0) -> tuple[Second, ...]:
    """A line for every second that has samples; rates need one before it.  `offset_s`: of the start."""
    by_second: dict[int, list[Load]] = {}
    for moment_ns, load in samples:
        by_second.setdefault((moment_ns - start_ns) // 10**9, []).append(load)
    lines, before = [], None
    times = {(moment_ns - start_ns) // 10**9: moment_ns for moment_ns, _ in samples}  # of the last sample
    for second, loads in by_second.items():
        last = (times[second], loads[-1])
        if before is not None:
            lines.append(_second(float(offset_s + second + 1), loads, before, last))
        before = last
    return tuple(lines)


def _second(at_s: float, loads: Sequence[Load], before: Sample, last: Sample) -> Second:
    def share(pages: Callable[[Load], int]) -> float:
        return round(fmean(pages(load) / max(load.pages_total, 1) for load in loads), 4)

    def mean(gauge: Callable[[Load], int]) -> float:
        return round(fmean(map(gauge, loads)), 3)

    elapsed_s = (last[0] - before[0]) / 1e9
    return Second(
        at_s=at_s,
        rows=mean(lambda load: load.rows_running),
        requests_running=mean(lambda load: load.requests_running),
        requests_waiting=mean(lambda load: load.requests_waiting),
        pages_held=share(lambda load: load.pages_total - load.pages_free),
        pages_prefixes=share(lambda load: load.pages_prefixes),
        pages_active=share(lambda load: load.pages_active),
        prefixes_ready=mean(lambda load: load.prefixes_ready),
        evictions=_gained(before[1], last[1], lambda load: load.prefix_evictions),
        tokens_per_s=round(_gained(before[1], last[1], lambda load: load.generated_tokens) / elapsed_s, 2),
    )


def _gained(before: Load, now: Load, counter: Callable[[Load], int]) -> int:
    """A server that was started again counts from 0."""
    return counter(now) - counter(before) if counter(now) >= counter(before) else counter(now)
