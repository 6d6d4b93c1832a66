"""What is measured, what comes out of it, and the sizes that both need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

from tinyloop_service.bench.machine import describe_machine
from tinyloop_service.engine.api import PAGE_TOKENS, Engine
from tinyloop_service.engine.spec import ModelSpec
from tinyloop_service.types import TokenIds

Progress = Callable[[str], None]
Samples = dict[str, list[float]]  # milliseconds per number of rows or requests, as text


@dataclass(frozen=True, slots=True)
class Workload:
    """What to measure; lengths in tokens."""

    prefix_len: int = 1024
    rows: tuple[int, ...] = (1, 10, 50)
    new_tokens: int = 32
    loops: int | None = None  # None: the model's default
    rounds: int = 3  # every figure is the median of this many; NO_CACHE of `no_cache_rounds`
    steps: int = 12  # plans of decode steps measured at least, for every number of rows
    steps_at_once: int = 4  # decode steps of one plan, as the scheduler asks for while nothing waits
    max_no_cache: int = 10  # requests of NO_CACHE measured
    no_cache_rounds: int = 1


@dataclass(frozen=True, slots=True)
class Report:
    """Milliseconds, medians.  Keys of the inner dictionaries are numbers of rows or requests, as text."""

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
    prefix_bytes: int  # stored
    active_bytes: int  # of the form that is read while requests run on it; 0: the stored one is
    activate_ms: float  # to make that of the stored one
    spread_ms: dict[str, dict[str, tuple[float, float]]]  # the least and the most of each figure above

    @classmethod
    def of(cls, engine: Engine, workload: Workload, samples: dict[str, Samples], scaled: list[str]) -> Report:
        """samples: of "prefill" and perhaps "activate" (under "1"), "decode_step", "shared", "no_cache"."""
        limits, loops = engine.limits, workload.loops or engine.limits.default_loops
        pages = limits.own_blocks(0, workload.prefix_len) * limits.cache_layers(loops)
        medians = {what: {key: median(times) for key, times in of.items()} for what, of in samples.items()}
        prefill, shared, no_cache = medians["prefill"]["1"], medians["shared"], medians["no_cache"]
        decode = medians["decode_step"]["1"] * (workload.new_tokens - 1)
        return cls(
            engine=engine.name,
            machine=describe_machine(),
            model_id=limits.model_id,
            cache_mode=limits.cache_mode.value,
            loops=loops,
            prefix_len=workload.prefix_len,
            new_tokens=workload.new_tokens,
            rounds=workload.rounds,
            prefill_ms=round(prefill, 3),
            prefill_tokens_per_s=round(workload.prefix_len / prefill * 1e3, 1),
            decode_step_ms=_rounded(medians["decode_step"]),
            shared_ms=_rounded(shared),
            no_cache_ms=_rounded(no_cache),
            no_cache_scaled=scaled,
            speedup=_rounded({n: no_cache[n] / shared[n] for n in shared}),
            predicted_speedup=_rounded({n: predicted_speedup(prefill, decode, int(n)) for n in shared}),
            prefix_bytes=pages * limits.page_bytes,
            active_bytes=pages * limits.active_page_bytes,
            activate_ms=round(medians.get("activate", {"1": 0.0})["1"], 3),
            spread_ms={
                what: {key: (round(min(times), 3), round(max(times), 3)) for key, times in of.items()}
                for what, of in samples.items()
            },
        )

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 3) for key, value in values.items()}


def predicted_speedup(prefill: float, decode: float, requests: int) -> float:
    """(P + D) / (P/N + D): N requests that share one prefill against N that each do their own."""
    return (prefill + decode) / (prefill / requests + decode)


def kv_memory_for(spec: ModelSpec, workload: Workload) -> int:
    """Bytes for the workload in any mode: the prefix as fp16 stores it, its active form, what every row owns, and a
    fifth more."""
    layers = spec.cache_layers(workload.loops or spec.default_loops)
    page_bytes = PAGE_TOKENS * spec.kv_dim * 2 * 2
    prefix_blocks = 2 * (workload.prefix_len // PAGE_TOKENS + 4)
    row_blocks = workload.new_tokens // PAGE_TOKENS + 3
    return (prefix_blocks + max(workload.rows) * row_blocks) * layers * page_bytes * 6 // 5


def prompt_tokens(vocab_size: int, length: int) -> TokenIds:
    """`length` ids spread over the vocabulary, the same on every machine."""
    return tuple((7919 * i + 13) % vocab_size for i in range(1, length + 1))
