"""What all pictures of this project have in common: colours, markers, a style.

Needs matplotlib (the extra `plot`), which whoever draws imports when something is drawn; nothing here does.  Colours
are Okabe and Ito's, which colour-blind readers tell apart; a line has a marker of its own beside its colour.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vPX*"
GREY = "#555555"
STYLE: Any = {
    "axes.edgecolor": GREY,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "font.size": 9,
    "svg.hashsalt": "tinyloop",  # the same content, the same file
}


def can_plot() -> bool:
    return find_spec("matplotlib") is not None
