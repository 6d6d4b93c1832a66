"""The Grafana dashboard as code: `python deploy/grafana/dashboard.py` writes dashboard.json beside it.

One row of numbers that say how it is now, and below it what came in, how long it took, what the engine did, and what
memory holds.  Everything can be narrowed to jobs and instances by the variables at the top.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET = Path(__file__).with_suffix(".json")
WIDTH = 24
SELECT = 'job=~"$job",instance=~"$instance"'
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
Query = tuple[str, str]  # expression, legend
Panel = dict[str, Any]


def of(metric: str, *selectors: str) -> str:
    """A metric of the chosen instances."""
    return f"{metric}{{{','.join([SELECT, *selectors])}}}"


def rate(metric: str, by: str = "", *selectors: str) -> str:
    """A counter's sum a second, by labels."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({of(metric, *selectors)}[$__rate_interval]))"


def quantiles(histogram: str) -> list[Query]:
    """The three that people ask for, over all chosen instances."""
    buckets = rate(f"{histogram}_bucket", "le")
    return [(f"histogram_quantile({q}, {buckets})", f"p{round(q * 100)}") for q in (0.5, 0.95, 0.99)]


@dataclass
class Page:
    """Panels in rows, from left to right, top to bottom."""

    panels: list[Panel]
    top: int = 0

    def row(self, title: str) -> None:
        self._add({"type": "row", "title": title, "collapsed": False, "panels": []}, 0, WIDTH, 1)
        self.top += 1

    def line(self, height: int, *panels: Panel) -> None:
        """Panels side by side, equally wide."""
        width = WIDTH // len(panels)
        for index, panel in enumerate(panels):
            self._add(panel, index * width, width, height)
        self.top += height

    def _add(self, panel: Panel, left: int, width: int, height: int) -> None:
        place = {"x": left, "y": self.top, "w": width, "h": height}
        self.panels.append({"id": len(self.panels) + 1, **panel, "gridPos": place})


def _panel(kind: str, title: str, unit: str, queries: list[Query], description: str) -> Panel:
    targets = [
        {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
        for i, (expression, legend) in enumerate(queries)
    ]
    field = {"defaults": {"unit": unit, "min": 0}, "overrides": []}
    panel = {"type": kind, "title": title, "datasource": SOURCE, "targets": targets, "fieldConfig": field}
    return {**panel, "description": description} if description else panel


def number(title: str, unit: str, expression: str, *steps: tuple[str, float | None], description: str = "") -> Panel:
    """One value; `steps`: from where it has which colour."""
    panel = _panel("stat", title, unit, [(expression, "")], description)
    colours = [{"color": colour, "value": start} for colour, start in steps or (("blue", None),)]
    panel["fieldConfig"]["defaults"]["thresholds"] = {"mode": "absolute", "steps": colours}
    panel["options"] = {"colorMode": "value", "graphMode": "area", "reduceOptions": {"calcs": ["lastNotNull"]}}
    return panel


def graph(title: str, unit: str, *queries: Query, stacked: bool = False, description: str = "") -> Panel:
    panel = _panel("timeseries", title, unit, list(queries), description)
    drawn = {"fillOpacity": 25 if stacked else 5, "lineWidth": 1, "showPoints": "never"}
    drawn["stacking"] = {"mode": "normal" if stacked else "none"}
    panel["fieldConfig"]["defaults"]["custom"] = drawn
    panel["options"] = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    return panel


def table(title: str, expression: str) -> Panel:
    """The labels of a metric whose value says nothing."""
    panel = _panel("table", title, "none", [(expression, "")], "")
    panel["targets"][0] |= {"format": "table", "instant": True}
    hidden = {"Time": True, "Value": True, "__name__": True, "job": True}
    panel["transformations"] = [{"id": "organize", "options": {"excludeByName": hidden}}]
    return panel


def _now(page: Page) -> None:
    hits, queries = rate("tinyloop_prefix_cache_hits_total"), rate("tinyloop_prefix_cache_queries_total")
    free, pages = of("tinyloop_kv_pages", 'state="free"'), of("tinyloop_kv_pages")
    first = quantiles("tinyloop_time_to_first_token_seconds")[1][0]
    failed = of("tinyloop_calls_total", 'code="INTERNAL"')
    page.row("Now")
    page.line(
        4,
        number("Ready", "none", f"sum({of('tinyloop_ready')})", ("red", None), ("green", 1)),
        number("Running", "none", f"sum({of('tinyloop_requests_running')})"),
        number(
            "Waiting", "none", f"sum({of('tinyloop_requests_waiting')})", ("green", None), ("orange", 1), ("red", 100)
        ),
        number("Tokens a second", "none", rate("tinyloop_generation_tokens_total")),
        number(
            "From prefixes",
            "percentunit",
            f"{hits} / {queries}",
            description="Share of prompt tokens that nothing was computed for: hits / queries.",
        ),
        number(
            "Pages in use",
            "percentunit",
            f"1 - sum({free}) / sum({pages})",
            ("green", None),
            ("orange", 0.9),
            ("red", 0.98),
        ),
        number("First token, p95", "s", first, description="First non-empty token − arrival, in the server."),
        number("Faults, last hour", "none", f"sum(increase({failed}[1h]))", ("green", None), ("red", 1)),
    )


def _traffic(page: Page) -> None:
    hits, queries = rate("tinyloop_prefix_cache_hits_total"), rate("tinyloop_prefix_cache_queries_total")
    page.row("What came in")
    page.line(
        8,
        graph(
            "Tokens generated a second, by tenant",
            "none",
            (rate("tinyloop_generation_tokens_total", "tenant"), "{{tenant}}"),
            stacked=True,
        ),
        graph(
            "Prompt tokens a second",
            "none",
            (hits, "from prefixes"),
            (f"{queries} - {hits}", "computed"),
            stacked=True,
            description="Of admitted requests, each counted once.",
        ),
        graph(
            "Prompt tokens a second, by tenant",
            "none",
            (rate("tinyloop_prompt_tokens_total", "tenant"), "{{tenant}}"),
            stacked=True,
        ),
    )
    page.line(
        8,
        graph(
            "Choices that ended a second, by reason",
            "none",
            (rate("tinyloop_choices_finished_total", "finish_reason"), "{{finish_reason}}"),
            stacked=True,
        ),
        graph(
            "Refusals a second, by reason",
            "none",
            (rate("tinyloop_rejections_total", "reason"), "{{reason}}"),
            stacked=True,
        ),
        graph(
            "Calls a second, by method and status",
            "none",
            (rate("tinyloop_calls_total", "method, code") + " > 0", "{{method}} {{code}}"),
            (rate("tinyloop_log_lines_dropped_total") + " > 0", "lines of the log, dropped"),
            stacked=True,
        ),
    )


def _times(page: Page) -> None:
    page.row("How long it took")
    page.line(
        8,
        graph("First token", "s", *quantiles("tinyloop_time_to_first_token_seconds")),
        graph(
            "Between two tokens",
            "s",
            *quantiles("tinyloop_inter_token_latency_seconds"),
            description="By token: k tokens that came together count k times, each the gap / k.",
        ),
        graph("Whole request", "s", *quantiles("tinyloop_e2e_request_latency_seconds")),
        graph(
            "In the queue",
            "s",
            *quantiles("tinyloop_request_queue_time_seconds"),
            description="Admission − arrival; the build of a missing prefix included.",
        ),
    )


def _engine(page: Page) -> None:
    step, rows = "tinyloop_step_time_seconds", "tinyloop_step_rows"
    page.row("What the engine did")
    page.line(
        8,
        graph("A step", "s", *quantiles(step)),
        graph(
            "Rows of a step",
            "none",
            (f"{rate(f'{rows}_sum')} / {rate(f'{rows}_count')}", "mean"),
            quantiles(rows)[1],
        ),
        graph(
            "Steps a second, and the share of time in them",
            "none",
            (rate(f"{step}_count", "instance"), "steps of {{instance}}"),
            (rate(f"{step}_sum", "instance"), "share of {{instance}}"),
        ),
        graph("Prompt tokens computed a second", "none", (rate("tinyloop_prefilled_tokens_total"), "tokens")),
    )
    page.line(
        8,
        graph("Running", "none", (of("tinyloop_requests_running"), "{{instance}}"), stacked=True),
        graph("Waiting", "none", (of("tinyloop_requests_waiting"), "{{instance}}"), stacked=True),
        graph("Rows", "none", (of("tinyloop_rows_running"), "{{instance}}"), stacked=True),
        graph(
            "Processes that speak gRPC",
            "none",
            (of("tinyloop_grpc_processes"), "{{instance}}"),
            (f"60 * {rate('tinyloop_grpc_process_restarts_total', 'reason')} > 0", "started anew a minute, {{reason}}"),
        ),
    )


def _memory(page: Page) -> None:
    page.row("What memory holds")
    page.line(
        8,
        graph("Pages", "none", (f"sum by (state) ({of('tinyloop_kv_pages')})", "{{state}}"), stacked=True),
        graph("Prefixes", "none", (f"sum by (state) ({of('tinyloop_prefixes')})", "{{state}}"), stacked=True),
        graph("Stored prefixes", "bytes", (of("tinyloop_prefix_bytes"), "{{instance}}"), stacked=True),
        graph(
            "Memory of processes",
            "bytes",
            (of("process_resident_memory_bytes"), "{{instance}}"),
            (of("tinyloop_grpc_processes_resident_memory_bytes") + " > 0", "{{instance}}, those that speak gRPC"),
        ),
    )
    page.line(
        8,
        graph("A prefix's build", "s", *quantiles("tinyloop_prefix_build_seconds")),
        graph(
            "Builds and evictions a minute",
            "none",
            (f"60 * {rate('tinyloop_prefix_build_seconds_count')}", "built"),
            (f"60 * {rate('tinyloop_prefix_restore_seconds_count')}", "restored from a snapshot"),
            (f"60 * {rate('tinyloop_prefix_evictions_total')}", "evicted"),
            (f"60 * {rate('tinyloop_prefix_builds_failed_total', 'reason')} > 0", "failed, {{reason}}"),
        ),
        table("What runs", of("tinyloop_build_info")),
    )


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard() -> dict[str, Any]:
    page = Page([])
    for part in (_now, _traffic, _times, _engine, _memory):
        part(page)
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    variables = [
        source,
        _variable("job", "job", "label_values(tinyloop_ready, job)"),
        _variable("instance", "instance", 'label_values(tinyloop_ready{job=~"$job"}, instance)'),
    ]
    return {
        "title": "TinyLoop",
        "uid": "tinyloop",
        "tags": ["tinyloop"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": variables},
        "panels": page.panels,
    }


def written() -> str:
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(written(), encoding="utf-8")
