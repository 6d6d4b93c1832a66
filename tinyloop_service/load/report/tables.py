"""The numbers of a report: tiles with the few that decide, one line a run, all percentiles, what sharing is worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from tinyloop_service.load.report.markup import Markup, join, tag
from tinyloop_service.load.report.numbers import (
    NOTHING,
    WAY_NAMES,
    count,
    factor,
    factors,
    load,
    number,
    percent,
    span,
)
from tinyloop_service.load.results import Distribution, Driving, Phase, Result, Slo, Sweep, Way

_QUANTITIES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "E2E", "queue": "queue", "gap": "gap"}
_PERCENTILES = ("p50", "p90", "p95", "p99", "max", "mean")


@dataclass(frozen=True, slots=True)
class Tile:
    title: str
    value: str
    note: str


def tiles(result: Result) -> tuple[Tile, ...]:
    """Of a sweep: where it ends, what sharing is worth.  Of single runs: latencies and throughput of the first."""
    alone = [] if result.sweeps or not result.phases else [*_phase_tiles(result.phases[0])]
    if result.comparisons:
        alone = alone[1:]  # its throughput: how it compares says more
    return (*_sweep_tiles(result), *alone, *_sharing_tiles(result))


def _sweep_tiles(result: Result) -> Iterator[Tile]:
    driving = result.phases[0].driving if result.phases else Driving.OPEN
    others = {sweep.way: sweep for sweep in result.sweeps}
    first = others.pop(Way.SHARED, None) or (result.sweeps[0] if result.sweeps else None)
    if first is None:
        return
    also = [sweep for sweep in others.values() if sweep is not first]
    yield Tile("Knee", _knee(first, driving), _ways(first, also, lambda sweep: _knee(sweep, driving)))
    if result.metadata.slo is not None:
        value = "none" if first.best_load is None else f"{number(first.best_goodput_per_s)}/s"
        value = value if any(result.is_goodput_known(first.way)) else NOTHING
        ways = _ways(first, also, lambda sweep: _goodput(sweep, driving, result), say_first=True)
        yield Tile("Most goodput", value, f"{ways}; within {slo_text(result.metadata.slo)}")


def _ways(first: Sweep, also: Sequence[Sweep], say: Callable[[Sweep], str], *, say_first: bool = False) -> str:
    """What the others of a tile have."""
    own = f"{WAY_NAMES[first.way]}: {say(first)}" if say_first else WAY_NAMES[first.way]
    return "; ".join([own, *(f"{WAY_NAMES[sweep.way]}: {say(sweep)}" for sweep in also)])


def _knee(sweep: Sweep, driving: Driving) -> str:
    return "not reached" if sweep.knee is None else load(sweep.knee, driving)


def _goodput(sweep: Sweep, driving: Driving, result: Result) -> str:
    known = result.is_goodput_known(sweep.way)
    of = "" if all(known) else ", of those that the harness kept up with"
    if not any(known):
        return "unknown, the harness kept up with no load"
    if sweep.best_load is None:
        return f"at no load did {percent(sweep.share_needed)} keep it{of}"
    return f"at {load(sweep.best_load, driving)}{of}"


def _sharing_tiles(result: Result) -> Iterator[Tile]:
    spread = ", from load to load" if len(result.comparisons) > 1 else ""
    if sooner := [each.ttft_p50 for each in result.comparisons if each.ttft_p50 is not None]:
        yield Tile("First token", factors(sooner), f"sooner with a shared prefix, in the median{spread}")
    if more := [each.tokens_per_s for each in result.comparisons if each.tokens_per_s is not None]:
        yield Tile("Throughput", factors(more), f"tokens per second with a shared prefix{spread}")
    if result.economy is not None:
        pays = result.economy.break_even
        value = "never" if pays is None else f"{math.ceil(pays)} request{'' if math.ceil(pays) == 1 else 's'}"
        note = "a request off it is no faster" if pays is None else f"break-even {number(pays)}"
        yield Tile("A build pays off after", value, note)
    cached = [phase.cached_token_rate for phase in result.of_way(Way.SHARED) if phase.cached_token_rate is not None]
    if cached:
        note = "of prompt tokens" + (", the least of all loads" if len(cached) > 1 else "")
        yield Tile("Cached", percent(min(cached)), note)


def _phase_tiles(phase: Phase) -> Iterator[Tile]:
    what = f"{WAY_NAMES[phase.way]}, {load(phase.load, phase.driving)}"
    yield Tile("Throughput", f"{number(phase.throughput.tokens_per_s)} tokens/s", what)
    for field, title in {"ttft": "First token after", "itl": "Token to token"}.items():
        if (measured := _distribution_of(phase, field)) is not None:
            yield Tile(title, span(measured.p50), f"in the median; 99 of 100 within {span(measured.p99)}")
    if phase.throughput.goodput_share is not None:
        rate = f"{number(phase.throughput.goodput_per_s)} requests/s"
        yield Tile("Within the SLO", percent(phase.throughput.goodput_share), rate)


def slo_text(slo: Slo) -> str:
    bounds = {"TTFT": slo.ttft_ms, "ITL": slo.itl_ms, "E2E": slo.e2e_ms}
    return ", ".join(f"{name} ≤ {bound:g} ms" for name, bound in bounds.items() if bound is not None)


def runs(result: Result) -> Markup:
    """One line a run, grouped by way; columns that would say nothing are left out."""
    columns = _columns(result)
    bodies = []
    for way in Way:
        if phases := result.of_way(way):
            title = tag("tr", tag("th", WAY_NAMES[way], colspan=str(len(columns) + 1), scope="rowgroup"))
            bodies.append(tag("tbody", title, *(_run(phase, columns) for phase in phases), class_=way.value))
    groups = [("", 1), *((group, len(list(names))) for group, names in groupby(columns, key=lambda each: each.group))]
    head = _head(groups, ["load", *(column.name for column in columns)])
    table = tag("div", tag("table", head, *bodies, class_="numbers"), class_="scroll")
    if any(phase.counts.completed < 100 for phase in result.phases):
        return join(table, tag("p", "Where fewer than 100 requests were completed, p99 is the slowest.", class_="note"))
    return table


@dataclass(frozen=True, slots=True)
class _Column:
    group: str
    name: str
    value: Callable[[Phase], str]


def _columns(result: Result) -> list[_Column]:
    def any_of(value: Callable[[Phase], object]) -> bool:
        return any(value(phase) for phase in result.phases)

    asked = [
        ("requests", "sent", lambda p: count(p.counts.offered), True),
        ("requests", "completed", lambda p: count(p.counts.completed), True),
        ("requests", "cancelled", lambda p: count(p.counts.cancelled), any_of(lambda p: p.counts.cancelled)),
        ("requests", "failed", lambda p: count(p.counts.failed), any_of(lambda p: p.counts.failed)),
        ("requests", "unfinished", lambda p: count(p.counts.unfinished), any_of(lambda p: p.counts.unfinished)),
        ("per second", "requests", lambda p: number(p.throughput.requests_per_s), True),
        ("per second", "tokens", lambda p: number(p.throughput.tokens_per_s), True),
        ("within SLO", "per s", lambda p: number(p.throughput.goodput_per_s), result.metadata.slo is not None),
        ("within SLO", "share", lambda p: percent(p.throughput.goodput_share), result.metadata.slo is not None),
    ]
    columns = [_Column(group, name, value) for group, name, value, is_shown in asked if is_shown]
    for field, percentiles in {"ttft": "p50 p95 p99", "itl": "p50 p95 p99", "e2e": "p50 p99", "queue": "p95"}.items():
        if any_of(lambda p, field=field: _distribution_of(p, field)):  # type: ignore[misc]
            columns += [_latency(field, percentile) for percentile in percentiles.split()]
    cached = any_of(lambda p: p.cached_token_rate is not None)
    return columns + ([_Column("cached", "tokens", lambda p: percent(p.cached_token_rate))] if cached else [])


def _latency(field: str, percentile: str) -> _Column:
    def value(phase: Phase) -> str:
        return number(getattr(_distribution_of(phase, field), percentile, None))

    return _Column(f"{_QUANTITIES[field]}, ms", percentile, value)


def _distribution_of(phase: Phase, field: str) -> Distribution | None:
    return getattr(phase.latencies, field, None)


def _run(phase: Phase, columns: Sequence[_Column]) -> Markup:
    cells = []
    for column in columns:
        is_bad = column.name in ("failed", "unfinished") and column.value(phase) != "0"
        cells.append(tag("td", column.value(phase), **({"class_": "bad"} if is_bad else {})))
    return tag("tr", tag("th", load(phase.load, phase.driving), scope="row"), *cells)


def _head(groups: Sequence[tuple[str, int]], names: Sequence[str]) -> Markup:
    over = [tag("th", text, colspan=str(columns), scope="colgroup") for text, columns in groups]
    return tag("thead", tag("tr", *over), tag("tr", *(tag("th", name, scope="col") for name in names)))


def percentiles(result: Result) -> Markup:
    """Every distribution of every run, in milliseconds."""
    names = ["load", "quantity", "samples", *_PERCENTILES]
    bodies = []
    for phase in sorted(result.phases, key=lambda phase: (phase.way is Way.NO_SHARE, phase.load)):
        measured = {name: getattr(phase.latencies, field, None) for field, name in _QUANTITIES.items()}
        measured["harness: lag of sends"] = phase.lag.send
        measured["harness: lag of its loop"] = phase.lag.loop
        there = {name: each for name, each in measured.items() if each is not None}
        title = f"{load(phase.load, phase.driving)}, {WAY_NAMES[phase.way]}"
        rows = [_distribution(name, each) for name, each in there.items()]
        first = tag("th", title, rowspan=str(max(1, len(rows))), scope="rowgroup")
        bodies.append(tag("tbody", *(tag("tr", *(() if i else (first,)), row) for i, row in enumerate(rows))))
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in names)))
    return tag("div", tag("table", head, *bodies, class_="numbers"), class_="scroll")


def _distribution(name: str, measured: Distribution) -> Markup:
    cells = [count(measured.count), *(number(getattr(measured, each)) for each in _PERCENTILES)]
    return join(tag("th", name, scope="row"), *(tag("td", cell) for cell in cells))


def comparisons(result: Result) -> Markup:
    """How much better shared is, load by load; empty where nothing was run both ways."""
    if not result.comparisons:
        return Markup()
    driving = result.phases[0].driving
    names = ["load", "tokens per second", "TTFT p50", "TTFT p95", "E2E p50"]
    rows = []
    for each in result.comparisons:
        factors = (each.tokens_per_s, each.ttft_p50, each.ttft_p95, each.e2e_p50)
        first = tag("th", load(each.load, driving), scope="row")
        rows.append(tag("tr", first, *(tag("td", factor(value)) for value in factors)))
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in names)))
    return tag("div", tag("table", head, tag("tbody", *rows), class_="numbers"), class_="scroll")


def economy(result: Result) -> Markup:
    """One sentence or two; empty where it was not asked for."""
    found = result.economy
    if found is None:
        return Markup()
    lengths = (
        f"{count(found.prefix_tokens)} prefix tokens, {count(found.suffix_tokens)} more, {count(found.new_tokens)} new"
    )
    said = (
        f"With nothing else going on ({lengths}): building the prefix took {span(found.build_ms)}, a request off it "
        f"{span(found.warm_ms)}, the same request without it {span(found.cold_ms)}. "
    )
    if found.break_even is None:
        return tag("p", said, "A request off the prefix is no faster, so building it never pays.")
    return tag("p", said, f"Break-even at {number(found.break_even)} requests.")
