"""An observer that keeps what it hears, with a clock and a canceller for streams without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tinyloop_service.observer import BuildRecord, CallRecord, Observer, RequestRecord


@dataclass
class Recorder:
    """`heard` has the names of the calls in order; the lists have what came with them."""

    heard: list[str] = field(default_factory=list)
    tokens: list[tuple[str, int, int, float]] = field(default_factory=list)
    ended: list[RequestRecord] = field(default_factory=list)
    builds: list[BuildRecord] = field(default_factory=list)
    steps: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    step_ns: int = 0

    def admitted(self, record: RequestRecord) -> None:
        self.heard.append("admitted")

    def first_token(self, record: RequestRecord) -> None:
        self.heard.append("first_token")

    def generated(self, tenant: str, num_tokens: int, num_gaps: int, gap_ns: float) -> None:
        self.heard.append("generated")
        self.tokens.append((tenant, num_tokens, num_gaps, gap_ns))

    def request_ended(self, record: RequestRecord) -> None:
        self.heard.append("request_ended")
        self.ended.append(record)

    def build_ended(self, record: BuildRecord) -> None:
        self.builds.append(record)

    def step(self, num_rows: Sequence[int], num_prefilled: int, duration_ns: int) -> None:
        self.steps.append(((*num_rows,), num_prefilled))
        self.step_ns += duration_ns

    def call_ended(self, call: CallRecord) -> None:
        self.heard.append("call_ended")

    def front_listens(self, process: int) -> None:
        self.heard.append("front_listens")

    def front_ended(self, process: int) -> None:
        self.heard.append("front_ended")

    def front_restarted(self, reason: str) -> None:
        self.heard.append(f"front_restarted {reason}")


@dataclass
class Alone:
    """What a stream asks of a scheduler."""

    observer: Observer
    time_ns: int = 0
    cancelled: list[int] = field(default_factory=list)

    def now_ns(self) -> int:
        return self.time_ns

    def cancel(self, request: int) -> None:
        self.cancelled.append(request)
