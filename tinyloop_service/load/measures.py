"""From records to figures: the percentiles, rates and verdicts of one phase.

In: what the drivers wrote down, and what the watch saw, of one or several turns of the same load.  Out: a `Phase`.
No clock and no I/O: the same records give the same figures.  Definitions are in `results.py`; TTFT and E2E count from
the *intended* start, and a request that never ended counts with what it had waited, so that no server is excused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from hdrh.histogram import HdrHistogram

from tinyloop_service.load.driver import Build, Driven, Failure, Job, Sent
from tinyloop_service.load.results import (
    Builds,
    Counts,
    Distribution,
    Driving,
    ErrorCount,
    Lag,
    Latencies,
    Phase,
    Slo,
    Throughput,
)
from tinyloop_service.load.watch import Sample, seconds

MOST_US = 3600 * 10**6  # longest time a histogram holds; longer ones count as this
CDF_SHARES = (0.001, 0.005, *(share / 50 for share in range(1, 48)), 0.95, 0.96, 0.98, 0.99, 0.995, 0.999)
LAG_FLOOR_MS = 5.0  # the harness may always be so late
LAG_SHARE = 0.2  # of what is measured, by which the harness may be late
BUSY = 0.95  # of a core: its event loop had no time left


@dataclass(frozen=True, slots=True)
class Turn:
    """Everything that was written down in one stretch of a phase."""

    job: Job
    driven: tuple[Driven, ...]
    samples: tuple[Sample, ...]
    pages_before: int
    pages_after: int

    @property
    def sent(self) -> Iterator[Sent]:
        for one in self.driven:
            yield from one.sent

    @property
    def measured(self) -> Iterator[Sent]:
        """Requests behind the warm-up: due there (open loop), or ended there (closed, where none is late)."""
        from_ns, is_open = self.job.measure_from_ns, self.job.arrivals_ns is not None
        return (sent for sent in self.sent if (sent.due_ns if is_open else sent.timeline.end_ns) >= from_ns)

    def holds(self, moment_ns: int) -> bool:
        """In the measured time."""
        return self.job.measure_from_ns <= moment_ns < self.job.end_ns


def phase(
    turns: Sequence[Turn],
    driving: Driving,
    load: float,
    slo: Slo | None,
    expected: Sequence[str],
    own_loop: bool = True,
) -> Phase:
    """Figures over all turns.  `own_loop`: the harness has its event loop to itself; else its lag is no verdict."""
    job, measured = turns[0].job, [sent for turn in turns for sent in turn.measured]
    counts = _counts(measured)
    taken = latencies(measured)
    lag = _lag([one for turn in turns for one in turn.driven], measured, taken, own_loop)
    measured_s = sum(turn.job.measured_s for turn in turns)
    lengths = [turn.job.warmup_s + turn.job.measured_s for turn in turns]
    return Phase(
        way=job.way,
        driving=driving,
        load=load,
        warmup_s=job.warmup_s,
        measured_s=measured_s,
        counts=counts,
        latencies=None if lag.bottleneck else taken,
        throughput=_throughput(turns, measured, counts, measured_s, None if lag.bottleneck else slo),
        cached_token_rate=_cached(measured),
        builds=builds(build for turn in turns for one in turn.driven for build in one.builds),
        errors=_errors(turns, measured, expected),
        lag=lag,
        series=tuple(
            line
            for at, turn in enumerate(turns)
            for line in seconds(turn.samples, turn.job.start_ns, offset_s=sum(lengths[:at]))
        ),
        pages_before=turns[0].pages_before,
        pages_after=turns[-1].pages_after,
    )


def latencies(measured: Sequence[Sent]) -> Latencies:
    """Of requests that did not fail; of those that hung up, what came before."""
    heard = [sent for sent in measured if sent.failure is None]
    ended = [sent for sent in heard if not sent.hung_up]
    return Latencies(
        queue=distribution(sent.timeline.started.queue_ns for sent in heard if sent.timeline.started is not None),
        ttft=distribution(_first_ns(sent) - sent.due_ns for sent in heard if sent.timeline.arrivals or sent.unfinished),
        itl=distribution(gap for sent in heard for gap in spread_gaps(sent.timeline.arrivals)),
        gap=distribution(gap for sent in heard for gap in gaps(sent.timeline.arrivals)),
        tpot=distribution(tpot for sent in heard if (tpot := tpot_ns(sent.timeline.arrivals)) is not None),
        e2e=distribution(sent.timeline.end_ns - sent.due_ns for sent in ended),
    )


def _first_ns(sent: Sent) -> int:
    """Its first token, or how long it was waited for."""
    return sent.timeline.arrivals[0][0] if sent.timeline.arrivals else sent.timeline.end_ns


def gaps(arrivals: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Between messages with tokens."""
    for (before_ns, _), (now_ns, _) in pairwise(arrivals):
        yield now_ns - before_ns


def spread_gaps(arrivals: Sequence[tuple[int, int]]) -> Iterator[float]:
    """Before each token but the first: k tokens that came together share the gap before them; those that came with the
    first one have none."""
    for _ in range(arrivals[0][1] - 1 if arrivals else 0):
        yield 0.0
    for gap, (_, count) in zip(gaps(arrivals), arrivals[1:], strict=True):
        for _ in range(count):
            yield gap / count


def tpot_ns(arrivals: Sequence[tuple[int, int]]) -> float | None:
    """Time per token after the first; None: there is none."""
    count = sum(tokens for _, tokens in arrivals)
    return (arrivals[-1][0] - arrivals[0][0]) / (count - 1) if count > 1 else None


def distribution(times_ns: Iterable[float]) -> Distribution | None:
    """None of nothing.  Percentiles are a histogram's, to three digits; never above the largest value."""
    times_us = [time_ns / 1e3 for time_ns in times_ns]
    if not times_us:
        return None
    histogram = HdrHistogram(1, MOST_US, 3)
    for value, count in Counter(min(round(time), MOST_US) for time in times_us).items():
        histogram.record_value(value, count)
    most_us = max(times_us)
    values_us = histogram.get_percentile_to_value_dict([100 * share for share in CDF_SHARES])
    at = {share: round(min(values_us[100 * share], most_us) / 1e3, 3) for share in CDF_SHARES}
    return Distribution(
        count=len(times_us),
        mean=round(fmean(times_us) / 1e3, 3),
        p50=at[0.5],
        p90=at[0.9],
        p95=at[0.95],
        p99=at[0.99],
        max=round(most_us / 1e3, 3),
        cdf=(*((value, share) for share, value in at.items()), (round(most_us / 1e3, 3), 1.0)),
    )


def keeps(sent: Sent, slo: Slo) -> bool:
    """Completed, within every bound."""
    if sent.timeline.completed is None or not sent.timeline.arrivals:
        return False
    bounds = (
        (slo.ttft_ms, _first_ns(sent) - sent.due_ns),
        (slo.itl_ms, tpot_ns(sent.timeline.arrivals) or 0.0),
        (slo.e2e_ms, sent.timeline.end_ns - sent.due_ns),
    )
    return all(bound_ms is None or value_ns <= bound_ms * 1e6 for bound_ms, value_ns in bounds)


def builds(made: Iterable[Build]) -> Builds | None:
    """Those that succeeded; None: there were none."""
    done = [build for build in made if build.failure is None]
    if not done:
        return None
    times_ms = [(build.end_ns - build.began_ns) / 1e6 for build in done]
    tokens = sum(build.tokens for build in done)
    return Builds(len(done), tokens, round(fmean(times_ms), 3), round(max(times_ms), 3))


def _counts(measured: Sequence[Sent]) -> Counts:
    failed = sum(sent.failure is not None for sent in measured)
    hung_up, unfinished = sum(sent.hung_up for sent in measured), sum(sent.unfinished for sent in measured)
    return Counts(len(measured), len(measured) - failed - hung_up - unfinished, hung_up, failed, unfinished)


def _throughput(
    turns: Sequence[Turn], measured: Sequence[Sent], counts: Counts, measured_s: float, slo: Slo | None
) -> Throughput:
    """By arrival: what was sent during the warm-up counts where it comes later, what comes after the end does not."""
    arrived = [(turn, sent) for turn in turns for sent in turn.sent]
    tokens = sum(count for turn, sent in arrived for at_ns, count in sent.timeline.arrivals if turn.holds(at_ns))
    done = [sent for turn, sent in arrived if turn.holds(sent.timeline.end_ns)]
    usages = [sent.timeline.completed.usage for sent in done if sent.timeline.completed is not None]
    asked = counts.offered - counts.cancelled
    return Throughput(
        requests_per_s=round(len(usages) / measured_s, 4),
        tokens_per_s=round(tokens / measured_s, 3),
        prompt_tokens_per_s=round(sum(usage.prompt_tokens for usage in usages) / measured_s, 3),
        goodput_per_s=None if slo is None else round(sum(keeps(sent, slo) for sent in done) / measured_s, 4),
        goodput_share=None if slo is None else round(sum(keeps(sent, slo) for sent in measured) / max(asked, 1), 4),
    )


def _cached(measured: Sequence[Sent]) -> float | None:
    usages = [sent.timeline.completed.usage for sent in measured if sent.timeline.completed is not None]
    prompts = sum(usage.prompt_tokens for usage in usages)
    return round(sum(usage.cached_tokens for usage in usages) / prompts, 5) if prompts else None


def _errors(turns: Sequence[Turn], measured: Sequence[Sent], expected: Sequence[str]) -> tuple[ErrorCount, ...]:
    """Of requests behind the warm-up, and of prefixes that were to be made, whenever."""
    made = (build.failure for turn in turns for one in turn.driven for build in one.builds)
    failures: list[Failure] = [each for each in (*(sent.failure for sent in measured), *made) if each is not None]
    kinds = Counter((failure.code, failure.reason) for failure in failures)
    examples = {(failure.code, failure.reason): failure.message for failure in reversed(failures)}
    return tuple(
        ErrorCount(code, reason, count, reason in expected, examples[code, reason][:300])
        for (code, reason), count in kinds.most_common()
    )


def _lag(driven: Sequence[Driven], measured: Sequence[Sent], taken: Latencies, own_loop: bool) -> Lag:
    loop = distribution(late for one in driven for late in one.loop_late_ns)
    send = distribution(max(0, sent.sent_ns - sent.due_ns) for sent in measured)
    busy = max((one.cpu_share for one in driven), default=0.0)
    return Lag(loop, send, round(busy, 4), bottleneck(loop, send, busy, taken) if own_loop else None)


def bottleneck(loop: Distribution | None, send: Distribution | None, busy: float, taken: Latencies) -> str | None:
    """Why the latencies would be the harness's own; None: it was quick enough for what it measured."""
    if busy > BUSY:
        return f"its event loop used {busy:.0%} of a core; give more --processes"
    for what, late, measured in (("sent requests", send, taken.ttft), ("heard answers", loop, taken.gap)):
        if late is None or measured is None:
            continue
        if late.p95 > (bound_ms := max(LAG_FLOOR_MS, LAG_SHARE * measured.p95)):
            return (
                f"it {what} {late.p95:.1f} ms late (p95), above {bound_ms:.1f} ms, a fifth of what it measured;"
                " give more --processes, or a machine of its own"
            )
    return None
