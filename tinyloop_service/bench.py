"""What sharing a prefix is worth, measured: prefill, decode steps, SHARED against NO_CACHE.

In: a model and an engine built from it.  Out: one frozen report, medians in milliseconds.  It refuses to know
about sockets: `prefill_ms` and `decode_step_ms` drive `engine.step(plan)` with nothing between, `shared_ms` and
`no_cache_ms` go through the scheduler, as the server does.

    prefill        the whole prefix, in chunks of the engine's size; its logits are kept
    decode step    one step of that many rows, all off one shared prefix
    SHARED(N)      one prefill, then N requests at once, `new_tokens` each
    NO_CACHE(N)    N requests, each with its own prefill, one after the other; measured up to 10, above
                   that N times the median request, and said so in `no_cache_scaled`
    predicted(N)   (P + D) / (P/N + D), P = prefill, D = new_tokens − 1 decode steps of one row
                   (a prefill gives the first token)
"""

from __future__ import annotations

import asyncio
import itertools
import os
import platform
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from tinyloop_service.engine.api import PAGE_TOKENS, Block, Clone, Engine, Extend, Open, Plan, Prefill, SequenceId
from tinyloop_service.engine.spec import ModelSpec
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.types import Completed, GenerationRequest, PrefixDefinition, Sampling, Stops, TokenIds

MAX_MEASURED_NO_CACHE = 10
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Workload:
    """What to measure; lengths in tokens."""

    prefix_len: int = 1024
    rows: tuple[int, ...] = (1, 10, 50)
    new_tokens: int = 32
    loops: int | None = None  # None: the model's default
    rounds: int = 3  # every figure is the median of this many
    steps: int = 12  # decode steps measured in a round


@dataclass(frozen=True, slots=True)
class Report:
    """Milliseconds, medians.  Keys of the dictionaries are numbers of rows or requests, as text."""

    engine: str
    machine: str
    model_id: str
    cache_mode: str
    loops: int
    prefix_len: int
    new_tokens: int
    rounds: int
    prefill_ms: float
    prefill_tokens_per_s: float
    decode_step_ms: dict[str, float]
    shared_ms: dict[str, float]
    no_cache_ms: dict[str, float]
    no_cache_scaled: list[str]  # keys of no_cache_ms that are scaled, not measured
    speedup: dict[str, float]
    predicted_speedup: dict[str, float]
    prefix_bytes: int

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def run_bench(engine: Engine, workload: Workload, progress: Progress = lambda _: None) -> Report:
    """Measure `workload` on `engine`, which is closed afterwards.

    Raises ValueError where the workload cannot fit the engine's limits.
    """
    _refuse_impossible(engine, workload)
    loops = workload.loops or engine.limits.default_loops
    tokens = prompt_tokens(engine.limits.vocab_size, workload.prefix_len)
    direct = _Direct(engine, loops)
    prefill_ms = _measure_prefill(direct, tokens, workload.rounds, progress)
    steps_ms = _measure_steps(direct, tokens, workload, progress)
    shared_ms, singles_ms = asyncio.run(_measure_requests(engine, tokens, loops, workload, progress))
    no_cache_ms, scaled = _no_cache(singles_ms, workload.rows)
    decode_ms = steps_ms["1"] * (workload.new_tokens - 1)
    limits = engine.limits
    return Report(
        engine=engine.name,
        machine=describe_machine(),
        model_id=limits.model_id,
        cache_mode=limits.cache_mode.value,
        loops=loops,
        prefix_len=workload.prefix_len,
        new_tokens=workload.new_tokens,
        rounds=workload.rounds,
        prefill_ms=round(prefill_ms, 3),
        prefill_tokens_per_s=round(workload.prefix_len / prefill_ms * 1e3, 1),
        decode_step_ms=_rounded(steps_ms),
        shared_ms=_rounded(shared_ms),
        no_cache_ms=_rounded(no_cache_ms),
        no_cache_scaled=scaled,
        speedup=_rounded({n: no_cache_ms[n] / shared_ms[n] for n in shared_ms}),
        predicted_speedup=_rounded({n: predicted_speedup(prefill_ms, decode_ms, int(n)) for n in shared_ms}),
        prefix_bytes=limits.own_blocks(0, workload.prefix_len) * limits.cache_layers(loops) * limits.page_bytes,
    )


def predicted_speedup(prefill: float, decode: float, requests: int) -> float:
    """(P + D) / (P/N + D): N requests that share one prefill against N that each do their own."""
    return (prefill + decode) / (prefill / requests + decode)


def kv_memory_for(spec: ModelSpec, workload: Workload) -> int:
    """Bytes for the workload at fp16: the prefix, its float32 active form, what every row owns, and a fifth more."""
    layers = spec.cache_layers(workload.loops or spec.default_loops)
    page_bytes = PAGE_TOKENS * spec.kv_dim * 2 * 2
    prefix_blocks = 3 * (workload.prefix_len // PAGE_TOKENS + 4)
    row_blocks = max(workload.new_tokens, workload.steps) // PAGE_TOKENS + 3
    return (prefix_blocks + max(workload.rows) * row_blocks) * layers * page_bytes * 6 // 5


def prompt_tokens(vocab_size: int, length: int) -> TokenIds:
    """`length` ids spread over the vocabulary, the same on every machine."""
    return tuple((7919 * i + 13) % vocab_size for i in range(1, length + 1))


def describe_machine() -> str:
    """Processor and core count, for example "AMD EPYC 9R14, 2 cores"."""
    return f"{_processor()}, {len(os.sched_getaffinity(0))} cores"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _refuse_impossible(engine: Engine, workload: Workload) -> None:
    """ValueError with the way out, before minutes are spent."""
    limits = engine.limits
    if min(workload.prefix_len, workload.new_tokens, workload.rounds, workload.steps, *workload.rows) < 1:
        raise ValueError(f"every number of a workload is at least 1, given {workload}")
    needed = workload.prefix_len + max(workload.new_tokens, workload.steps + 1)
    if needed > limits.max_seq_len:
        raise ValueError(
            f"prefix and new tokens need {needed} positions, the model has {limits.max_seq_len}; shorten one"
        )
    if max(workload.rows) > limits.max_rows:
        raise ValueError(f"{max(workload.rows)} rows asked, a step of this engine has at most {limits.max_rows}")
    if workload.loops is not None and not 1 <= workload.loops <= limits.max_loops:
        raise ValueError(f"loops must be 1 to {limits.max_loops}, given {workload.loops}")


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 3) for key, value in values.items()}


# --- the engine alone -------------------------------------------------------------------------------------------


class _Direct:
    """Drives an engine with plans of its own making; pages are handed out in order and all taken back by `clear`."""

    PREFIX: SequenceId = 1

    def __init__(self, engine: Engine, loops: int) -> None:
        self.engine = engine
        self.loops = loops
        self.layers = engine.limits.cache_layers(loops)
        self._plans = itertools.count(1)
        self._pages_taken = 0
        self._open: list[SequenceId] = []
        self._last_block: Block = ()

    def prefill(self, tokens: TokenIds) -> float:
        """Build the prefix; milliseconds over all its plans."""
        blocks = self._take_blocks(self.engine.limits.own_blocks(0, len(tokens)))
        self._last_block = blocks[-1]
        self._open.append(self.PREFIX)
        opened = Open(self.PREFIX, None, 0, self.loops, 0, None)
        elapsed = self._step(Plan(next(self._plans), open=(opened,), extend=(Extend(self.PREFIX, blocks),)))
        size = self.engine.limits.max_chunk
        for start in range(0, len(tokens), size):
            chunk = Prefill(self.PREFIX, start, tokens[start : start + size], last=start + size >= len(tokens))
            elapsed += self._step(Plan(next(self._plans), prefill=(chunk,)))
        return elapsed

    def open_rows(self, length: int, count: int, room: int) -> tuple[SequenceId, ...]:
        """`count` requests off the prefix of `length` tokens, `room` own positions each, their first token sampled."""
        limits = self.engine.limits
        rows = tuple(range(self.PREFIX + 1, self.PREFIX + 1 + count))
        own = {seq: self._take_blocks(limits.own_blocks(length, length + room)) for seq in rows}
        partial = length % PAGE_TOKENS
        self._open.extend(rows)
        self._step(
            Plan(
                next(self._plans),
                open=tuple(Open(seq, self.PREFIX, length, self.loops, 0, Sampling()) for seq in rows),
                extend=tuple(Extend(seq, own[seq]) for seq in rows),
                clone=tuple(Clone(seq, self._last_block, own[seq][0], partial) for seq in rows if partial),
                activate=(self.PREFIX,) if limits.active_pages_per_page else (),
                first=rows,
            )
        )
        return rows

    def decode(self, rows: tuple[SequenceId, ...]) -> float:
        """Milliseconds of one decode step."""
        return self._step(Plan(next(self._plans), decode=rows))

    def clear(self) -> None:
        """Close every sequence, children first, and take all pages back."""
        released = tuple(range(self._pages_taken))
        self._step(Plan(next(self._plans), close=tuple(reversed(self._open)), released=released))
        self._open, self._pages_taken = [], 0

    def _step(self, plan: Plan) -> float:
        start = time.perf_counter()
        self.engine.step(plan)
        return (time.perf_counter() - start) * 1e3

    def _take_blocks(self, count: int) -> tuple[Block, ...]:
        first, total = self._pages_taken, self.engine.limits.num_pages
        self._pages_taken += count * self.layers
        if self._pages_taken > total:
            raise ValueError(f"{self._pages_taken} pages needed, the pool has {total}; give more with --kv-memory")
        return tuple(tuple(range(page, page + self.layers)) for page in range(first, self._pages_taken, self.layers))


def _measure_prefill(direct: _Direct, tokens: TokenIds, rounds: int, progress: Progress) -> float:
    times = []
    for index in range(rounds):
        progress(f"prefill of {len(tokens)} tokens, {index + 1} of {rounds}")
        times.append(direct.prefill(tokens))
        direct.clear()
    return median(times)


def _measure_steps(direct: _Direct, tokens: TokenIds, workload: Workload, progress: Progress) -> dict[str, float]:
    """Median step per number of rows, one row always: the prediction needs it.  A shape's first step is not counted."""
    progress("a prefix to decode from")
    times: dict[str, float] = {}
    for count in sorted({1, *workload.rows}):
        direct.prefill(tokens)
        rows = direct.open_rows(len(tokens), count, room=workload.steps + 1)
        progress(f"decode steps of {count} rows")
        direct.decode(rows)
        times[str(count)] = median(direct.decode(rows) for _ in range(workload.steps))
        direct.clear()
    return times


# --- through the scheduler --------------------------------------------------------------------------------------


async def _measure_requests(
    engine: Engine, tokens: TokenIds, loops: int, workload: Workload, progress: Progress
) -> tuple[dict[str, float], list[float]]:
    """SHARED per number of requests, and the times of the single requests of NO_CACHE.  Closes the engine."""
    scheduler = Scheduler(engine, SchedulerSettings())
    await scheduler.start()
    try:
        shared: dict[str, float] = {}
        for count in workload.rows:
            times = []
            for index in range(workload.rounds):
                progress(f"SHARED, {count} requests, {index + 1} of {workload.rounds}")
                times.append(await _timed(_shared(scheduler, tokens, loops, workload.new_tokens, count)))
            shared[str(count)] = median(times)
        singles: list[float] = []
        needed = min(max(workload.rows), MAX_MEASURED_NO_CACHE)
        for index in range(needed):
            progress(f"NO_CACHE, request {index + 1} of {needed}")
            alone = GenerationRequest(
                tokens, workload.new_tokens, loops=loops, stops=Stops(ignore_eos=True), want_text=False
            )
            singles.append(await _timed(_finish(scheduler, alone)))
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


def _no_cache(singles_ms: list[float], rows: tuple[int, ...]) -> tuple[dict[str, float], list[str]]:
    """Milliseconds per number of requests, and which of them are scaled from the measured ones."""
    times = {str(n): sum(singles_ms[:n]) if n <= len(singles_ms) else n * median(singles_ms) for n in rows}
    return times, [str(n) for n in rows if n > len(singles_ms)]
