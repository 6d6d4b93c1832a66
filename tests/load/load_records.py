"""Records of a driver made by hand; times in milliseconds from the start of the phase."""

from __future__ import annotations

from collections.abc import Sequence

from tinyloop_service.bench.rounds import Timeline
from tinyloop_service.load.driver import Driven, Failure, Job, Sent
from tinyloop_service.load.measures import Turn
from tinyloop_service.load.results import Way
from tinyloop_service.load.schedule import Drawn
from tinyloop_service.types import Completed, FinishReason, Started, Timings, Usage

START_NS = 10**12
MS = 10**6


def moment(ms: float) -> int:
    return START_NS + round(ms * MS)


def job(*, warmup_s: float = 1.0, measured_s: float = 4.0, is_open: bool = True) -> Job:
    arrivals, callers = ((0,), 0) if is_open else (None, 1)
    return Job(Way.SHARED, START_NS, warmup_s, measured_s, 30.0, arrivals, callers)


def sent(
    due: float,
    *arrivals: tuple[float, int],
    start: float | None = None,
    queue: float = 0.0,
    cached: int = 90,
    failure: Failure | None = None,
    hung_up: bool = False,
    end: float | None = None,
) -> Sent:
    """Due and answered; without `end` it completed with its last message.  A prompt has 100 tokens."""
    drawn = Drawn(0, 0, 10, sum(count for _, count in arrivals), None)
    over = end if end is not None else arrivals[-1][0] if arrivals else due
    timeline = Timeline(
        sent_ns=moment(due if start is None else start),
        started=Started(cached, 100, round(queue * MS), 0) if arrivals else None,
        arrivals=[(moment(ms), count) for ms, count in arrivals],
        end_ns=moment(over),
    )
    if failure is None and not hung_up and end is None:
        usage = Usage(100, cached, drawn.output_len)
        timeline.completed = Completed(0, FinishReason.LENGTH, usage, Timings(round(queue * MS), 0, 0))
    unfinished = failure is None and not hung_up and end is not None
    return Sent(drawn, moment(due), timeline.sent_ns, timeline, failure, hung_up, unfinished)


def turn(requests: Sequence[Sent], *, of: Job | None = None, late_ms: float = 0.1, busy: float = 0.2) -> Turn:
    driven = Driven([*requests], [], [round(late_ms * MS)] * 100, busy)
    return Turn(of or job(), (driven,), (), 0, 0)
