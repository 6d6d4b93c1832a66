"""The whole measurement: the engine by hand, then requests through a scheduler of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import asdict
from statistics import median

from tinyloop_service.bench.direct import Direct, measure_activation, measure_prefill, measure_steps
from tinyloop_service.bench.workload import Progress, Report, Samples, Workload, prompt_tokens
from tinyloop_service.engine.api import Engine
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.types import Completed, GenerationRequest, PrefixDefinition, Stops, TokenIds


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
    shared, singles = asyncio.run(_measure_requests(engine, tokens, loops, workload, progress))
    no_cache, scaled = no_cache_totals(singles, workload.rows)
    samples = {"prefill": {"1": prefills}, "decode_step": steps, "shared": shared, "no_cache": no_cache}
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


async def _measure_requests(
    engine: Engine, tokens: TokenIds, loops: int, workload: Workload, progress: Progress
) -> tuple[Samples, list[list[float]]]:
    """SHARED per number of requests; of every round of NO_CACHE, its single requests.  Closes the engine."""
    scheduler = Scheduler(engine, SchedulerSettings())
    await scheduler.start()
    try:
        shared: Samples = {str(count): [] for count in workload.rows}
        for count in workload.rows:
            for index in range(workload.rounds):
                progress(f"SHARED, {count} requests, {index + 1} of {workload.rounds}")
                work = _shared(scheduler, tokens, loops, workload.new_tokens, count)
                shared[str(count)].append(await _timed(work))
        alone = GenerationRequest(
            tokens, workload.new_tokens, loops=loops, stops=Stops(ignore_eos=True), want_text=False
        )
        needed = min(max(workload.rows), workload.max_no_cache)
        singles: list[list[float]] = []
        for index in range(workload.no_cache_rounds):
            progress(f"NO_CACHE, {needed} requests, {index + 1} of {workload.no_cache_rounds}")
            singles.append([await _timed(_finish(scheduler, alone)) for _ in range(needed)])
        return shared, singles
    finally:
        await scheduler.close()


async def _shared(scheduler: Scheduler, tokens: TokenIds, loops: int, new_tokens: int, count: int) -> None:
    prefix = await scheduler.create_prefix(PrefixDefinition(tokens, loops=loops))
    try:
        request = GenerationRequest(
            (), new_tokens, prefix_uid=prefix.uid, stops=Stops(ignore_eos=True), want_text=False
        )
        await asyncio.gather(*(_finish(scheduler, request) for _ in range(count)))
    finally:
        scheduler.release_prefix(prefix.uid)


async def _finish(scheduler: Scheduler, request: GenerationRequest) -> None:
    async with scheduler.generate(request) as stream:
        async for outputs in stream:
            if any(isinstance(output, Completed) for output in outputs):
                return


async def _timed(work: Awaitable[None]) -> float:
    start = time.perf_counter()
    await work
    return (time.perf_counter() - start) * 1e3


def no_cache_totals(rounds: list[list[float]], rows: tuple[int, ...]) -> tuple[Samples, list[str]]:
    """Of each round's requests, the time of N; and which N are scaled from the measured ones."""
    measured = len(rounds[0])

    def total(singles: list[float], count: int) -> float:
        return sum(singles[:count]) if count <= measured else count * median(singles)

    samples = {str(count): [total(singles, count) for singles in rounds] for count in rows}
    return samples, [str(count) for count in rows if count > measured]
