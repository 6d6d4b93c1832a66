"""The scheduler's core, prefix by prefix: names, builds, lifetimes, eviction, parents, pins, active forms."""

from __future__ import annotations

import dataclasses

import pytest
from scheduler_driver import SMALL, Driver, tokens

from tinyloop_service.errors import (
    EngineFault,
    EtagMismatch,
    InvalidArgument,
    OutOfMemory,
    ParentMismatch,
    PinBudgetExceeded,
    PrefixExists,
    PrefixExpired,
    PrefixNotFound,
    SequenceTooLong,
    TinyLoopError,
)
from tinyloop_service.scheduler.catalog import UNCHANGED
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.types import GenerationRequest, PrefixDefinition, PrefixInfo

SECOND = 10**9
TWO = SchedulerSettings(max_prefixes=2)


def names(driver: Driver, tenant: str = "") -> list[str | None]:
    return [info.name for info in driver.core.catalog.named(tenant, driver.now_ns)]


def delete(driver: Driver, name: str) -> None:
    driver.core.catalog.delete("", name, None, driver.now_ns)


def builds(driver: Driver) -> int:
    """How many builds the engine has been asked for."""
    return sum(opened.sampling is None for plan in driver.plans for opened in plan.open)


def test_a_build_goes_from_building_to_ready_with_progress() -> None:
    driver = Driver()
    uid = driver.create("p", tokens(150), loops=2)
    assert driver.state(uid) == "building"
    progress = []
    while driver.step():
        progress.append(driver.info(uid).tokens_built)
    info = driver.info(uid)
    assert progress == [64, 128, 150] and info.state.value == "ready"
    assert info.size_bytes == 3 * 3 * 1000 and info.shared_bytes == 0 and info.build_ns > 0
    assert info.tokens == tokens(150) and info.loops == 2 and info.name == "p"


def test_many_creates_of_one_content_are_one_build() -> None:
    """T10."""
    driver = Driver()
    uids = {driver.create("p", tokens(100)) for _ in range(10)}
    assert len(uids) == 1
    driver.run()
    assert builds(driver) == 1 and driver.engine.tokens_prefilled == 100
    driver.create("p", tokens(100))
    driver.run()
    assert builds(driver) == 1
    for other in (tokens(101), tokens(100, 1)):
        with pytest.raises(PrefixExists, match="other content"):
            driver.create("p", other)
    with pytest.raises(PrefixExists):
        driver.create("p", tokens(100), loops=2)
    with pytest.raises(PrefixExists):
        driver.create("p", tokens(100), window=10)


def test_a_failed_build_gives_every_waiter_its_error_and_the_next_create_replaces_it() -> None:
    """T10."""
    driver = Driver()
    uid = driver.create("p", tokens(100))
    driver.create("p", tokens(100))
    child = driver.create("c", tokens(5), parent="p")
    queued = driver.submit(GenerationRequest((1,), 5, prefix="p"))
    below = driver.submit(GenerationRequest((1,), 5, prefix="c"))
    driver.fault = EngineFault("a fault")
    driver.step()
    assert driver.state(uid) == driver.state(child) == "failed"
    for order in (queued, below):
        assert isinstance(driver.requests[order].error, EngineFault)
    first, second = driver.core.catalog.outcome(uid), driver.core.catalog.outcome(uid)
    assert isinstance(first, EngineFault) and isinstance(second, EngineFault) and first is not second
    with pytest.raises(EngineFault, match="create it again"):
        driver.submit(GenerationRequest((1,), 5, prefix="p"))
    again = driver.create("p", tokens(50, 1))
    assert again != uid
    driver.run()
    assert driver.state(again) == "ready"
    driver.check()


def test_a_build_ends_when_the_last_waiter_leaves() -> None:
    driver = Driver()
    uid = driver.create("p", tokens(300))
    driver.create("p", tokens(300))
    driver.step()
    driver.core.catalog.leave(uid)
    assert driver.state(uid) == "building"
    driver.core.catalog.leave(uid)
    assert driver.state(uid) is None and names(driver) == []
    driver.check_empty()


def test_a_build_that_others_need_goes_on() -> None:
    driver = Driver()
    detached = driver.create("d", tokens(100), wait=False)
    driver.core.catalog.leave(detached)
    wanted = driver.create("w", tokens(100, 1))
    order = driver.submit(GenerationRequest((1,), 5, prefix="w"))
    driver.core.catalog.leave(wanted)
    driver.run()
    assert driver.state(detached) == driver.state(wanted) == "ready"
    assert driver.requests[order].is_over


def test_delete_ends_the_name_and_running_decodes_finish() -> None:
    """T5."""
    driver = Driver(dataclasses.replace(SMALL, max_rows=32, num_pages=400))
    driver.create("p", tokens(100))
    driver.run()
    for i in range(32):
        driver.submit(GenerationRequest((i,), 30, prefix="p"))
    late = [driver.submit(GenerationRequest((i,), 30, prefix="p")) for i in range(4)]
    for _ in range(6):
        driver.step()
    delete(driver, "p")
    with pytest.raises(PrefixNotFound):
        driver.core.catalog.get("", "p", driver.now_ns)
    with pytest.raises(PrefixNotFound):
        driver.submit(GenerationRequest((1,), 30, prefix="p"))
    other = driver.create("p", tokens(30, 2))
    driver.run()
    assert all(watched.is_over and watched.error is None for watched in driver.requests.values())
    assert driver.requests[late[0]].admitted is not None
    assert driver.state("uid1") is None and driver.state(other) == "ready"
    delete(driver, "p")
    driver.check_empty()


def test_a_queued_request_outlives_name_and_pages() -> None:
    """It holds the definition, so what was evicted and deleted meanwhile is built again for it, without a name."""
    driver = Driver(dataclasses.replace(SMALL, max_rows=1), SchedulerSettings(max_prefixes=1))
    driver.create("p", tokens(100))
    driver.run()
    driver.submit(GenerationRequest((9,), 40))
    driver.step()
    driver.create("q", tokens(50, 1))  # older than the request on p, so it may evict it
    order = driver.submit(GenerationRequest((1,), 5, prefix="p"))
    driver.step()
    assert driver.state("uid1") == "evicted"
    delete(driver, "p")
    driver.run()
    assert driver.requests[order].reasons[0] is not None
    assert driver.state("uid1") is None, "nobody holds it any more"
    driver.check()


def test_expiry_is_by_timestamp_and_use_does_not_extend_it() -> None:
    driver = Driver()
    driver.create("p", tokens(70), expire_time_ns=driver.now_ns + SECOND)
    driver.run()
    order = driver.submit(GenerationRequest((1,), 50, prefix="p"))
    driver.step()
    driver.now_ns += 2 * SECOND
    with pytest.raises(PrefixExpired):
        driver.submit(GenerationRequest((1,), 5, prefix="p"))
    with pytest.raises(PrefixExpired):
        driver.core.catalog.get("", "p", driver.now_ns)
    assert names(driver) == []
    driver.run()
    assert driver.requests[order].reasons[0] is not None
    driver.check_empty()
    driver.create("p", tokens(70))
    assert names(driver) == ["p"]


def test_update_moves_expiry_and_pin_and_changes_the_etag() -> None:
    driver = Driver()
    uid = driver.create("p", tokens(70), expire_time_ns=driver.now_ns + SECOND)
    driver.run()
    before = driver.info(uid)
    after = driver.core.catalog.update("", "p", None, UNCHANGED, before.etag, driver.now_ns)
    assert after.expire_time_ns is None and not after.pinned and after.etag != before.etag
    with pytest.raises(EtagMismatch):
        driver.core.catalog.update("", "p", UNCHANGED, True, before.etag, driver.now_ns)
    with pytest.raises(EtagMismatch):
        driver.core.catalog.delete("", "p", before.etag, driver.now_ns)
    driver.now_ns += 5 * SECOND
    pinned = driver.core.catalog.update("", "p", UNCHANGED, True, after.etag, driver.now_ns)
    assert pinned.pinned and pinned.expire_time_ns is None
    with pytest.raises(InvalidArgument, match="expire_time"):
        driver.core.catalog.update("", "p", driver.now_ns, UNCHANGED, None, driver.now_ns)


def test_create_again_takes_the_new_ttl_and_pin() -> None:
    driver = Driver()
    uid = driver.create("p", tokens(70), expire_time_ns=driver.now_ns + SECOND)
    driver.run()
    assert driver.create("p", tokens(70), pinned=True) == uid
    assert driver.info(uid).pinned and driver.info(uid).expire_time_ns is None


def test_tenants_never_meet() -> None:
    """T12: same name, same tokens; another tenant's answers are those of an unknown name."""
    driver = Driver()
    one = driver.create("p", tokens(70), tenant="one")
    two = driver.create("p", tokens(70), tenant="two")
    assert one != two
    driver.run()
    driver.core.catalog.delete("two", "p", None, driver.now_ns)
    assert names(driver, "one") == ["p"] and names(driver, "two") == []
    answers: list[TinyLoopError] = []
    for name, tenant in (("p", "two"), ("p", "three"), ("never", "three")):
        with pytest.raises(PrefixNotFound) as caught:
            driver.core.catalog.get(tenant, name, driver.now_ns)
        answers.append(caught.value)
    assert {type(answer) for answer in answers} == {PrefixNotFound}
    assert str(answers[1]) == str(answers[2]).replace("never", "p")
    with pytest.raises(PrefixNotFound):
        driver.submit(GenerationRequest((1,), 5, tenant="two", prefix_uid=one))
    with pytest.raises(PrefixNotFound):
        driver.create("c", tokens(3), tenant="two", parent="p")


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


def test_windows_give_back_what_slides_out() -> None:
    """A prefix of 400 tokens that reads 65 holds two blocks at the end, and never needs room for seven."""
    driver = Driver(dataclasses.replace(SMALL, num_pages=8))
    uid = driver.create("p", tokens(400), window=65)
    most = 0
    while driver.step():
        load = driver.core.load()
        most = max(most, load.pages_prefixes)
        driver.check()
    assert driver.state(uid) == "ready" and most <= 8
    assert driver.info(uid).size_bytes == 2 * 2 * 1000
    with pytest.raises(OutOfMemory):
        driver.create("q", tokens(400))


def test_parents_share_pages_and_live_until_their_children_go() -> None:
    driver = Driver()
    driver.create("parent", tokens(100), loops=2, window=0)
    child = driver.create("child", tokens(70, 1), parent="parent")
    driver.run()
    info = driver.info(child)
    assert info.tokens == tokens(100) + tokens(70, 1) and info.loops == 2 and info.parent == "parent"
    assert info.size_bytes == 2 * 3 * 1000 and info.shared_bytes == 2 * 3 * 1000
    assert driver.engine.tokens_prefilled == 170
    delete(driver, "parent")
    driver.check()
    assert driver.state("uid1") == "ready", "nameless, but its child reads it"
    driver.submit(GenerationRequest((4,), 20, prefix="child"))
    driver.run()
    delete(driver, "child")
    driver.check_empty()


def test_a_child_has_its_parents_depth_and_window() -> None:
    driver = Driver()
    driver.create("parent", tokens(100), loops=2, window=30)
    for loops, window in ((1, None), (None, 31), (None, 0)):
        with pytest.raises(ParentMismatch, match="has"):
            driver.create("child", tokens(5), parent="parent", loops=loops, window=window)
    driver.create("child", tokens(5), parent="parent", loops=2, window=30)
    with pytest.raises(SequenceTooLong):
        driver.create("long", tokens(301), parent="parent")


def test_a_chain_that_was_evicted_is_built_again_from_the_top() -> None:
    driver = Driver(dataclasses.replace(SMALL, num_pages=12))
    driver.create("parent", tokens(70))
    driver.create("child", tokens(70, 1), parent="parent")
    driver.run()
    driver.submit(GenerationRequest(tokens(300, 2), 60))
    driver.run()
    assert driver.state("uid1") == driver.state("uid2") == "evicted"
    order = driver.submit(GenerationRequest((3,), 9, prefix="child"))
    driver.run()
    watched = driver.requests[order]
    assert watched.reasons[0] is not None and watched.admitted is not None and watched.admitted.cached_tokens == 0
    assert builds(driver) == 4


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


def test_a_prefix_that_could_not_be_built_says_why_on_use() -> None:
    driver = Driver(dataclasses.replace(SMALL, num_pages=20, max_rows=1))
    driver.create("pinned", tokens(200, 1))
    driver.run()
    driver.submit(GenerationRequest((1,), 60, prefix="pinned"))
    driver.step()
    driver.create("large", tokens(390), wait=False)
    driver.core.catalog.update("", "pinned", UNCHANGED, True, None, driver.now_ns)
    driver.run()
    for use in (
        lambda: driver.submit(GenerationRequest((1,), prefix="large")),
        lambda: driver.create("c", (1,), parent="large"),
    ):
        with pytest.raises(OutOfMemory, match=r"prefix .large. could not be built: out of memory.*create it again"):
            use()
    driver.core.catalog.update("", "pinned", UNCHANGED, False, None, driver.now_ns)
    uid = driver.create("large", tokens(390))
    driver.run()
    assert driver.state(uid) == "ready"


def test_lifetimes_that_were_renewed_are_forgotten() -> None:
    driver = Driver()
    for i in range(1000):
        driver.create("p", tokens(10), expire_time_ns=driver.now_ns + SECOND + i)
    assert len(driver.core._prefixes._expiries) < 100
    driver.now_ns += SECOND + 998
    assert names(driver) == ["p"]
    driver.now_ns += 1
    assert names(driver) == []


def test_a_handle_holds_a_nameless_prefix() -> None:
    driver = Driver()
    uid = driver.create(None, tokens(100))
    driver.run()
    assert names(driver) == [] and driver.state(uid) == "ready"
    order = driver.submit(GenerationRequest((1,), 20, prefix_uid=uid))
    driver.step()
    driver.core.catalog.release(uid)
    with pytest.raises(PrefixNotFound):
        driver.core.submit(GenerationRequest((1,), 20, prefix_uid="unknown"), driver.now_ns)
    driver.run()
    assert driver.requests[order].reasons[0] is not None
    driver.check_empty()


def test_preview_answers_without_work() -> None:
    driver = Driver(dataclasses.replace(SMALL, num_pages=8))
    preview = driver.core.catalog.preview(PrefixDefinition(tokens(70), 2), "", "p", None, False, driver.now_ns)
    assert isinstance(preview, PrefixInfo) and preview.loops == 2 and preview.uid == "" and names(driver) == []
    with pytest.raises(OutOfMemory):
        driver.core.catalog.preview(PrefixDefinition(tokens(390)), "", "p", None, False, driver.now_ns)
    with pytest.raises(InvalidArgument):
        driver.core.catalog.preview(PrefixDefinition(()), "", "p", None, False, driver.now_ns)
    assert driver.plan() is None


def test_the_digest_tells_contents_apart() -> None:
    driver = Driver()
    driver.create("parent", tokens(10))
    made = [
        driver.create("a", tokens(20)),
        driver.create("b", tokens(20), loops=2),
        driver.create("c", tokens(20), window=5),
        driver.create("d", tokens(20)[10:], parent="parent"),
        driver.create("e", tokens(20, 1)),
    ]
    digests = {driver.info(uid).content_sha256 for uid in made}
    assert len(digests) == 5
    assert driver.info(driver.create("f", tokens(20))).content_sha256 in digests


ACTIVE = dataclasses.replace(SMALL, active_pages_per_page=2)


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
