"""Plots against the load: latencies, throughput against latency, what is served; only where there are several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinyloop_service.load.report.canvas import INK_OF, MARKER_OF, PANEL, Ink, figure, plain, times_axis
from tinyloop_service.load.report.markup import Markup
from tinyloop_service.load.report.numbers import WAY_NAMES, short_load
from tinyloop_service.load.results import Distribution, Driving, Phase, Result, Way

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DASHES: dict[str, Any] = {"p50": "-", "p95": "--", "p99": ":"}
_LOAD_AXIS = {
    Driving.OPEN: "load: requests sent per second",
    Driving.CLOSED: "load: callers, each waiting for its answer",
}


@dataclass(frozen=True, slots=True)
class Plot:
    title: str
    caption: str
    svg: Markup
    is_wide: bool = False


def curves(result: Result) -> Iterator[Plot]:
    for driving in Driving:
        ways = {way: [p for p in result.of_way(way) if p.driving is driving] for way in Way}
        ways = {way: phases for way, phases in ways.items() if len({p.load for p in phases}) > 1}
        if ways:
            yield from _curves(result, driving, ways)


def _curves(result: Result, driving: Driving, ways: dict[Way, list[Phase]]) -> Iterator[Plot]:
    slo = result.metadata.slo
    plots = {
        "ttft": ("How long until the first token?", "TTFT", slo.ttft_ms if slo else None),
        "itl": ("How long from token to token?", "ITL", slo.itl_ms if slo else None),
    }
    for field, (title, short, bound) in plots.items():
        lines = {way: _measured(phases, field) for way, phases in ways.items()}
        if any(len(points) > 1 for points in lines.values()):
            svg = _latency(lines, driving, short, bound, f"{field}-{driving.value}")
            yield Plot(title, f"{short} against the load: median, 95th and 99th percentile.", svg)
    lines = {way: _measured(phases, "ttft") for way, phases in ways.items()}
    if any(len(points) > 1 for points in lines.values()):
        svg = _throughput_latency(result, lines, driving)
        caption = (
            "Every point is a load. To the right is more work done, up is longer waiting; where the curve turns up, "
            "more load brings waiting and no more work."
        )
        yield Plot("How much work, at what wait?", caption, svg)
    yield Plot("How much of it is served?", _served_caption(result), _served(result, ways, driving))


def _measured(phases: Sequence[Phase], field: str) -> list[tuple[Phase, Distribution]]:
    found = [(phase, getattr(phase.latencies, field)) for phase in phases if phase.latencies is not None]
    return [(phase, distribution) for phase, distribution in found if distribution is not None]


def _latency(
    lines: dict[Way, list[tuple[Phase, Distribution]]], driving: Driving, short: str, bound: float | None, name: str
) -> Markup:
    def draw(drawn: Figure) -> None:
        axes = drawn.subplots()
        values = [bound] if bound else []
        for way, points in lines.items():
            loads = [phase.load for phase, _ in points]
            for percentile, dash in _DASHES.items():
                heights = [getattr(distribution, percentile) for _, distribution in points]
                values += heights
                filled = INK_OF[way] if percentile == "p50" else "none"
                axes.plot(
                    loads, heights, linestyle=dash, color=INK_OF[way], marker=MARKER_OF[way],
                    markersize=4.5, markerfacecolor=filled, linewidth=1.5,
                )  # fmt: skip
        plain(axes, _LOAD_AXIS[driving], short)
        _bound(axes, bound)
        times_axis(axes, values)
        _legend(drawn, [way for way, points in lines.items() if points], percentiles=True)
        axes.set_xlim(left=0)

    return figure(draw, PANEL, name, f"{short} against the load")


def _bound(axes: Axes, bound: float | None) -> None:
    if bound is not None:
        axes.axhline(bound, color=Ink.BOUND, linewidth=1.2, linestyle=(0, (6, 2)))
        axes.annotate(
            "SLO", (1, bound), xycoords=("axes fraction", "data"), xytext=(4, 0), textcoords="offset points",
            ha="left", va="center", color=Ink.BOUND, fontsize=8,
        )  # fmt: skip


def _legend(drawn: Figure, ways: Sequence[Way], *, percentiles: bool = False) -> None:
    """Colours are ways, dashes are percentiles.  Above the plot, so that it hides nothing."""
    from matplotlib.lines import Line2D

    entries = [
        Line2D([], [], color=INK_OF[way], marker=MARKER_OF[way], markersize=4.5, label=WAY_NAMES[way]) for way in ways
    ]
    if percentiles:
        names = {"p50": "median", "p95": "p95", "p99": "p99"}
        entries += [Line2D([], [], color=Ink.FAINT, linestyle=_DASHES[p], label=name) for p, name in names.items()]
    drawn.legend(handles=entries, loc="outside upper left", ncols=len(entries), handlelength=2.2, columnspacing=1.2)


def _throughput_latency(result: Result, lines: dict[Way, list[tuple[Phase, Distribution]]], driving: Driving) -> Markup:
    knees = {sweep.way: sweep.knee for sweep in result.sweeps}
    bound = result.metadata.slo.ttft_ms if result.metadata.slo else None

    def draw(drawn: Figure) -> None:
        axes = drawn.subplots()
        values = [bound] if bound else []
        for way, points in lines.items():
            xs = [phase.throughput.tokens_per_s for phase, _ in points]
            ys = [distribution.p95 for _, distribution in points]
            values += ys
            axes.plot(xs, ys, color=INK_OF[way], marker=MARKER_OF[way], markersize=4.5, linewidth=1.5)
            for place, ((phase, _), x, y) in enumerate(zip(points, xs, ys, strict=True)):
                is_knee = phase.load == knees.get(way)
                hides = place > 0 and abs(x - xs[place - 1]) < 0.02 * x and abs(y - ys[place - 1]) < 0.05 * y
                if is_knee or not hides:
                    _name_point(axes, short_load(phase.load, driving), x, y, is_knee=is_knee)
        plain(axes, "tokens generated per second", "TTFT, 95th percentile")
        axes.margins(x=0.05, y=0.1)
        _bound(axes, bound)
        times_axis(axes, values)
        axes.set_xlim(left=0)
        _legend(drawn, [way for way, points in lines.items() if points])

    return figure(draw, PANEL, f"throughput-{driving.value}", "TTFT against tokens per second, load by load")


def _name_point(axes: Axes, text: str, x: float, y: float, *, is_knee: bool) -> None:
    if is_knee:
        axes.plot([x], [y], marker="o", markersize=12, markerfacecolor="none", color=Ink.TEXT, linewidth=0)
        text += ", knee"
    aside = (0, -16) if is_knee else (0, 5)
    axes.annotate(text, (x, y), xytext=aside, textcoords="offset points", ha="center", fontsize=7.5)


def _served_caption(result: Result) -> str:
    if not any(any(result.is_goodput_known(way)) for way in Way):
        return "Requests completed per second against the load."
    return "Requests completed per second against the load, and of them those within the SLO (goodput)."


def _served(result: Result, ways: dict[Way, list[Phase]], driving: Driving) -> Markup:
    has_goodput = any(any(result.is_goodput_known(way)) for way in ways)

    def draw(drawn: Figure) -> None:
        from matplotlib.lines import Line2D

        axes = drawn.subplots()
        highest = max(phase.load for phases in ways.values() for phase in phases)
        if driving is Driving.OPEN:
            axes.plot([0, highest], [0, highest], color=Ink.FAINT, linewidth=0.8)
            axes.annotate("all that is sent", (highest, highest), xytext=(-4, 0), textcoords="offset points",
                          ha="right", va="bottom", color=Ink.FAINT, fontsize=8)  # fmt: skip
        for way, phases in ways.items():
            loads = [phase.load for phase in phases]
            look: Any = {"color": INK_OF[way], "marker": MARKER_OF[way], "markersize": 4.5, "linewidth": 1.5}
            axes.plot(loads, [phase.throughput.requests_per_s for phase in phases], **look)
            known = [(p.load, p.throughput.goodput_per_s) for p in phases if p.throughput.goodput_per_s is not None]
            if known:
                axes.plot(*zip(*known, strict=True), linestyle="--", **{**look, "markerfacecolor": "none"})
        plain(axes, _LOAD_AXIS[driving], "requests per second")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        entries = [
            Line2D([], [], color=INK_OF[way], marker=MARKER_OF[way], markersize=4.5, label=WAY_NAMES[way])
            for way in ways
        ]
        if has_goodput:
            entries += [
                Line2D([], [], color=Ink.FAINT, label="completed"),
                Line2D([], [], color=Ink.FAINT, linestyle="--", label="within the SLO"),
            ]
        drawn.legend(handles=entries, loc="outside upper left", ncols=len(entries), handlelength=2.2, columnspacing=1.2)

    return figure(draw, PANEL, f"served-{driving.value}", "Requests completed per second against the load")
