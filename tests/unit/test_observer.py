"""What the scheduler tells who watches: each thing once, with the times of the scheduler's clock."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import pytest
from loop_harness import collect, is_settled, until
from recording_observer import Alone, Recorder
from scheduler_driver import SMALL, Driver, tokens

from tinyloop_service.engine.api import Plan
from tinyloop_service.engine.fake import FakeEngine, expected_tokens
from tinyloop_service.errors import EngineFault, TinyLoopError
from tinyloop_service.observe.metrics import Histogram, Metrics
from tinyloop_service.observer import CallRecord, RequestRecord
from tinyloop_service.scheduler.events import Admitted, Sampled
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.scheduler.stream import Stream
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.types import FinishReason, GenerationRequest, PrefixDefinition, PrefixState, Sampling, Stops

MS = 10**6


def stream(spec: GenerationRequest, observer: Recorder) -> Stream:
    """One that arrived at 100 ms and was admitted at 130 ms."""
    made = Stream(spec, 100 * MS, Alone(observer, 900 * MS), None)
    made.deliver_start(Admitted(1, 0, len(spec.tokens), 30 * MS))
    return made


def sampled(choice: int, count: int, at_ms: float, reason: FinishReason | None = None) -> Sampled:
    return Sampled(1, choice, tuple(range(5, 5 + count)), (), reason, int(at_ms * MS))


def test_gaps_are_by_token_and_spread_over_tokens_that_come_together() -> None:
    observer = Recorder()
    one = stream(GenerationRequest((1, 2), 10, tenant="t"), observer)
    one.deliver_tokens(sampled(0, 1, 150))
    one.deliver_tokens(sampled(0, 4, 170))
    one.deliver_tokens(sampled(0, 0, 175))  # nothing that a caller sees
    one.deliver_tokens(sampled(0, 2, 180, FinishReason.LENGTH))
    assert observer.tokens == [("t", 1, 0, 0.0), ("t", 4, 4, 5.0 * MS), ("t", 2, 2, 5.0 * MS)]
    assert observer.heard == ["admitted", "first_token", *["generated"] * 3, "request_ended"]
    record = one.record
    assert (record.queue_ns, record.ttft_ns, record.total_ns) == (30 * MS, 50 * MS, 80 * MS)
    assert (record.generated_tokens, record.finish_reasons, record.is_complete) == (7, ["length"], True)


def test_first_tokens_that_come_together_have_no_time_between_them() -> None:
    observer = Recorder()
    stream(GenerationRequest((1,), 10), observer).deliver_tokens(sampled(0, 3, 150))
    assert observer.tokens == [("", 3, 2, 0.0)]


def test_choices_have_their_own_gaps_and_one_first_token() -> None:
    observer = Recorder()
    two = stream(GenerationRequest((1,), 10, n=2), observer)
    two.deliver_tokens(sampled(1, 1, 140))
    two.deliver_tokens(sampled(0, 1, 160))
    two.deliver_tokens(sampled(1, 1, 170, FinishReason.EOS))
    two.deliver_tokens(sampled(0, 1, 170, FinishReason.LENGTH))
    assert [gaps for _, _, *gaps in observer.tokens] == [[0, 0.0], [0, 0.0], [1, 30.0 * MS], [1, 10.0 * MS]]
    assert (observer.heard.count("first_token"), observer.heard.count("request_ended")) == (1, 1)
    assert (two.record.ttft_ns, two.record.finish_reasons) == (40 * MS, ["eos", "length"])


@pytest.mark.parametrize("end", ["cancelled", "error"])
def test_what_ends_before_its_time_ends_once(end: str) -> None:
    observer = Recorder()
    two = stream(GenerationRequest((1,), 10, n=2), observer)
    two.deliver_tokens(sampled(1, 1, 140, FinishReason.EOS))
    for _ in range(2):
        two.deliver_error(TinyLoopError("gone")) if end == "error" else two.leave()
    two.leave()
    assert observer.heard.count("request_ended") == 1
    record = two.record
    assert (record.finish_reasons, record.is_complete, record.total_ns) == (["eos", end], False, 800 * MS)


def test_an_empty_answer_has_no_first_token() -> None:
    observer = Recorder()
    one = stream(GenerationRequest((1,), 10), observer)
    one.deliver_tokens(sampled(0, 0, 150, FinishReason.EOS))
    assert observer.heard == ["admitted", "request_ended"]


def test_builds_are_told_with_their_times() -> None:
    driver = Driver()
    driver.create("a", tokens(130))
    first = driver.submit(GenerationRequest((1,), 3, prefix="a"))
    driver.run()
    assert [(b.name, b.num_tokens, b.error) for b in driver.builds] == [("a", 130, None)]
    info = driver.core.catalog.get("", "a", driver.now_ns)
    assert driver.builds[0].build_ns == info.build_ns > 0
    admitted = driver.requests[first].admitted
    assert admitted is not None and admitted.build_start_ns == info.build_start_ns
    assert admitted.build_end_ns == info.build_start_ns + info.build_ns <= admitted.queue_ns + 10**9
    second = driver.submit(GenerationRequest((1,), 3, prefix="a"))
    driver.run()
    admitted = driver.requests[second].admitted
    assert admitted is not None and (admitted.build_start_ns, admitted.build_end_ns) == (0, 0)


def test_a_failed_build_is_told_with_its_error() -> None:
    driver = Driver()
    driver.create("a", tokens(130))
    driver.fault = EngineFault("broken")
    driver.run()
    assert [(b.name, b.build_ns, type(b.error)) for b in driver.builds] == [("a", 0, EngineFault)]


def test_evictions_are_counted() -> None:
    driver = Driver(settings=SchedulerSettings(max_prefixes=1))
    for name in ("a", "b", "c"):
        driver.create(name, tokens(64))
        driver.run()
    assert driver.core.load().prefix_evictions == 2


async def run(scheduler: Scheduler) -> None:
    await scheduler.create_prefix(PrefixDefinition(tokens(100)), name="p", tenant="t")
    await collect(scheduler.generate(GenerationRequest((1, 2), 9, tenant="t", prefix="p")))
    await collect(scheduler.generate(GenerationRequest((1, 2, 3), 1)))
    await until(lambda: is_settled(scheduler))


async def test_steps_cover_every_token() -> None:
    """Rows × steps of all plans are the tokens sampled, and prompt tokens are those the engine was fed."""
    observer = Recorder()
    scheduler = Scheduler(FakeEngine(SMALL, strict=True), SchedulerSettings(), observer=observer)
    await scheduler.start()
    try:
        began_ns = scheduler.now_ns()
        await run(scheduler)
        assert 0 < observer.step_ns <= scheduler.now_ns() - began_ns
    finally:
        await scheduler.close()
    assert sum(prefilled for _, prefilled in observer.steps) == 100 + 2 + 3
    chunks = [rows for rows, prefilled in observer.steps if prefilled]
    decoded = sum(sum(rows) for rows, prefilled in observer.steps if not prefilled)
    assert decoded == 8 and len(chunks) == 4  # two of the prefix, and each request's own, which gives its first token
    assert [(b.tenant, b.name, b.num_tokens, b.error) for b in observer.builds] == [("t", "p", 100, None)]
    assert [r.generated_tokens for r in observer.ended] == [9, 1]


@pytest.mark.parametrize("stops", [False, True])
async def test_rows_take_part_in_no_step_behind_their_end(stops: bool) -> None:
    """Be it their last token or one that stops them, of which a plan on its way knows nothing."""
    observer, limits = Recorder(), dataclasses.replace(SMALL, max_steps=8, busy_steps=8)
    scheduler = Scheduler(FakeEngine(limits, strict=True), SchedulerSettings(), observer=observer)
    await scheduler.start()
    try:
        wanted = {(1, seed): 3 + seed for seed in range(3)}
        streams = []
        for prompt, most in wanted.items():
            drawn = expected_tokens([(prompt, 0)], most, Sampling(), 1, limits)
            assert drawn[-1] not in drawn[:-1]
            ends = Stops(token_sequences=(drawn[-1:],)) if stops else Stops()
            streams.append(scheduler.generate(GenerationRequest(prompt, 40 if stops else most, stops=ends)))
        await asyncio.gather(*(collect(stream) for stream in streams))
        await until(lambda: is_settled(scheduler))
    finally:
        await scheduler.close()
    assert observer.steps[:2] == [((3,), 6), ((3, 3, 2, 1), 0)]
    assert not any(rows for rows, _ in observer.steps[2:])


async def test_a_step_is_not_charged_for_the_one_before_it() -> None:
    """Two plans in flight: the time of the engine, not the time since a plan was handed over, which would be double."""
    observer = Recorder()
    gate = threading.Event()
    scheduler = Scheduler(FakeEngine(SMALL, step_s=0.01, gate=gate), SchedulerSettings(), observer=observer)
    await scheduler.start()
    try:
        began_ns = scheduler.now_ns()
        waiting = scheduler.generate(GenerationRequest((1,), 40))
        gate.set()
        await collect(waiting)
        assert observer.step_ns <= scheduler.now_ns() - began_ns
        assert observer.step_ns >= len(observer.steps) * 9 * MS
    finally:
        await scheduler.close()


async def test_a_failed_step_is_no_step() -> None:
    observer = Recorder()

    def fault(plan: Plan) -> EngineFault | None:
        return EngineFault("broken")

    scheduler = Scheduler(FakeEngine(SMALL, fault=fault), SchedulerSettings(), observer=observer)
    await scheduler.start()
    try:
        with pytest.raises(EngineFault):
            await collect(scheduler.generate(GenerationRequest((1,), 40)))
    finally:
        await scheduler.close()
    assert [r.finish_reasons for r in observer.ended] == [["error"]]
    assert not any(rows for rows, _ in observer.steps)


def test_a_histogram_takes_a_bound_in() -> None:
    histogram = Histogram((0.001, 0.002), unit=1e9)
    for value, times in ((1 * MS, 1), (1 * MS + 1, 3), (2 * MS, 2), (10 * MS, 1)):
        histogram.add(value, times)
    assert histogram.counts == [1, 5, 1]
    assert histogram.total == pytest.approx(18 * MS + 3)


def test_a_copy_of_the_metrics_stands_still() -> None:
    metrics = Metrics()
    before = metrics.copy()
    metrics.generated("t", 5, 5, 1e6)
    assert before.generated_tokens["t"] == 0 and sum(before.itl.counts) == 0
    assert metrics.generated_tokens["t"] == sum(metrics.itl.counts) == 5


@pytest.mark.parametrize(
    ("facts", "is_rejection"),
    [
        ({}, False),
        ({"code": "CANCELLED"}, False),
        ({"code": "NOT_FOUND", "reason": "PREFIX_NOT_FOUND"}, True),
        ({"code": "INTERNAL", "reason": "ENGINE_FAULT", "error": EngineFault("x")}, False),
        ({"code": "UNAVAILABLE", "reason": "MODEL_CLOSED", "request": RequestRecord("", None, 1, 0)}, False),
    ],
)
def test_a_rejection_comes_before_any_work(facts: dict[str, object], is_rejection: bool) -> None:
    assert CallRecord("s", "m", "id", 0, **facts).is_rejection is is_rejection  # type: ignore[arg-type]


async def test_a_stop_in_the_text_ends_a_request_once() -> None:
    observer = Recorder()
    scheduler = Scheduler(FakeEngine(SMALL), SchedulerSettings(), observer=observer)
    await scheduler.start()
    try:
        spec = GenerationRequest((1, 2), 40)
        whole = [o.token_ids for m in await collect(scheduler.generate(spec)) for o in m if hasattr(o, "token_ids")]
        third = [token for ids in whole for token in ids][2]
        stops = Stops(token_sequences=((third,),))
        await collect(scheduler.generate(GenerationRequest((1, 2), 40, stops=stops)))
        assert [r.finish_reasons for r in observer.ended] == [["length"], ["stop"]]
        await scheduler.create_prefix(PrefixDefinition((1, 2)), name="p")
        assert scheduler.get_prefix("p").state is PrefixState.READY
    finally:
        await scheduler.close()
