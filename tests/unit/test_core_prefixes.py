"""The scheduler's core, prefix by prefix: names, builds, lifetimes, windows, parents, handles, previews."""

from __future__ import annotations

import dataclasses

import pytest
from scheduler_driver import SMALL, Driver, builds, delete, names, tokens

from tinyloop_service.errors import (
    EngineFault,
    EtagMismatch,
    InvalidArgument,
    OutOfMemory,
    ParentMismatch,
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
    with pytest.raises(PrefixExpired, match="ran out before"):
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
