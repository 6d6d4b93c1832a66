"""How many prefixes an engine's memory holds at a time, and whether each of them still answers as it did.

    python tests/bench_pool.py [--engine cuda] [--model 407m] [--kv-memory 8GiB] [--cache-mode fp16] [--prefix 1024]
        [--most 2048] [--cold 5] [--out FILE.json]
    quick, on a CPU: --engine cpu --model tiny --kv-memory 64MiB --prefix 70

Prefixes of different random tokens are made one after the other, as many as stay READY side by side with room for the
form that one of them is read in, and for a request; each answers a request at once.  Then all answer the same again, in
turn: in h modes each is made active for that, out of what is stored.  Last, all are deleted and some of the requests
run cold.  Greedy, one token behind the prefix, 8 generated; every answer must be the first one's, ids and logprobs to
the bit, and no prefix may have been evicted: else the status is 1.

Through the scheduler, in this process.  Milliseconds, medians, in brackets the least and the most.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
from bench_report import milliseconds, spread, versions, write_json

from tinyloop_service.bench import describe_machine
from tinyloop_service.completion import CompletionBuilder
from tinyloop_service.engine.api import Engine, Limits
from tinyloop_service.engine.spec import SIZES
from tinyloop_service.engine.weights import random_model, read_model
from tinyloop_service.loading import build_engine
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.settings import MOST_PREFIXES, EngineKind, EngineSettings, SchedulerSettings, parse_integer
from tinyloop_service.types import (
    CacheMode,
    GenerationRequest,
    PrefixDefinition,
    Sampling,
    Stops,
    TokenIds,
    TokenLogprob,
)

NEW_TOKENS = 8
Answer = tuple[TokenIds, tuple[TokenLogprob, ...] | None]


@dataclass(slots=True)
class Measured:
    """Bytes are of stored pages; times are milliseconds, one a prefix."""

    prefixes: int = 0
    prefix_bytes: int = 0
    stored_bytes: int = 0  # of all prefixes
    pool_bytes: int = 0
    evictions: int = 0
    changed: list[int] = field(default_factory=list)  # prefixes whose second answer was another
    cold_changed: list[int] = field(default_factory=list)  # whose cold one was
    cold_runs: int = 0
    created_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    again_ms: list[float] = field(default_factory=list)
    cold_ms: list[float] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not (self.evictions or self.changed or self.cold_changed)


class Pool:
    """One engine's memory, and the prefixes in it."""

    def __init__(self, scheduler: Scheduler, prefix_len: int) -> None:
        self._scheduler, self._len = scheduler, prefix_len
        self._answers: list[Answer] = []
        self.measured = Measured(pool_bytes=scheduler.limits.num_pages * scheduler.limits.page_bytes)

    async def fill(self, most: int) -> None:
        """As many as there is room for, at most so many."""
        found = self.measured
        while found.prefixes < most and self._has_room():
            tokens, began = self._tokens(found.prefixes), time.perf_counter()
            info = await self._scheduler.create_prefix(PrefixDefinition(tokens), name=f"p{found.prefixes}")
            found.created_ms.append((time.perf_counter() - began) * 1e3)
            found.prefix_bytes = info.size_bytes
            self._answers.append(await self._ask(found.first_ms, prefix=f"p{found.prefixes}"))
            found.prefixes += 1

    async def ask_all(self) -> None:
        found = self.measured
        for index, first in enumerate(self._answers):
            if await self._ask(found.again_ms, prefix=f"p{index}") != first:
                found.changed.append(index)
        load = self._scheduler.load()
        found.evictions = load.prefix_evictions + found.prefixes - load.prefixes_ready
        found.stored_bytes = load.pages_prefixes * load.page_bytes

    async def ask_cold(self, count: int) -> None:
        """Of `count` prefixes spread over all; they are gone then."""
        found = self.measured
        for index in range(found.prefixes):
            self._scheduler.delete_prefix(f"p{index}")
        chosen = sorted({round(each) for each in np.linspace(0, found.prefixes - 1, min(count, found.prefixes))})
        for index in chosen:
            if await self._ask(found.cold_ms, tokens=self._tokens(index)) != self._answers[index]:
                found.cold_changed.append(index)
        found.cold_runs = len(chosen)

    def _has_room(self) -> bool:
        """For one more, for the form that it is read in, and for a request; idle forms of others make room."""
        limits, load = self._scheduler.limits, self._scheduler.load()
        loops, end = limits.default_loops, self._len + 1 + NEW_TOKENS - 1
        stored, active = _pages(limits, 0, self._len, loops)
        own = sum(_pages(limits, self._len, end, loops))
        return load.pages_free + load.pages_active >= stored + active + own

    async def _ask(self, times: list[float], *, tokens: TokenIds = (), prefix: str | None = None) -> Answer:
        request = GenerationRequest(
            (*tokens, 1), NEW_TOKENS, prefix=prefix, sampling=Sampling(logprobs=1), stops=Stops(ignore_eos=True),
            want_text=False,
        )  # fmt: skip
        builder, began = CompletionBuilder(1), time.perf_counter()
        async with self._scheduler.generate(request) as stream:
            async for outputs in stream:
                builder.add(outputs)
        times.append((time.perf_counter() - began) * 1e3)
        choice = builder.completion().choices[0]
        return choice.token_ids, choice.logprobs

    def _tokens(self, index: int) -> TokenIds:
        """Of prefix number `index`: others' begin otherwise."""
        random = np.random.default_rng(index)
        return tuple(random.integers(0, self._scheduler.limits.vocab_size, self._len).tolist())


def _pages(limits: Limits, start: int, end: int, loops: int) -> tuple[int, int]:
    """Stored, and of the budget for the form that is read."""
    return limits.own_blocks(start, end) * limits.cache_layers(loops), limits.active_pages(start, end, loops)


async def measure(engine: Engine, prefix_len: int, most: int, cold: int) -> Measured:
    """Closes the engine."""
    scheduler = Scheduler(engine, SchedulerSettings())
    await scheduler.start()
    try:
        pool = Pool(scheduler, prefix_len)
        await pool.fill(most)
        await pool.ask_all()
        await pool.ask_cold(cold)
        return pool.measured
    finally:
        await scheduler.close()


def report(found: Measured, title: str) -> None:
    def figure(times: list[float]) -> str:
        return f"{milliseconds(median(times))} ({spread((min(times), max(times)))})" if times else "–"

    share = 100 * found.stored_bytes / found.pool_bytes
    print(f"{title}\n")
    print(f"prefixes READY side by side   {found.prefixes}, {found.evictions} evicted")
    print(f"stored                        {_mib(found.stored_bytes)} of {_mib(found.pool_bytes)}, {share:.1f}%")
    print(f"one prefix                    {_mib(found.prefix_bytes)}")
    print(f"create                        {figure(found.created_ms)} ms, in all {sum(found.created_ms) / 1e3:.1f} s")
    print(f"answer, first                 {figure(found.first_ms)} ms")
    print(f"answer, again                 {figure(found.again_ms)} ms")
    print(f"answer, cold                  {figure(found.cold_ms)} ms")
    print(f"the same again                {found.prefixes - len(found.changed)} of {found.prefixes}")
    print(f"the same cold                 {found.cold_runs - len(found.cold_changed)} of {found.cold_runs}")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f} MiB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=EngineKind, choices=list(EngineKind), default=EngineKind.CUDA)
    parser.add_argument("--model", default="407m", help=f"a file, or {' or '.join(SIZES)} with random weights")
    parser.add_argument("--kv-memory", type=parse_integer, default=parse_integer("8GiB"))
    parser.add_argument("--cache-mode", type=CacheMode, choices=list(CacheMode), default=CacheMode.FP16)
    parser.add_argument("--prefix", type=int, default=1024, help="tokens")
    parser.add_argument("--most", type=int, default=MOST_PREFIXES, help="prefixes")
    parser.add_argument("--cold", type=int, default=5, help="requests")
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    weights = random_model(SIZES[args.model]) if args.model in SIZES else read_model(args.model)
    settings = EngineSettings(engine=args.engine, cache_mode=args.cache_mode, kv_memory=args.kv_memory)
    engine = build_engine(weights, settings)
    found = asyncio.run(measure(engine, args.prefix, args.most, args.cold))
    name, machine = Path(args.model).name, describe_machine()
    report(found, f"{name}, {args.cache_mode.value}, {args.prefix} tokens a prefix, on {machine}")
    if args.out is not None:
        asked = {"model": name, "cache_mode": args.cache_mode.value, "prefix_len": args.prefix}
        write_json(args.out, {"machine": machine, "versions": versions(), **asked, **asdict(found)})
    return 0 if found.holds else 1


if __name__ == "__main__":
    sys.exit(main())
