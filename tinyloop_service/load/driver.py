"""The driver: sends the requests of one phase when they are due, and writes down what came of each.

    open loop      every request leaves when the schedule says, whatever became of those before
    closed loop    every caller sends its next request when it has the last answer; after an error it pauses first

In: a service, prompts, a job.  Out: `Driven`: plain records, and how late the driver itself was.  It refuses to know
processes, figures and servers.  Times are nanoseconds of the monotonic clock, which all processes share.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

from tinyloop_service.arguments import parameters
from tinyloop_service.bench.rounds import Timeline, follow
from tinyloop_service.bench.service import Ask, Content, Service
from tinyloop_service.errors import PrefixNotFound, TinyLoopError
from tinyloop_service.load.prompts import Prompts
from tinyloop_service.load.results import Way
from tinyloop_service.load.schedule import Drawn
from tinyloop_service.rpc.status import TABLE

TICK_NS = 10_000_000  # of the clock by which the event loop's lateness is taken
TRIES = 3  # to use a prefix that was gone and has been made again
PAUSE_S = 0.1  # of a caller whose request failed


@dataclass(frozen=True, slots=True)
class Job:
    """What one process does of a phase."""

    way: Way
    start_ns: int
    warmup_s: float
    measured_s: float
    patience_s: float  # for what still runs at the end
    arrivals_ns: tuple[int, ...] | None  # after the start, the whole phase's; None: closed loop
    callers: int = 0  # the whole phase's; closed loop
    first_index: int = 0  # of the phase's requests
    share: int = 0  # this process's, of
    shares: int = 1
    keep_ids: bool = False

    @property
    def measure_from_ns(self) -> int:
        return self.start_ns + round(self.warmup_s * 1e9)

    @property
    def end_ns(self) -> int:
        """From then on nothing is sent."""
        return self.start_ns + round((self.warmup_s + self.measured_s) * 1e9)


@dataclass(frozen=True, slots=True)
class Failure:
    code: str  # of the status
    reason: str
    message: str

    @classmethod
    def of(cls, error: TinyLoopError) -> Self:
        return cls(TABLE[type(error)].name, error.reason, str(error))


@dataclass(slots=True)
class Sent:
    """One request, from its schedule to its end."""

    drawn: Drawn
    due_ns: int
    sent_ns: int = 0
    timeline: Timeline = field(default_factory=Timeline)
    failure: Failure | None = None
    hung_up: bool = False  # as its workload says
    unfinished: bool = False  # the driver's patience ended first


@dataclass(frozen=True, slots=True)
class Build:
    """A prefix that was made, or a prompt as long as it, without one."""

    tokens: int
    began_ns: int
    end_ns: int
    failure: Failure | None


@dataclass(slots=True)
class Counted:
    """Requests so far, for who watches."""

    sent: int = 0
    completed: int = 0
    failed: int = 0
    hung_up: int = 0

    def __add__(self, other: Counted) -> Counted:
        return Counted(
            self.sent + other.sent,
            self.completed + other.completed,
            self.failed + other.failed,
            self.hung_up + other.hung_up,
        )


@dataclass(slots=True)
class Driven:
    """What one process did."""

    sent: list[Sent] = field(default_factory=list)
    builds: list[Build] = field(default_factory=list)
    loop_late_ns: list[int] = field(default_factory=list)  # at every tick
    cpu_share: float = 0.0  # of a core, of the event loop's thread


class Driver:
    """Drives one job, once; `counted` may be read meanwhile."""

    def __init__(self, service: Service, prompts: Prompts, job: Job) -> None:
        self._service = service
        self._prompts = prompts
        self._job = job
        self._driven = Driven()
        self.counted = Counted()

    async def run(self) -> Driven:
        """From the job's start, which is waited for, to the end of its last request."""
        await sleep_until(self._job.start_ns)
        began_ns, cpu_ns = time.monotonic_ns(), time.thread_time_ns()
        ticking = asyncio.create_task(self._tick())
        working = [asyncio.create_task(work) for work in self._work()]
        patience_s = (self._job.end_ns - began_ns) / 1e9 + self._job.patience_s
        try:
            await asyncio.wait(working, timeout=patience_s)
        finally:
            for task in (ticking, *working):
                task.cancel()
            await asyncio.wait((ticking, *working))
        self._driven.cpu_share = (time.thread_time_ns() - cpu_ns) / (time.monotonic_ns() - began_ns)
        for task in working:
            if not task.cancelled():
                task.result()  # raises what is a mistake of ours
        return self._driven

    def _work(self) -> Iterator[Coroutine[None, None, None]]:
        job = self._job
        yield sleep_until(job.end_ns)  # also where nothing is left to be sent
        if job.arrivals_ns is not None:
            yield self._open_loop(job.arrivals_ns)
        for caller in range(job.share, job.callers, job.shares):
            yield self._caller(caller)
        if job.share == 0:
            for number in range(self._prompts.workload.builds):
                yield self._build_meanwhile(number)

    async def _open_loop(self, arrivals_ns: tuple[int, ...]) -> None:
        async with asyncio.TaskGroup() as group:
            for index in range(self._job.share, len(arrivals_ns), self._job.shares):
                due_ns = self._job.start_ns + arrivals_ns[index]
                await sleep_until(due_ns)
                group.create_task(self._request(index, due_ns))

    async def _caller(self, index: int) -> None:
        """Asks at least once, however late it is."""
        due_ns = time.monotonic_ns()
        while index < self._job.callers or due_ns < self._job.end_ns:
            if (await self._request(index, due_ns)).failure is not None:
                await asyncio.sleep(PAUSE_S)
            index += self._job.callers
            due_ns = time.monotonic_ns()

    async def _request(self, index: int, due_ns: int) -> Sent:
        drawn = self._prompts.draws.at(self._job.first_index + index)
        ask = self._prompts.ask(drawn, self._job.way)
        sent = Sent(drawn, due_ns, time.monotonic_ns())
        self._driven.sent.append(sent)
        self.counted.sent += 1
        try:
            await self._follow(ask, sent)
        except TinyLoopError as error:
            sent.failure = Failure.of(error)
            self.counted.failed += 1
        except asyncio.CancelledError:
            sent.unfinished = True
            raise
        else:
            sent.hung_up = sent.timeline.completed is None
            self.counted.hung_up += sent.hung_up
            self.counted.completed += not sent.hung_up
        finally:
            if not self._job.keep_ids:
                sent.timeline.token_ids.clear()
        return sent

    async def _follow(self, ask: Ask, sent: Sent) -> None:
        """A prefix that is gone is made again, as its owner would; that takes part in the latency."""
        for _ in range(TRIES - 1):
            try:
                return await follow(self._service, ask, sent.timeline, most=sent.drawn.hang_up_after)
            except PrefixNotFound:
                assert sent.drawn.prefix is not None
                name, content = self._prompts.prefix(sent.drawn.prefix)
                await self._build(name, content, self._prompts.draws.prefix_len(sent.drawn.prefix))
        await follow(self._service, ask, sent.timeline, most=sent.drawn.hang_up_after)

    async def _build_meanwhile(self, number: int) -> None:
        """The workload's further builds, evenly over the measured time."""
        job, workload = self._job, self._prompts.workload
        await sleep_until(job.measure_from_ns + round((number + 0.5) / workload.builds * job.measured_s * 1e9))
        name, content = self._prompts.further_build(number)
        with suppress(TinyLoopError):  # it is written down
            await self._build(name, content, workload.build_len)

    async def _build(self, name: str, content: Content, tokens: int) -> None:
        began_ns, failure = time.monotonic_ns(), None
        try:
            await build(self._service, self._job.way, name, content, self._prompts.workload.ttl_s)
        except TinyLoopError as error:
            failure = Failure.of(error)
            raise
        finally:
            self._driven.builds.append(Build(tokens, began_ns, time.monotonic_ns(), failure))

    async def _tick(self) -> None:
        """How late the event loop wakes up; a tick that was slept through is as late as it would have been."""
        due_ns = time.monotonic_ns()
        while True:
            due_ns += TICK_NS
            await sleep_until(due_ns)
            now_ns = time.monotonic_ns()
            self._driven.loop_late_ns.extend(range(now_ns - due_ns, 0, -TICK_NS))
            due_ns = max(due_ns, now_ns - (now_ns - due_ns) % TICK_NS)


async def build(service: Service, way: Way, name: str, content: Content, ttl_s: float | None) -> None:
    """Make a prefix; where nothing is shared, prefill as much and keep nothing."""
    if way is Way.SHARED:
        await service.create_prefix(name, content, ttl_s=ttl_s)
    else:
        await follow(service, Ask(content, parameters(1, ignore_eos=True, seed=0)), Timeline())


async def sleep_until(moment_ns: int) -> None:
    """Gives way at least once."""
    await asyncio.sleep(max(0.0, (moment_ns - time.monotonic_ns()) / 1e9))
