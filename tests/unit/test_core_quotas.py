"""Quotas of tenants in the scheduler: bytes are refused, requests and tokens wait, and nobody else notices."""

from __future__ import annotations

import dataclasses

import pytest
from loop_harness import WIDE, collect, ids
from loop_harness import running as running_loop
from scheduler_driver import SMALL, Driver, builds, names, tokens

from tinyloop_service.engine.fake import expected_tokens
from tinyloop_service.errors import EngineFault, PinBudgetExceeded, TenantQuotaExceeded
from tinyloop_service.scheduler.catalog import UNCHANGED
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.types import GenerationRequest, PrefixDefinition, Quota, Sampling

SECOND = 10**9
BLOCK = 2000  # bytes of 64 tokens at one loop: a page in each of two cache layers


def driver_of(quota: Quota, tenant: str = "a", **limits: int) -> Driver:
    driver = Driver(dataclasses.replace(SMALL, **limits))
    driver.core.set_quotas({tenant: quota}, driver.now_ns)
    return driver


def ask(tenant: str = "a", prompt: int = 2, max_tokens: int = 8, prefix: str | None = None) -> GenerationRequest:
    return GenerationRequest(tokens(prompt, 3), max_tokens, tenant, prefix)


def refusal(call: object) -> TenantQuotaExceeded:
    with pytest.raises(TenantQuotaExceeded) as caught:
        call()  # type: ignore[operator]
    return caught.value


def running(driver: Driver, *orders: int) -> list[bool]:
    """Which of the requests have been admitted."""
    return [driver.requests[order].admitted is not None for order in orders]


# ---- bytes, through the catalog


def test_prefix_bytes_count_what_is_evicted_and_not_what_failed() -> None:
    driver = driver_of(Quota(prefix_bytes=3 * BLOCK), num_pages=8)
    driver.create("p", tokens(64), tenant="a")
    driver.create("q", tokens(65, 1), tenant="a")
    driver.run()
    driver.submit(GenerationRequest(tokens(120, 2), 60))  # somebody else's, needs six pages
    driver.run()
    assert {info.state.value for info in driver.core.catalog.named("a", driver.now_ns)} == {"evicted"}
    error = refusal(lambda: driver.create("r", (1,), tenant="a"))
    assert error.subject == "prefix_bytes" and error.retry_after_s is None
    assert "6000 bytes are taken, 2000 more were asked for, your quota is 6000; delete a prefix" in str(error)
    driver.create("q", tokens(65, 1), tenant="a")  # there already, so it costs nothing
    driver.create("r", tokens(100), tenant="b")
    driver.run()
    driver.core.catalog.delete("a", "p", None, driver.now_ns)
    driver.create("r", (1,), tenant="a")
    driver.fault = EngineFault("a fault")
    driver.run()
    assert driver.core.catalog.get("a", "r", driver.now_ns).state.value == "failed"
    driver.create("s", (1,), tenant="a")
    driver.check()


def test_a_deleted_prefix_counts_until_nothing_reads_it() -> None:
    driver = driver_of(Quota(prefix_bytes=2 * BLOCK))
    driver.create("p", tokens(100), tenant="a")
    driver.run()
    driver.submit(ask(prefix="p", max_tokens=30))
    driver.step()
    driver.core.catalog.delete("a", "p", None, driver.now_ns)
    refusal(lambda: driver.create("q", (1,), tenant="a"))
    driver.run()
    driver.create("q", (1,), tenant="a")


def test_a_parent_counts_once_and_as_long_as_its_children() -> None:
    driver = driver_of(Quota(prefix_bytes=3 * BLOCK))
    driver.create("parent", tokens(64), tenant="a")
    driver.create("one", (1, 2), tenant="a", parent="parent")
    driver.create("two", (3, 4), tenant="a", parent="parent")
    driver.run()
    driver.core.catalog.delete("a", "parent", None, driver.now_ns)
    refusal(lambda: driver.create("q", (1,), tenant="a"))


def test_what_a_create_would_be_refused_its_preview_is_too() -> None:
    driver = driver_of(Quota(prefix_bytes=1 * BLOCK, pinned_bytes=0))
    preview = driver.core.catalog.preview
    preview(PrefixDefinition(tokens(64)), "a", "p", None, False, driver.now_ns)
    refusal(lambda: preview(PrefixDefinition(tokens(65)), "a", "p", None, False, driver.now_ns))
    refusal(lambda: preview(PrefixDefinition(tokens(64)), "a", "p", None, True, driver.now_ns))
    assert names(driver, "a") == []


def test_pinned_bytes_count_what_pinned_prefixes_hang_from() -> None:
    driver = driver_of(Quota(pinned_bytes=3 * BLOCK), num_pages=24)
    driver.create("parent", tokens(64), tenant="a")
    driver.create("child", (1,), tenant="a", parent="parent", pinned=True)
    error = refusal(lambda: driver.create("q", tokens(65), tenant="a", pinned=True))
    assert error.subject == "pinned_bytes" and "4000 bytes are taken, 4000 more" in str(error)
    driver.create("q", tokens(65), tenant="a")
    refusal(lambda: driver.core.catalog.update("a", "q", UNCHANGED, True, None, driver.now_ns))
    driver.core.catalog.update("a", "parent", UNCHANGED, True, None, driver.now_ns)  # was kept already
    driver.core.catalog.update("a", "child", UNCHANGED, False, None, driver.now_ns)
    driver.core.catalog.update("a", "q", UNCHANGED, True, None, driver.now_ns)
    driver.create("p", tokens(100), tenant="b", pinned=True)
    with pytest.raises(PinBudgetExceeded):  # what all have in common is bounded as before
        driver.create("p", tokens(100), tenant="c", pinned=True)


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
    assert error.subject == "queued_requests" and "5 of yours wait, your quota is 3" in str(error)
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


# ---- tokens, through the core


def test_requests_wait_until_their_tenant_has_tokens() -> None:
    driver = driver_of(Quota(tokens_per_s=2))  # a bucket of 20
    first, second, third = (driver.submit(ask(prompt=2, max_tokens=11)) for _ in range(3))  # 13 each
    other = driver.submit(ask("b"))
    start_ns = driver.now_ns + 1_000_000
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
    free = driver.core._quotas.free("a", driver.now_ns)
    assert 10 * SECOND <= free.balance < 11 * SECOND
    driver.create("p", tokens(190), tenant="a")
    driver.core._prefixes.evict(next(iter(driver.core._prefixes)))
    request = driver.submit(ask(prefix="p", prompt=1, max_tokens=5))
    driver.step()
    driver.run()
    assert running(driver, request) == [True] and builds(driver) == 2
    assert driver.core._quotas.free("a", driver.now_ns).balance > 4 * SECOND
    driver.create("q", tokens(300), tenant="a")  # leaves a debt, which is paid off in time
    error = refusal(lambda: driver.create("r", (1,), tenant="a"))
    assert error.subject == "tokens_per_s" and 14 < (error.retry_after_s or 0) < 15


# ---- the load of one tenant


def test_the_load_of_a_tenant_is_its_own() -> None:
    driver = Driver()
    driver.create("p", tokens(64), tenant="a")
    driver.create("q", tokens(130), tenant="b")
    driver.run()
    driver.submit(dataclasses.replace(ask("b"), n=2))
    driver.submit(ask("a", prefix="p"))
    driver.step()
    driver.submit(ask("b"))
    whole, own, nobody = (driver.core.load(tenant) for tenant in (None, "a", "c"))
    assert (whole.rows_running, whole.requests_waiting, whole.prefixes_ready) == (3, 1, 2)
    assert (own.rows_running, own.requests_waiting, own.prefixes_ready) == (1, 0, 1)
    assert (own.pages_prefixes, own.pages_requests) == (2, 2)
    assert own.pages_free == own.pages_total - 4 > whole.pages_free
    assert nobody.pages_free == nobody.pages_total and nobody.prefixes_ready == 0


# ---- on a clock


async def test_the_loop_wakes_by_itself_when_a_quota_lets_a_request_start() -> None:
    async with running_loop() as scheduler:
        scheduler.set_quotas({"a": Quota(tokens_per_s=39)})  # a bucket of 390
        await scheduler.create_prefix(PrefixDefinition(tokens(395)), tenant="a", name="p")
        messages = await collect(scheduler.generate(GenerationRequest((1,), 3, "a")))
        assert messages[0][0].queue_ns > 50_000_000, "the debt of 5 tokens takes an eighth of a second"
        assert ids(messages) == expected_tokens([((1,), 0)], 3, Sampling(), 1, WIDE)
