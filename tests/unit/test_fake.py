"""The fake engine: it gives what the oracle gives, and it notices every way to break the plan contract."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from tinyloop_service.engine.api import Block, Clone, Drop, Extend, Open, Plan, Prefill, RowOutput, StepResult
from tinyloop_service.engine.fake import FAKE_LIMITS, FakeEngine, FaultAt
from tinyloop_service.engine.fake_state import PlanViolation
from tinyloop_service.engine.fake_tokens import expected_tokens
from tinyloop_service.errors import DeviceLost, EngineFault
from tinyloop_service.types import Sampling, TokenIds

LIMITS = dataclasses.replace(FAKE_LIMITS, num_pages=40, max_rows=2, max_chunk=100, max_steps=4, max_loops=4)
GREEDY = Sampling()
PROMPT: TokenIds = tuple(range(1, 71))


def block(index: int) -> Block:
    """The pages of the index-th block at two loops: three layers."""
    return (3 * index, 3 * index + 1, 3 * index + 2)


def prefix_plan(number: int = 1, seq: int = 1) -> Plan:
    """A prefix of 70 tokens in two blocks."""
    return Plan(
        number,
        open=(Open(seq, None, 0, 2, 0, None),),
        extend=(Extend(seq, (block(0), block(1))),),
        prefill=(Prefill(seq, 0, PROMPT),),
    )


def row_plan(number: int = 2) -> Plan:
    """A row on it with a suffix of two tokens."""
    return Plan(
        number,
        open=(Open(2, 1, 70, 2, 0, GREEDY),),
        extend=(Extend(2, (block(2),)),),
        clone=(Clone(2, block(1), block(2), 6),),
        prefill=(Prefill(2, 70, (5, 6)),),
    )


def ready(*, row: bool = True, strict: bool = True) -> FakeEngine:
    engine = FakeEngine(LIMITS, strict=strict)
    engine.step(prefix_plan())
    if row:
        engine.step(row_plan())
    return engine


def sampled(*results: StepResult) -> TokenIds:
    return tuple(token for result in results for row in result.rows for token in row.tokens)


@pytest.mark.parametrize("strict", [False, True])
def test_warm_rows_give_what_the_whole_prompt_gives(strict: bool) -> None:
    engine = ready(row=False, strict=strict)
    results = [
        engine.step(row_plan()),
        engine.step(Plan(3, decode=(2,), num_steps=4)),
        engine.step(Plan(4, decode=(2,))),
    ]
    assert sampled(*results) == expected_tokens([((*PROMPT, 5, 6), 0)], 6, GREEDY, 2, LIMITS)


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 6])
@pytest.mark.parametrize("by", ["end", "stop_tokens"])
def test_a_row_ends_by_itself(by: str, num_tokens: int) -> None:
    wanted = expected_tokens([((*PROMPT, 5, 6), 0)], 6, GREEDY, 2, LIMITS)
    assert wanted.index(wanted[num_tokens - 1]) == num_tokens - 1, "a stop token that comes earlier as well"
    ends = {"end": {"end": 71 + num_tokens}, "stop_tokens": {"stop_tokens": (wanted[num_tokens - 1],)}}[by]
    engine, plan = ready(row=False), row_plan()
    results = [
        engine.step(replace(plan, open=(plan.open[0]._replace(**ends),))),
        *(engine.step(Plan(number, decode=(2,), num_steps=4)) for number in (3, 4)),
    ]
    assert sampled(*results) == wanted[:num_tokens]
    assert engine.step(Plan(5, decode=(2,), num_steps=4)).rows == ()


def test_an_empty_suffix_starts_from_the_kept_logits() -> None:
    engine = ready(row=False)
    first = engine.step(Plan(2, open=(Open(2, 1, 70, 2, 0, GREEDY),), first=(2,)))
    extend = (Extend(2, (block(2),)),)
    second = engine.step(Plan(3, extend=extend, clone=(Clone(2, block(1), block(2), 6),), decode=(2,)))
    assert sampled(first, second) == expected_tokens([(PROMPT, 0)], 2, GREEDY, 2, LIMITS)


def test_what_is_sampled_follows_from_all_that_counts() -> None:
    def tokens(prompt: TokenIds = PROMPT, window: int = 0, sampling: Sampling = GREEDY, loops: int = 2) -> TokenIds:
        return expected_tokens([(prompt, window)], 8, sampling, loops, LIMITS)

    noisy = Sampling(temperature=1.0, seed=3)
    different = [
        tokens(),
        tokens(PROMPT[1:]),
        tokens((*PROMPT[:5], 9, *PROMPT[6:])),
        tokens(window=10),
        tokens(loops=3),
        tokens(sampling=noisy),
        tokens(sampling=dataclasses.replace(noisy, choice=1)),
        tokens(sampling=dataclasses.replace(noisy, seed=4)),
        tokens(sampling=Sampling(repetition_penalty=1.1)),
    ]
    assert len(set(different)) == len(different)
    assert tokens() == tokens(sampling=Sampling(seed=9)), "greedy has no noise"


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        (Plan(2), "plan 2 after 2"),
        (Plan(3, decode=(9,)), "not open"),
        (Plan(3, close=(9,)), "not open"),
        (Plan(3, close=(1,)), "closed under"),
        (Plan(3, open=(Open(2, None, 0, 2, 0, GREEDY),)), "is open"),
        (Plan(3, open=(Open(3, 1, 64, 2, 0, GREEDY),)), "parent's length"),
        (Plan(3, open=(Open(3, None, 0, 9, 0, GREEDY),)), "9 loops"),
        (Plan(3, extend=(Extend(2, ((9, 10),)),)), "2 pages for 3 layers"),
        (Plan(3, extend=(Extend(2, ((9, 10, 40),)),)), "does not exist"),
        (Plan(3, extend=(Extend(2, (block(1),)),)), "owned by 1"),
        (Plan(3, released=(0,)), "owned by 1"),
        (Plan(3, decode=(2,), prefill=(Prefill(2, 72, (1,)),)), "takes part twice"),
        (Plan(3, decode=(2,), num_steps=5), "5 steps"),
        (Plan(3, decode=(1,)), "before its first token"),
        (Plan(3, prefill=(Prefill(1, 69, (1,), 1),)), "prefill at 69 of 70"),
        (Plan(3, prefill=(Prefill(1, 70, (1,)),)), "after the last"),
        (Plan(3, prefill=(Prefill(1, 70, (1,) * 101),)), "too large"),
        (Plan(3, first=(2,)), "has begun"),
        (Plan(3, activate=(1,)), "no active form"),
        (Plan(3, drop=(Drop(1, 3),)), "a drop below"),
        (
            Plan(
                3,
                open=(Open(3, 1, 70, 2, 0, GREEDY),),
                extend=(Extend(3, (block(3),)),),
                prefill=(Prefill(3, 70, (1,)),),
            ),
            "block 1 holds 0 tokens, 6 are read",
        ),
        (
            Plan(
                3,
                open=(Open(3, 1, 70, 2, 0, GREEDY),),
                extend=(Extend(3, (block(3),)),),
                clone=(Clone(3, block(1), block(3), 5),),
            ),
            "wrong size",
        ),
        (
            Plan(
                3,
                open=(Open(3, 1, 70, 2, 0, GREEDY),),
                extend=(Extend(3, (block(3),)),),
                clone=(Clone(3, block(0), block(3), 6),),
            ),
            "wrong block",
        ),
    ],
)
def test_a_broken_plan_is_noticed(plan: Plan, what: str) -> None:
    with pytest.raises(PlanViolation, match=what):
        ready().step(plan)


def test_too_many_rows_and_tokens_outside_the_vocabulary_are_noticed() -> None:
    with pytest.raises(PlanViolation, match="3 rows"):
        ready().step(Plan(3, decode=(2, 3, 4)))
    bad = dataclasses.replace(prefix_plan(), prefill=(Prefill(1, 0, (512,)),))
    with pytest.raises(PlanViolation, match="outside the vocabulary"):
        FakeEngine(LIMITS).step(bad)


def test_a_sequence_without_room_is_noticed() -> None:
    plan = dataclasses.replace(prefix_plan(), extend=(Extend(1, (block(0),)),))
    with pytest.raises(PlanViolation, match="no block for position 64"):
        FakeEngine(LIMITS).step(plan)


def test_a_page_that_was_dropped_is_never_read() -> None:
    """T18: the row reads the prefix's first block, which is given away under it."""
    engine = ready()
    engine.step(Plan(3, drop=(Drop(1, 1),)))
    with pytest.raises(PlanViolation, match="reads block 0"):
        engine.step(Plan(4, decode=(2,)))


def test_an_inactive_prefix_is_not_read() -> None:
    engine = FakeEngine(dataclasses.replace(LIMITS, active_page_bytes=1), strict=True)
    with pytest.raises(PlanViolation, match="not active"):
        engine.step(prefix_plan())
    engine = FakeEngine(dataclasses.replace(LIMITS, active_page_bytes=1), strict=True)
    engine.step(dataclasses.replace(prefix_plan(), activate=(1,)))
    engine.step(row_plan())
    with pytest.raises(PlanViolation, match="sequence 1 is read but not active"):
        engine.step(Plan(3, deactivate=(1,), decode=(2,)))


@pytest.mark.parametrize("fault_at", FaultAt)
def test_a_fault_loses_what_the_plan_named_and_what_hangs_from_it(fault_at: FaultAt) -> None:

    def fault(plan: Plan) -> EngineFault | None:
        return EngineFault("a fault") if plan.number == 3 else None

    engine = FakeEngine(LIMITS, fault=fault, fault_at=fault_at)
    engine.step(prefix_plan())
    engine.step(row_plan())
    with pytest.raises(EngineFault):
        engine.step(Plan(3, decode=(2,)))
    engine.step(Plan(4, close=(2,)))
    engine.check_idle(1)


def test_a_lost_device_loses_everything() -> None:
    engine = FakeEngine(LIMITS, fault=lambda plan: DeviceLost("gone") if plan.number == 2 else None)
    engine.step(prefix_plan())
    with pytest.raises(DeviceLost):
        engine.step(row_plan())
    engine.check_idle(0)


def test_logprobs_are_given_for_every_token_that_is_asked_for() -> None:
    engine = ready(row=False)
    opened = Open(2, 1, 70, 2, 0, Sampling(logprobs=3))
    plan = dataclasses.replace(row_plan(), open=(opened,))
    (row,) = engine.step(plan).rows
    assert len(row.logprobs) == 1 and len(row.logprobs[0].top) == 3 and row.logprobs[0].logprob <= 0
    (row,) = engine.step(Plan(3, decode=(2,), num_steps=3)).rows
    assert len(row.logprobs) == len(row.tokens) == 3


def test_a_row_may_begin_and_go_on_in_one_plan_where_the_limits_say_so() -> None:
    """Its output has all its tokens; steps are counted without the first."""
    engine = FakeEngine(replace(LIMITS, goes_on=2), strict=True)
    engine.step(prefix_plan())
    plan = replace(row_plan(), decode=(2,), num_steps=3)
    together = engine.step(plan)
    (row,) = together.rows
    apart = ready(row=False)
    assert row.tokens == sampled(apart.step(row_plan()), apart.step(Plan(3, decode=(2,), num_steps=3)))
    assert together.rows_by_step(plan) == (2, 1, 1) and together.took_every_step(plan)
    with pytest.raises(PlanViolation, match="takes part twice"):
        engine.step(Plan(3, decode=(2, 2)))


def test_steps_that_a_row_did_not_take_are_not_counted() -> None:
    """It began and ended with its first token."""
    plan = Plan(1, prefill=(Prefill(1, 0, (3,)),), decode=(1, 2), num_steps=2)
    ended = StepResult((RowOutput(1, (7,)), RowOutput(2, (8,))))
    assert ended.rows_by_step(plan) == (2,) and not ended.took_every_step(plan)
    went_on = StepResult((RowOutput(1, (7, 8, 9)), RowOutput(2, (8,))))
    assert went_on.rows_by_step(plan) == (3, 1) and went_on.took_every_step(plan)
    assert not StepResult((RowOutput(1, (7,)),)).took_every_step(replace(plan, decode=(), num_steps=1))
