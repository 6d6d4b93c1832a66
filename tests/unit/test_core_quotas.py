"""Quotas of tenants in the scheduler: bytes are refused beyond them; the load of one tenant."""

from __future__ import annotations

import dataclasses

import pytest
from quota_driver import ask, driver_of, refusal
from scheduler_driver import SMALL, Driver, names, tokens

from tinyloop_service.errors import (
    EngineFault,
    OutOfMemory,
    PinBudgetExceeded,
)
from tinyloop_service.scheduler.catalog import UNCHANGED
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.types import GenerationRequest, PrefixDefinition, Quota

BLOCK = 2000  # bytes of 64 tokens at one loop: a page in each of two cache layers


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


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_who_is_cancelled_has_paid_for_what_was_planned(num_steps: int) -> None:
    """Else a tenant that hangs up in time, again and again, computes for nothing."""
    driver = driver_of(Quota(tokens_per_s=100))
    order = driver.submit(ask(prompt=2, max_tokens=40))
    planned = 0
    for _ in range(num_steps):
        plan = driver.plan()
        planned += 0 if plan is None else 1 if plan.num_prompt_tokens else plan.num_steps  # tokens to be sampled
    driver.cancel(order)
    paid = 2 + planned if num_steps else 0
    assert driver.core._quotas.balance("a", driver.now_ns) == 1000 - paid
    driver.run()


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


# ---- what all have in common


@pytest.mark.parametrize("theirs", [1, 2], ids=["less is held", "more is held"])
def test_a_refusal_tells_a_tenant_nothing_of_what_others_hold(theirs: int) -> None:
    """The same words whatever others hold and have pinned; without tenants all is one's own, and told."""
    driver = Driver(dataclasses.replace(SMALL, num_pages=24))
    for seed in range(theirs):
        driver.create(f"p{seed}", tokens(64, seed), tenant="b", pinned=True)
    driver.create("q", tokens(100, 9), tenant="b")
    driver.run()
    driver.submit(ask("b", max_tokens=100))
    driver.step()
    with pytest.raises(OutOfMemory) as refused:
        driver.submit(ask(prompt=380, max_tokens=20, n=3))
    assert str(refused.value) == (
        "out of memory: 24 pages (0.0 MiB) needed, 24 in all, 12 may be pinned; "
        "use a shorter prompt, fewer loops, a compact cache mode or a cache_window"
    )
    driver.create("own", tokens(10), tenant="a", pinned=True)
    with pytest.raises(PinBudgetExceeded) as over_budget:
        driver.create("p", tokens(280, 1), tenant="a", pinned=True)
    assert str(over_budget.value) == (
        "pin budget: 12 pages of yours would be pinned, 12 may be in all; unpin or delete another prefix"
    )


def test_a_refusal_for_the_number_of_prefixes_counts_no_others() -> None:
    driver = Driver(settings=SchedulerSettings(max_prefixes=2))
    driver.create("p", (1,), tenant="b", pinned=True)
    driver.create("mother", (1,), tenant="a")
    with pytest.raises(OutOfMemory) as refused:
        driver.create("child", (2,), tenant="a", parent="mother")
    assert str(refused.value) == (
        "out of memory: 2 prefixes needed at once, 2 may be in memory, pinned ones included; unpin some"
    )


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
