"""Numbers as people read them: three digits that matter, thousands apart, units where they stand alone."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tinyloop_service.load.results import Driving, Phase, Way

_THIN = "\u202f"  # narrow no-break space
NOTHING = "–"
WAY_NAMES = {Way.SHARED: "shared prefix", Way.NO_SHARE: "no sharing"}


def number(value: float | None) -> str:
    """Three digits: 14.2, 0.184; above a thousand whole: 1 043."""
    if value is None:
        return NOTHING
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(float(f"{value:.3g}")))))
    return f"{value:,.{digits}f}".replace(",", _THIN)


def count(value: int) -> str:
    return f"{value:,}".replace(",", _THIN)


def span(milliseconds: float | None) -> str:
    """A time that stands alone: 0.25 ms, 40 ms, 1.25 s."""
    if milliseconds is None:
        return NOTHING
    if abs(milliseconds) >= 1000:
        return f"{number(milliseconds / 1000)}{_THIN}s"
    return f"{number(milliseconds)}{_THIN}ms"


def percent(share: float | None) -> str:
    """Never 100 % of what is not all, nor 0 % of what is not nothing."""
    if share is None:
        return NOTHING
    shown = (
        f"{100 * share:.1f}" if 0.1 < 100 * share < 99.9 and not (100 * share).is_integer() else f"{100 * share:.0f}"
    )
    if shown == "100" and share < 1:
        shown = "99.9"
    if shown == "0" and share > 0:
        shown = "<0.1"
    return f"{shown}{_THIN}%"


def factor(value: float | None) -> str:
    return NOTHING if value is None else f"{number(value)}{_THIN}×"


def factors(values: Iterable[float]) -> str:
    """From the least to the most: 1.00–2.80 ×."""
    shown = dict.fromkeys(number(value) for value in sorted(values))
    return f"{NOTHING.join([*shown][:: max(1, len(shown) - 1)])}{_THIN}×"


def load(value: float, driving: Driving) -> str:
    """For example "4 requests/s", "1 caller"."""
    what = "request" if driving is Driving.OPEN else "caller"
    return f"{value:g} {what}{'' if value == 1 else 's'}{'/s' if driving is Driving.OPEN else ''}"


def short_load(value: float, driving: Driving) -> str:
    """Beside a point of a plot: "4/s", "32"."""
    return f"{value:g}/s" if driving is Driving.OPEN else f"{value:g}"


def phase_name(phase: Phase) -> str:
    return f"{load(phase.load, phase.driving)}, {WAY_NAMES[phase.way]}"
