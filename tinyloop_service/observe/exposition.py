"""The metrics by name.

In: a snapshot, so that all values are of one moment.  Out: what the text format is made of.  It refuses to count, which
`metrics` does, and to know who reads.

Names and meanings follow vLLM's where there is one that fits.  FAMILIES is the whole list: the table in
docs/watching.md, the dashboard and the rules are held to it by tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from tinyloop_service.observe.metrics import Histogram, Metrics
from tinyloop_service.types import Load

_FACTS = ("version", "replica", "model_id", "engine", "cache_mode")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything of one moment."""

    metrics: Metrics
    load: Load | None = None  # None while the model loads
    is_ready: bool = False
    facts: Mapping[str, str] = field(default_factory=dict)  # constant labels of tinyloop_build_info
    dropped_lines: int = 0  # of the log
    front_bytes: int = 0  # of memory that processes which speak gRPC have

    def pages(self) -> dict[str, int]:
        load = self.load
        if load is None:
            return {}
        held = {"prefixes": load.pages_prefixes, "requests": load.pages_requests, "active": load.pages_active}
        return {"free": load.pages_free, **held}

    def prefixes(self) -> dict[str, int]:
        load = self.load
        if load is None:
            return {}
        ready, building = load.prefixes_ready, load.prefixes_building
        return {
            "ready": ready,
            "building": building,
            "evicted": load.prefixes_evicted,
            "failed": load.prefixes_failed,
        }

    def of_load(self, read: Callable[[Load], int]) -> dict[tuple[str, ...], int]:
        return {(): read(self.load)} if self.load is not None else {}


class Family(Protocol):
    """One metric: its name, and what it says of a snapshot."""

    @property
    def name(self) -> str:
        """As queries call it; a histogram's without _bucket, _sum and _count."""
        ...

    @property
    def help(self) -> str: ...

    @property
    def labels(self) -> tuple[str, ...]: ...

    def at(self, snapshot: Snapshot) -> Metric: ...


Values = Mapping[Any, float]  # by label value, or by a tuple of them


@dataclass(frozen=True, slots=True)
class Counter:
    name: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[Snapshot], Values]

    def at(self, snapshot: Snapshot) -> Metric:
        family = CounterMetricFamily(self.name, self.help, labels=self.labels)
        return _filled(family, self.read(snapshot))


@dataclass(frozen=True, slots=True)
class Gauge:
    name: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[Snapshot], Values]

    def at(self, snapshot: Snapshot) -> Metric:
        return _filled(GaugeMetricFamily(self.name, self.help, labels=self.labels), self.read(snapshot))


@dataclass(frozen=True, slots=True)
class Distribution:
    name: str
    help: str
    read: Callable[[Metrics], Histogram]
    labels: tuple[str, ...] = ()

    def at(self, snapshot: Snapshot) -> Metric:
        histogram = self.read(snapshot.metrics)
        below, buckets = 0, []
        for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
            below += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), below))
        family = HistogramMetricFamily(self.name, self.help)
        family.add_metric([], buckets=buckets, sum_value=histogram.total / histogram.unit)
        return family


def _filled(family: Any, values: Values) -> Metric:
    for key, value in values.items():
        family.add_metric([key] if isinstance(key, str) else list(key), value)
    result: Metric = family
    return result


FAMILIES: tuple[Family, ...] = (
    Counter(
        "tinyloop_prefix_cache_queries_total",
        "Prompt tokens of admitted requests, each request counted once.",
        ("tenant",),
        lambda s: s.metrics.prompt_tokens,
    ),
    Counter(
        "tinyloop_prefix_cache_hits_total",
        "Of the queried tokens, those that nothing was computed for: a prefix had them.",
        ("tenant",),
        lambda s: s.metrics.cached_tokens,
    ),
    Counter(
        "tinyloop_prompt_tokens_total",
        "Prompt tokens of admitted requests, prefix included, each request counted once.",
        ("tenant",),
        lambda s: s.metrics.prompt_tokens,
    ),
    Counter(
        "tinyloop_generation_tokens_total",
        "Tokens generated, over all choices; the end-of-text token is none.",
        ("tenant",),
        lambda s: s.metrics.generated_tokens,
    ),
    Counter(
        "tinyloop_prefilled_tokens_total",
        "Prompt tokens computed, those of prefixes that were built included.",
        (),
        lambda s: {(): s.metrics.prefilled_tokens},
    ),
    Counter(
        "tinyloop_choices_finished_total",
        "Choices (n of a request) that ended, by reason: stop, eos, length, cancelled, error.",
        ("tenant", "finish_reason"),
        lambda s: s.metrics.finished,
    ),
    Counter(
        "tinyloop_rejections_total",
        "Calls refused before any work, by the reason in their ErrorInfo.",
        ("tenant", "reason"),
        lambda s: s.metrics.rejections,
    ),
    Counter(
        "tinyloop_calls_total",
        "Calls that ended, by method and gRPC status.",
        ("method", "code"),
        lambda s: s.metrics.calls,
    ),
    Counter(
        "tinyloop_prefix_evictions_total",
        "How often a prefix lost its pages and kept its name.",
        (),
        lambda s: s.of_load(lambda load: load.prefix_evictions),
    ),
    Counter(
        "tinyloop_prefix_builds_failed_total",
        "Builds of prefixes that failed, by reason.",
        ("reason",),
        lambda s: s.metrics.failed_builds,
    ),
    Counter(
        "tinyloop_log_lines_dropped_total",
        "Lines of the log that nobody will see: who reads standard error did not keep up, or it could not be written.",
        (),
        lambda s: {(): s.dropped_lines},
    ),
    Counter(
        "tinyloop_grpc_process_restarts_total",
        "Tries to start a process that speaks gRPC anew, by what became of the one before: it exited, was killed by a "
        "signal, hung and was ended, or was not_started, because the try before failed.",
        ("reason",),
        lambda s: s.metrics.front_restarts,
    ),
    Gauge(
        "tinyloop_ready",
        "1 while requests are taken; 0 while the model loads, while draining, and after the device was lost.",
        (),
        lambda s: {(): int(s.is_ready)},
    ),
    Gauge(
        "tinyloop_requests_running",
        "Requests that are admitted and have not ended.",
        (),
        lambda s: s.of_load(lambda load: load.requests_running),
    ),
    Gauge(
        "tinyloop_requests_waiting",
        "Requests that wait for admission.",
        (),
        lambda s: s.of_load(lambda load: load.requests_waiting),
    ),
    Gauge(
        "tinyloop_rows_running",
        "Choices being prefilled or decoded.",
        (),
        lambda s: s.of_load(lambda load: load.rows_running),
    ),
    Gauge(
        "tinyloop_kv_pages",
        "Pages (64 tokens of one cache layer) by who holds them: free, prefixes, requests, active (prefixes made ready "
        "for reading). The sum is constant.",
        ("state",),
        Snapshot.pages,
    ),
    Gauge(
        "tinyloop_prefixes",
        "Prefixes by state: ready, building, evicted, failed.",
        ("state",),
        Snapshot.prefixes,
    ),
    Gauge(
        "tinyloop_prefix_bytes",
        "Stored bytes of the pages that prefixes hold.",
        (),
        lambda s: s.of_load(lambda load: load.pages_prefixes * load.page_bytes),
    ),
    Gauge(
        "tinyloop_grpc_processes",
        "Processes that speak gRPC in front of the engine's and listen; 0 where that one does it itself.",
        (),
        lambda s: {(): len(s.metrics.fronts)},
    ),
    Gauge(
        "tinyloop_grpc_processes_resident_memory_bytes",
        "Resident memory of the processes that speak gRPC; what they share counts for each of them.",
        (),
        lambda s: {(): s.front_bytes},
    ),
    Gauge(
        "tinyloop_build_info",
        "1; what runs here is in the labels.",
        _FACTS,
        lambda s: {tuple(s.facts[fact] for fact in _FACTS): 1} if s.facts else {},
    ),
    Distribution(
        "tinyloop_time_to_first_token_seconds",
        "First non-empty token - arrival of the request.",
        lambda m: m.ttft,
    ),
    Distribution(
        "tinyloop_inter_token_latency_seconds",
        "Gap before each token but a choice's first; k tokens that came together count k times (gap / k).",
        lambda m: m.itl,
    ),
    Distribution(
        "tinyloop_e2e_request_latency_seconds",
        "End of the last choice - arrival, of requests that were neither cancelled nor failed.",
        lambda m: m.e2e,
    ),
    Distribution(
        "tinyloop_request_queue_time_seconds",
        "Admission - arrival; the build of a prefix that the request waited for included.",
        lambda m: m.queue_time,
    ),
    Distribution(
        "tinyloop_step_time_seconds",
        "Time of the engine for a step; k steps of one plan count k times (time / k), prompt tokens of it included.",
        lambda m: m.step_time,
    ),
    Distribution(
        "tinyloop_step_rows",
        "Sequences that took part in a step, decoded or fed with prompt tokens.",
        lambda m: m.step_rows,
    ),
    Distribution(
        "tinyloop_prefix_build_seconds",
        "Admission of a build - its last prompt token, of builds that came to READY.",
        lambda m: m.build_time,
    ),
    Distribution(
        "tinyloop_prefix_restore_seconds",
        "The same, of prefixes whose state came from a snapshot; no token of them was computed.",
        lambda m: m.restore_time,
    ),
)


def families(snapshot: Snapshot) -> Iterable[Metric]:
    return (family.at(snapshot) for family in FAMILIES)
