"""The report of a load test: what it says first, which plots there are, and that a browser shows them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import open_page
from load_example import example, phase, slowed

from tinyloop_service import plotting
from tinyloop_service.errors import InvalidArgument, install
from tinyloop_service.load import report
from tinyloop_service.load.definitions import DEFINITIONS
from tinyloop_service.load.report.numbers import factors, load, number, percent, span
from tinyloop_service.load.results import Counts, Driving, ErrorCount, Latencies, Phase, Result, Verification, Way

SWEEP_PLOTS = {"ttft-open", "itl-open", "throughput-open", "served-open", "distributions", "rows", "pages"}


class Parts(HTMLParser):
    """Texts by tag, ids of plots, and every address that the page would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[tuple[str, str]] = []
        self.plots: set[str] = set()
        self.loads: list[str] = []
        self._open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self._open.append(tag)
        if tag == "svg":
            self.plots.add(str(given["id"]))
        self.loads += [str(value) for name, value in attributes if name in ("src", "srcset", "data", "action")]
        self.loads += [str(given["href"])] if tag in ("link", "image") else []

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self._open[-1], data))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def of(self, tag: str) -> list[str]:
        return [text for inside, text in self.texts if inside == tag]


def written(result: Result, folder: Path) -> Parts:
    return Parts(report.write(result, folder).read_text(encoding="utf-8"))


def single(one: Phase) -> Result:
    """One run, nothing beside it."""
    return replace(example(), phases=(one,), comparisons=(), economy=None, sweeps=(), verification=None)


def test_a_sweep_has_all_plots_and_failures_come_first(tmp_path: Path) -> None:
    parts = written(example(), tmp_path / "made" / "here")
    assert parts.of("h1") == ["97 of 1\u202f150 requests failed."]
    assert parts.plots == SWEEP_PLOTS
    assert Result.from_json((tmp_path / "made" / "here" / "result.json").read_text()) == example()
    assert any(text.startswith("UNAVAILABLE QUEUE_FULL: 9 at 4 requests/s, no sharing;") for text in parts.of("li"))
    assert "request 7, shared: token 3 is 41, alone 40" in parts.of("li")
    assert parts.of("pre")[0] == example().metadata.command
    assert [*DEFINITIONS] == parts.of("dt")[: len(DEFINITIONS)]
    assert parts.loads == [], "a page that needs nothing else"


def test_a_single_run_has_no_curve_against_loads(tmp_path: Path) -> None:
    one = replace(phase(Way.SHARED, 4.0), driving=Driving.CLOSED, load=32.0)
    parts = written(single(one), tmp_path)
    assert parts.of("h1") == ["No errors: 100 of 100 requests completed."]
    assert parts.plots == {"distributions", "rows", "pages"}
    assert "knee" not in parts.of("dt") and "no sharing" not in parts.of("dt")
    assert "32 callers" in parts.of("th")


def test_nothing_measured_draws_nothing(tmp_path: Path) -> None:
    empty = replace(phase(Way.SHARED, 4.0), latencies=Latencies(None, None, None, None, None, None), series=())
    assert written(single(empty), tmp_path).plots == set()
    assert written(replace(example(), phases=(), comparisons=(), sweeps=()), tmp_path).plots == set()


def test_a_harness_that_was_too_slow_says_so_first_and_draws_no_latency(tmp_path: Path) -> None:
    kept_up = phase(Way.SHARED, 2.0)
    slow = slowed(phase(Way.SHARED, 4.0), "its loop woke 34 ms late")
    parts = written(replace(single(slow), phases=(kept_up, slow)), tmp_path)
    said = "The harness was the bottleneck in 1 of 2 runs: their latencies and goodput are not reported."
    assert parts.of("h1") == [said]
    assert "within the SLO" in parts.of("text"), "of the load that it kept up with"
    assert "4 requests/s, shared prefix: its loop woke 34 ms late" in parts.of("li")
    assert parts.plots == {"served-open", "distributions", "rows", "pages"}, "one point is no curve"


def test_goodput_that_nobody_knows_is_neither_said_nor_drawn(tmp_path: Path) -> None:
    slow = tuple(slowed(one, "its loop woke 34 ms late") for one in example().phases)
    sweeps = tuple(replace(sweep, best_load=None, best_goodput_per_s=None) for sweep in example().sweeps)
    parts = written(replace(example(), phases=slow, sweeps=sweeps), tmp_path)
    assert "within the SLO" not in parts.of("text") and "Requests completed per second against the load." in [
        text.strip() for text in parts.of("figcaption")
    ]
    value = parts.texts.index(("span", "Most goodput")) + 1
    assert parts.texts[value] == ("b", "–")
    assert "unknown, the harness kept up with no load" in parts.texts[value + 1][1]


def test_expected_errors_are_told_apart_and_what_is_quoted_cannot_break_the_page(tmp_path: Path) -> None:
    expired = ErrorCount("NOT_FOUND", "PREFIX_EXPIRED", 3, True, "gone")
    one = replace(phase(Way.SHARED, 2.0), errors=(expired,), counts=Counts(60, 47, 10, 3, 0), pages_after=3)
    parts = written(single(one), tmp_path)
    assert parts.of("h1") == ["Memory did not come back: requests hold pages after the last of them."]
    said = "No unexpected errors: 47 of 60 requests completed, 10 were cancelled on purpose."
    assert said in parts.of("li")
    assert "Refused as the workload provokes it: 3 NOT_FOUND PREFIX_EXPIRED." in parts.of("li")

    hostile = "</style><script>alert('&')</script>"
    broken = replace(one, errors=(replace(expired, expected=False, example=hostile),), pages_after=0)
    quoted = replace(single(broken), metadata=replace(example().metadata, command=hostile, server={"name": hostile}))
    parts = written(quoted, tmp_path)
    assert parts.of("script") == []
    assert parts.of("pre")[:2] == [hostile, json.dumps({"name": hostile}, indent=2)]


def test_evictions_have_a_plot_where_there_were_any(tmp_path: Path) -> None:
    one = phase(Way.SHARED, 2.0)
    evicting = replace(one, series=tuple(replace(second, evictions=2) for second in one.series))
    assert written(single(evicting), tmp_path).plots == {"distributions", "rows", "pages", "evictions"}


def test_verified_runs_say_so(tmp_path: Path) -> None:
    checked = replace(single(phase(Way.SHARED, 2.0)), verification=Verification(16, 16, ()))
    assert "All 16 requests that were asked again, alone, gave the same tokens." in written(checked, tmp_path).of("li")


def test_nothing_completed_and_nothing_verified_is_not_good(tmp_path: Path) -> None:
    none = replace(phase(Way.SHARED, 2.0), counts=Counts(3, 0, 0, 0, 3), errors=())
    page = written(replace(single(none), verification=Verification(0, 0, ())), tmp_path)
    assert page.of("h1") == ["Not one of 3 requests was completed."]
    assert any("No answer could be asked for again" in line for line in page.of("li"))


def test_without_matplotlib_there_is_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plotting, "find_spec", lambda name: None)
    with pytest.raises(InvalidArgument, match=re.escape(install("plot"))):
        report.write(example(), tmp_path / "never")
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (number(1043.2), "1\u202f043"),
        (number(9.9996), "10.0"),
        (number(0.18444), "0.184"),
        (number(0.0), "0"),
        (number(None), "–"),
        (span(1250.0), "1.25\u202fs"),
        (span(42.0), "42.0\u202fms"),
        (percent(0.99999), "99.9\u202f%"),
        (percent(1.0), "100\u202f%"),
        (percent(0.00001), "<0.1\u202f%"),
        (percent(0.055), "5.5\u202f%"),
        (load(1.0, Driving.OPEN), "1 request/s"),
        (load(0.5, Driving.OPEN), "0.5 requests/s"),
        (load(32.0, Driving.CLOSED), "32 callers"),
        (factors([2.8, 1.0, 2.0]), "1.00–2.80\u202f×"),
        (factors([2.8]), "2.80\u202f×"),
    ],
)
def test_numbers_as_people_read_them(shown: str, expected: str) -> None:
    assert shown == expected


MEASURE = """<script>
const plots = {};
for (const svg of document.querySelectorAll("svg")) {
  const texts = [...svg.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  const overlaps = texts.flatMap(([one, a], place) =>
    texts.slice(place + 1).filter(([_, b]) => meet(a, b)).map(([other]) => one + " / " + other));
  const {width, height} = svg.getBoundingClientRect(), line = svg.querySelector("path[style*=stroke]");
  plots[svg.id] = {width, height, texts: texts.length, overlaps, stroke: getComputedStyle(line).stroke};
}
const cut = [...document.querySelectorAll("html, .scroll")].filter(each => each.scrollWidth > each.clientWidth).length;
document.body.textContent = JSON.stringify({plots, cut});
</script>"""


def test_a_browser_shows_every_plot_and_has_nothing_to_complain_of(tmp_path: Path) -> None:
    page = report.write(example(), tmp_path).read_text(encoding="utf-8")
    measured = tmp_path / "measured.html"
    allowed = page.replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'")
    measured.write_text(allowed.replace("</body>", f"{MEASURE}</body>"), encoding="utf-8")
    opened = open_page(measured, tmp_path / "profile")
    assert opened.complaints == ()
    found = json.loads(opened.dom.partition("<body>")[2].partition("</body>")[0])
    assert found["plots"].keys() == SWEEP_PLOTS
    for name, plot in found["plots"].items():
        assert plot["width"] > 400 and plot["height"] > 200 and plot["texts"] > 5, f"{name}: {plot}"
        assert plot["stroke"].startswith("rgb"), f"{name}: a colour that the page does not have"
        assert plot["overlaps"] == [], f"{name}: texts lie upon each other"
    assert found["cut"] == 0, "page and tables fit a laptop's width"


def test_the_browser_would_complain_of_a_page_that_loads_something(tmp_path: Path) -> None:
    page = report.write(single(phase(Way.SHARED, 2.0)), tmp_path).read_text(encoding="utf-8")
    (tmp_path / "loads.html").write_text(page.replace("</body>", '<img src="http://127.0.0.1:9/x.png"></body>'))
    [complaint] = open_page(tmp_path / "loads.html", tmp_path / "profile").complaints
    assert "Content Security Policy" in complaint
