"""Saved state: what is saved, what is restored from it, and when nobody wants it any more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scheduler_driver import SMALL, Driver, delete, tokens

from tinyloop_service.engine.fake import FaultAt
from tinyloop_service.errors import EngineFault
from tinyloop_service.scheduler.adoption import record_of
from tinyloop_service.scheduler.catalog import UNCHANGED
from tinyloop_service.types import GenerationRequest

HOUR = 3600 * 10**9


def keeping(**options: FaultAt) -> Driver:
    driver = Driver(**options)
    driver.core.snapshots.keep()
    return driver


def restarted(driver: Driver) -> Driver:
    """Another core that is told the same names, and offered what was kept."""
    again = keeping()
    for prefix in driver.core._prefixes:
        if prefix.name is not None:
            again.core.adoption.adopt(record_of(prefix), again.now_ns)
    again.now_ns = driver.now_ns
    for digest, state in driver.snapshots.items():
        again.core.snapshots.found(digest, state, driver.expiries[digest])
    return again


def use(driver: Driver, name: str, suffix: tuple[int, ...] = (1, 2)) -> tuple[int, int]:
    """(prompt tokens computed, prompt tokens counted as cached) of a request on it; the driver checks the answer."""
    before = driver.engine.tokens_prefilled
    order = driver.submit(GenerationRequest(suffix, 3, prefix=name))
    driver.run()
    admitted = driver.requests[order].admitted
    assert admitted is not None
    return driver.engine.tokens_prefilled - before, admitted.cached_tokens


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 200])
def test_what_was_saved_needs_no_prefill(length: int) -> None:
    driver = keeping()
    driver.create("p", tokens(length))
    driver.run()
    assert len(driver.snapshots) == 1
    [built] = driver.builds
    assert built.snapshot == ""
    again = restarted(driver)
    assert use(again, "p", ()) == (0, length)
    assert use(again, "p") == (2, length)
    [restored] = again.builds
    assert (restored.name, restored.num_tokens, [restored.snapshot]) == ("p", length, [*driver.snapshots])
    delete(again, "p")
    again.check_empty()


def test_children_are_restored_on_their_parents() -> None:
    driver = keeping()
    driver.create("mother", tokens(100))
    driver.create("child", tokens(30, 1), parent="mother")
    driver.run()
    again = restarted(driver)
    assert use(again, "child") == (2, 130)
    lost = restarted(driver)
    lost.core.snapshots.withdraw(lost.core.catalog.get("", "mother", lost.now_ns).content_sha256)
    assert use(lost, "child") == (100 + 2, 0), "the mother is built, the child restored"


def test_an_evicted_prefix_is_restored_and_not_saved_again() -> None:
    driver = keeping()
    driver.create("p", tokens(100))
    driver.run()
    prefix = driver.core._prefixes.peek("", "p")
    assert prefix is not None
    driver.core._prefixes.evict(prefix)
    num_plans = len(driver.plans)
    assert use(driver, "p") == (2, 100)
    assert not any(plan.save for plan in driver.plans[num_plans:])


@pytest.mark.parametrize(
    "create",
    [
        lambda driver: driver.create(None, tokens(70)),
        lambda driver: driver.create("p", tokens(64), window=1),
    ],
    ids=["nameless", "without a page"],
)
def test_what_is_not_worth_it_is_not_saved(create: Callable[[Driver], str]) -> None:
    driver = keeping()
    create(driver)
    driver.run()
    assert not driver.snapshots


@pytest.mark.parametrize("window", [1, 20, 64, 65, 150])
@pytest.mark.parametrize("length", [70, 200])
def test_what_slides_is_saved_as_far_as_it_is_read(length: int, window: int) -> None:
    driver = keeping()
    driver.create("mother", tokens(length), window=window)
    driver.create("child", tokens(90, 1), parent="mother")
    driver.run()
    again = restarted(driver)
    delete(driver, "child")
    for name, its in (("mother", length), ("child", length + 90)):
        assert use(again, name, ()) == (0, its)
        assert use(again, name) == (2, its)
    delete(again, "child")
    delete(again, "mother")
    again.check_empty()


def test_a_state_is_wanted_until_the_last_name_that_needs_it_ends() -> None:
    """Names of one content, renewed ones, and children's: each counts."""
    driver = keeping()
    start = driver.now_ns
    driver.create("a", tokens(70), expire_time_ns=start + 10 * HOUR)
    driver.run()
    (digest,) = driver.snapshots
    assert driver.expiries == {digest: start + 10 * HOUR}

    def ends() -> int | None:
        driver.take_events()
        return driver.expiries[digest]

    driver.create("b", tokens(70), expire_time_ns=start + 20 * HOUR)
    assert ends() == start + 20 * HOUR
    driver.core.catalog.update("", "a", start + 30 * HOUR, UNCHANGED, None, start)
    assert ends() == start + 30 * HOUR
    driver.create("child", tokens(10), parent="a", expire_time_ns=start + 40 * HOUR)
    assert ends() == start + 40 * HOUR
    driver.core.catalog.update("", "b", None, UNCHANGED, None, start)
    assert ends() is None
    delete(driver, "b")
    assert ends() == start + 40 * HOUR
    driver.run()
    driver.now_ns = start + 35 * HOUR
    driver.run()
    assert digest in driver.snapshots, "the child hangs from it"
    driver.now_ns = start + 40 * HOUR
    driver.plan()
    assert not driver.snapshots
    driver.check_empty()


def test_state_whose_time_is_over_is_neither_used_nor_kept() -> None:
    """Found at a start, and claimed by nobody until then."""
    driver = keeping()
    driver.create("p", tokens(100), expire_time_ns=driver.now_ns + HOUR)
    driver.run()
    again = keeping()
    again.snapshots = dict(driver.snapshots)
    for digest, state in driver.snapshots.items():
        again.core.snapshots.found(digest, state, driver.expiries[digest])
    ends = next(iter(driver.expiries.values()))
    assert ends is not None and again.core.next_wake_ns == ends
    again.now_ns = ends
    assert again.plan() is None and not again.snapshots
    again.create("p", tokens(100))
    again.run()
    assert again.engine.tokens_prefilled == 100 and len(again.snapshots) == 1


def test_a_state_that_is_claimed_lives_as_long_as_the_name() -> None:
    driver = keeping()
    driver.create("p", tokens(100), expire_time_ns=driver.now_ns + HOUR)
    driver.run()
    again = keeping()
    for digest, state in driver.snapshots.items():
        again.core.snapshots.found(digest, state, driver.expiries[digest])
    again.create("p", tokens(100))
    again.run()
    assert again.engine.tokens_prefilled == 0
    assert list(again.expiries.values()) == [None]
    again.now_ns += 2 * HOUR
    assert use(again, "p") == (2, 100)


def test_a_plan_restores_one_and_a_keeper_has_so_much_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many prefixes at once stop nobody's decodes for as long as all of them take."""
    monkeypatch.setattr("tinyloop_service.scheduler.saved._MOST_ON_THE_WAY", 4 * SMALL.page_bytes * 3)
    driver = keeping()
    settled = driver.core.snapshots.settled
    monkeypatch.setattr(driver.core.snapshots, "settled", lambda digest: None)
    for i in range(5):
        driver.create(f"p{i}", tokens(100, i), loops=1)
    driver.run()
    pages = driver.core.load().pages_prefixes
    assert len(driver.snapshots) == 4 * 3 // (pages // 5) < 5 and not driver.core.is_idle
    settled(next(iter(driver.snapshots)))
    driver.run()
    assert len(driver.snapshots) == 5 or not driver.core.is_idle
    for digest in list(driver.snapshots):
        settled(digest)
    driver.run()
    assert len(driver.snapshots) == 5 and driver.core.is_idle
    again = restarted(driver)
    for i in range(5):
        again.submit(GenerationRequest((1,), 3, prefix=f"p{i}"))
    again.run()
    assert [len(plan.restore) for plan in again.plans].count(1) == 5
    assert max(len(plan.restore) for plan in again.plans) == 1


def test_nothing_is_saved_unless_somebody_keeps_it() -> None:
    driver = Driver()
    driver.create("p", tokens(70))
    driver.run()
    assert not any(plan.save for plan in driver.plans)


def test_state_goes_with_the_last_name_of_its_content() -> None:
    driver = keeping()
    for name in ("a", "b"):
        driver.create(name, tokens(70))
    driver.run()
    assert len(driver.snapshots) == 1
    delete(driver, "a")
    driver.run()
    assert len(driver.snapshots) == 1
    delete(driver, "b")
    driver.run()
    assert not driver.snapshots


def test_what_one_tenant_built_hastens_no_other() -> None:
    """Who creates a guess must not see by the time it takes that somebody else has the same prompt."""
    driver = keeping()
    driver.create("p", tokens(100), tenant="a")
    driver.run()
    again = restarted(driver)
    for tenant, prefilled in (("b", 100), ("", 100), ("a", 0)):
        before = again.engine.tokens_prefilled
        again.create("same", tokens(100), tenant=tenant)
        again.run()
        assert again.engine.tokens_prefilled - before == prefilled, tenant
    assert len(again.snapshots) == 2, "b's and of nobody's"
    delete(again, "same")
    again.run()
    assert len(again.snapshots) == 1


def test_what_could_not_be_kept_is_saved_again() -> None:
    driver = keeping()
    driver.create("p", tokens(100))
    driver.create("ends", tokens(30))
    driver.run()
    lost, ended = (driver.core.catalog.get("", name, driver.now_ns).content_sha256 for name in ("p", "ends"))
    keep_nothing(driver)
    assert driver.core.save_again(lost) and driver.core.save_again(ended)
    delete(driver, "ends")
    assert not driver.core.save_again("of nobody")
    driver.run()
    assert driver.snapshots.keys() == {lost}
    prefix = driver.core._prefixes.peek("", "p")
    assert prefix is not None
    driver.core._prefixes.evict(prefix)
    keep_nothing(driver)
    assert not driver.core.save_again(lost), "there is nothing to save it from"
    assert use(driver, "p")[0] == 100 + 2
    assert driver.snapshots.keys() == {lost}, "what is built is saved"


def keep_nothing(driver: Driver) -> None:
    """As if none of it had ever been offered."""
    for digest in driver.snapshots:
        driver.core.snapshots.withdraw(digest)
    driver.core.snapshots._kept.update(driver.snapshots)
    driver.snapshots.clear()


def test_a_name_that_ends_while_it_is_saved_leaves_nothing() -> None:
    driver = keeping()
    driver.create("p", tokens(10))
    while not (driver.in_flight and driver.in_flight[-1].save):
        driver.plan()
        if driver.in_flight and not driver.in_flight[-1].save:
            driver.settle()
    delete(driver, "p")
    driver.run()
    assert not driver.snapshots
    driver.check_empty()


@pytest.mark.parametrize("fault_at", FaultAt)
def test_a_fault_in_the_plan_that_saves_loses_no_prefix(fault_at: FaultAt) -> None:
    driver = keeping(fault_at=fault_at)
    driver.create("p", tokens(10))
    driver.run(until=lambda: bool(driver.core.snapshots._wanted))
    driver.fault = EngineFault("of the test")
    driver.run()
    assert use(driver, "p")[0] == 2


@pytest.mark.parametrize("fault_at", FaultAt)
def test_state_that_cannot_be_restored_is_not_tried_again(fault_at: FaultAt) -> None:
    driver = keeping()
    driver.create("p", tokens(100))
    driver.run()
    again = restarted(driver)
    again.engine._fault_at = fault_at
    again.snapshots = dict(driver.snapshots)
    again.fault = EngineFault("of the test")
    order = again.submit(GenerationRequest((1,), 3, prefix="p"))
    again.run()
    assert isinstance(again.requests[order].error, EngineFault)
    assert not again.snapshots, "its keeper was told"
    assert use(again, "p") == (100 + 2, 0)
    assert len(again.snapshots) == 1, "what was built is saved anew"
    restore, build = again.builds
    assert (restore.snapshot, type(restore.error)) == (*driver.snapshots, EngineFault)
    assert (build.snapshot, build.error) == ("", None)
