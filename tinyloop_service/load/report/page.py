"""The page: headline, tiles, plots, tables, how it was made, in the order that a reader needs them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from importlib.resources import files
from typing import Any

from tinyloop_service.load.definitions import used
from tinyloop_service.load.report import tables
from tinyloop_service.load.report.clocks import distributions, over_time
from tinyloop_service.load.report.curves import Plot, curves
from tinyloop_service.load.report.markup import Markup, join, tag
from tinyloop_service.load.report.verdict import Finding, findings
from tinyloop_service.load.results import Metadata, Result

_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
"""


def render(result: Result) -> str:
    """The whole document."""
    found = findings(result)
    workload = str(result.metadata.workload.get("name", "load test"))
    style = files("tinyloop_service.load.report").joinpath("style.css").read_text(encoding="utf-8")
    title = tag("title", f"{workload}: {found[0].sentence}")
    body = tag("body", *_sections(result, found, workload))
    return f"{_HEAD}{title}\n<style>\n{style}</style>\n</head>\n{body}\n</html>\n"


def _sections(result: Result, found: tuple[Finding, ...], workload: str) -> Iterator[Markup]:
    about = result.metadata
    yield tag("div", f"TinyLoop load test, workload “{workload}”, {about.target}, {_moment(about)}", class_="about")
    yield _headline(found[0])
    yield tag("ul", *map(_finding, found[1:]), class_="findings")
    yield tag("div", *map(_tile, tables.tiles(result)), class_="tiles")
    plots = [*curves(result), *distributions(result), *over_time(result)]
    if plots:
        yield join(tag("h2", "Curves"), tag("div", *map(_figure, plots), class_="plots"))
    yield join(tag("h2", "Numbers"), tables.runs(result))
    yield tag("details", tag("summary", "All percentiles, and the harness's own lag"), tables.percentiles(result))
    sharing = join(tables.comparisons(result), tables.economy(result))
    if sharing:
        yield join(tag("h2", "What sharing is worth"), tag("p", _SHARING, class_="note"), sharing)
    yield join(tag("h2", "What the words mean"), _definitions(result))
    yield join(tag("h2", "How it was made"), *_made(about))


_SHARING = "How many times better a load was served with a shared prefix than without: 1 × is alike."


def _headline(first: Finding) -> Markup:
    grade = first.grade.name.lower()
    details = tag("ul", tag("li", *_details(first), class_=grade), class_="findings") if first.details else Markup()
    return join(tag("h1", first.sentence, class_=grade), details)


def _finding(finding: Finding) -> Markup:
    return tag("li", finding.sentence, *_details(finding), class_=finding.grade.name.lower())


def _details(finding: Finding) -> tuple[Markup, ...]:
    return (tag("ul", *(tag("li", detail) for detail in finding.details)),) if finding.details else ()


def _tile(tile: tables.Tile) -> Markup:
    return tag("div", tag("span", tile.title), tag("b", tile.value), tag("span", tile.note), class_="tile")


def _figure(plot: Plot) -> Markup:
    text = tag("figcaption", tag("h3", plot.title), plot.caption)
    return tag("figure", text, plot.svg, class_="wide" if plot.is_wide else "narrow")


def _definitions(result: Result) -> Markup:
    return tag("dl", *(join(tag("dt", term), tag("dd", meaning)) for term, meaning in used(result).items()))


def _moment(about: Metadata) -> str:
    try:
        moment = datetime.fromisoformat(about.start_time)
    except ValueError:
        return about.start_time
    return f"{moment:%Y-%m-%d %H:%M} {moment.tzname() or ''}".strip()


def _made(about: Metadata) -> Iterator[Markup]:
    yield tag("pre", about.command)
    facts = {
        "harness on": about.machine,
        "target": about.target,
        "seed": str(about.seed),
        "processes": str(about.processes),
        "SLO": tables.slo_text(about.slo) if about.slo else "none",
        "versions": ", ".join(f"{name} {version}" for name, version in about.versions.items()),
    }
    yield tag("dl", *(join(tag("dt", name), tag("dd", value)) for name, value in facts.items()))
    yield _quoted("The server (GetModel)", about.server)
    yield _quoted("The workload, scaled to the model", about.workload)
    yield tag(
        "p", "All numbers, with the distributions and the seconds, are in result.json beside this page.", class_="note"
    )


def _quoted(title: str, value: Mapping[str, Any]) -> Markup:
    return tag("details", tag("summary", title), tag("pre", json.dumps(value, indent=2, ensure_ascii=False)))
