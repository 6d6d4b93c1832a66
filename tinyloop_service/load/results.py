"""What a load test found, as one frozen value: all that the table, the JSON and the report show.

    Result ── Metadata                                           where, with what, by whom
       ├───── Phase, one per load and way                        figures, CDFs, errors, the server second by second
       ├───── Comparison, one per load that was run both ways    what sharing is worth
       └───── Economy, Sweep, Verification                       None where not asked for

A *load* is a rate in requests per second (open loop) or a number of callers (closed loop).  A *way* is "shared", or
"no-share": the same requests with the prefix sent as part of each prompt.  Milliseconds and seconds are in the names.
Counts and latencies are of requests that were due behind the warm-up, in a closed loop of those that ended there; rates
are of what arrived from the end of the warm-up to the end of the phase.  Standard library only; how it is measured is
for `measures.py` to know.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from tinyloop_service.load import document

VERSION = 1  # of the JSON


class Way(StrEnum):
    SHARED = "shared"
    NO_SHARE = "no-share"


class Driving(StrEnum):
    OPEN = "open"  # Poisson, at a rate; nobody waits for an answer
    CLOSED = "closed"  # so many callers, each sends when it has its answer


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of one quantity; milliseconds.  Percentiles are exact to three digits, `max` and `mean` to the digit."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    cdf: tuple[tuple[float, float], ...]  # (value, share of samples at or below it), both rising, the last share 1.0


@dataclass(frozen=True, slots=True)
class Latencies:
    """None: there was nothing to measure.  Requests that never ended count with what they had waited."""

    queue: Distribution | None  # arrival at the server → admission, the build of a missing prefix included
    ttft: Distribution | None  # intended start → first token
    itl: Distribution | None  # gap between messages, spread over the k tokens of the later one: gap / k, k times
    gap: Distribution | None  # the same, not spread: how long a reader sat before nothing
    tpot: Distribution | None  # of a request: (last token − first token) / (tokens − 1)
    e2e: Distribution | None  # intended start → end

    @property
    def stall(self) -> float | None:
        """The longest that a token let a stream wait, in medians: the largest ITL / its p50."""
        return self.itl.max / self.itl.p50 if self.itl is not None and self.itl.p50 else None


@dataclass(frozen=True, slots=True)
class Throughput:
    """Per second of the measured time, by arrival."""

    requests_per_s: float  # completed
    tokens_per_s: float  # generated
    prompt_tokens_per_s: float  # of completed requests, cached ones included
    goodput_per_s: float | None  # completed within every bound of the SLO; None: no SLO, or no latencies
    goodput_share: float | None  # kept every bound, of all requests that were not cancelled on purpose


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests; the last four add up to `offered`."""

    offered: int
    completed: int
    cancelled: int  # by the harness, as the workload says
    failed: int  # in `errors`
    unfinished: int  # still running when the harness had waited long enough; cancelled then


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """Errors of one kind: status code and reason as on the wire, and whether the workload says that they may come."""

    code: str
    reason: str
    count: int
    expected: bool
    example: str  # one message


@dataclass(frozen=True, slots=True)
class Builds:
    """Prefixes that the harness made, as the caller of create saw it; in a phase: those made again after their end, and
    those that the workload builds meanwhile (without sharing: prompts as long), warm-up included."""

    count: int
    tokens: int
    mean_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class Lag:
    """Of the harness itself."""

    loop: Distribution | None  # how late its event loop woke up
    send: Distribution | None  # sent − due: intended start (open loop), or end of the caller's last answer (closed)
    cpu_share: float  # of a core, of its busiest process
    bottleneck: str | None  # why latencies and what follows from them are not reported; None: it kept up


@dataclass(frozen=True, slots=True)
class Second:
    """One second of the server; gauges are means of what GetLoad said, four times a second."""

    at_s: float  # its end, from the start of the phase
    rows: float  # sequences being decoded or prefilled: what a step has
    requests_running: float
    requests_waiting: float
    pages_held: float  # share of the pool, 0 to 1
    pages_prefixes: float  # of it, held by prefixes
    pages_active: float  # of it, taken by prefixes made ready for reading
    prefixes_ready: float
    evictions: int  # in this second
    tokens_per_s: float  # generated, all callers'


@dataclass(frozen=True, slots=True)
class Phase:
    """One load, one way."""

    way: Way
    driving: Driving
    load: float  # requests per second, or callers
    warmup_s: float
    measured_s: float
    counts: Counts
    latencies: Latencies | None  # None: the harness was the bottleneck
    throughput: Throughput
    cached_token_rate: float | None  # cached / prompt tokens of completed requests; None: there were none
    builds: Builds | None
    errors: tuple[ErrorCount, ...]  # most frequent first
    lag: Lag
    series: tuple[Second, ...]  # warm-up included
    pages_before: int  # held by requests before the first of them, and
    pages_after: int  # after the last; -1: the server did not say

    @property
    def name(self) -> str:
        """For example "4/s, shared" or "32 callers, no-share"."""
        load = f"{self.load:g}/s" if self.driving is Driving.OPEN else f"{self.load:g} callers"
        return f"{load}, {self.way.value}"

    @property
    def keeps_pages(self) -> bool:
        """Requests hold more after the last of them than before the first."""
        return self.pages_after > self.pages_before


@dataclass(frozen=True, slots=True)
class Comparison:
    """A load both ways; every factor is how much better shared is, 1 alike.  None: one way has no such figure."""

    load: float
    tokens_per_s: float | None
    ttft_p50: float | None
    ttft_p95: float | None
    e2e_p50: float | None


@dataclass(frozen=True, slots=True)
class Economy:
    """One prefix of the workload with nothing else going on; medians, milliseconds."""

    prefix_tokens: int
    suffix_tokens: int
    new_tokens: int
    build_ms: float  # create → ready
    warm_ms: float  # a request off the prefix
    cold_ms: float  # the same request, the prefix part of its prompt
    break_even: float | None  # build / (cold − warm): requests from which on a build pays; None: warm is no faster


@dataclass(frozen=True, slots=True)
class Sweep:
    """What the phases of one way add up to."""

    way: Way
    knee: float | None  # the highest load before tokens per second stop following it; None: not reached
    best_load: float | None  # of the loads at which enough requests kept the SLO, as far as known, that of most goodput
    best_goodput_per_s: float | None
    share_needed: float  # of requests that have to keep it


@dataclass(frozen=True, slots=True)
class Verification:
    """A sample of the requests, asked again alone afterwards."""

    asked: int
    alike: int  # every id the same
    differing: tuple[str, ...]  # what was asked, and the first place that differs


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds that a request must keep to count as goodput; None: no bound.  TTFT and E2E from the intended start."""

    ttft_ms: float | None = None
    itl_ms: float | None = None  # the mean of the request's own gaps per token, its TPOT
    e2e_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Metadata:
    command: str
    start_time: str  # ISO 8601, UTC
    target: str  # host:port, or "in process"
    machine: str  # that the harness ran on
    versions: dict[str, str]
    server: dict[str, Any]  # GetModel
    workload: dict[str, Any]  # as its file has it, scaled to the model
    seed: int
    processes: int
    slo: Slo | None


@dataclass(frozen=True, slots=True)
class Result:
    metadata: Metadata
    phases: tuple[Phase, ...]  # in the order they ran
    comparisons: tuple[Comparison, ...] = ()
    economy: Economy | None = None
    setup: Builds | None = None  # prefixes made before the first phase, one after the other
    sweeps: tuple[Sweep, ...] = ()
    verification: Verification | None = None

    def of_way(self, way: Way) -> tuple[Phase, ...]:
        """By load."""
        return tuple(sorted((phase for phase in self.phases if phase.way is way), key=lambda phase: phase.load))

    def is_goodput_known(self, way: Way) -> tuple[bool, ...]:
        """Of its loads; not where the harness was the bottleneck."""
        return tuple(phase.throughput.goodput_per_s is not None for phase in self.of_way(way))

    def errors(self) -> Iterator[tuple[Phase, ErrorCount]]:
        """All that went wrong."""
        for phase in self.phases:
            for error in phase.errors:
                yield phase, error

    def to_json(self) -> str:
        return document.write(VERSION, self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ValueError with the place of what does not belong there."""
        return document.read(VERSION, cls, text)
