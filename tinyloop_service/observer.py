"""What is told to who watches: one protocol, called by the scheduler and by the edge of every RPC.

In: plain values, as things happen.  Out: nothing; an observer changes nothing and never fails a request.  It refuses to
know metrics, logs and traces: `observe/` has those.

    scheduler   admitted, first_token, generated, request_ended   one generation request
                build_ended                                       one build of a prefix
                step                                              one plan that the engine ran
    rpc         call_ended                                        one call, with the request it made
                front_listens, front_ended, front_restarted       one process that speaks gRPC

Everything is called on the event loop's thread.  Times are nanoseconds since the Unix epoch, by one clock that never
goes back; a time of 0 says that it never came to that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tinyloop_service.types import PrefixInfo, PrefixState

EPOCH_NS = time.time_ns() - time.monotonic_ns()


def now_ns() -> int:
    """The one clock: it started with the wall clock and never jumps."""
    return EPOCH_NS + time.monotonic_ns()


@dataclass(slots=True)
class RequestRecord:
    """What becomes of one generation request; filled in as it goes."""

    tenant: str
    prefix: str | None
    num_choices: int
    arrival_ns: int
    build_start_ns: int = 0  # of its prefix, if the request waited for that
    build_end_ns: int = 0
    admitted_ns: int = 0
    first_token_ns: int = 0  # the first non-empty piece of any choice
    end_ns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0  # over all choices; EOS is none, those after a stop in the text may be counted
    finish_reasons: list[str] = field(default_factory=list)  # of the choices, as they end; the rest by `cut_short`

    @property
    def queue_ns(self) -> int:
        """Arrival → admission."""
        return max(0, self.admitted_ns - self.arrival_ns)

    @property
    def ttft_ns(self) -> int:
        """Arrival → first non-empty token."""
        return max(0, self.first_token_ns - self.arrival_ns)

    @property
    def total_ns(self) -> int:
        """Arrival → the end of its last choice."""
        return max(0, self.end_ns - self.arrival_ns)

    @property
    def is_complete(self) -> bool:
        """Every choice came to an end of its own."""
        return bool(self.end_ns) and not {"cancelled", "error"} & set(self.finish_reasons)

    def phases(self, left_ns: int) -> list[tuple[str, int, int]]:
        """Name, start and end of what it went through, one after the other, as far as it came; `left_ns`: when the
        caller had it all, or was gone."""
        marks = [("queue", self.arrival_ns), ("prefill", self.admitted_ns), ("decode", self.first_token_ns)]
        if self.is_complete:
            marks.append(("delivery", self.end_ns))
        begun = [(name, start_ns) for name, start_ns in marks if start_ns]
        ends = [start_ns for _, start_ns in begun[1:]] + [max(left_ns, self.end_ns)]
        return [(name, start_ns, end_ns) for (name, start_ns), end_ns in zip(begun, ends, strict=True)]

    def cut_short(self, reason: str, now_ns: int) -> None:
        """The choices that have not ended end with `reason`: cancelled or error."""
        self.finish_reasons += [reason] * (self.num_choices - len(self.finish_reasons))
        self.end_ns = now_ns


@dataclass(frozen=True, slots=True)
class BuildRecord:
    """One build of a prefix that came to an end: its tokens prefilled, or its state restored."""

    tenant: str
    name: str | None
    num_tokens: int  # the parent's not counted
    build_ns: int  # admission → last chunk done, or restored; 0 if it failed
    error: str | None = None  # the reason it failed with
    snapshot: str = ""  # digest of the saved state that it was to be restored from; empty: prefilled


@dataclass(slots=True)
class CallRecord:
    """One RPC, from its first line to its status."""

    service: str  # full name, tinyloop.v1.GenerationService
    method: str
    request_id: str
    begin_ns: int
    trace_headers: tuple[tuple[str, str], ...] = ()  # traceparent and tracestate, as the caller sent them
    tenant: str = ""
    prefix: str | None = None  # id of the prefix that the call names
    request: RequestRecord | None = None  # the generation request it queued
    build_start_ns: int = 0  # of the prefix that the call made or waited for
    build_end_ns: int = 0
    end_ns: int = 0
    code: str = "OK"  # of the gRPC status
    reason: str = ""  # ErrorInfo's, if it was refused or failed
    error: BaseException | None = None  # where it was no refusal but a fault

    def built(self, prefix: PrefixInfo) -> None:
        """The call has made this prefix, or it was there; a build that ended before the call began is none of its."""
        end_ns = prefix.build_start_ns + prefix.build_ns
        if prefix.state is PrefixState.READY and end_ns > self.begin_ns:
            self.build_start_ns, self.build_end_ns = prefix.build_start_ns, end_ns

    def build_times(self) -> tuple[int, int]:
        """Start and end of the build that the call or its request waited for; 0, 0 if there was none."""
        if self.request is not None and not self.build_end_ns:
            return self.request.build_start_ns, self.request.build_end_ns
        return self.build_start_ns, self.build_end_ns

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.begin_ns

    @property
    def is_rejection(self) -> bool:
        """Refused before any work: no fault of ours, not cancelled, and no request of it was queued."""
        return bool(self.reason) and self.error is None and self.request is None


class Observer(Protocol):
    """Who watches.  Methods return at once and raise nothing."""

    def admitted(self, record: RequestRecord) -> None:
        """Its pages are reserved.  Told once for a request, whatever is built, evicted or tried again."""

    def first_token(self, record: RequestRecord) -> None:
        """Something other than an end was generated, for any choice."""

    def generated(self, tenant: str, num_tokens: int, num_gaps: int, gap_ns: float) -> None:
        """Tokens of one choice arrived; `num_gaps` of them came after another one, `gap_ns` apart in the mean."""

    def request_ended(self, record: RequestRecord) -> None:
        """It completed, failed or was cancelled."""

    def build_ended(self, record: BuildRecord) -> None:
        """A prefix is READY, or its build failed."""

    def step(self, num_rows: Sequence[int], num_prefilled: int, duration_ns: int) -> None:
        """The engine ran a plan: so many rows in each of its steps, `num_prefilled` prompt tokens with the first."""

    def call_ended(self, call: CallRecord) -> None:
        """An RPC was answered, refused, cancelled, or failed."""

    def front_listens(self, process: int) -> None:
        """One that speaks gRPC, by its process id."""

    def front_ended(self, process: int) -> None:
        """It listens no more."""

    def front_restarted(self, reason: str) -> None:
        """A try to start another: the last one exited, was killed, hung, or was not_started, if the last try failed."""


class Unwatched:
    """The observer of who has none."""

    def admitted(self, record: RequestRecord) -> None:
        pass

    def first_token(self, record: RequestRecord) -> None:
        pass

    def generated(self, tenant: str, num_tokens: int, num_gaps: int, gap_ns: float) -> None:
        pass

    def request_ended(self, record: RequestRecord) -> None:
        pass

    def build_ended(self, record: BuildRecord) -> None:
        pass

    def step(self, num_rows: Sequence[int], num_prefilled: int, duration_ns: int) -> None:
        pass

    def call_ended(self, call: CallRecord) -> None:
        pass

    def front_listens(self, process: int) -> None:
        pass

    def front_ended(self, process: int) -> None:
        pass

    def front_restarted(self, reason: str) -> None:
        pass


UNWATCHED = Unwatched()
