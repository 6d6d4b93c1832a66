"""What to know before any number: errors, a harness that was too slow, bits that differ, memory that did not come back.

In: a result.  Out: findings, the worst first.  The first one is the report's headline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from tinyloop_service.load.report.numbers import count, percent, phase_name, span
from tinyloop_service.load.results import Phase, Result


class Grade(IntEnum):
    """The worst first."""

    BAD = 0
    DOUBTFUL = 1
    GOOD = 2


@dataclass(frozen=True, slots=True)
class Finding:
    grade: Grade
    sentence: str
    details: tuple[str, ...] = ()


def findings(result: Result) -> tuple[Finding, ...]:
    found = [
        *_failures(result),
        *_bottleneck(result),
        *_unfinished(result),
        *_verification(result),
        *_leftovers(result),
        *_expected(result),
    ]
    return tuple(sorted(found, key=lambda finding: finding.grade))


def _failures(result: Result) -> Iterator[Finding]:
    offered = sum(phase.counts.offered for phase in result.phases)
    where: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    failed = 0
    for phase, error in result.errors():
        if not error.expected:
            where[error.code, error.reason, error.example].append(f"{count(error.count)} at {phase_name(phase)}")
            failed += error.count
    if failed:
        details = tuple(
            f"{' '.join(filter(None, kind[:2]))}: {'; '.join(at)}. “{kind[2]}”" for kind, at in where.items()
        )
        yield Finding(Grade.BAD, f"{count(failed)} of {count(offered)} requests failed.", details)
        return
    completed = sum(phase.counts.completed for phase in result.phases)
    cancelled = sum(phase.counts.cancelled for phase in result.phases)
    if not completed + cancelled:
        yield Finding(Grade.BAD, f"Not one of {count(offered)} requests was completed.")
        return
    aside = f", {count(cancelled)} were cancelled on purpose" if cancelled else ""
    none = "No unexpected errors" if any(result.errors()) else "No errors"
    yield Finding(Grade.GOOD, f"{none}: {count(completed)} of {count(offered)} requests completed{aside}.")


def _expected(result: Result) -> Iterator[Finding]:
    kinds: dict[str, int] = defaultdict(int)
    for _, error in result.errors():
        if error.expected:
            kinds[f"{error.code} {error.reason}".strip()] += error.count
    if kinds:
        named = ", ".join(f"{count(number)} {kind}" for kind, number in kinds.items())
        yield Finding(Grade.GOOD, f"Refused as the workload provokes it: {named}.")


def _bottleneck(result: Result) -> Iterator[Finding]:
    slow = [phase for phase in result.phases if phase.lag.bottleneck is not None]
    if slow:
        details = tuple(f"{phase_name(phase)}: {phase.lag.bottleneck}" for phase in slow)
        which = f"{count(len(slow))} of {count(len(result.phases))} runs"
        sentence = f"The harness was the bottleneck in {which}: their latencies and goodput are not reported."
        yield Finding(Grade.BAD, sentence, details)
        return
    worst = max((_late_ms(phase) for phase in result.phases), default=0.0)
    busiest = max((phase.lag.cpu_share for phase in result.phases), default=0.0)
    yield Finding(
        Grade.GOOD,
        f"The harness kept up: 99 of 100 requests left at most {span(worst)} late, "
        f"and its busiest process used {percent(busiest)} of a core.",
    )


def _late_ms(phase: Phase) -> float:
    return phase.lag.send.p99 if phase.lag.send is not None else 0.0


def _unfinished(result: Result) -> Iterator[Finding]:
    late = [phase for phase in result.phases if phase.counts.unfinished]
    if late:
        total = count(sum(phase.counts.unfinished for phase in late))
        where = "; ".join(f"{count(phase.counts.unfinished)} at {phase_name(phase)}" for phase in late)
        sentence = f"{total} requests were still running when the harness had waited long enough."
        yield Finding(Grade.DOUBTFUL, sentence, (where,))


def _verification(result: Result) -> Iterator[Finding]:
    checked = result.verification
    if checked is None:
        return
    if not checked.asked:
        yield Finding(Grade.DOUBTFUL, "No answer could be asked for again, alone: there was none.")
        return
    if checked.alike == checked.asked:
        sentence = f"All {count(checked.asked)} requests that were asked again, alone, gave the same tokens."
        yield Finding(Grade.GOOD, sentence)
        return
    differing = count(checked.asked - checked.alike)
    sentence = f"{differing} of {count(checked.asked)} requests did not give the same tokens again, alone."
    yield Finding(Grade.BAD, sentence, checked.differing)


def _leftovers(result: Result) -> Iterator[Finding]:
    kept = [phase for phase in result.phases if phase.keeps_pages]
    if kept:
        details = tuple(f"{phase_name(p)}: {count(p.pages_before)} before, {count(p.pages_after)} after" for p in kept)
        yield Finding(Grade.BAD, "Memory did not come back: requests hold pages after the last of them.", details)
