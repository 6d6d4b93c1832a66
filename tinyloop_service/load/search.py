"""Which loads to try, and what the phases add up to: the knee, the goodput at the SLO, what sharing is worth.

A load is *followed* when the server does what it asks:
    open loop      at least 0.9 of the requests that were offered were completed, in their time
    closed loop    tokens per second grew by at least a quarter of what the callers grew by, from the load before
The *knee* is the highest load up to which every load is followed.  A search doubles the load until one is not followed,
then halves the gap; every way searches for itself.  Pure: phases in, loads and figures out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tinyloop_service.load.results import Comparison, Distribution, Driving, Phase, Sweep, Way

FOLLOWED = 0.9  # of offered requests
GAIN = 0.25  # of the growth in callers
KEPT = 0.9  # of requests that have to keep the SLO for a load to count
REFINEMENTS = 2


@dataclass(frozen=True, slots=True)
class Search:
    """From `start` on, at most `most` phases."""

    driving: Driving
    start: float
    most: int

    def next_load(self, phases: Sequence[Phase]) -> float | None:
        """After these phases of one way; None: it is known well enough."""
        if len(phases) >= self.most:
            return None
        if not phases:
            return self.start
        by_load = sorted(phases, key=lambda phase: phase.load)
        knee = knee_of(by_load)
        if knee is None:
            return by_load[-1].load * 2
        beyond = next((phase.load for phase in by_load if phase.load > knee), None)
        refined = len(phases) - len({phase.load for phase in phases if _is_doubled(phase.load, self.start)})
        if knee < self.start or beyond is None or refined >= REFINEMENTS:
            return None
        middle = (knee + beyond) / 2
        if self.driving is Driving.CLOSED:
            middle = float(int(middle))
        return middle if knee < middle < beyond else None


def _is_doubled(load: float, start: float) -> bool:
    while load > start:
        load /= 2
    return load == start


def is_followed(phase: Phase, before: Phase | None) -> bool:
    """`before`: of the next lower load."""
    if phase.counts.completed + phase.counts.cancelled < FOLLOWED * phase.counts.offered:
        return False
    if phase.driving is Driving.OPEN:
        offered = (phase.counts.offered - phase.counts.cancelled) / phase.measured_s
        return phase.throughput.requests_per_s >= FOLLOWED * offered
    if before is None:
        return phase.counts.completed > 0
    needed = 1 + GAIN * (phase.load / before.load - 1)
    return phase.throughput.tokens_per_s >= needed * before.throughput.tokens_per_s


def knee_of(by_load: Sequence[Phase]) -> float | None:
    """None: every load was followed.  0: none was."""
    knee, before = 0.0, None
    for phase in by_load:
        if not is_followed(phase, before):
            return knee
        knee, before = phase.load, phase
    return None


def sweep_of(way: Way, by_load: Sequence[Phase]) -> Sweep:
    """Of phases of one way, by load."""
    good = [phase for phase in by_load if (phase.throughput.goodput_share or 0.0) >= KEPT]
    best = max(good, key=lambda phase: phase.throughput.goodput_per_s or 0.0, default=None)
    return Sweep(
        way=way,
        knee=knee_of(by_load),
        best_load=None if best is None else best.load,
        best_goodput_per_s=None if best is None else best.throughput.goodput_per_s,
        share_needed=KEPT,
    )


def comparisons(phases: Sequence[Phase]) -> Iterator[Comparison]:
    """Of every load that was run both ways."""
    shared, alone = ({phase.load: phase for phase in phases if phase.way is way} for way in Way)
    for load in sorted(shared.keys() & alone.keys()):
        one, other = shared[load], alone[load]
        both = (one.latencies, other.latencies)
        times: tuple[float | None, ...] = (None, None, None)
        if both[0] is not None and both[1] is not None:
            times = (
                _factor(both[1].ttft, both[0].ttft, "p50"),
                _factor(both[1].ttft, both[0].ttft, "p95"),
                _factor(both[1].e2e, both[0].e2e, "p50"),
            )
        tokens = _ratio(one.throughput.tokens_per_s, other.throughput.tokens_per_s)
        yield Comparison(load, tokens, *times)


def _factor(longer: Distribution | None, shorter: Distribution | None, figure: str) -> float | None:
    if longer is None or shorter is None:
        return None
    return _ratio(getattr(longer, figure), getattr(shorter, figure))


def _ratio(above: float, below: float) -> float | None:
    return round(above / below, 3) if below else None
