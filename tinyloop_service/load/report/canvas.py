"""Figures as SVG inside a page: they take their colours and their typeface from it, so dark screens and paper are fine.

In: a size and who draws.  Out: `<svg>` as text.  matplotlib gets a colour that stands for a role; in what it writes the
role's CSS variable takes its place.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable
from enum import StrEnum
from html import escape
from typing import TYPE_CHECKING, Any

from tinyloop_service.load.report.markup import Markup
from tinyloop_service.load.results import Way
from tinyloop_service.plotting import STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Ink(StrEnum):
    """What a colour is for; the value is what matplotlib is told."""

    TEXT = "#000001"
    FAINT = "#000002"
    GRID = "#000003"
    SHARED = "#000004"
    ALONE = "#000005"
    BOUND = "#000006"
    PAPER = "#000007"


INK_OF = {Way.SHARED: Ink.SHARED, Way.NO_SHARE: Ink.ALONE}
MARKER_OF = {Way.SHARED: "o", Way.NO_SHARE: "s"}
_LOG_TICKS = ((1.3, (1.0, 2.0, 5.0)), (2.2, (1.0, 3.0)), (math.inf, (1.0,)))  # up to so many decades
PANEL = (5.4, 3.5)  # inches, of one plot; two of them side by side fill the page
_PAGE_STYLE: Any = {
    **STYLE,
    "svg.fonttype": "none",  # text stays text
    "axes.edgecolor": Ink.FAINT.value,
    "axes.labelcolor": Ink.TEXT.value,
    "axes.titlecolor": Ink.TEXT.value,
    "axes.titlesize": 9,
    "axes.titleweight": "normal",
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "grid.color": Ink.GRID.value,
    "grid.linewidth": 0.6,
    "text.color": Ink.TEXT.value,
    "xtick.color": Ink.FAINT.value,
    "xtick.labelcolor": Ink.TEXT.value,
    "ytick.color": Ink.FAINT.value,
    "ytick.labelcolor": Ink.TEXT.value,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def figure(draw: Callable[[Figure], None], size: tuple[float, float], name: str, description: str) -> Markup:
    """What `draw` puts on a new figure.  name: unique within the page; description: for who cannot see it."""
    import matplotlib
    from matplotlib.figure import Figure

    image = io.StringIO()
    with matplotlib.rc_context(_PAGE_STYLE):
        drawn = Figure(figsize=size, layout="constrained")
        draw(drawn)
        drawn.savefig(image, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return Markup(_inline(image.getvalue(), name, description))


def _inline(svg: str, name: str, description: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    for ink in Ink:
        svg = svg.replace(ink.value, f"var(--{ink.name.lower()})")
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" class="plot" id="{name}">', svg)
    return svg.replace(">", f">\n <title>{escape(description)}</title>", 1).strip()


def times_axis(axes: Axes, values: Iterable[float], *, along: str = "y") -> None:
    """Ticks of milliseconds with their unit; logarithmic where the greatest is far from the least."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    positive = [value for value in values if value > 0]
    axis = axes.yaxis if along == "y" else axes.xaxis
    decades = math.log10(max(positive) / min(positive)) if positive else 0.0
    if decades > 0.9:
        axes.set_yscale("log") if along == "y" else axes.set_xscale("log")
        axis.set_major_locator(LogLocator(subs=next(subs for most, subs in _LOG_TICKS if decades < most)))
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_major_locator(MaxNLocator(nbins=6 if along == "y" else 4, steps=[1, 2, 5, 10]))
        if along == "y":
            axes.set_ylim(bottom=0)
    axis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))


def tick(milliseconds: float) -> str:
    """0.5 ms, 20 ms, 2 s."""
    return f"{milliseconds / 1000:g} s" if milliseconds >= 1000 else f"{milliseconds:g} ms"


def plain(axes: Axes, xlabel: str, ylabel: str, title: str = "") -> None:
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
