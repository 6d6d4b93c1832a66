"""When few prompt tokens wait for others, on an engine whose pass costs as much for one token as for 100."""

from __future__ import annotations

import dataclasses

import pytest
from scheduler_driver import SMALL, Driver, tokens

from tinyloop_service.engine.api import Plan, Prefill
from tinyloop_service.scheduler.gathering import Gathering
from tinyloop_service.scheduler.pace import Pace
from tinyloop_service.scheduler.sequences import Extent, Feed, Sequences
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.types import GenerationRequest

LIMITS = dataclasses.replace(SMALL, max_rows=64, max_chunk=200, least_chunk=100, num_pages=2000)
MS = 1_000_000
STEP, PASS = 1 * MS, 2 * MS  # of any number of rows; of up to 100 tokens


def took_ns(plan: Plan) -> int:
    return plan.num_steps * STEP * bool(plan.decode) + PASS * bool(plan.prefill)


class Queue:
    """Newcomers of 10 tokens, and what becomes of them."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.pace = Pace(LIMITS, 0.5)
        self.gathering = Gathering(self.pace)
        self.sequences = Sequences(LIMITS)
        self.feeds: list[Feed] = []

    def learn(self, *, num_tokens: int = 0) -> None:
        prefill = (Prefill(99, 0, (1,) * num_tokens, 0),) if num_tokens else ()
        plan = Plan(1, decode=tuple(range(self.num_rows)), prefill=prefill)
        self.pace.learn(plan, took_ns(plan))
        self.gathering.learn(plan, took_ns(plan))

    def knowing(self) -> Queue:
        self.learn()
        self.learn(num_tokens=10)
        return self

    def waits(self, num_new: int, num_tokens: int = 10) -> bool:
        """Of a plan that so many come before."""
        for _ in range(num_new):
            sequence = self.sequences.create(None, Extent(0, num_tokens, 1, 0))
            self.feeds.append(Feed(sequence, tokens(num_tokens), 0))
        waits = self.gathering.waits(self.feeds, self.num_rows, 1)
        if not waits:
            self.feeds.clear()
        return waits


def test_without_a_pass_that_was_seen_nobody_waits() -> None:
    queue = Queue(50)
    queue.learn()
    assert not any(queue.waits(1) for _ in range(20))


def test_among_many_rows_newcomers_wait_for_two_plans_or_until_they_fill_a_pass() -> None:
    queue = Queue(50).knowing()
    assert [queue.waits(1) for _ in range(7)] == [False, *[True, True, False] * 2], "the first one had nobody before it"
    queue = Queue(50).knowing()
    assert [queue.waits(1, 60) for _ in range(5)] == [False, *[True, False] * 2]


def test_whom_nobody_follows_does_not_wait() -> None:
    queue = Queue(8).knowing()
    assert not any(queue.waits(num_new) for num_new in [*[0] * 24, 1] * 4)
    queue = Queue(50).knowing()
    assert [queue.waits(num_new) for num_new in (1, 1, 0, 0)] == [False, True, True, False]
    assert not queue.feeds


@pytest.mark.parametrize(("num_rows", "most"), [(1, 1), (2, 1), (4, 2), (50, 2)])
def test_the_fewer_rows_would_stand_still_the_less_they_wait(num_rows: int, most: int) -> None:
    queue = Queue(num_rows).knowing()
    waited = [queue.waits(1) for _ in range(40)]
    runs = "".join("w" if each else " " for each in waited).split()
    assert max(map(len, runs)) == most


def test_passes_of_larger_chunks_and_plans_without_rows_teach_nothing() -> None:
    queue = Queue(50)
    queue.learn()
    queue.learn(num_tokens=101)
    queue.gathering.learn(Plan(1, prefill=(Prefill(99, 0, (1,), 0),)), 50 * MS)
    assert not any(queue.waits(1) for _ in range(20))


def test_whoever_has_waited_is_in_the_next_plan() -> None:
    """Also where a plan must not carry as much as the engine would like."""
    pace = Pace(dataclasses.replace(LIMITS, max_chunk=64), 0.5)
    gathering, sequences, feeds = Gathering(pace), Sequences(LIMITS), list[Feed]()
    for plan in (Plan(1, decode=(1,)), Plan(2, decode=(1,), prefill=(Prefill(99, 0, (1,)),))):
        pace.learn(plan, took_ns(plan))
        gathering.learn(plan, took_ns(plan))
    waited = 0
    for _ in range(40):
        sequence = sequences.create(None, Extent(0, 25, 1, 0))
        feeds.append(Feed(sequence, tokens(25), 0))
        is_in = not gathering.waits(feeds, 50, 1) and pace.take(sum(feed.remaining for feed in feeds), 50, 1) > 0
        waited = 0 if is_in else waited + 1
        feeds = [] if is_in else feeds
        assert waited <= 2


def run_with_arrivals(num_plans: int) -> Driver:
    """Twenty streams, and a request of ten tokens before each of so many plans."""
    driver = Driver(LIMITS, SchedulerSettings())
    driver.cost_ns = took_ns
    for i in range(20):
        driver.submit(GenerationRequest((1, i), 300))
    driver.run(until=lambda: len(driver.plans) == 4)
    for i in range(num_plans):
        driver.submit(GenerationRequest(tokens(10, i), 2))
        driver.step()
    driver.run()
    driver.check()
    return driver


def test_streams_stand_still_for_fewer_passes_and_nobody_is_forgotten() -> None:
    driver = run_with_arrivals(40)
    assert all(watched.is_over for watched in driver.requests.values())
    with_prompts = [bool(plan.prefill) for plan in driver.plans if plan.decode][4:48]
    assert sum(with_prompts) <= len(with_prompts) // 3
    assert "   " * 2 not in "".join("p" if each else " " for each in with_prompts[:40]), "somebody waited too long"
