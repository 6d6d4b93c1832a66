"""A report as a picture: bits per byte, what each row adds to the reference, and how far its state is from it.

In: a `Report` and a format.  Out: the bytes of an image.  Needs matplotlib (the extra `plot`), which is imported only
when something is drawn.  int8 activations are dotted, caches dashed, dash-dotted where they are attended in int8.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tinyloop_service.evaluate.report import label
from tinyloop_service.evaluate.run import Report, Row
from tinyloop_service.plotting import COLOURS, GREY, MARKERS, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("svg", "png", "pdf")
_ASIDE = 0.5  # loops over which the error bars of a depth are spread, so that they do not hide each other


def draw(report: Report, image_format: str) -> bytes:
    """One panel where there is nothing beside the reference, else three."""
    import matplotlib
    from matplotlib.figure import Figure

    compared = [row for row in report.rows if not row.is_reference]
    with matplotlib.rc_context(STYLE):
        num_panels = 3 if compared else 1
        figure = Figure(figsize=(4.3 * num_panels, 4.2), layout="constrained")
        panels = figure.subplots(1, num_panels, squeeze=False)[0]
        _draw_bits(panels[0], report)
        if compared:
            _draw_added(panels[1], report, compared)
            _draw_distance(panels[2], report, compared)
        named: dict[str, Any] = {}
        for axes in panels[:2]:
            for line, name in zip(*axes.get_legend_handles_labels(), strict=True):
                named.setdefault(name, line)
        figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=3, frameon=False)
        image = io.BytesIO()
        metadata = {"Date": None} if image_format == "svg" else {}
        figure.savefig(image, format=image_format, dpi=160, metadata=metadata)
    return image.getvalue()


def _look(report: Report, row: Row) -> dict[str, Any]:
    """A row's name, colour, marker and dash, the same in every panel.  Hollow markers show what lies beneath."""
    index = report.rows.index(row)
    dotted = ":" if row.rounding.activations == "int8" else "-"
    dashed = "-." if row.rounding.attention == "int8" else "--"
    return {
        "label": label(row) + (" (second halves)" if row.span == "second half" else ""),
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "markerfacecolor": "none",
        "markersize": 5,
        "linestyle": dashed if row.span == "second half" else dotted,
        "linewidth": 1.4,
    }


def _draw_bits(axes: Axes, report: Report) -> None:
    axes.set(title="Bits per byte, all of the text", ylabel="bits per byte (lower is better)")
    _depth_axis(axes, "loops", report.depths)
    for row in report.over("all"):
        axes.plot(report.depths, row.quality.bits_per_byte, **_look(report, row))


def _draw_added(axes: Axes, report: Report, rows: Sequence[Row]) -> None:
    axes.set(title="More than the reference", ylabel="added bits per byte, ± standard error")
    axes.axhline(0, color=GREY, linewidth=0.8)
    _depth_axis(axes, "loops", report.depths)
    for place, row in enumerate(rows):
        quality, aside = row.quality, _ASIDE * ((place + 0.5) / len(rows) - 0.5)
        depths = [depth + aside for depth in report.depths]
        axes.errorbar(depths, quality.added_bits, quality.added_bits_error, capsize=2.5, **_look(report, row))


def _draw_distance(axes: Axes, report: Report, rows: Sequence[Row]) -> None:
    axes.set(title="The state's distance from the reference's", ylabel="distance, % of the reference state's length")
    for row in rows:
        if row.quality.distance is not None:
            shares = [100 * value for value in row.quality.distance]
            axes.plot(range(len(shares)), shares, **_look(report, row))
    axes.set_yscale("log")  # rows differ by orders of magnitude, and growth by a factor is a slope
    axes.yaxis.set_major_formatter("{x:g}")
    _depth_axis(axes, "loops done (0: what enters the first)", (0, *report.depths))


def _depth_axis(axes: Axes, name: str, ticks: Sequence[int]) -> None:
    axes.set_xlabel(name)
    axes.set_xticks(ticks)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
