"""How many prompt tokens a plan has beside rows that decode, on engines whose time is a formula."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import pytest
from scheduler_driver import SMALL, Driver, tokens

from tinyloop_service.engine.api import Open, Pending, Plan, Prefill, Restore
from tinyloop_service.scheduler.pace import Pace
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.types import GenerationRequest

SHARE = 0.7
LIMITS = dataclasses.replace(SMALL, max_chunk=1000, least_chunk=16)
MOST = 500
MS = 1_000_000


def step(num_rows: int, **fields: object) -> Plan:
    return dataclasses.replace(Plan(1, decode=tuple(range(num_rows))), **fields)  # type: ignore[arg-type]


def both(num_tokens: int, num_rows: int = 8, **fields: object) -> Plan:
    return step(num_rows, prefill=(Prefill(99, 0, (1,) * num_tokens, 1),), **fields)


def settled(took_ns: Callable[[Plan], float], num_rows: int = 8, *, pace: Pace | None = None) -> int:
    """Tokens of a plan after many of them, beside an endless build."""
    pace, counts = pace or Pace(LIMITS, SHARE), [0]
    for _ in range(60):
        counts.append(pace.take(10_000, num_rows, 1))
        plan = both(counts[-1], num_rows) if counts[-1] else step(num_rows)
        pace.learn(plan, round(took_ns(plan)))
    return max(counts[-2:])  # one of them may only decode


def test_before_it_knows_anything_a_plan_gets_the_least() -> None:
    pace = Pace(LIMITS, SHARE)
    assert pace.take(10_000, 8, 1) == 16
    assert pace.take(7, 8, 1) == 7, "fewer cost hardly less"
    pace.learn(step(8), 10 * MS)
    assert pace.take(10_000, 8, 1) == 16, "what a token costs is not known"


@pytest.mark.parametrize(("num_rows", "step_ms", "token_ms", "expected"), [(8, 10, 0.75, 31), (1, 4, 0.1, 93)])
def test_prompt_tokens_take_their_share_of_the_time(
    num_rows: int, step_ms: float, token_ms: float, expected: int
) -> None:
    def took_ns(plan: Plan) -> float:
        return (step_ms * bool(plan.decode) + token_ms * plan.num_prompt_tokens) * MS

    count = settled(took_ns, num_rows)
    assert abs(count - expected) <= 1
    assert took_ns(both(count)) == pytest.approx(step_ms * MS / (1 - SHARE), rel=0.05)


def test_it_settles_where_a_chunk_has_a_cost_of_its_own() -> None:
    """10 ms a step: 23.3 ms for prompt tokens, of which the pass itself takes 6."""
    assert abs(settled(lambda plan: (10 + 6 * bool(plan.prefill) + 0.5 * plan.num_prompt_tokens) * MS) - 34) <= 2


@pytest.mark.parametrize(("token_ms", "expected"), [(100, 16), (0.0001, MOST)])
def test_it_stays_within_what_the_engine_is_good_at(token_ms: float, expected: int) -> None:
    assert settled(lambda plan: (10 + token_ms * plan.num_prompt_tokens) * MS) == expected


def test_several_steps_carry_more_tokens() -> None:
    pace = Pace(LIMITS, SHARE)
    settled(lambda plan: (10 + 0.75 * plan.num_prompt_tokens) * MS, pace=pace)
    assert pace.take(10_000, 8, 4) == pytest.approx(4 * 31, abs=4)


def test_what_no_row_was_left_for_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that were on their way when their last row was stopped are over at once, on an engine that looks."""
    driver = Driver(dataclasses.replace(SMALL, eos_token_ids=tuple(range(1, 97, 2))))
    ran: dict[int, int] = {}  # steps that were, by plan
    submit = driver.engine.submit

    def watched(plan: Plan) -> Pending:
        pending = submit(plan)
        ran[plan.number] = len(pending.result().rows_by_step(plan))
        return pending

    monkeypatch.setattr(driver.engine, "submit", watched)
    driver.cost_ns = lambda plan: ran[plan.number] * 10 * MS
    for seed in range(20):
        driver.submit(GenerationRequest((1, seed), 50))
        driver.plan()
        while driver.in_flight:  # always one behind the one that runs
            driver.plan()
            driver.settle()
    stopped = [plan for plan in driver.plans if plan.decode and ran[plan.number] < plan.num_steps]
    assert any(not ran[plan.number] for plan in stopped), "no plan was without rows"
    assert driver.core._pace.step_ns(1) == 10 * MS


def test_a_machine_that_stood_still_once_does_not_count() -> None:
    pace = Pace(LIMITS, SHARE)
    settled(lambda plan: (10 + 0.75 * plan.num_prompt_tokens) * MS, pace=pace)
    pace.learn(step(8), 5_000 * MS)
    pace.learn(both(31), 5_000 * MS)
    assert pace.take(10_000, 8, 1) == pytest.approx(31, abs=1)


@pytest.mark.parametrize("factor", [0.25, 4])
def test_it_follows_a_machine_whose_speed_changes(factor: float) -> None:
    """All costs alike: the same chunk.  It never comes to a plan of more than 12 steps, whatever was learned before."""
    pace = Pace(LIMITS, SHARE)
    settled(lambda plan: (10 + 0.75 * plan.num_prompt_tokens) * MS, pace=pace)
    took: list[float] = []

    def took_ns(plan: Plan) -> float:
        took.append(factor * (10 + 0.75 * plan.num_prompt_tokens))
        return took[-1] * MS

    assert settled(took_ns, pace=pace) == pytest.approx(31, abs=1)
    assert max(took) <= 12 * 10 * factor
    assert max(took[-20:]) <= 4 * 10 * factor


def test_fewer_rows_are_not_thought_as_dear_as_many() -> None:
    pace = Pace(LIMITS, SHARE)
    settled(lambda plan: (80 + 0.75 * plan.num_prompt_tokens) * MS, num_rows=64, pace=pace)
    assert pace.take(10_000, 8, 1) == pytest.approx(31, abs=2)
    assert pace.take(10_000, 200, 1) == pytest.approx(249, abs=8), "no more than was seen"


def test_plans_that_move_state_and_small_chunks_teach_nothing() -> None:
    pace = Pace(LIMITS, SHARE)
    for _ in range(5):
        pace.learn(step(8, save=(3,)), 500 * MS)
        pace.learn(step(8, restore=(Restore(3, 64, None),)), 500 * MS)
        pace.learn(step(8, activate=(3,)), 500 * MS)
        pace.learn(step(8), 10 * MS)
        pace.learn(both(15), 11 * MS)
    assert pace.take(10_000, 8, 1) == 16
    pace.learn(both(30, open=(Open(3, None, 0, 1, 0, None),), activate=(3,)), 40 * MS)  # of what it builds itself
    assert pace.take(10_000, 8, 1) > 16


def test_now_and_then_a_plan_only_decodes_unless_all_that_waits_fits() -> None:
    pace = Pace(LIMITS, SHARE)
    counts = [pace.take(10_000, 8, 1) for _ in range(80)]
    assert counts.count(0) == 10 and not any(a == b == 0 for a, b in pairwise(counts))
    assert all(pace.take(16, 8, 1) for _ in range(80))


def slow_attention_ns(plan: Plan) -> int:
    """Of an engine of which a token costs 0.6 ms at the beginning and three times as much at the end of 400."""
    tokens_ms = sum(0.6 * len(p.tokens) * (1 + p.start / 200) for p in plan.prefill)
    decode_ms = plan.num_steps * (4 + 0.8 * len(plan.decode)) if plan.decode else 0
    return round((tokens_ms + decode_ms) * MS)


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("num_streams", [1, 3, 7])
def test_a_long_build_leaves_gaps_of_a_few_steps_and_takes_not_much_longer(num_streams: int, ahead: int) -> None:
    """T9 in the engine's time, with one plan in flight and with two."""
    driver = Driver(dataclasses.replace(SMALL, least_chunk=4), SchedulerSettings(prefill_share=SHARE))
    driver.cost_ns = slow_attention_ns
    for _ in range(num_streams):
        driver.submit(GenerationRequest((1, 2), 390))
    driver.run(until=lambda: len(driver.plans) == 6)
    for _ in range(ahead - 1):
        driver.plan()
    driver.create("long", tokens(400))
    before = len(driver.plans)
    driver.run(until=lambda: driver.core.load().prefixes_ready == 1)
    during = driver.plans[before:]
    step_ns = median(slow_attention_ns(plan) / plan.num_steps for plan in driver.plans[2:before])
    assert all(len(plan.decode) == num_streams for plan in during)
    assert max(map(slow_attention_ns, during)) <= 5 * step_ns
    alone_ns = sum(0.6 * MS * (1 + i / 200) for i in range(400))
    assert sum(map(slow_attention_ns, during)) <= 2 * alone_ns
