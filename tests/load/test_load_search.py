"""Sweeps over servers that are formulas: the knee is found, in few phases, and the goodput is the best that holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from load_example import example, slowed

from tinyloop_service.load.results import Counts, Driving, Phase, Throughput, Way
from tinyloop_service.load.search import Search, comparisons, knee_of, sweep_of

ANY = example().phases[0]


def open_phase(load: float, capacity: float, way: Way = Way.SHARED) -> Phase:
    """20 s of a server that completes at most `capacity` requests a second; beyond it nobody keeps the SLO."""
    offered, served = round(20 * load), min(load, capacity)
    kept = served if load <= capacity else 0.0
    counts = Counts(offered, round(20 * served), 0, 0, offered - round(20 * served))
    throughput = Throughput(served, 10 * served, 0.0, kept, kept / load)
    return replace(ANY, way=way, driving=Driving.OPEN, load=load, measured_s=20.0, counts=counts, throughput=throughput)


def closed_phase(load: float, capacity: float) -> Phase:
    """Tokens per second grow with the callers up to `capacity` of them."""
    throughput = Throughput(1.0, 10 * min(load, capacity), 0.0, None, None)
    return replace(ANY, driving=Driving.CLOSED, load=load, counts=Counts(20, 20, 0, 0, 0), throughput=throughput)


def searched(search: Search, capacity: float) -> list[Phase]:
    make, phases = (open_phase if search.driving is Driving.OPEN else closed_phase), list[Phase]()
    while (load := search.next_load(phases)) is not None:
        assert load not in [phase.load for phase in phases], "no load is tried twice"
        phases.append(make(load, capacity))
    return phases


@pytest.mark.parametrize("capacity", [3.0, 5.0, 6.9, 100.0])
def test_an_open_search_doubles_then_halves_the_gap(capacity: float) -> None:
    phases = searched(Search(Driving.OPEN, 1.0, 12), capacity)
    by_load = sorted(phases, key=lambda phase: phase.load)
    knee = knee_of(by_load)
    assert knee is not None
    assert knee <= capacity / 0.9 < 1.3 * knee, "what is followed by 0.9 counts; two halvings leave a quarter"
    loads = [phase.load for phase in phases]
    assert loads[: len(loads) - 2] == [2.0**power for power in range(len(loads) - 2)]


def test_a_closed_search_tries_whole_callers_and_ends_where_more_of_them_bring_little() -> None:
    phases = searched(Search(Driving.CLOSED, 1.0, 12), 6.0)
    assert [phase.load for phase in phases] == [1, 2, 4, 8, 16, 12, 10]
    assert knee_of(sorted(phases, key=lambda phase: phase.load)) == 8, "two more than six gain 0.5 of twofold"
    assert all(phase.load.is_integer() for phase in searched(Search(Driving.CLOSED, 3.0, 12), 10.0))


def test_a_search_is_bounded() -> None:
    phases = searched(Search(Driving.OPEN, 1.0, 4), 1e9)
    assert [phase.load for phase in phases] == [1, 2, 4, 8]
    assert sweep_of(Way.SHARED, phases).knee is None, "above every load that was tried"


def test_a_search_that_starts_too_high_says_so() -> None:
    phases = searched(Search(Driving.OPEN, 8.0, 9), 2.0)
    assert [phase.load for phase in phases] == [8]
    assert sweep_of(Way.SHARED, phases).knee == 0.0


def test_requests_that_fail_are_not_followed() -> None:
    failing = replace(open_phase(2.0, 9.0), counts=Counts(40, 30, 0, 10, 0))
    assert knee_of([open_phase(1.0, 9.0), failing]) == 1.0


def test_the_best_goodput_is_of_a_load_at_which_enough_keep_the_slo() -> None:
    phases = [open_phase(load, 5.0) for load in (1.0, 2.0, 4.0, 8.0)]
    found = sweep_of(Way.SHARED, phases)
    assert (found.best_load, found.best_goodput_per_s, found.knee) == (4.0, 4.0, 4.0)
    assert sweep_of(Way.SHARED, [open_phase(8.0, 5.0)]).best_load is None
    withheld = [*phases[:2], slowed(phases[2], "late"), phases[3]]
    assert sweep_of(Way.SHARED, withheld).best_load == 2.0, "what is not known is not the best"


def test_what_sharing_is_worth_is_said_of_loads_that_were_run_both_ways() -> None:
    phases = [open_phase(8.0, 8.0), open_phase(8.0, 2.0, Way.NO_SHARE), open_phase(16.0, 8.0)]
    [found] = comparisons(phases)
    assert (found.load, found.tokens_per_s) == (8.0, 4.0)
    assert found.ttft_p50 == 1.0, "the same latencies were given to both"
    [silent] = comparisons([replace(phases[0], latencies=None), phases[1]])
    assert (silent.tokens_per_s, silent.ttft_p50, silent.e2e_p50) == (4.0, None, None)
