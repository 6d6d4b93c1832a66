"""A whole load test of the fake engine: what is found, and that everything is taken back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from load_harness import VOCABULARY, Around, fake, plan_of, prompts_of

from tinyloop_service.bench.service import Answering, Ask
from tinyloop_service.engine.api import Open
from tinyloop_service.engine.fake import FakeEngine
from tinyloop_service.errors import InvalidArgument, Unavailable
from tinyloop_service.load.fleet import Here
from tinyloop_service.load.local import Local
from tinyloop_service.load.prompts import Prompts
from tinyloop_service.load.results import Driving, Slo, Way
from tinyloop_service.load.run import Findings, LoadTest, Plan, Status, _enough, vocabulary_of
from tinyloop_service.load.verify import difference


async def run(target: Local, plan: Plan) -> tuple[Findings, list[Status]]:
    told: list[Status] = []
    here = Here(target, Prompts(plan.workload, plan.seed, plan.vocabulary))
    return await LoadTest(plan, target, here, told.append).run(), told


async def test_both_ways_in_turn_and_the_answers_verified() -> None:
    async with fake() as target:
        found, told = await run(target, plan_of(prompts_of(), ways=tuple(Way), verify=6, slo=Slo(ttft_ms=10_000)))
        assert target._own.list_prefixes() == [], "all are deleted"
        load = await target.load()
        assert load.pages_free == load.pages_total
    shared, alone = found.phases
    assert (shared.way, alone.way) == tuple(Way)
    assert shared.cached_token_rate is not None and shared.cached_token_rate > 0.9
    assert alone.cached_token_rate == 0.0
    assert shared.counts.completed > 0 and shared.counts.failed == 0
    assert shared.throughput.goodput_share == 1.0
    assert (shared.pages_before, shared.pages_after) == (0, 0)
    assert found.verification is not None
    assert (found.verification.asked, found.verification.alike) == (6, 6)
    assert found.setup is not None and (found.setup.count, found.setup.tokens) == (2, 140)
    assert found.economy is not None
    assert (found.economy.prefix_tokens, found.economy.suffix_tokens, found.economy.new_tokens) == (70, 3, 5)
    turns = [status.doing for status in told if status.length_s]
    order = [name for at, name in enumerate(turns) if at == 0 or turns[at - 1] != name]
    sides = ("shared, turn 1", "no-share, turn 1", "no-share, turn 2", "shared, turn 2")
    assert order == [f"4 callers, {side} of 2" for side in sides], "the second pair the other way"


async def test_answers_that_differ_are_told_with_their_place() -> None:
    """An engine that gives other tokens every time."""
    count = 0

    def unsteady(opened: Open, position: int, token: int) -> int:
        nonlocal count
        count += 1
        return 1 + count % 500

    async with fake(FakeEngine(next_token=unsteady)) as target:
        found, _ = await run(target, plan_of(prompts_of(), verify=3))
    assert found.verification is not None
    assert found.verification.alike < found.verification.asked == 3
    assert "token 0 is" in found.verification.differing[0]


async def test_a_server_that_is_gone_before_the_second_look_takes_no_figures_along() -> None:
    gone = False

    def tell(status: Status) -> None:
        nonlocal gone
        gone |= status.doing.startswith("asking again, 2")

    class Vanishing(Around):
        def ask(self, ask: Ask) -> Answering:
            if gone:
                raise Unavailable("it is gone")
            return self.service.ask(ask)

    plan = plan_of(prompts_of(), verify=3)
    async with fake() as target:
        vanishing: Any = Vanishing(target)
        found = await LoadTest(plan, vanishing, Here(target, prompts_of()), tell).run()
    assert found.phases[0].counts.completed > 0
    assert found.verification is not None
    assert (found.verification.asked, found.verification.alike) == (3, 1)
    assert all("asked again it failed: it is gone" in line for line in found.verification.differing)


async def test_a_search_runs_phases_until_it_knows() -> None:
    async with fake() as target:
        found, _ = await run(target, plan_of(prompts_of(), loads=(1.0,), search_phases=3, measured_s=0.15))
    loads = [phase.load for phase in found.phases]
    assert loads[:2] == [1.0, 2.0]
    assert len(loads) <= 3
    [sweep] = found.sweeps
    assert sweep.way is Way.SHARED


async def test_an_open_loop_and_the_seconds_of_the_server() -> None:
    async with fake() as target:
        plan = plan_of(prompts_of(), driving=Driving.OPEN, loads=(40.0,), measured_s=1.2)
        found, _ = await run(target, plan)
    [phase] = found.phases
    assert phase.driving is Driving.OPEN
    assert phase.series[0].at_s >= 1.0
    assert sum(second.tokens_per_s for second in phase.series) > 0
    for second in phase.series:
        assert second.prefixes_ready == 2.0
        assert 0 < second.pages_prefixes <= second.pages_held < 1


async def test_what_was_made_is_deleted_when_it_is_stopped() -> None:
    async with fake() as target:
        started = asyncio.Event()
        plan = plan_of(prompts_of(), measured_s=60.0)

        def tell(status: Status) -> None:
            if status.counted.completed:
                started.set()

        here = Here(target, Prompts(plan.workload, plan.seed, plan.vocabulary))
        running = asyncio.create_task(LoadTest(plan, target, here, tell).run())
        await started.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert target._own.list_prefixes() == []


async def test_text_needs_a_tokenizer() -> None:
    workload = replace(prompts_of().workload, content="text")
    async with fake() as target:
        model = await target.model()
        with pytest.raises(InvalidArgument, match="no tokenizer"):
            await vocabulary_of(target, model, workload)
        assert await vocabulary_of(target, model, prompts_of().workload) == VOCABULARY


@pytest.mark.parametrize(
    ("rounds", "elapsed_s", "is_enough"),
    [
        (0, 99.0, False),
        (1, 19.0, False),
        (1, 20.0, True),
        (3, 4.9, False),
        (3, 5.0, True),
        (8, 4.0, False),
        (9, 0.1, True),
    ],
)
def test_lone_requests_are_few_where_they_take_long(rounds: int, elapsed_s: float, is_enough: bool) -> None:
    assert _enough(rounds, elapsed_s) is is_enough


def test_the_first_difference_is_named() -> None:
    assert difference([1, 2, 3], [1, 2, 3]) is None
    assert difference([1, 2, 3], [1, 9, 3]) == "token 1 is 2, alone 9"
    assert difference([1, 2], [1, 2, 3]) == "2 tokens, alone 3"
