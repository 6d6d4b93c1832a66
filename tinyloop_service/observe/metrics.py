"""What is counted: plain numbers, changed as things happen and read when Prometheus asks.

In: what an observer hears.  Out: counters and histograms, to be copied.  It refuses to know how they are called and
written; `exposition` does.  One thread; no locks, since a token may cost a microsecond and no more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from copy import deepcopy
from typing import Self

from tinyloop_service.observer import BuildRecord, CallRecord, RequestRecord
from tinyloop_service.pb import generation_pb2, model_pb2, prefix_pb2

NS = 1e9
RESTART_REASONS = ("exited", "killed", "hung", "not_started")
FINISH_REASONS = ("stop", "eos", "length", "cancelled", "error")
_METHODS = [
    method.name
    for contract in (generation_pb2, model_pb2, prefix_pb2)
    for service in contract.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
_ONE_TWO_FIVE = (1, 2, 5)


def _decades(first: int, last: int) -> tuple[float, ...]:
    """1, 2 and 5 times each power of ten, from 10^first up to 10^last."""
    return (*(float(f"{step}e{power}") for power in range(first, last) for step in _ONE_TWO_FIVE), float(f"1e{last}"))


class Histogram:
    """How often a value was at most each of some bounds.  `unit`: what is added, in a one of the bounds."""

    __slots__ = ("_scaled", "bounds", "counts", "total", "unit")

    def __init__(self, bounds: Sequence[float], unit: float = 1.0) -> None:
        self.bounds = tuple(bounds)
        self.unit = unit
        self._scaled = [bound * unit for bound in bounds]
        self.counts = [0] * (len(self.bounds) + 1)  # not cumulated; the last one is beyond all bounds
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self._scaled, value)] += times
        self.total += value * times


class Metrics:
    """All counts since the start.  By tenant where a dictionary's keys begin with one.

    What an alert waits for is there as 0 from the start: Prometheus sees no increase in a series that begins at 1.
    """

    def __init__(self) -> None:
        self.prompt_tokens: defaultdict[str, int] = defaultdict(int, {"": 0})
        self.cached_tokens: defaultdict[str, int] = defaultdict(int, {"": 0})
        self.generated_tokens: defaultdict[str, int] = defaultdict(int, {"": 0})
        self.finished: defaultdict[tuple[str, str], int] = defaultdict(int, {("", r): 0 for r in FINISH_REASONS})
        self.rejections: defaultdict[tuple[str, str], int] = defaultdict(int)  # tenant, reason
        self.calls: defaultdict[tuple[str, str], int] = defaultdict(  # method, code
            int, {(method, code): 0 for method in _METHODS for code in ("OK", "INTERNAL")}
        )
        self.failed_builds: defaultdict[str, int] = defaultdict(int, {"ENGINE_FAULT": 0, "OUT_OF_MEMORY": 0})
        self.fronts: set[int] = set()  # process ids of those that listen
        self.front_restarts: defaultdict[str, int] = defaultdict(int, dict.fromkeys(RESTART_REASONS, 0))
        self.prefilled_tokens = 0
        self.queue_time = Histogram(_decades(-3, 2), NS)
        self.ttft = Histogram(_decades(-3, 2), NS)
        self.itl = Histogram(_decades(-4, 1), NS)
        self.e2e = Histogram(_decades(-3, 3), NS)
        self.step_time = Histogram(_decades(-4, 1), NS)
        self.step_rows = Histogram([1, 2, 4, 8, 16, 32, 64, 128, 256])
        self.build_time = Histogram(_decades(-3, 3), NS)
        self.restore_time = Histogram(_decades(-3, 3), NS)

    def copy(self) -> Self:
        return deepcopy(self)

    # ---- what an observer hears

    def admitted(self, record: RequestRecord) -> None:
        self.prompt_tokens[record.tenant] += record.prompt_tokens
        self.cached_tokens[record.tenant] += record.cached_tokens
        self.queue_time.add(record.queue_ns)

    def first_token(self, record: RequestRecord) -> None:
        self.ttft.add(record.ttft_ns)

    def generated(self, tenant: str, num_tokens: int, num_gaps: int, gap_ns: float) -> None:
        self.generated_tokens[tenant] += num_tokens
        if num_gaps:
            self.itl.add(gap_ns, num_gaps)

    def request_ended(self, record: RequestRecord) -> None:
        for reason in record.finish_reasons:
            self.finished[record.tenant, reason] += 1
        if record.is_complete:
            self.e2e.add(record.total_ns)

    def build_ended(self, record: BuildRecord) -> None:
        if record.error is not None:
            self.failed_builds[record.error] += 1
        else:
            (self.restore_time if record.snapshot else self.build_time).add(record.build_ns)

    def step(self, num_rows: Sequence[int], num_prefilled: int, duration_ns: int) -> None:
        if num_rows:
            self.step_time.add(duration_ns / len(num_rows), len(num_rows))
            for count in num_rows:
                self.step_rows.add(count)
            self.prefilled_tokens += num_prefilled

    def call_ended(self, call: CallRecord) -> None:
        self.calls[call.method, call.code] += 1
        if call.is_rejection:
            self.rejections[call.tenant, call.reason] += 1

    def front_listens(self, process: int) -> None:
        self.fronts.add(process)

    def front_ended(self, process: int) -> None:
        self.fronts.discard(process)

    def front_restarted(self, reason: str) -> None:
        self.front_restarts[reason] += 1
