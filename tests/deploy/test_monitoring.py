"""Dashboard and rules: promtool takes every expression, every alert fires when it should, every metric exists."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tinyloop_service.observe.exposition import FAMILIES, Distribution, Snapshot, families
from tinyloop_service.observe.metrics import Metrics
from tinyloop_service.types import Load

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yaml"
ALERTS = Path(__file__).parent / "alerts.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboard.json"
OF_EVERY_SERIES = {"job", "instance", "le"}  # what Prometheus adds, and what a histogram has
KNOWN = {family.name: family for family in FAMILIES}


def promtool(*arguments: str | Path, stdin: str = "") -> str:
    """What it says.  Skips where there is none; fails in CI, and where it finds fault."""
    own = ROOT / "build" / "ops" / "promtool"
    found = str(own) if own.exists() else shutil.which("promtool")
    if found is None:
        assert os.environ.get("CI", "").lower() not in ("1", "true"), "promtool is missing; run `make ops-tools`"
        pytest.skip("promtool is missing; `make ops-tools` fetches it (as root, on Debian or Ubuntu)")
    done = subprocess.run([found, *arguments], input=stdin, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def queries() -> list[str]:
    """Every expression of the dashboard, its variables filled in."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    raw = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [re.sub(r"\$job|\$instance", ".*", query.replace("$__rate_interval", "5m")) for query in raw]


def recorded() -> set[str]:
    return set(re.findall(r"record: (\S+)", RULES.read_text(encoding="utf-8")))


def test_promtool_takes_the_rules() -> None:
    assert "SUCCESS" in promtool("check", "rules", RULES)


def test_every_alert_fires_when_it_should_and_only_then() -> None:
    assert "SUCCESS" in promtool("test", "rules", ALERTS)
    alerts = re.findall(r"alert: (\S+)", RULES.read_text(encoding="utf-8"))
    tested = set(re.findall(r"alertname: (\S+)", ALERTS.read_text(encoding="utf-8")))
    assert len(alerts) == len(set(alerts)) and tested == set(alerts)


def test_promtool_takes_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(queries())]
    made = tmp_path / "dashboard.yaml"
    made.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))  # JSON is YAML too
    assert f"{len(rules)} rules found" in promtool("check", "rules", made)


def test_promtool_finds_no_fault_with_names_and_help() -> None:
    class All(Collector):
        def collect(self) -> Iterator[Metric]:
            yield from families(Snapshot(metrics, load, True, dict.fromkeys(labels, "x")))

    metrics, load = Metrics(), Load(*range(1, 12), accepting=True)
    metrics.rejections["", "QUEUE_FULL"] += 1
    labels = KNOWN["tinyloop_build_info"].labels
    registry = CollectorRegistry()
    registry.register(All())
    assert promtool("check", "metrics", stdin=generate_latest(registry).decode()).strip() == ""


@pytest.mark.parametrize("source", ["dashboard", "rules", "alerts"])
def test_every_metric_that_is_named_exists_and_has_the_labels(source: str) -> None:
    text = "\n".join(queries()) if source == "dashboard" else {"rules": RULES, "alerts": ALERTS}[source].read_text()
    assert set(re.findall(r"\btinyloop:[a-z0-9_:]+", text)) <= recorded()
    named = re.findall(r"\b(tinyloop_[a-z0-9_]+)(?:\{([^}]*)\})?", text)
    assert len(named) > 10
    for name, selectors in named:
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        family = KNOWN.get(name) or KNOWN.get(base)
        assert family is not None, f"{source} names {name}, which nothing exposes"
        assert (name == family.name) is not isinstance(family, Distribution), f"{name} is no series of a {family}"
        labels = set(re.findall(r"(\w+)=~?\"", selectors))
        assert labels <= {*family.labels, *OF_EVERY_SERIES}, f"{source}: {name} has no {labels - {*family.labels}}"


def test_every_metric_is_on_the_dashboard() -> None:
    shown = "\n".join(queries())
    assert [name for name in KNOWN if name not in shown] == []


def test_what_is_grouped_by_is_a_label() -> None:
    labels = {label for family in FAMILIES for label in family.labels} | OF_EVERY_SERIES
    grouped = re.findall(r"(?:by|without) \(([^)]*)\)", "\n".join(queries()) + RULES.read_text(encoding="utf-8"))
    assert {name.strip() for group in grouped for name in group.split(",")} <= labels


def test_the_dashboard_is_the_one_its_source_makes() -> None:
    made = runpy.run_path(str(DASHBOARD.with_suffix(".py")))
    assert DASHBOARD.read_text(encoding="utf-8") == made["written"](), "run python deploy/grafana/dashboard.py"


def test_panels_lie_beside_one_another() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and all(x < 24 for x, _ in cells)
    assert len({panel["id"] for panel in panels}) == len(panels)
