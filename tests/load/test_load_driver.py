"""The driver against a real scheduler on the fake engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import cast

import pytest
from load_harness import Around, drive, fake, job_of, prompts_of, with_prefixes

from tinyloop_service.bench.service import Answering, Ask, Outputs, Service
from tinyloop_service.engine.fake import FakeEngine
from tinyloop_service.errors import PrefixNotFound
from tinyloop_service.load import watch
from tinyloop_service.load.driver import TICK_NS, Driver
from tinyloop_service.load.results import Way
from tinyloop_service.load.watch import settled_pages
from tinyloop_service.types import Load

MS = 10**6


async def test_an_open_loop_asks_what_is_due_and_reads_every_answer() -> None:
    prompts, arrivals = prompts_of(), tuple(range(0, 300 * MS, 10 * MS))
    async with fake() as target:
        await with_prefixes(target, prompts)
        driven = await drive(target, prompts, arrivals_ns=arrivals)
    assert [sent.drawn for sent in driven.sent] == [prompts.draws.at(index) for index in range(30)]
    for sent in driven.sent:
        timeline = sent.timeline
        assert sent.failure is None and timeline.completed is not None and timeline.started is not None
        assert len(timeline.token_ids) == sum(count for _, count in timeline.arrivals) == sent.drawn.output_len
        assert sent.due_ns <= sent.sent_ns <= timeline.arrivals[0][0] <= timeline.end_ns
        assert timeline.started.cached_tokens == 70


async def test_both_ways_get_the_same_answers() -> None:
    prompts, answers = prompts_of(), []
    async with fake() as target:
        await with_prefixes(target, prompts)
        for way in Way:
            driven = await drive(target, prompts, way=way, arrivals_ns=tuple(range(20)))
            answers.append([sent.timeline.token_ids for sent in driven.sent])
    assert answers[0] == answers[1]
    assert len({*map(tuple, answers[0])}) > 10


async def test_an_open_loop_waits_for_nobody_and_gives_up_in_the_end() -> None:
    """The engine stands still: all is sent when due, nothing ends, and what was held comes back."""
    prompts, gate = prompts_of(), threading.Event()
    gate.set()
    async with fake(FakeEngine(gate=gate)) as target:
        await with_prefixes(target, prompts)
        gate.clear()
        driven = await drive(target, prompts, arrivals_ns=tuple(range(0, 200 * MS, 20 * MS)), patience_s=0.0)
        gate.set()
        assert await settled_pages(target, 0) == 0
    assert len(driven.sent) == 10
    assert all(sent.unfinished and sent.timeline.end_ns for sent in driven.sent)
    assert not any(sent.timeline.arrivals for sent in driven.sent)


async def test_a_closed_loop_has_so_many_callers_each_with_its_own_requests() -> None:
    prompts = prompts_of()
    async with fake() as target:
        await with_prefixes(target, prompts)
        driven = await drive(target, prompts, callers=3)
    by_caller: dict[int, list[int]] = {}
    for sent in driven.sent:
        by_caller.setdefault(sent.drawn.index % 3, []).append(sent.drawn.index)
    assert by_caller.keys() == {0, 1, 2}
    assert all(indexes == [*range(caller, indexes[-1] + 1, 3)] for caller, indexes in by_caller.items())
    moments = [(sent.sent_ns, 1) for sent in driven.sent] + [(sent.timeline.end_ns, -1) for sent in driven.sent]
    running = 0
    for _, change in sorted(moments):
        running += change
        assert running <= 3


async def test_callers_who_hang_up_leave_nothing_behind() -> None:
    prompts = prompts_of(cancel_rate=1.0, output_len=[40, 60])
    async with fake(stream_interval_ns=0) as target:
        await with_prefixes(target, prompts)
        driver = Driver(target, prompts, job_of(callers=4))
        driven = await driver.run()
        assert await settled_pages(target, 0) == 0
    assert driver.counted.hung_up == sum(sent.hung_up for sent in driven.sent) > 0
    for sent in driven.sent:
        assert sent.hung_up == (sent.timeline.completed is None)
        assert sent.drawn.hang_up_after is not None
        assert len(sent.timeline.token_ids) >= sent.drawn.hang_up_after
    assert driver.counted.sent == driver.counted.hung_up + driver.counted.completed


async def test_a_prefix_that_is_gone_is_made_again() -> None:
    prompts = prompts_of()
    async with fake() as target:  # nobody made any
        driven = await drive(target, prompts, arrivals_ns=tuple(range(10)))
    assert all(sent.failure is None and sent.timeline.completed is not None for sent in driven.sent)
    assert 0 < len(driven.builds) <= 10
    assert {build.tokens for build in driven.builds} == {70}
    assert all(build.failure is None and build.began_ns < build.end_ns for build in driven.builds)


class Forgetful(Around):
    """Forgets a prefix just before it is asked for, once for each request."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._asked: set[int] = set()

    @asynccontextmanager
    async def ask(self, ask: Ask) -> AsyncIterator[AsyncIterator[Outputs]]:
        if (seed := ask.parameters.sampling.seed) not in self._asked and ask.prefix is not None:
            self._asked.add(seed)
            with suppress(PrefixNotFound):
                await self.delete_prefix(ask.prefix)
        async with self.service.ask(ask) as pieces:
            yield pieces


async def test_prefixes_that_end_all_the_time_are_made_all_the_time() -> None:
    prompts = prompts_of()
    async with fake() as target:
        driven = await drive(Forgetful(target), prompts, callers=1)
    assert all(sent.failure is None and sent.timeline.completed is not None for sent in driven.sent)
    assert len(driven.builds) == len(driven.sent) > 0


async def test_what_is_refused_is_written_down_and_the_caller_goes_on() -> None:
    prompts = prompts_of(output_len=5000)
    async with fake() as target:
        await with_prefixes(target, prompts)
        driver = Driver(target, prompts, job_of(callers=2))
        driven = await driver.run()
    assert {(sent.failure.code, sent.failure.reason) for sent in driven.sent if sent.failure is not None} == {
        ("INVALID_ARGUMENT", "SEQUENCE_TOO_LONG")
    }
    assert 2 <= len(driven.sent) == driver.counted.failed < 10, "after an error a caller pauses"


@pytest.mark.parametrize("way", Way)
async def test_builds_in_the_midst(way: Way) -> None:
    prompts = prompts_of(builds=2, build_len=300)
    async with fake() as target:
        await with_prefixes(target, prompts)
        driven = await drive(target, prompts, way=way, callers=1)
        names = {prompts.further_build(number)[0] for number in range(2)}
        made = {info.name for info in target._own.list_prefixes()}
    assert [build.tokens for build in driven.builds] == [300, 300]
    assert (names <= made) is (way is Way.SHARED), "without sharing nothing is kept"


async def test_processes_share_a_schedule_without_talking() -> None:
    prompts, arrivals = prompts_of(), tuple(range(15))
    async with fake() as target:
        await with_prefixes(target, prompts)
        several = [await drive(target, prompts, arrivals_ns=arrivals, share=share, shares=2) for share in range(2)]
    indexes = [[sent.drawn.index for sent in driven.sent] for driven in several]
    assert indexes == [[*range(0, 15, 2)], [*range(1, 15, 2)]]


class Blocking(Around):
    """Keeps the event loop to itself."""

    def ask(self, ask: Ask) -> Answering:
        time.sleep(0.1)
        return self.service.ask(ask)


async def test_a_loop_that_was_blocked_was_late_at_every_tick_it_slept_through() -> None:
    prompts = prompts_of()
    async with fake() as target:
        await with_prefixes(target, prompts)
        driven = await drive(Blocking(target), prompts, arrivals_ns=(50 * MS,))
    late = [each for each in driven.loop_late_ns if each >= 20 * MS]
    assert len(late) >= 7, "ticks come every 10 ms"
    assert max(late) >= 100 * MS - TICK_NS


async def test_a_phase_lasts_as_long_as_it_is_said_to() -> None:
    async with fake() as target:
        job = job_of(arrivals_ns=())
        driven = await Driver(target, prompts_of(), job).run()
    assert driven.sent == []
    assert time.monotonic_ns() >= job.end_ns


async def test_a_server_that_has_gone_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        async def load(self) -> Load:
            await asyncio.Event().wait()
            raise AssertionError

    monkeypatch.setattr(watch, "SETTLE_S", 0.01)
    assert await settled_pages(cast("Service", Silent()), 0) == -1
