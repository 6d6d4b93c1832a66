"""What tests/bench_scaling.py found: straight lines through points, as tables, JSON and one picture.

In: samples of a quantity at points of an axis.  Out: text, plain values, SVG.  It refuses to know how they were
measured.

    y = at_zero + slope · x    least squares on the medians, each weighed by 1/y (a point's noise is a share of it);
                               ± is the slope's standard error from how far the medians are off the line
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from bench_report import print_table

from tinyloop_service.plotting import COLOURS, GREY, MARKERS, STYLE

Samples = Mapping[int, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Fit:
    at_zero: float
    slope: float
    slope_error: float

    def at(self, x: float) -> float:
        return self.at_zero + self.slope * x


@dataclass(frozen=True, slots=True)
class Series:
    """One quantity along one axis."""

    axis: str
    x_name: str
    name: str
    unit: str
    per: int | None  # x that the slope is told for, as in "per 1000 tokens"; None: no line is meant to go through it
    samples: dict[int, list[float]]

    @property
    def medians(self) -> dict[int, float]:
        return {x: median(values) for x, values in sorted(self.samples.items())}

    @property
    def fit(self) -> Fit | None:
        """None where no line is meant, and with fewer than three points, which would leave no doubt about any line."""
        xs, ys = (np.array(list(values), float) for values in (self.medians.keys(), self.medians.values()))
        if self.per is None or len(xs) < 3:
            return None
        (slope, at_zero), covariance = np.polyfit(xs, ys, 1, w=1 / ys, cov=True)
        return Fit(float(at_zero), float(slope), float(covariance[0, 0] ** 0.5))

    def slope(self) -> str:
        """For example "3.20 ± 0.05 ms per 1000 tokens"; empty without a line."""
        if (fit := self.fit) is None or self.per is None:
            return ""
        along = f"per {self.per} {self.x_name}" if self.per > 1 else "each"
        return f"{digits(fit.slope * self.per)} ± {digits(fit.slope_error * self.per)} {self.unit} {along}"

    def sentence(self) -> str:
        """For example "step: 20.1 ms + 3.20 ± 0.05 ms per 1000 tokens; from 256 to 1024 tokens × 1.11 ± 0.01"."""
        if (fit := self.fit) is None:
            return "" if self.per is None else f"{self.name}: too few points for a line"
        least, most = min(self.samples), max(self.samples)
        factor, doubt = fit.at(most) / fit.at(least), fit.slope_error * (most - least) / fit.at(least)
        along = f"from {least} to {most} {self.x_name} × {factor:.2f} ± {doubt:.2f}"
        plus = f"+ {self.slope()}".replace("+ -", "− ")
        return f"{self.name}: {digits(fit.at_zero)} {self.unit} {plus}; {along}"

    def as_dict(self) -> dict[str, Any]:
        plain = {name: value for name, value in asdict(self).items() if name != "samples"}
        fit = self.fit
        return plain | {
            "median": self.medians,
            "samples": self.samples,
            "fit": None if fit is None else asdict(fit),
        }


def digits(value: float) -> str:
    """Three that matter: 1043, 14.2, -2.75, 0.184, 0.00312."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def print_axis(title: str, series: Sequence[Series], left_out: Sequence[str]) -> None:
    """One table of all quantities along an axis, the lines through them, and what is not in it."""
    points = sorted({x for each in series for x in each.samples})
    columns = [series[0].x_name, *(f"{each.name}, {each.unit}" for each in series)]
    print_table(title, columns, [[str(x), *(_cell(each.samples.get(x)) for each in series)] for x in points])
    for line in filter(None, (*(each.sentence() for each in series), *left_out)):
        print(f"  {line}")


def _cell(values: Sequence[float] | None) -> str:
    if not values:
        return "–"
    return f"{digits(median(values))} ({digits(min(values))}–{digits(max(values))})"


def draw(series: Sequence[Series], title: str, path: Path) -> None:
    """Small plots, one a quantity: medians, the least and the most, the line through the medians."""
    import matplotlib
    from matplotlib.figure import Figure

    columns = min(3, len(series))
    rows = -(-len(series) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.9 * columns, 2.9 * rows + 0.4), layout="constrained")
        figure.suptitle(title, fontsize=10, x=0.01, ha="left", color=GREY)
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        places = {name: place for place, name in enumerate(dict.fromkeys(each.axis for each in series))}
        for panel, each in zip(panels, series, strict=False):
            _draw_one(panel, each, places[each.axis])
        for panel in panels[len(series) :]:
            panel.set_axis_off()
        image = io.BytesIO()
        figure.savefig(image, format="svg", metadata={"Date": None})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(image.getvalue())


def _draw_one(panel: Any, series: Series, place: int) -> None:
    xs, ys = list(series.medians), list(series.medians.values())
    least = [y - min(series.samples[x]) for x, y in series.medians.items()]
    most = [max(series.samples[x]) - y for x, y in series.medians.items()]
    colour = COLOURS[1 + place % (len(COLOURS) - 1)]
    marker = MARKERS[place % len(MARKERS)]
    panel.errorbar(xs, ys, (least, most), fmt=marker, color=colour, markersize=4, capsize=2, elinewidth=0.8)
    if (fit := series.fit) is not None:
        ends = [min(xs), max(xs)]
        panel.plot(ends, [fit.at(x) for x in ends], color=GREY, linewidth=1, zorder=1)
    highest = max(map(max, series.samples.values()))
    panel.set(xlabel=series.x_name, ylabel=series.unit, ylim=(0, 1.1 * highest))
    panel.set_title(series.name, pad=16)
    panel.text(0, 1.02, series.slope(), transform=panel.transAxes, fontsize=8, color=GREY, va="bottom")
    panel.xaxis.get_major_locator().set_params(integer=True, nbins=7)
    panel.grid(axis="y", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)


def write(path: Path, facts: Mapping[str, Any], series: Sequence[Series], left_out: Sequence[str]) -> None:
    """JSON: the facts, every series with its samples and its line, what is missing."""
    content = {**facts, "series": [each.as_dict() for each in series], "left_out": list(left_out)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
