"""The whole measurement: the engine by hand, then requests through a scheduler of its own.

The rounds of requests, `measure_rounds`, are for any service.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from statistics import median

from tinyloop_service.arguments import parameters
from tinyloop_service.bench.direct import Direct, measure_activation, measure_prefill, measure_steps
from tinyloop_service.bench.rounds import Run, run_no_cache, run_shared
from tinyloop_service.bench.service import InProcess, Service
from tinyloop_service.bench.workload import Progress, Report, Samples, Workload, prompt_tokens
from tinyloop_service.engine.api import Engine
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.types import TokenIds

PREFIX_NAME = "bench"


def run_bench(engine: Engine, workload: Workload, progress: Progress = lambda _: None) -> Report:
    """Measure `workload` on `engine`, which is closed afterwards.

    Raises ValueError where the workload cannot fit the engine's limits.
    """
    _refuse_impossible(engine, workload)
    loops = workload.loops or engine.limits.default_loops
    tokens = prompt_tokens(engine.limits.vocab_size, workload.prefix_len)
    direct = Direct(engine, loops)
    prefills = measure_prefill(direct, tokens, workload.rounds, progress)
    activations = measure_activation(direct, tokens, workload.rounds, progress)
    steps = measure_steps(direct, tokens, workload, progress)
    rounds = asyncio.run(_in_process(engine, tokens, workload, progress))
    no_cache, scaled = no_cache_totals(rounds.singles, workload.rows)
    samples = {"prefill": {"1": prefills}, "decode_step": steps, "shared": rounds.samples, "no_cache": no_cache}
    if activations:
        samples["activate"] = {"1": activations}
    return Report.of(engine, workload, samples, scaled)


def _refuse_impossible(engine: Engine, workload: Workload) -> None:
    """ValueError with the way out, before minutes are spent."""
    limits = engine.limits
    numbers = [value for value in asdict(workload).values() if isinstance(value, int)]
    if min(*numbers, *workload.rows) < 1:
        raise ValueError(f"every number of a workload is at least 1, given {workload}")
    needed = workload.prefix_len + workload.new_tokens
    if needed > limits.max_seq_len:
        raise ValueError(
            f"prefix and new tokens need {needed} positions, the model has {limits.max_seq_len}; shorten one"
        )
    if max(workload.rows) > limits.max_rows:
        raise ValueError(f"{max(workload.rows)} rows asked, a step of this engine has at most {limits.max_rows}")
    if workload.steps_at_once > limits.max_steps:
        raise ValueError(f"{workload.steps_at_once} steps at once asked, a plan has at most {limits.max_steps}")
    if workload.loops is not None and not 1 <= workload.loops <= limits.max_loops:
        raise ValueError(f"loops must be 1 to {limits.max_loops}, given {workload.loops}")


@dataclass(frozen=True, slots=True)
class Rounds:
    """Runs per number of requests; NO_CACHE once a round, of as many requests as were measured."""

    shared: dict[int, list[Run]]
    no_cache: list[Run]

    @property
    def samples(self) -> Samples:
        return {str(count): [run.total_ms for run in runs] for count, runs in self.shared.items()}

    @property
    def singles(self) -> list[list[float]]:
        """Of every round of NO_CACHE, its single requests."""
        return [[answer.total_ms for answer in run.answers] for run in self.no_cache]


async def measure_rounds(
    service: Service, tokens: TokenIds, workload: Workload, progress: Progress = lambda _: None, *, warm_up: int = 0
) -> Rounds:
    """Greedy requests without a suffix, to the last token; SHARED after `warm_up` rounds that do not count."""
    greedy = parameters(workload.new_tokens, loops=workload.loops, ignore_eos=True, seed=0)
    shared: dict[int, list[Run]] = {}
    for count in workload.rows:
        runs = []
        for index in range(warm_up + workload.rounds):
            progress(f"SHARED, {count} request{'s' * (count > 1)}, {index + 1} of {warm_up + workload.rounds}")
            runs.append(await run_shared(service, PREFIX_NAME, tokens, [()] * count, greedy))
            await service.delete_prefix(PREFIX_NAME)
        shared[count] = runs[warm_up:]
    needed = min(max(workload.rows), workload.max_no_cache)
    no_cache = []
    for index in range(workload.no_cache_rounds):
        progress(f"NO_CACHE, {needed} request{'s' * (needed > 1)}, {index + 1} of {workload.no_cache_rounds}")
        no_cache.append(await run_no_cache(service, [tokens] * needed, greedy))
    return Rounds(shared, no_cache)


async def _in_process(engine: Engine, tokens: TokenIds, workload: Workload, progress: Progress) -> Rounds:
    """Closes the engine."""
    scheduler = Scheduler(engine, SchedulerSettings())
    await scheduler.start()
    try:
        return await measure_rounds(InProcess(scheduler), tokens, workload, progress)
    finally:
        await scheduler.close()


def no_cache_totals(rounds: list[list[float]], rows: tuple[int, ...]) -> tuple[Samples, list[str]]:
    """Of each round's requests, the time of N; and which N are scaled from the measured ones."""
    measured = len(rounds[0])

    def total(singles: list[float], count: int) -> float:
        return sum(singles[:count]) if count <= measured else count * median(singles)

    samples = {str(count): [total(singles, count) for singles in rounds] for count in rows}
    return samples, [str(count) for count in rows if count > measured]
