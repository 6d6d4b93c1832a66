"""A whole load test: prefixes, economy, phases in turn, the second look at some answers, and everything taken back.

    what a lone request costs ─► prefixes ─► phase ─► phase ─► … ─► verification ─► prefixes deleted
                                             shared and no-share take turns

In: a plan, and a target.  Out: the findings of a `Result`.  It refuses to know options, terminals and how a phase is
driven.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Protocol

from tinyloop_service.bench import Run, Service, run_no_cache, run_shared
from tinyloop_service.client import ModelInfo
from tinyloop_service.errors import InvalidArgument, TinyLoopError
from tinyloop_service.load import measures
from tinyloop_service.load.driver import Build, Counted, Driven, Job, Sent
from tinyloop_service.load.fleet import Fleet
from tinyloop_service.load.measures import Turn
from tinyloop_service.load.prompts import CORPUS, Prompts, Vocabulary, joined
from tinyloop_service.load.results import Builds, Driving, Economy, Phase, Slo, Sweep, Verification, Way
from tinyloop_service.load.schedule import Drawn, arrivals_ns
from tinyloop_service.load.search import Search, sweep_of
from tinyloop_service.load.verify import verify
from tinyloop_service.load.watch import Watch, peek, settled_pages
from tinyloop_service.load.workload import Workload
from tinyloop_service.types import Load

ECONOMY_ROUNDS = ((1, 20.0), (3, 5.0), (9, 0.0))  # of lone requests: so many are enough once so many seconds are over
FAR = 10**6  # between the requests of one turn and of the next


class Target(Service, Protocol):
    """What a load test asks besides requests."""

    async def model(self) -> ModelInfo: ...

    async def tokenize(self, text: str, *, bos: bool) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be found out."""

    workload: Workload  # scaled to the model
    vocabulary: Vocabulary
    seed: int
    driving: Driving
    loads: tuple[float, ...]  # or only the first, where a search is to find the others
    search_phases: int  # at most so many of each way; 0: no search
    ways: tuple[Way, ...]
    warmup_s: float
    measured_s: float
    slo: Slo | None
    verify: int  # answers to look at a second time
    own_loop: bool  # the harness shares its event loop with nobody
    patience_s: float = 30.0  # for what still runs at the end of a phase; at least as long as the phase


@dataclass(frozen=True, slots=True)
class Status:
    """What goes on, for who watches."""

    doing: str
    started_ns: int = 0  # of the phase
    length_s: float = 0.0
    counted: Counted = field(default_factory=Counted)
    load: Load | None = None
    tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Findings:
    phases: tuple[Phase, ...]
    sweeps: tuple[Sweep, ...]
    economy: Economy | None
    setup: Builds | None
    verification: Verification | None


Tell = Callable[[Status], None]


async def vocabulary_of(target: Target, model: ModelInfo, workload: Workload) -> Vocabulary:
    """What `Prompts` needs of a model.  Raises InvalidArgument for text without a tokenizer."""
    bos = model.config.get("bos_token_id")
    special = tuple({*model.eos_token_ids, *(() if bos is None else (bos,))})
    tokens = 0
    if workload.content == "text":
        if not model.has_tokenizer:
            raise InvalidArgument("content", "is text, but the model has no tokenizer; set it to ids")
        tokens = len(await target.tokenize(CORPUS, bos=False))
    return Vocabulary(model.config["vocab_size"], special, tokens)


class LoadTest:
    """One plan carried out, once."""

    def __init__(self, plan: Plan, target: Target, fleet: Fleet, tell: Tell) -> None:
        self._plan = plan
        self._target = target
        self._fleet = fleet
        self._tell = tell
        self._prompts = Prompts(plan.workload, plan.seed, plan.vocabulary)
        self._phases: list[Phase] = []
        self._answers: list[tuple[Way, Sent]] = []

    async def run(self) -> Findings:
        """Raises what the target raises where nothing can be measured without it."""
        plan = self._plan
        economy, setup, verification = None, None, None
        try:
            economy = await self._economy()
            if Way.SHARED in plan.ways:
                setup = await self._make_prefixes()
            if plan.search_phases:
                await self._search()
            else:
                for load in plan.loads:
                    await self._run_load(load, plan.ways)
            if plan.verify:
                verification = await self._verify()
        finally:
            await self._delete_prefixes()
        by_way = {way: sorted((p for p in self._phases if p.way is way), key=lambda p: p.load) for way in plan.ways}
        sweeps = [sweep_of(way, phases) for way, phases in by_way.items() if len(phases) > 1]
        return Findings(tuple(self._phases), tuple(sweeps), economy, setup, verification)

    async def _economy(self) -> Economy:
        """One prefix and one typical request, nothing else going on."""
        workload = self._plan.workload
        runs: list[Run] = []
        alone: list[Run] = []
        drawn = Drawn(0, 0, workload.suffix_len.middle, workload.output_len.middle, None)
        ask = self._prompts.ask(drawn, Way.SHARED)
        name, prefix = self._prompts.prefix(0)
        began_ns = time.monotonic_ns()
        while not _enough(len(runs), (time.monotonic_ns() - began_ns) / 1e9):
            self._tell(Status(f"a lone request, round {len(runs) + 1}"))
            try:
                runs.append(await run_shared(self._target, f"{name}-alone", prefix, [ask.content], ask.parameters))
            finally:
                await self._delete(f"{name}-alone")
            alone.append(await run_no_cache(self._target, [joined(prefix, ask.content)], ask.parameters))
        build_ms = median(run.build_ms for run in runs)
        warm_ms, cold_ms = _total_ms(runs), _total_ms(alone)
        return Economy(
            prefix_tokens=self._prompts.draws.prefix_len(0),
            suffix_tokens=drawn.suffix_len,
            new_tokens=drawn.output_len,
            build_ms=round(build_ms, 3),
            warm_ms=round(warm_ms, 3),
            cold_ms=round(cold_ms, 3),
            break_even=round(build_ms / (cold_ms - warm_ms), 3) if cold_ms > warm_ms else None,
        )

    async def _make_prefixes(self) -> Builds | None:
        """All of the workload, one after the other."""
        made, ttl_s = [], self._plan.workload.ttl_s
        for number in range(self._plan.workload.prefixes):
            self._tell(Status(f"prefix {number + 1} of {self._plan.workload.prefixes}"))
            began_ns = time.monotonic_ns()
            await self._target.create_prefix(*self._prompts.prefix(number), ttl_s=ttl_s)
            made.append(Build(self._prompts.draws.prefix_len(number), began_ns, time.monotonic_ns(), None))
        return measures.builds(made)

    async def _search(self) -> None:
        """Every way looks for its own knee; while both look, they take turns."""
        search = Search(self._plan.driving, self._plan.loads[0], self._plan.search_phases)
        while True:
            wanted = {way: search.next_load([p for p in self._phases if p.way is way]) for way in self._plan.ways}
            if not (loads := [load for load in wanted.values() if load is not None]):
                return
            await self._run_load(min(loads), [way for way, load in wanted.items() if load == min(loads)])

    async def _run_load(self, load: float, ways: Sequence[Way]) -> None:
        """One way: one turn.  Both: two half as long of each, one way first, then the other."""
        order = [(way, turn) for turn, pair in enumerate((ways, ways[::-1])) for way in pair]
        if len(ways) == 1:
            order = order[:1]
        turns: dict[Way, list[Turn]] = {way: [] for way in ways}
        for way, number in order:
            named = f", turn {number + 1} of {len(order) // len(ways)}" if len(order) > 1 else ""
            measured_s = self._plan.measured_s * len(ways) / len(order)
            turns[way].append(await self._turn(load, way, number, measured_s, named))
        plan = self._plan
        for way in ways:
            found = measures.phase(
                turns[way], plan.driving, load, plan.slo, plan.workload.expected_errors, plan.own_loop
            )
            self._phases.append(found)
            self._answers += [(way, sent) for turn in turns[way] for sent in turn.measured if sent.timeline.token_ids]

    async def _turn(self, load: float, way: Way, number: int, measured_s: float, named: str) -> Turn:
        plan, is_open = self._plan, self._plan.driving is Driving.OPEN
        length_s = plan.warmup_s + measured_s
        before = await peek(self._target)
        job = Job(
            way=way,
            start_ns=time.monotonic_ns() + self._fleet.lead_ns,
            warmup_s=plan.warmup_s,
            measured_s=measured_s,
            patience_s=max(plan.patience_s, length_s),
            arrivals_ns=arrivals_ns(load, length_s, plan.seed + number) if is_open else None,
            callers=0 if is_open else int(load),
            first_index=number * FAR,
            keep_ids=plan.verify > 0,
        )
        pages_before = 0 if before is None else before.pages_requests
        driven, watch = await self._watched(job, f"{load:g}{'/s' if is_open else ' callers'}, {way.value}{named}")
        pages_after = await settled_pages(self._target, pages_before)
        return Turn(job, driven, tuple(watch.samples), pages_before, pages_after)

    async def _watched(self, job: Job, doing: str) -> tuple[tuple[Driven, ...], Watch]:
        watch = Watch(self._target)
        status = Status(doing, job.start_ns, (job.end_ns - job.start_ns) / 1e9)

        def tell(**changes: object) -> None:
            nonlocal status
            status = replace(status, **changes)  # type: ignore[arg-type]
            self._tell(status)

        watching = asyncio.create_task(watch.run(lambda load: tell(load=load, tokens_per_s=watch.tokens_per_s)))
        try:
            driven = await self._fleet.drive(job, lambda counted: tell(counted=counted))
        finally:
            watching.cancel()
            await asyncio.wait([watching])
        return driven, watch

    async def _verify(self) -> Verification:
        done = [(way, sent) for way, sent in self._answers if sent.timeline.completed is not None]
        chosen = done[:: max(1, len(done) // self._plan.verify)][: self._plan.verify]

        def show(number: int) -> None:
            self._tell(Status(f"asking again, {number} of {len(chosen)}"))

        return await verify(self._target, self._prompts, chosen, show)

    async def _delete_prefixes(self) -> None:
        workload = self._plan.workload
        if Way.SHARED in self._plan.ways:
            for number in range(workload.prefixes):
                await self._delete(self._prompts.prefix(number)[0])
            for number in range(workload.builds):
                await self._delete(self._prompts.further_build(number)[0])

    async def _delete(self, name: str) -> None:
        """What is gone is gone, and what cannot be deleted now is another's to delete."""
        with suppress(TinyLoopError):
            await self._target.delete_prefix(name)


def _enough(rounds: int, elapsed_s: float) -> bool:
    return any(rounds >= count and elapsed_s >= seconds for count, seconds in ECONOMY_ROUNDS)


def _total_ms(runs: Sequence[Run]) -> float:
    """Median over all their requests."""
    return median(answer.total_ms for run in runs for answer in run.answers)
