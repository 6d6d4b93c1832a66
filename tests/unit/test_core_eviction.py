"""Prefixes under pressure: eviction, rebuilds, pins, active forms, and what a fault takes along."""

from __future__ import annotations

import dataclasses

import pytest
from scheduler_driver import SMALL, Driver, builds, names, tokens

from tinyloop_service.errors import (
    EngineFault,
    OutOfMemory,
    PinBudgetExceeded,
)
from tinyloop_service.scheduler.catalog import UNCHANGED
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.types import GenerationRequest, PrefixDefinition

SECOND = 10**9
TWO = SchedulerSettings(max_prefixes=2)


def test_the_least_recently_used_is_evicted_and_keeps_its_name() -> None:
    driver = Driver(settings=TWO)
    a, b = (driver.create(name, tokens(70, seed)) for seed, name in enumerate("ab"))
    driver.run()
    driver.submit(GenerationRequest((1,), 5, prefix="a"))
    driver.run()
    c = driver.create("c", tokens(70, 2))
    driver.run()
    assert [driver.state(uid) for uid in (a, b, c)] == ["ready", "evicted", "ready"]
    assert names(driver) == ["a", "b", "c"] and driver.info(b).size_bytes == 0


def test_an_evicted_prefix_is_built_again_once_on_its_next_use() -> None:
    """T5."""
    driver = Driver(settings=TWO)
    for seed, name in enumerate("abc"):
        driver.create(name, tokens(70, seed))
        driver.run()
    assert driver.state("uid1") == "evicted" and builds(driver) == 3
    for i in range(5):
        driver.submit(GenerationRequest((i,), 5, prefix="a"))
    driver.run()
    assert builds(driver) == 4 and driver.state("uid1") == "ready"
    assert all(watched.reasons[0] is not None for watched in driver.requests.values())


def test_a_used_prefix_is_never_evicted() -> None:
    """T5: memory for one; the other waits until the decode is through."""
    driver = Driver(dataclasses.replace(SMALL, num_pages=10))
    used = driver.create("used", tokens(128))
    driver.run()
    order = driver.submit(GenerationRequest((1,), 40, prefix="used"))
    driver.step()
    other = driver.create("other", tokens(256))
    driver.run(until=lambda: driver.requests[order].is_over)
    assert driver.state(used) == "ready" and builds(driver) == 1
    driver.run()
    assert driver.state(used) == "evicted" and driver.state(other) == "ready"


def test_two_evicted_prefixes_do_not_push_each_other_out_for_ever() -> None:
    """Memory for one of them: each is built when its turn comes, and nobody older loses what waits for it."""
    driver = Driver(dataclasses.replace(SMALL, num_pages=8, max_rows=2), SchedulerSettings(aging_ns=0))
    for seed, name in enumerate("ab"):
        driver.create(name, tokens(128, seed))
        driver.run()
    orders = [driver.submit(GenerationRequest((i,), 20, prefix="ab"[i % 2])) for i in range(8)]
    driver.run()
    assert all(driver.requests[order].reasons[0] is not None for order in orders)
    assert builds(driver) <= 2 + len(orders)


def test_pins_guard_against_eviction_within_a_budget_and_not_against_expiry() -> None:
    driver = Driver(dataclasses.replace(SMALL, num_pages=20), SchedulerSettings(pin_fraction=0.4))
    pinned = driver.create("pinned", tokens(128), pinned=True, expire_time_ns=driver.now_ns + SECOND)
    driver.create("child", tokens(64), parent="pinned")
    driver.run()
    with pytest.raises(PinBudgetExceeded, match="10 pages would be pinned, 8 may be"):
        driver.create("more", tokens(190), pinned=True)
    driver.core.catalog.update("", "child", UNCHANGED, True, None, driver.now_ns)
    with pytest.raises(OutOfMemory, match="6 pinned"):
        driver.submit(GenerationRequest(tokens(350), 50, n=2))
    driver.submit(GenerationRequest(tokens(350), 50))
    driver.run()
    assert driver.state(pinned) == "ready"
    driver.now_ns += 2 * SECOND
    assert names(driver) == ["child"]
    driver.check()


def test_a_pin_that_makes_a_waiting_request_impossible_ends_its_wait() -> None:
    driver = Driver(dataclasses.replace(SMALL, num_pages=12, max_rows=2))
    driver.create("p", tokens(128))
    driver.run()
    driver.submit(GenerationRequest((1,), 30, prefix="p"))
    driver.step()
    order = driver.submit(GenerationRequest(tokens(350), 30))
    driver.core.catalog.update("", "p", UNCHANGED, True, None, driver.now_ns)
    driver.run()
    assert isinstance(driver.requests[order].error, OutOfMemory)


def test_an_evicted_prefix_is_not_waited_for_when_pins_leave_it_no_room() -> None:
    driver = Driver(dataclasses.replace(SMALL, num_pages=20))
    driver.create("large", tokens(390))  # 14 pages
    driver.run()
    driver.create("pinned", tokens(200, 1), pinned=True)  # 8 pages
    driver.run()
    with pytest.raises(OutOfMemory, match="8 pinned"):
        driver.create("large", tokens(390))
    with pytest.raises(OutOfMemory, match="8 pinned"):
        driver.core.catalog.preview(PrefixDefinition(tokens(390)), "", "large", None, False, driver.now_ns)
    driver.core.catalog.update("", "pinned", UNCHANGED, False, None, driver.now_ns)
    uid = driver.create("large", tokens(390))
    driver.run()
    assert driver.state(uid) == "ready"


ACTIVE = dataclasses.replace(SMALL, active_page_bytes=2 * SMALL.page_bytes)


def test_an_active_form_is_rounded_up_to_pages_once_for_an_extent() -> None:
    limits = dataclasses.replace(SMALL, active_page_bytes=14 * SMALL.page_bytes + 1)
    layers = limits.cache_layers(2)
    assert limits.active_pages(0, 64 * 100, 2) == 14 * 100 * layers + 1, f"{layers} · 100 bytes more are one page more"
    assert limits.active_pages(64, 64, 2) == 0
    assert not SMALL.has_active_form and SMALL.active_pages(0, 64, 2) == 0


def test_an_active_form_is_made_once_and_stays_until_pressure() -> None:
    driver = Driver(dataclasses.replace(ACTIVE, num_pages=40))
    driver.create("a", tokens(64))
    driver.create("b", tokens(64, 1))
    driver.run()
    assert driver.core.load().pages_active == 8, "two prefixes of two pages, twice their size active"
    for i in range(3):
        driver.submit(GenerationRequest((i,), 5, prefix="b"))
    driver.run()
    assert sum(len(plan.activate) for plan in driver.plans) == 2, "they were active since they were built"
    driver.submit(GenerationRequest(tokens(250), 70))  # 10 pages and 20 active: more than the 28 that are free
    driver.run()
    assert [len(plan.deactivate) for plan in driver.plans if plan.deactivate] == [1], "one was enough"
    assert driver.core.load().pages_active == 4 and driver.core.load().prefixes_ready == 2
    driver.submit(GenerationRequest((1,), 5, prefix="a"))
    driver.run()
    assert sum(len(plan.activate) for plan in driver.plans) == 3, "the least recently used one had gone"


def test_active_forms_count_against_the_budget() -> None:
    driver = Driver(dataclasses.replace(ACTIVE, num_pages=11))
    with pytest.raises(OutOfMemory):
        driver.create("p", tokens(128))
    driver.create("q", tokens(64))
    driver.run()
    with pytest.raises(OutOfMemory):
        driver.submit(GenerationRequest((1,), 5, prefix="q"))


def test_nobody_evicts_what_somebody_older_waits_for() -> None:
    """The younger build would fit if the prefix went that the older request, short of a row, is to read."""
    driver = Driver(dataclasses.replace(SMALL, num_pages=11, max_rows=1))
    driver.create("p", tokens(128))
    driver.run()
    busy = driver.submit(GenerationRequest((1,), 40))
    driver.step()
    older = driver.submit(GenerationRequest((2,), 5, prefix="p"))
    younger = driver.create("q", tokens(256, 1))
    driver.run(until=lambda: driver.requests[busy].is_over)
    assert driver.state(younger) == "building" and driver.info(younger).tokens_built == 0
    driver.run()
    admitted = driver.requests[older].admitted
    assert admitted is not None and admitted.cached_tokens == 128 and builds(driver) == 2
    assert driver.state(younger) == "ready" and driver.state("uid1") == "evicted"


def test_what_nobody_waits_for_is_evicted_before_what_somebody_does() -> None:
    """One row at a time: when it is free an older request needs pages, and a younger one waits for the prefix that was
    used longest ago."""
    driver = Driver(dataclasses.replace(SMALL, num_pages=12, max_rows=1))
    for seed, name in enumerate("pq"):
        driver.create(name, tokens(128, seed))
        driver.run()
    driver.submit(GenerationRequest((1,), 40))
    driver.step()
    driver.submit(GenerationRequest(tokens(128, 2), 5))
    younger = driver.submit(GenerationRequest((2,), 5, prefix="p"))
    driver.run()
    admitted = driver.requests[younger].admitted
    assert admitted is not None and admitted.cached_tokens == 128 and builds(driver) == 2
    assert driver.state("uid1") == "ready" and driver.state("uid2") == "evicted"


@pytest.mark.parametrize(("length", "waits"), [(128, True), (100, False)])
def test_nothing_is_evicted_for_a_build_that_would_only_share_time(length: int, waits: bool) -> None:
    """Another has 236 tokens left: one of less than half of that goes ahead, one of more would make both late."""
    driver = Driver(dataclasses.replace(SMALL, num_pages=16))
    kept = driver.create("kept", tokens(128))
    driver.run()
    first = driver.create("first", tokens(300, 1))
    driver.step()
    second = driver.create("second", tokens(length, 2))
    driver.step()
    assert driver.state(kept) == ("ready" if waits else "evicted")
    driver.run(until=lambda: driver.state(first if waits else second) == "ready")
    assert driver.info(second).tokens_built == (0 if waits else 100)
    driver.run()
    assert [driver.state(uid) for uid in (kept, first, second)] == ["evicted", "ready", "ready"]


def test_who_needs_no_room_does_not_wait_for_a_build_that_yields() -> None:
    """The second build has aged, and is next once the first has ended; a build for which there is room waits for it."""
    driver = Driver(dataclasses.replace(SMALL, num_pages=44, max_seq_len=700))
    driver.create("hot", tokens(64))
    driver.run()
    kept = driver.create("kept", tokens(500, 9))
    driver.run()
    first = driver.create("first", tokens(600, 1))
    driver.step()
    second = driver.create("second", tokens(600, 2))
    driver.step()
    driver.now_ns += SchedulerSettings().aging_ns
    request = driver.submit(GenerationRequest((1,), 3, prefix="hot"))
    third = driver.create("third", tokens(100, 3))
    driver.run(until=lambda: driver.requests[request].admitted is not None)
    assert driver.state(first) == "building" and driver.state(kept) == "ready"
    driver.run(until=lambda: driver.state(first) == "ready")
    assert driver.info(third).build_start_ns == 0
    driver.run()
    assert builds(driver) == 5 and driver.state(kept) == "evicted"
    assert driver.info(second).build_start_ns <= driver.info(third).build_start_ns


def idle_chain() -> Driver:
    """A prefix and its child, READY, their active forms dropped under pressure."""
    driver = Driver(dataclasses.replace(ACTIVE, num_pages=40))
    driver.create("parent", tokens(64))
    driver.create("child", tokens(64, 1), parent="parent")
    driver.run()
    driver.submit(GenerationRequest(tokens(300, 2), 60))
    driver.run()
    assert driver.core.load().pages_active == 0 and driver.core.load().prefixes_ready == 2
    return driver


def test_a_fault_while_an_active_form_is_made_costs_the_pages_and_not_the_name() -> None:
    driver = idle_chain()
    order = driver.submit(GenerationRequest((3,), 5, prefix="child"))
    driver.fault = EngineFault("a fault")
    driver.step()
    assert isinstance(driver.requests[order].error, EngineFault)
    assert driver.state("uid1") == driver.state("uid2") == "evicted"
    again = driver.submit(GenerationRequest((3,), 5, prefix="child"))
    driver.run()
    assert driver.requests[again].reasons[0] is not None and builds(driver) == 4


def test_what_hangs_from_a_lost_prefix_is_lost_too() -> None:
    driver = idle_chain()
    driver.submit(GenerationRequest((3,), 5, prefix="parent"))
    driver.fault = EngineFault("a fault")
    driver.step()
    assert driver.state("uid2") == "evicted", "the child was not in the plan, its parent was"
    driver.check()


def test_who_leaves_the_queue_as_impossible_holds_up_nobody() -> None:
    """The refused one protected what the next needs; both are settled by one plan."""
    driver = Driver(dataclasses.replace(SMALL, num_pages=12, max_rows=2), SchedulerSettings(max_prefixes=2))
    driver.create("p", tokens(64))
    driver.create("q", tokens(128, 1))
    driver.run()
    impossible = driver.submit(GenerationRequest(tokens(190, 2), 60, prefix="p"))
    next_one = driver.create("r", tokens(64, 3))
    driver.core.catalog.update("", "q", UNCHANGED, True, None, driver.now_ns)
    driver.step()
    assert isinstance(driver.requests[impossible].error, OutOfMemory)
    assert driver.info(next_one).tokens_built == 64


def test_a_rebuild_that_fails_can_be_tried_again() -> None:
    """It was READY once, so the name stays good; who waited gets the error."""
    driver = Driver(settings=SchedulerSettings(max_prefixes=1))
    for seed, name in enumerate("ab"):
        driver.create(name, tokens(70, seed))
        driver.run()
    order = driver.submit(GenerationRequest((1,), 5, prefix="a"))
    driver.fault = EngineFault("a fault")
    driver.step()
    assert isinstance(driver.requests[order].error, EngineFault) and driver.state("uid1") == "evicted"
    again = driver.submit(GenerationRequest((1,), 5, prefix="a"))
    driver.run()
    assert driver.requests[again].reasons[0] is not None and driver.state("uid1") == "ready"
