"""The scheduler's core, request by request: what is admitted, planned, cancelled and lost."""

from __future__ import annotations

import dataclasses

import pytest
from scheduler_driver import SMALL, Driver, tokens

from tinyloop_service.engine.fake import FaultAt
from tinyloop_service.errors import (
    DeviceLost,
    EngineFault,
    InvalidArgument,
    LoopsMismatch,
    OutOfMemory,
    QueueFull,
    SequenceTooLong,
)
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.types import FinishReason, GenerationRequest, Sampling, Stops

SECOND = 10**9


def test_cold_equals_warm_for_every_length_and_window() -> None:
    """T1: the driver compares each with the prompt alone; lengths around a page and a chunk."""
    for window in (0, 1, 64, 65):
        driver = Driver()
        for length in (1, 63, 64, 65, 128, 200):
            driver.create(f"p{length}", tokens(length), window=window)
            for suffix in (0, 1, 64):
                driver.submit(GenerationRequest(tokens(suffix, 5), 9, prefix=f"p{length}"))
                driver.submit(GenerationRequest(tokens(length) + tokens(suffix, 5), 9, cache_window=window))
        driver.run()
        assert all(watched.reasons == [FinishReason.LENGTH] for watched in driver.requests.values())
        driver.check()


def test_a_request_may_narrow_its_prefix_window_and_not_widen_it() -> None:
    driver = Driver()
    driver.create("p", tokens(100), window=40)
    driver.submit(GenerationRequest(tokens(5), 30, prefix="p", cache_window=7))
    driver.run()
    with pytest.raises(InvalidArgument, match="can only be narrowed"):
        driver.submit(GenerationRequest(tokens(5), 30, prefix="p", cache_window=41))


def test_refusals_at_the_door() -> None:
    driver = Driver()
    driver.create("p", tokens(100), loops=2)
    for request, error in (
        (GenerationRequest((), 5), InvalidArgument),
        (GenerationRequest((97,), 5), InvalidArgument),
        (GenerationRequest((-1,), 5), InvalidArgument),
        (GenerationRequest((1,), 0), InvalidArgument),
        (GenerationRequest((1,), 5, n=17), InvalidArgument),
        (GenerationRequest((1,), 5, loops=4), InvalidArgument),
        (GenerationRequest((1,), 5, cache_window=-1), InvalidArgument),
        (GenerationRequest((1,), 5, loops=1, prefix="p"), LoopsMismatch),
        (GenerationRequest((1,), 300, prefix="p"), SequenceTooLong),
    ):
        with pytest.raises(error):
            driver.core.submit(request, 0)
    assert driver.core.load().requests_waiting == 0


def test_what_can_never_fit_is_refused_and_blocks_nobody() -> None:
    """T7."""
    driver = Driver(dataclasses.replace(SMALL, num_pages=8))
    with pytest.raises(OutOfMemory, match=r"12 pages.*8 free.*shorter prompt"):
        driver.submit(GenerationRequest(tokens(300), 65))
    driver.submit(GenerationRequest(tokens(100), 20))
    driver.run()
    assert all(watched.is_over for watched in driver.requests.values())


def test_a_full_queue_refuses() -> None:
    driver = Driver(settings=SchedulerSettings(max_queue=2))
    for _ in range(2):
        driver.submit(GenerationRequest((1,), 5))
    with pytest.raises(QueueFull):
        driver.submit(GenerationRequest((1,), 5))
    driver.run()
    driver.submit(GenerationRequest((1,), 5))


@pytest.mark.parametrize("aging_ns", [30_000_000, 10**15])
def test_a_flood_on_a_hot_prefix_does_not_starve_a_cold_request(aging_ns: int) -> None:
    """T8: new requests of all lengths arrive faster than they finish; the cold one needs most of the memory, which is
    never free at once unless it is kept for it.  Without aging it would wait as long as the flood lasts."""
    driver = Driver(dataclasses.replace(SMALL, num_pages=18), SchedulerSettings(aging_ns=aging_ns))
    driver.create("hot", tokens(64))
    driver.run()
    served = 0

    def flood() -> None:
        nonlocal served
        while driver.core.load().requests_waiting < 8:
            driver.submit(GenerationRequest((1,), 5 + served * 7 % 30, prefix="hot"))
            served += 1

    flood()
    driver.step()
    cold = driver.submit(GenerationRequest(tokens(350), 30))
    for _ in range(120):
        flood()
        driver.step()
    assert (driver.requests[cold].admitted is not None) == (aging_ns < 10**15)


def test_a_long_build_never_stops_a_stream() -> None:
    """T9: every row that decodes is in every plan, prompts get half a chunk at most; `test_pace.py` has times."""
    driver = Driver()
    for _ in range(3):
        driver.submit(GenerationRequest((1, 2), 100))
    for _ in range(4):
        driver.step()
    driver.create("long", tokens(400))
    before = len(driver.plans)
    driver.run(until=lambda: driver.core.load().prefixes_ready == 1)
    building = driver.plans[before:]
    assert len(building) >= 400 / 32
    assert all(len(plan.decode) == 3 for plan in building)
    assert all(sum(len(p.tokens) for p in plan.prefill) <= 32 for plan in building)


def test_a_chunk_says_how_many_tokens_are_still_to_come() -> None:
    driver = Driver()
    driver.create("long", tokens(400))
    driver.run(until=lambda: driver.core.load().prefixes_ready == 1)
    chunks = [chunk for plan in driver.plans for chunk in plan.prefill]
    assert all(chunk.start + len(chunk.tokens) + chunk.num_left == 400 for chunk in chunks)
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_a_short_prompt_passes_a_long_one() -> None:
    driver = Driver()
    driver.create("long", tokens(400))
    driver.step()
    short = driver.submit(GenerationRequest(tokens(10), 1))
    driver.step()
    assert driver.requests[short].is_over
    assert driver.plans[-1].prefill[0].seq != driver.plans[-1].prefill[1].seq
    assert len(driver.plans[-1].prefill[0].tokens) >= 32, "the older one is sure of half"


def test_steps_come_in_several_when_nothing_waits() -> None:
    driver = Driver()
    driver.submit(GenerationRequest((1, 2), 12))
    driver.run()
    assert [plan.num_steps for plan in driver.plans if plan.decode] == [4, 4, 3]


def test_a_row_near_its_end_does_not_shorten_plans() -> None:
    driver = Driver()
    for most in (2, 3, 12):
        driver.submit(GenerationRequest((1, 2), most))
    driver.run()
    assert [plan.num_steps for plan in driver.plans if plan.decode] == [4, 4, 3]
    assert [len(plan.decode) for plan in driver.plans if plan.decode] == [3, 1, 1]


def test_the_engine_is_told_what_ends_a_request() -> None:
    driver = Driver(dataclasses.replace(SMALL, eos_token_ids=(11, 12)))
    stops = Stops(token_sequences=((5,), (6, 7)))
    driver.submit(GenerationRequest((1, 2), 3, stops=stops))
    driver.submit(GenerationRequest((1, 2, 3), 3, stops=dataclasses.replace(stops, ignore_eos=True)))
    driver.run()
    opened = [(each.end, each.stop_tokens) for plan in driver.plans for each in plan.open]
    assert opened == [(4, (11, 12, 5)), (5, (5,))]


def test_one_step_at_a_time_while_somebody_waits() -> None:
    driver = Driver(dataclasses.replace(SMALL, max_rows=1))
    driver.submit(GenerationRequest((1, 2), 4))
    driver.submit(GenerationRequest((1, 2), 4))
    driver.run()
    assert [plan.num_steps for plan in driver.plans if plan.decode] == [1, 1, 1, 3]


def test_an_engine_of_short_steps_takes_several_while_somebody_waits() -> None:
    driver = Driver(dataclasses.replace(SMALL, max_rows=1, busy_steps=2))
    driver.submit(GenerationRequest((1, 2), 6))
    driver.submit(GenerationRequest((1, 2), 6))
    driver.run()
    assert [plan.num_steps for plan in driver.plans if plan.decode] == [2, 2, 1, 4, 1]


def test_rows_never_exceed_the_engine() -> None:
    driver = Driver(dataclasses.replace(SMALL, max_rows=5))
    for i in range(6):
        driver.submit(GenerationRequest((1, i), 6 + i, n=1 + i % 3))
    driver.run()  # the engine checks it
    assert all(watched.is_over for watched in driver.requests.values())


def test_eos_ends_a_choice_and_is_not_emitted() -> None:
    driver = Driver(dataclasses.replace(SMALL, eos_token_ids=tuple(range(0, 97, 5))))
    for i in range(20):
        driver.submit(GenerationRequest((i + 1, 1), 20))
        driver.submit(GenerationRequest((i + 1, 1), 20, stops=Stops(ignore_eos=True)))
    driver.run()
    reasons = [watched.reasons[0] for watched in driver.requests.values()]
    assert reasons[1::2] == [FinishReason.LENGTH] * 20
    assert reasons[::2].count(FinishReason.EOS) > 15
    assert any(not watched.got[0] for watched in driver.requests.values()) or reasons[0] is not None
    driver.check_empty()


def test_n_choices_share_the_suffix_and_choice_0_is_the_single_request() -> None:
    """T19: the driver compares every choice with the request alone at that choice."""
    sampling = Sampling(temperature=0.7, seed=11)
    driver = Driver()
    driver.create("p", tokens(70))
    driver.run()
    before = driver.engine.tokens_prefilled
    order = driver.submit(GenerationRequest(tokens(50, 3), 20, prefix="p", n=4, sampling=sampling))
    driver.run()
    watched = driver.requests[order]
    assert driver.engine.tokens_prefilled - before == 50, "the suffix is fed once"
    assert len({tuple(got) for got in watched.got}) == 4
    driver.core.catalog.delete("", "p", None, driver.now_ns)
    driver.check_empty()


def test_n_choices_with_an_empty_suffix_start_from_kept_logits() -> None:
    driver = Driver()
    driver.create("p", tokens(70))
    driver.run()
    before = driver.engine.tokens_prefilled
    driver.submit(GenerationRequest((), 3, prefix="p", n=3, sampling=Sampling(temperature=1.0, seed=2)))
    driver.run()
    assert driver.engine.tokens_prefilled == before
    assert sum(len(plan.first) for plan in driver.plans) == 3


def test_repetition_penalty_counts_prefix_tokens() -> None:
    """T14: at every shape of request; the driver compares with the whole prompt."""
    penalty = Sampling(repetition_penalty=1.4)
    driver = Driver()
    driver.create("p", tokens(70))
    driver.submit(GenerationRequest(tokens(5, 3), 9, prefix="p", sampling=penalty))
    driver.submit(GenerationRequest((), 9, prefix="p", sampling=penalty))
    driver.submit(GenerationRequest(tokens(5, 3), 9, prefix="p", sampling=penalty, n=2))
    driver.submit(GenerationRequest(tokens(5, 3), 9, sampling=penalty))
    driver.run()
    assert all(watched.is_over for watched in driver.requests.values())


@pytest.mark.parametrize("when", ["queued", "building", "prefilling", "decoding", "finishing"])
def test_cancel_in_every_state_gives_all_pages_back(when: str) -> None:
    """T11: what it had is free at once, and the engine is told by the next plan."""
    driver = Driver()
    if when == "building":
        driver.create("p", tokens(300))
    order = driver.submit(GenerationRequest(tokens(90), 4, prefix="p" if when == "building" else None))
    for _ in range({"queued": 0, "building": 2, "prefilling": 1, "decoding": 3, "finishing": 3}[when]):
        driver.step()
    if when == "finishing":
        driver.plan()  # its last tokens are on the device
    driver.cancel(order)
    driver.check()
    assert driver.core.load().rows_running == driver.core.load().requests_waiting == 0
    assert driver.core.load().pages_requests == 0
    driver.step()
    if when == "building":
        driver.run()
        driver.core.catalog.delete("", "p", None, driver.now_ns)
    driver.check_empty()


def test_ten_thousand_cancels_leave_nothing() -> None:
    """T6."""
    driver = Driver()
    driver.create("p", tokens(70))
    driver.run()
    for i in range(10_000):
        order = driver.core.submit(GenerationRequest((i % 97, 1), 20, prefix="p"), driver.now_ns)
        if i % 3 == 0:
            driver.step()
        driver.core.cancel(order)
    driver.core.take_events()
    driver.run()
    driver.check()
    load = driver.core.load()
    assert load.pages_free + load.pages_prefixes == load.pages_total
    driver.engine.check_idle(1)


def test_a_row_that_ended_is_dropped_when_the_plan_ahead_comes_back() -> None:
    limits = dataclasses.replace(SMALL, eos_token_ids=tuple(range(0, 97, 3)))
    driver = Driver(limits)
    for i in range(12):
        driver.submit(GenerationRequest((i + 1,), 30))
    while driver.plan() is not None or driver.in_flight:
        driver.plan()
        driver.settle()
        driver.check()
    assert all(watched.is_over for watched in driver.requests.values())


def test_a_text_stop_ends_one_choice_and_the_request_with_the_last() -> None:
    driver = Driver()
    order = driver.submit(GenerationRequest((1, 2), 50, n=2))
    driver.run(until=lambda: bool(driver.requests[order].got[1]))
    driver.core.finish(order, 0)
    driver.requests[order].reasons[0] = FinishReason.STOP
    assert driver.core.load().rows_running == 1
    driver.core.finish(order, 1)
    assert driver.core.is_idle
    driver.requests.clear()
    driver.check_empty()


@pytest.mark.parametrize("fault_at", FaultAt)
def test_a_fault_fails_the_rows_of_its_plan_and_no_others(fault_at: FaultAt) -> None:
    driver = Driver(dataclasses.replace(SMALL, max_rows=2), fault_at=fault_at)
    driver.create("p", tokens(70))
    driver.run()
    lost = [driver.submit(GenerationRequest((i,), 9, prefix="p")) for i in range(2)]
    waiting = driver.submit(GenerationRequest((7,), 9, prefix="p"))
    driver.step()
    driver.plan()
    driver.plan()  # one is behind the plan that fails
    driver.fault = EngineFault("a fault")
    driver.settle()
    driver.run()
    assert all(isinstance(driver.requests[order].error, EngineFault) for order in lost)
    assert driver.requests[waiting].reasons == [FinishReason.LENGTH]
    assert driver.core.catalog.get("", "p", driver.now_ns).state.value == "ready"
    driver.check()


def test_the_plan_behind_a_fault_goes_on_without_the_lost() -> None:
    """A row that joins in the second plan lives; the rows of the first do not."""
    driver = Driver()
    lost = driver.submit(GenerationRequest((1,), 9))
    driver.step()
    driver.plan()
    lives = driver.submit(GenerationRequest((2,), 9))
    plan = driver.plan()
    assert plan is not None and plan.decode and plan.prefill
    driver.fault = EngineFault("a fault")
    driver.settle()
    assert [p.tokens for p in driver.in_flight[0].prefill] == [(2,)] and not driver.in_flight[0].decode
    driver.run()
    assert driver.requests[lost].error is not None
    assert driver.requests[lives].reasons == [FinishReason.LENGTH]


def test_the_plan_behind_one_without_a_result_was_submitted_and_counts() -> None:
    """It names the lost row too, whose tokens are dropped; the row that joined in it gets its own."""
    driver = Driver(fault_at=FaultAt.RESULT)
    lost = driver.submit(GenerationRequest((1,), 9))
    driver.step()
    driver.plan()
    lives = driver.submit(GenerationRequest((2,), 9))
    behind = driver.plan()
    driver.fault = EngineFault("a fault")
    driver.settle()
    assert behind is not None and behind.decode and driver.in_flight[0] is behind
    driver.run()
    assert isinstance(driver.requests[lost].error, EngineFault)
    assert driver.requests[lives].reasons == [FinishReason.LENGTH]
    driver.requests.clear()
    driver.check_empty()


def test_a_build_without_a_result_fails_though_its_last_chunk_was_submitted() -> None:
    driver = Driver(dataclasses.replace(SMALL, max_chunk=50), fault_at=FaultAt.RESULT)
    uid = driver.create("p", tokens(100))
    request = driver.submit(GenerationRequest((1,), 9, prefix="p"))
    driver.plan()
    driver.plan()
    driver.fault = EngineFault("a fault")
    driver.settle()
    driver.settle()  # the last chunk; were it counted, the prefix would be READY without its first
    assert driver.state(uid) == "failed" and isinstance(driver.requests[request].error, EngineFault)
    driver.create("p", tokens(100))
    driver.run()
    assert driver.core.catalog.get("", "p", driver.now_ns).state.value == "ready"
    driver.check()


def test_a_lost_device_ends_everything() -> None:
    driver = Driver()
    driver.create("p", tokens(300))
    order = driver.submit(GenerationRequest((1,), 9, prefix="p"))
    driver.step()
    driver.core.lose(DeviceLost("gone"))
    driver.take_events()
    assert isinstance(driver.requests[order].error, DeviceLost)
    assert driver.core.plan(driver.now_ns) is None
    with pytest.raises(DeviceLost):
        driver.submit(GenerationRequest((1,), 9))


def test_prompt_tokens_are_counted_once_at_admission() -> None:
    """T16: hits + misses = admitted prompt tokens."""
    driver = Driver(dataclasses.replace(SMALL, num_pages=12), SchedulerSettings(max_prefixes=1))
    driver.create("p", tokens(100))
    driver.run()
    first = driver.submit(GenerationRequest((1, 2), 5, prefix="p", n=2))
    driver.run()
    driver.create("q", tokens(100, 1))  # evicts p
    driver.run()
    assert driver.state("uid1") == "evicted"
    rebuilds = driver.submit(GenerationRequest((1,), 5, prefix="p"))
    joins = driver.submit(GenerationRequest((3,), 5, prefix="p"))
    cold = driver.submit(GenerationRequest(tokens(10), 5))
    never = driver.submit(GenerationRequest(tokens(11), 5))
    driver.cancel(never)
    driver.run()
    cached = {order: watched.admitted.cached_tokens for order, watched in driver.requests.items() if watched.admitted}
    assert cached == {first: 100, rebuilds: 0, joins: 100, cold: 0}
    counters = driver.core.counters
    assert (counters.prompt_hits, counters.prompt_misses) == (200, 2 + 101 + 1 + 10)
    assert counters.generated == 5 * 5
