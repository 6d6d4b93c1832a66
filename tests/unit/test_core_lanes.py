"""Requests beyond a quota of their tenant wait in a lane of their own, and nobody else notices."""

from __future__ import annotations

import dataclasses
import gc
import sys

import pytest
from loop_harness import WIDE, collect, ids
from loop_harness import running as running_loop
from quota_driver import ask, driver_of, refusal, running
from scheduler_driver import SMALL, Driver, builds, tokens

from tinyloop_service.engine.fake import expected_tokens
from tinyloop_service.errors import (
    ModelClosed,
    OutOfMemory,
    QueueFull,
)
from tinyloop_service.scheduler.catalog import UNCHANGED
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.types import GenerationRequest, PrefixDefinition, Quota, Sampling

SECOND = 10**9


# ---- requests at a time, and the line


def test_requests_beyond_the_concurrent_ones_wait_in_order_and_hold_up_nobody() -> None:
    driver = driver_of(Quota(concurrent_requests=2))
    mine = [driver.submit(ask()) for _ in range(5)]
    other = driver.submit(ask("b"))
    driver.step()
    assert running(driver, *mine, other) == [True, True, False, False, False, True]
    driver.cancel(mine[0])
    driver.step()
    assert running(driver, *mine[1:]) == [True, True, False, False]
    driver.run()
    assert all(watched.is_over for watched in driver.requests.values())
    driver.check_empty()


def test_a_line_takes_what_may_run_and_what_may_wait() -> None:
    """A burst that arrives at once is not refused for want of a plan in between."""
    driver = driver_of(Quota(concurrent_requests=2, queued_requests=3))
    mine = [driver.submit(ask()) for _ in range(5)]
    error = refusal(lambda: driver.submit(ask()))
    assert error.subject == "queued_requests" and "3 of yours wait, your quota is 3" in str(error)
    driver.submit(ask("b"))
    driver.step()
    refusal(lambda: driver.submit(ask()))
    driver.cancel(mine[4])
    driver.submit(ask())
    driver.run()
    driver.check_empty()


def test_builds_wait_in_the_same_line() -> None:
    driver = driver_of(Quota(queued_requests=2))
    driver.create("p", tokens(10), tenant="a")
    driver.submit(ask())
    refusal(lambda: driver.create("q", tokens(10), tenant="a"))
    refusal(lambda: driver.submit(ask()))
    assert driver.create("p", tokens(10), tenant="a") == "uid1", "joining a build adds nothing to the line"
    driver.run()
    driver.create("q", tokens(10), tenant="a")


def test_a_request_on_a_cold_prefix_is_not_passed_by_its_own_tenant_for_ever() -> None:
    driver = driver_of(Quota(concurrent_requests=1))
    driver.create("hot", tokens(10), tenant="a")
    driver.create("cold", tokens(300, 1), tenant="a")
    driver.run()
    driver.core._prefixes.evict(next(p for p in driver.core._prefixes if p.name == "cold"))
    first = driver.submit(ask(prefix="hot", max_tokens=20))
    driver.step()
    cold = driver.submit(ask(prefix="cold"))
    later = [driver.submit(ask(prefix="hot")) for _ in range(5)]
    driver.run(until=lambda: driver.requests[cold].admitted is not None)
    assert running(driver, first, *later) == [True, False, False, False, False, False]
    driver.run()
    driver.check()


def test_who_waits_for_a_quota_keeps_no_memory_and_does_not_age() -> None:
    """Its prefix goes when others want the room, and is built again when its turn comes."""
    driver = Driver(dataclasses.replace(SMALL, num_pages=8), SchedulerSettings(aging_ns=0, max_overtaken=0))
    driver.core.set_quotas({"a": Quota(concurrent_requests=1)}, driver.now_ns)
    uid = driver.create("p", tokens(64), tenant="a")
    driver.run()
    driver.submit(ask(max_tokens=40))
    driver.step()
    kept_back = driver.submit(ask(prefix="p"))
    driver.step()
    driver.now_ns += SECOND
    large = driver.submit(GenerationRequest(tokens(130, 1), 10, "b"))  # three blocks: six pages
    small = driver.submit(ask("b"))
    driver.step()
    assert running(driver, kept_back, large, small) == [False, True, False], "who lacks room ages, as ever"
    assert driver.state(uid) == "evicted"
    driver.run()
    assert running(driver, kept_back, small) == [True, True] and builds(driver) == 2
    driver.check()


def test_who_waits_for_a_quota_does_not_make_plans_shorter() -> None:
    driver = driver_of(Quota(concurrent_requests=1), busy_steps=1)
    driver.submit(ask("b", max_tokens=60))
    driver.submit(ask("a", max_tokens=60))
    driver.run(until=lambda: len(driver.plans) == 4)
    alone = driver.plans[-1].num_steps
    driver.submit(ask("a"))
    driver.now_ns += SECOND
    driver.step()
    assert driver.plans[-1].num_steps == alone > 1


def test_who_waits_for_a_quota_does_not_fill_the_queue_of_others() -> None:
    driver = Driver(settings=SchedulerSettings(max_queue=3))
    driver.core.set_quotas({"a": Quota(concurrent_requests=1)}, driver.now_ns)
    for _ in range(4):
        driver.submit(ask())
    with pytest.raises(QueueFull):
        driver.submit(ask())
    driver.submit(ask("b"))
    driver.submit(ask("b"))
    with pytest.raises(QueueFull):
        driver.submit(ask("b"))
    driver.run()
    driver.check_empty()


def test_a_plan_is_as_much_work_however_many_wait_for_a_quota() -> None:
    def calls_of_a_plan(num_kept_back: int) -> int:
        driver = driver_of(Quota(concurrent_requests=1))
        driver.create("p", tokens(10), tenant="a")
        for _ in range(1 + num_kept_back):
            driver.submit(ask(prefix="p", max_tokens=60))
        driver.run(until=lambda: len(driver.plans) == 5)
        calls: list[str] = []
        gc.disable()  # what it finalizes of other tests would be counted
        sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name))
        try:
            driver.core.plan(driver.now_ns)
        finally:
            sys.setprofile(None)
            gc.enable()
        return len(calls)

    assert calls_of_a_plan(1) == calls_of_a_plan(100) > 20


def test_who_leaves_a_lane_gives_back_nothing_that_he_never_had() -> None:
    driver = driver_of(Quota(concurrent_requests=1, tokens_per_s=10))
    driver.create("p", tokens(10), tenant="a")
    driver.run()
    first = driver.submit(ask(prefix="p"))
    kept_back = [driver.submit(ask(prefix="p")) for _ in range(3)]
    before = driver.core._quotas.balance("a", driver.now_ns)
    driver.cancel(kept_back[1])
    driver.check()
    assert driver.core._quotas.balance("a", driver.now_ns) == before
    driver.cancel(first)  # let in and not started: all of it comes back
    assert driver.core._quotas.balance("a", driver.now_ns) == before + 10
    driver.core.abort(ModelClosed())
    driver.run()
    driver.check()


def test_a_pin_that_makes_a_request_impossible_ends_its_wait_in_a_lane_too() -> None:
    driver = driver_of(Quota(concurrent_requests=1), num_pages=12)
    driver.create("p", tokens(100), tenant="b")
    driver.run()
    driver.submit(ask(max_tokens=60))
    driver.step()
    large = driver.submit(GenerationRequest(tokens(300), 20, "a"))
    driver.core.catalog.update("b", "p", UNCHANGED, True, None, driver.now_ns)
    driver.step()
    assert isinstance(driver.requests[large].error, OutOfMemory)
    driver.run()
    driver.check()


# ---- tokens, through the core


def test_requests_wait_until_their_tenant_has_tokens() -> None:
    driver = driver_of(Quota(tokens_per_s=2))  # a bucket of 20
    first, second, third = (driver.submit(ask(prompt=2, max_tokens=11)) for _ in range(3))  # 13 each
    other = driver.submit(ask("b"))
    start_ns = driver.now_ns
    driver.step()
    assert running(driver, first, second, third, other) == [True, True, False, True]
    wake_ns = driver.core.next_wake_ns
    assert wake_ns == start_ns + 3 * SECOND + 1, "20 − 26 is a debt of three seconds"
    while driver.step():
        pass
    assert running(driver, third) == [False] and not driver.core.is_idle
    driver.now_ns = wake_ns
    driver.step()
    assert running(driver, third) == [True]
    driver.run()
    driver.check_empty()


def test_what_was_not_generated_comes_back() -> None:
    driver = driver_of(Quota(tokens_per_s=2))
    first, second = driver.submit(ask(max_tokens=30)), driver.submit(ask(max_tokens=5))
    driver.step()
    assert running(driver, first, second) == [True, False]
    driver.core.finish(first, 0)  # by a stop in its text
    driver.requests[first].reasons[0] = driver.requests[first].reasons[0] or "stop"  # type: ignore[assignment]
    driver.step()
    assert running(driver, second) == [True]


def test_builds_take_tokens_once_and_reading_them_is_free() -> None:
    driver = driver_of(Quota(tokens_per_s=20), num_pages=12)
    driver.create("p", tokens(190), tenant="a")
    driver.run()
    assert 10 <= driver.core._quotas.balance("a", driver.now_ns) < 11
    driver.create("p", tokens(190), tenant="a")
    driver.core._prefixes.evict(next(iter(driver.core._prefixes)))
    request = driver.submit(ask(prefix="p", prompt=1, max_tokens=5))
    driver.step()
    driver.run()
    assert running(driver, request) == [True] and builds(driver) == 2
    assert driver.core._quotas.balance("a", driver.now_ns) > 4
    driver.create("q", tokens(300), tenant="a")  # leaves a debt, which is paid off in time
    error = refusal(lambda: driver.create("r", (1,), tenant="a"))
    assert error.subject == "tokens_per_s" and 14 < (error.retry_after_s or 0) < 15


# ---- on a clock


async def test_the_loop_wakes_by_itself_when_a_quota_lets_a_request_start() -> None:
    async with running_loop() as scheduler:
        scheduler.set_quotas({"a": Quota(tokens_per_s=20)})  # a bucket of 200
        await scheduler.create_prefix(PrefixDefinition(tokens(210)), tenant="a", name="p", wait=False)
        stream = scheduler.generate(GenerationRequest((1,), 3, "a"))  # behind a debt of half a second
        assert scheduler._core._admission._line.waiting("a").kept_back == 1
        messages = await collect(stream)
        assert ids(messages) == expected_tokens([((1,), 0)], 3, Sampling(), 1, WIDE)
