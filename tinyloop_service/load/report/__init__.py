"""A load test as a page that a stranger understands: verdict, figures with their definitions, plots, how it was made.

    verdict     what to know first                  tables    numbers, and what they mean
    curves      plots against the load              clocks    plots over time, distributions
    canvas      matplotlib's figures as inline SVG  page      HTML of all that

In: a `Result`.  Out: report.html, which needs no network and no script, and result.json beside it.  It refuses to know
how anything was measured.
"""

from __future__ import annotations

from pathlib import Path

from tinyloop_service.errors import InvalidArgument, install
from tinyloop_service.load.results import Result
from tinyloop_service.plotting import can_plot

__all__ = ["write"]


def write(result: Result, directory: Path | str) -> Path:
    """The page's path; the folder is made if it is missing.

    Raises InvalidArgument without matplotlib, which the extra `plot` brings, and OSError.
    """
    if not can_plot():
        raise InvalidArgument("report", f"needs matplotlib: {install('plot')}")
    from tinyloop_service.load.report.page import render

    page = render(result)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(result.to_json() + "\n", encoding="utf-8")
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path
