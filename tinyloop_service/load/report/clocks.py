"""Plots of one load: how latencies are distributed; and over time: rows of a step, pages, evictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tinyloop_service.load.report.canvas import INK_OF, PANEL, Ink, figure, plain, times_axis
from tinyloop_service.load.report.curves import Plot
from tinyloop_service.load.report.markup import Markup
from tinyloop_service.load.report.numbers import WAY_NAMES, load
from tinyloop_service.load.results import Driving, Phase, Result, Second, Way

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_COLUMNS = 4  # of small plots side by side
_FULL_WIDTH = 11.0  # inches
_DASH_OF: dict[Way, Any] = {Way.SHARED: "-", Way.NO_SHARE: "--"}
_QUANTITIES = {"ttft": "TTFT", "itl": "ITL", "e2e": "E2E"}
Load = tuple[Driving, float]


def distributions(result: Result) -> Iterator[Plot]:
    """CDFs at the load that tells most: where both ways were served, and as much as possible."""
    phases = _telling(result)
    fields = [
        field
        for field in _QUANTITIES
        if any(phase.latencies and getattr(phase.latencies, field) is not None for phase in phases)
    ]
    if not fields:
        return
    at = load(phases[0].load, phases[0].driving)
    caption = f"At {at}: the share of requests (ITL: of tokens) that needed at most so long. Further left is better."

    def draw(drawn: Figure) -> None:
        for axes, field in zip(drawn.subplots(1, len(fields), squeeze=False)[0], fields, strict=True):
            _cdf(axes, phases, field)
        _legend(drawn, {phase.way for phase in phases})

    svg = figure(draw, (_FULL_WIDTH, 3.3), "distributions", f"Distributions of latencies at {at}")
    title = "How do the two ways compare, request by request?" if len(phases) > 1 else "How are the waits distributed?"
    yield Plot(title, caption, svg, is_wide=True)


def _telling(result: Result) -> list[Phase]:
    """Of each way its phase at one load: the highest that all ways served nearly whole, else the lowest."""
    by_load: dict[Load, list[Phase]] = {}
    for phase in result.phases:
        if phase.latencies is not None:
            by_load.setdefault((phase.driving, phase.load), []).append(phase)
    most = max(map(len, by_load.values()), default=0)
    whole = {key: phases for key, phases in by_load.items() if len(phases) == most}
    served = [key for key, phases in whole.items() if all(_is_served(phase) for phase in phases)]
    if not whole:
        return []
    return whole[max(served, key=lambda key: key[1]) if served else min(whole, key=lambda key: key[1])]


def _is_served(phase: Phase) -> bool:
    return phase.counts.completed + phase.counts.cancelled >= 0.98 * phase.counts.offered


def _cdf(axes: Axes, phases: Sequence[Phase], field: str) -> None:
    values: list[float] = []
    for phase in phases:
        measured = getattr(phase.latencies, field)
        if measured is None:
            continue
        xs = [value for value, _ in measured.cdf]
        shares = [100 * share for _, share in measured.cdf]
        values += xs
        axes.plot([xs[0], *xs], [0, *shares], color=INK_OF[phase.way], linestyle=_DASH_OF[phase.way])
    plain(axes, "", "", _QUANTITIES[field])
    times_axis(axes, values, along="x")
    axes.set_ylim(0, 100)
    axes.yaxis.set_major_formatter("{x:g} %")


def _legend(drawn: Figure, ways: set[Way]) -> None:
    from matplotlib.lines import Line2D

    if len(ways) > 1:
        entries = [
            Line2D([], [], color=INK_OF[way], linestyle=_DASH_OF[way], label=WAY_NAMES[way])
            for way in Way
            if way in ways
        ]
        drawn.legend(handles=entries, loc="outside upper left", ncols=len(entries), handlelength=2.6)


def over_time(result: Result) -> Iterator[Plot]:
    """One small plot a load."""
    loads: dict[Load, list[Phase]] = {}
    for phase in sorted(result.phases, key=lambda phase: phase.load):
        if phase.series:
            loads.setdefault((phase.driving, phase.load), []).append(phase)
    if not loads:
        return
    name = "Second by second. The shaded part is the warm-up, which no figure above counts."
    rows = _panels(loads, "rows", "rows", _rows, "Rows per step over time")
    wide = len(loads) > 1
    yield Plot("How many requests share a step?", f"Rows: sequences in one step of the server. {name}", rows, wide)
    pages = _panels(loads, "pages", "pages held, % of the pool", _pages, "Page use over time")
    caption = "Pages that are held; thin: those of prefixes. " + name
    yield Plot("How full is the memory?", caption, pages, wide)
    if any(second.evictions for phases in loads.values() for phase in phases for second in phase.series):
        evictions = _panels(loads, "evictions", "evictions per second", _evictions, "Evictions over time")
        yield Plot("When did prefixes lose their memory?", f"Evictions. {name}", evictions, wide)


def _panels(
    loads: dict[Load, list[Phase]], name: str, ylabel: str, draw_one: Callable[[Axes, Phase], None], description: str
) -> Markup:
    rows = -(-len(loads) // _MOST_COLUMNS)
    columns = -(-len(loads) // rows)

    def draw(drawn: Figure) -> None:
        from matplotlib.ticker import MaxNLocator

        grid = list(drawn.subplots(rows, columns, squeeze=False, sharey=True).flat)
        for place, (axes, ((driving, value), phases)) in enumerate(zip(grid, loads.items(), strict=False)):
            is_lowest = place + columns >= len(loads)
            plain(axes, "seconds" if is_lowest else "", ylabel if place % columns == 0 else "", load(value, driving))
            axes.axvspan(0, max(phase.warmup_s for phase in phases), color=Ink.GRID, alpha=0.6, linewidth=0)
            for phase in phases:
                draw_one(axes, phase)
            axes.set_xlim(left=0)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        grid[0].set_ylim(bottom=0)
        for axes in grid[len(loads) :]:
            axes.set_axis_off()
        _legend(drawn, {phase.way for phases in loads.values() for phase in phases})

    size = PANEL if len(loads) == 1 else (_FULL_WIDTH, 2.1 * rows + 0.9)
    return figure(draw, size, name, description)


def _line(axes: Axes, phase: Phase, value: Callable[[Second], float], **look: Any) -> None:
    times = [second.at_s for second in phase.series]
    heights = [value(second) for second in phase.series]
    axes.plot(
        times, heights, **{"color": INK_OF[phase.way], "linestyle": _DASH_OF[phase.way], "linewidth": 1.4, **look}
    )


def _rows(axes: Axes, phase: Phase) -> None:
    _line(axes, phase, lambda second: second.rows)


def _pages(axes: Axes, phase: Phase) -> None:
    _line(axes, phase, lambda second: 100 * second.pages_held)
    if any(second.pages_prefixes for second in phase.series):
        _line(axes, phase, lambda second: 100 * second.pages_prefixes, linewidth=0.7)


def _evictions(axes: Axes, phase: Phase) -> None:
    _line(axes, phase, lambda second: second.evictions, drawstyle="steps-pre")
