"""An engine's two threads: what becomes of a plan, and how late the event loop hears of it."""

from __future__ import annotations

import threading
import time

import pytest

from tinyloop_service.engine.api import Plan, StepResult
from tinyloop_service.engine.fake import FakeEngine, FaultAt
from tinyloop_service.errors import EngineFault
from tinyloop_service.scheduler.engine_threads import EngineThreads, NotRun, NotSubmitted

MS = 10**6


def failing(number: int, fault_at: FaultAt) -> FakeEngine:
    """One of its plans fails."""
    return FakeEngine(fault=lambda plan: EngineFault("a fault") if plan.number == number else None, fault_at=fault_at)


async def test_behind_a_plan_that_was_not_taken_none_runs_until_the_owner_says_so() -> None:
    engine = failing(1, FaultAt.START)
    threads = EngineThreads(engine)
    first, second = threads.submit(Plan(1)), threads.submit(Plan(2))
    with pytest.raises(NotSubmitted) as refused:
        await first
    assert isinstance(refused.value.__cause__, EngineFault)
    with pytest.raises(NotRun):
        await second
    threads.submit_failed = False
    assert await threads.submit(Plan(2)) == StepResult(())
    assert engine.num_steps == 2
    await threads.close()
    assert engine.is_closed


async def test_a_result_that_fails_stops_nothing_behind_it() -> None:
    threads = EngineThreads(failing(1, FaultAt.RESULT))
    first, second = threads.submit(Plan(1)), threads.submit(Plan(2))
    with pytest.raises(EngineFault, match="a fault"):
        await first
    assert await second == StepResult(())
    await threads.close()


async def test_it_is_known_how_late_the_event_loop_came_to_a_result() -> None:
    second_is_submitted = threading.Event()
    threads = EngineThreads(FakeEngine(fault=lambda plan: second_is_submitted.set() if plan.number == 2 else None))
    first, second = threads.submit(Plan(1)), threads.submit(Plan(2))
    second_is_submitted.wait()  # the result of the first one was there before
    began_ns = time.monotonic_ns()
    while time.monotonic_ns() < began_ns + 2 * MS:
        pass
    await first
    assert threads.lag_ns >= 2 * MS
    await second
    await threads.close()


async def test_an_event_loop_that_is_late_once_is_not_behind() -> None:
    third_is_submitted = threading.Event()
    threads = EngineThreads(FakeEngine(fault=lambda plan: third_is_submitted.set() if plan.number == 3 else None))
    await threads.submit(Plan(1))
    prompt_ns = threads.lag_ns
    second, third = threads.submit(Plan(2)), threads.submit(Plan(3))
    third_is_submitted.wait()  # the result of the second one was there before
    began_ns = time.monotonic_ns()
    while time.monotonic_ns() <= began_ns + prompt_ns:
        pass
    await second
    assert threads.lag_ns == prompt_ns
    await third
    await threads.close()


async def test_who_has_run_nothing_closes_without_threads() -> None:
    engine, before = FakeEngine(), threading.active_count()
    await EngineThreads(engine).close()
    assert engine.is_closed and threading.active_count() == before
