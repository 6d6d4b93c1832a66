"""Names made of records: a core that knows only what another one wrote down."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
from scheduler_driver import SMALL, Driver, delete, tokens

from tinyloop_service.errors import EngineFault, PrefixDamaged, PrefixExpired, PrefixNotFound
from tinyloop_service.scheduler.adoption import record_of
from tinyloop_service.scheduler.catalog import UNCHANGED
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.types import GenerationRequest, PrefixInfo, PrefixRecord


def record(driver: Driver, name: str) -> PrefixRecord:
    prefix = driver.core._prefixes.peek("", name)
    assert prefix is not None
    return record_of(prefix)


def family() -> tuple[Driver, list[PrefixRecord]]:
    """grandmother ← mother ← a, b: their records in that order."""
    driver = Driver()
    driver.create("grandmother", tokens(100), loops=2, window=90)
    driver.create("mother", tokens(70, 1), parent="grandmother")
    for name, seed in (("a", 2), ("b", 3)):
        driver.create(name, tokens(10, seed), parent="mother")
    driver.run()
    return driver, [record(driver, name) for name in ("grandmother", "mother", "a", "b")]


def adopt(driver: Driver, *records: PrefixRecord) -> None:
    for found in records:
        driver.core.adoption.adopt(found, driver.now_ns)
    driver.check()


def info(driver: Driver, name: str) -> PrefixInfo:
    return driver.core.catalog.get("", name, driver.now_ns)


def use(driver: Driver, name: str) -> int:
    """The prompt tokens that a request on it computes."""
    before = driver.engine.tokens_prefilled
    driver.submit(GenerationRequest((1, 2), 3, prefix=name))
    driver.run()
    return driver.engine.tokens_prefilled - before


def test_an_adopted_name_is_evicted_until_its_first_use_builds_it_once() -> None:
    driver = Driver()
    driver.create("p", tokens(100))
    driver.run()
    restarted = Driver()
    adopt(restarted, record(driver, "p"))
    was, found = info(driver, "p"), info(restarted, "p")
    assert found.state.value == "evicted"
    for field in ("uid", "etag", "tokens", "loops", "cache_window", "content_sha256", "create_time_ns"):
        assert getattr(found, field) == getattr(was, field), field
    for seed in range(5):
        restarted.submit(GenerationRequest(tokens(3, seed), 4, prefix="p"))
    restarted.run()
    assert restarted.engine.tokens_prefilled == 100 + 5 * 3
    assert use(restarted, "p") == 2
    delete(restarted, "p")
    restarted.check_empty()


def test_children_bring_their_ancestors_and_share_their_pages() -> None:
    built, (_, _, a, b) = family()
    driver = Driver()
    adopt(driver, a, b)
    assert use(driver, "a") == 100 + 70 + 10 + 2
    assert use(driver, "b") == 10 + 2, "the mother's pages are there already"
    assert info(driver, "a").content_sha256 == info(built, "a").content_sha256
    assert info(driver, "a").shared_bytes == info(built, "a").shared_bytes > 0
    assert info(driver, "a").parent == "mother"
    with pytest.raises(PrefixNotFound):
        info(driver, "mother")
    delete(driver, "a")
    delete(driver, "b")
    driver.check_empty()


def test_a_nameless_ancestor_gets_its_name_when_it_is_told() -> None:
    _, (grandmother, mother, a, _) = family()
    driver = Driver()
    adopt(driver, a)
    use(driver, "a")
    adopt(driver, mother, grandmother)
    assert use(driver, "mother") == use(driver, "grandmother") == 2, "both were built for the child"
    assert (info(driver, "mother").parent, info(driver, "mother").etag) == ("grandmother", mother.etag)
    for name in ("grandmother", "mother"):
        delete(driver, name)
    assert use(driver, "a") == 2, "a parent's pages live until its children go"
    delete(driver, "a")
    driver.check_empty()


def test_another_uid_ends_the_name_and_running_requests_finish() -> None:
    driver = Driver()
    driver.create("p", tokens(100))
    driver.run()
    order = driver.submit(GenerationRequest((5,), 30, prefix="p"))
    driver.run(until=lambda: bool(driver.requests[order].got[0]))
    other = Driver()
    other.create("p", tokens(80, 9))
    other.run()
    newer = replace(record(other, "p"), uid="made elsewhere")
    adopt(driver, newer)
    assert info(driver, "p").uid == "made elsewhere" and info(driver, "p").state.value == "evicted"
    driver.run()
    assert driver.requests[order].is_over and driver.requests[order].error is None
    assert use(driver, "p") == 80 + 2
    driver.core.adoption.forget("", "p")
    driver.check_empty()


def test_lifetimes_follow_the_record() -> None:
    driver = Driver()
    driver.create("p", tokens(10))
    driver.run()
    first = record(driver, "p")
    later = replace(first, revision=first.revision + 1, pinned=True, expire_time_ns=driver.now_ns + 5)
    adopt(driver, later)
    assert (info(driver, "p").pinned, info(driver, "p").etag) == (True, later.etag)
    driver.now_ns += 5
    with pytest.raises(PrefixExpired):
        info(driver, "p")
    adopt(driver, later)
    assert not driver.core.adoption.knows("", "p", driver.now_ns)
    renewed = replace(later, revision=later.revision + 1, expire_time_ns=None)
    adopt(driver, renewed)
    assert info(driver, "p").expire_time_ns is None


def test_an_expired_record_says_so_where_it_was_never_known() -> None:
    _, (grandmother, *_) = family()
    restarted = Driver()
    adopt(restarted, replace(grandmother, expire_time_ns=restarted.now_ns))
    with pytest.raises(PrefixExpired):
        info(restarted, "grandmother")


def test_a_pin_that_has_no_room_here_does_not_keep_the_name_from_serving() -> None:
    big = Driver()
    big.create("p", tokens(300), pinned=True)
    big.run()
    pages = big.core.load().pages_prefixes
    small = Driver(dataclasses.replace(SMALL, num_pages=pages + 8), SchedulerSettings(pin_fraction=0.5, max_prefixes=2))
    adopt(small, record(big, "p"))
    assert not info(small, "p").pinned
    assert use(small, "p") == 300 + 2
    small.core.catalog.update("", "p", UNCHANGED, False, None, small.now_ns)


def test_a_fault_in_a_rebuild_is_no_end_of_the_name() -> None:
    _, (_, _, a, _) = family()
    driver = Driver()
    adopt(driver, a)
    driver.fault = EngineFault("of the test")
    order = driver.submit(GenerationRequest((1,), 2, prefix="a"))
    driver.run()
    assert isinstance(driver.requests[order].error, EngineFault)
    assert use(driver, "a") == 100 + 70 + 10 + 2


def test_a_parent_that_failed_here_was_built_where_its_child_was() -> None:
    driver = Driver()
    driver.fault = EngineFault("of the test")
    uid = driver.create("mother", tokens(70))
    driver.run()
    assert driver.state(uid) == "failed"
    elsewhere = Driver()
    elsewhere._num_uids = 100  # uids are unique in the world
    adopt(elsewhere, record(driver, "mother"))
    elsewhere.create("child", tokens(5, 1), parent="mother")
    elsewhere.run()
    adopt(driver, record(elsewhere, "child"))
    assert use(driver, "child") == 70 + 5 + 2


@pytest.mark.parametrize(
    "change",
    [
        {"content_sha256": "00" * 32},
        {"loops": 99},
        {"loops": 0},
        {"cache_window": -1},
        {"tokens": ()},
        {"tokens": (97,)},
        {"tokens": tuple(range(90)) * 5},
        {"ancestors": ()},
    ],
)
def test_a_record_that_does_not_fit_together_changes_nothing(change: dict[str, object]) -> None:
    _, (_, _, a, _) = family()
    driver = Driver()
    with pytest.raises(PrefixDamaged, match="'a'"):
        adopt(driver, replace(a, **change))  # type: ignore[arg-type]
    driver.check_empty()


def test_ancestors_out_of_order_are_refused() -> None:
    _, (_, _, a, _) = family()
    with pytest.raises(PrefixDamaged):
        adopt(Driver(), replace(a, ancestors=a.ancestors[::-1]))
