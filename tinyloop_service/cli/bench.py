"""`tinyloop bench`: what a model costs on this machine, and what sharing a prefix saves."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from tinyloop_service.cli import output
from tinyloop_service.cli.options import json_option, read_settings, settings_options

if TYPE_CHECKING:
    from tinyloop_service.bench import Report


@click.command()
@click.option("--model", "path", type=click.Path(path_type=Path), help="A .tinyloop file.  [default: the demo model]")
@click.option("--prefix", "prefix_len", type=click.IntRange(1), default=1024, show_default=True, help="Prefix tokens.")
@click.option(
    "--rows", type=click.IntRange(1), multiple=True, metavar="N [N]...", help="Requests at once.  [default: 1 10 50]"
)
@click.argument("more_rows", type=click.IntRange(1), nargs=-1, metavar="")  # what follows the first number of --rows
@click.option("--new-tokens", type=click.IntRange(1), default=32, show_default=True, help="Tokens per request.")
@click.option("--loops", type=click.IntRange(1), help="Depth, in loops.  [default: the model's]")
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="How often all is measured; figures are medians.",
)
@settings_options("engine", "threads", "cache_mode", "kv_memory", "accuracy_level")
@json_option
def bench(
    path: Path | None,
    prefix_len: int,
    rows: tuple[int, ...],
    more_rows: tuple[int, ...],
    new_tokens: int,
    loops: int | None,
    rounds: int,
    as_json: bool,
    **given: str | None,
) -> None:
    """Measure prefill, decode steps, and SHARED against NO_CACHE, on one model in this process.

    A decode step is one step of that many rows off one shared prefix.  SHARED is one prefill, then all requests at
    once; NO_CACHE is each request with its own prefill, one after the other, measured up to 10 requests and
    scaled above.  Predicted: (P + D) / (P/N + D), P a prefill, D the decode steps of one request.

    \b
    Examples:
      tinyloop bench
      tinyloop bench --model 407m.tinyloop --prefix 1024 --rows 1 10 50 --new-tokens 32 --json
    """
    from tinyloop_service.bench import Workload, kv_memory_for, run_bench
    from tinyloop_service.demo import MODEL_PATH
    from tinyloop_service.engine.weights import read_model
    from tinyloop_service.loading import build_engine

    counts = tuple(sorted({*rows, *more_rows})) or (1, 10, 50)
    workload = Workload(prefix_len, counts, new_tokens, loops, rounds)
    settings = read_settings(given).engine
    with output.waiting("loading the model") as say:
        weights = read_model(path or MODEL_PATH)
        if settings.kv_memory is None:
            settings = dataclasses.replace(settings, kv_memory=kv_memory_for(weights.spec, workload))
        say("preparing the engine and checking its bits")
        report = run_bench(build_engine(weights, settings, progress=say), workload, say)
    if as_json:
        output.print_json({"model": str(path or "demo"), **report.as_dict()})
    else:
        _print(report)


def _print(report: Report) -> None:
    active = {}
    if report.active_bytes:
        made = f"made from the stored form in {report.activate_ms:.1f} ms"
        active["active"] = f"{output.human_bytes(report.active_bytes)} while requests read it, {made}"
    output.print_facts(
        {
            "engine": f"{report.engine} on {report.machine}",
            "prefix": f"{report.prefix_len} tokens at {report.loops} loops, "
            f"{output.human_bytes(report.prefix_bytes)} ({report.cache_mode})",
            "prefill": f"{report.prefill_ms:.1f} ms, {report.prefill_tokens_per_s:.0f} tokens/s",
            **active,
        }
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("requests", "decode step", "SHARED", "NO_CACHE", "speed-up", "predicted"):
        table.add_column(column, justify="right")
    for key, shared in report.shared_ms.items():
        scaled = "≈" if key in report.no_cache_scaled else ""
        table.add_row(
            key,
            f"{report.decode_step_ms[key]:.2f} ms",
            f"{shared:.0f} ms",
            f"{scaled}{report.no_cache_ms[key]:.0f} ms",
            f"{scaled}{report.speedup[key]:.2f}×",
            f"{report.predicted_speedup[key]:.2f}×",
        )
    output.out.print()
    output.out.print(table)
    note = "; ≈ scaled from the measured requests" if report.no_cache_scaled else ""
    made = f"medians of {report.rounds} rounds" if report.rounds > 1 else "one round"
    output.out.print(f"\n{report.new_tokens} new tokens a request, {made}{note}", style="dim")
