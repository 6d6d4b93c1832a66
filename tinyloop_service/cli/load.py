"""`tinyloop load`: a load test of a server, or of the engine in this process.

    load_options   what is asked        load_run   what is found        load_view   what is shown meanwhile and then

Here: the options by name, and where a result goes.
"""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from tinyloop_service.cli import output
from tinyloop_service.cli.connection import Connection, client_options
from tinyloop_service.cli.load_options import VERIFIED, asked, parse_change, parse_loads, parse_slo
from tinyloop_service.cli.options import parse_duration
from tinyloop_service.errors import install
from tinyloop_service.load.results import Result


@click.command()
@click.option(
    "--workload",
    "-w",
    "name",
    default="rag",
    show_default=True,
    metavar="NAME|FILE",
    help="What is asked: a name from above, or a file.",
)
@click.option(
    "--set",
    "changes",
    type=parse_change,
    multiple=True,
    metavar="KEY=VALUE",
    help="Change one key of the workload, for example prefix_len=512; may be repeated.",
)
@click.option(
    "--rate",
    type=parse_loads,
    metavar="R[,R]...",
    help="Open loop: so many requests a second, whether answers come or not.  Excludes --concurrency.",
)
@click.option(
    "--concurrency",
    "-c",
    type=parse_loads,
    metavar="C[,C]...",
    help="Closed loop: so many callers, each waits for its answer.  Excludes --rate.  [default: 8]",
)
@click.option(
    "--sweep",
    is_flag=True,
    help="Begin with that load and double it until the server does not follow; find that point.",
)
@click.option(
    "--phases", type=click.IntRange(2), default=8, show_default=True, help="Loads that a sweep may try, at most."
)
@click.option(
    "--duration",
    type=parse_duration,
    default="30s",
    show_default=True,
    metavar="DURATION",
    help="How long each load is measured.",
)
@click.option(
    "--warmup",
    type=parse_duration,
    default="5s",
    show_default=True,
    metavar="DURATION",
    help="How long each load runs before anything counts.",
)
@click.option(
    "--slo",
    type=parse_slo,
    metavar="BOUNDS",
    help="Count requests that keep these bounds, for example ttft=200ms,itl=30ms.",
)
@click.option("--no-share", is_flag=True, help="Share nothing: send the prefix with each prompt.")
@click.option("--compare", is_flag=True, help="Run both with and without sharing, in turn.")
@click.option("--verify", is_flag=True, help=f"Ask {VERIFIED} of the requests again, alone; the ids must be the same.")
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="The same seed gives the same schedule, prompts and sampling.",
)
@click.option(
    "--processes", type=click.IntRange(1, 64), default=1, show_default=True, help="Processes that send the requests."
)
@click.option(
    "--in-process",
    type=click.Path(path_type=Path),
    metavar="MODEL",
    help="Ask no server, but this model file, in this process.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, allow_dash=True, dir_okay=False, writable=True),
    help="Write every figure to this file; - prints.",
)
@click.option(
    "--report",
    "report_path",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write a page with plots into this directory.",
)
@client_options
def load(server: Connection, json_path: Path | None, report_path: Path | None, **options: Any) -> int:
    """Load a server as its users would, and say how it did: latencies, throughput, what sharing is worth.

    Workloads: rag, chat-template, few-shot, gsp, prefix-repetition, zipf-churn, cancel-heavy, one-huge-build, or a
    file like theirs.  Prefixes are made before, and deleted afterwards.  Ends with 1 where anything failed
    with an error that the workload does not name, where latencies are the harness's own, where no request was
    completed, where memory did not come back, or where an answer differs.

    \b
    Examples:
      tinyloop load --workload rag --concurrency 32 --compare --verify
      tinyloop load --workload chat-template --rate 4 --slo ttft=200ms,itl=30ms --json run.json
      tinyloop load --sweep --rate 1 --duration 20s --report curves
      tinyloop load --in-process model.tinyloop --set prefix_len=512 --set output_len=[8,64]
    """
    if find_spec("hdrh") is None:
        raise click.UsageError(f"load tests need hdrhistogram: {install('load')}")
    test = asked(options, json_path, report_path)
    from tinyloop_service.cli import load_view
    from tinyloop_service.cli.load_run import run

    with load_view.watching(test.workload.name) as tell:
        result = asyncio.run(run(test, server, tell))
    _deliver(result, json_path, report_path)
    return _status(result)


def _deliver(result: Result, json_path: Path | None, report_path: Path | None) -> None:
    from tinyloop_service.cli import load_view
    from tinyloop_service.load import report

    try:
        if json_path is not None and str(json_path) != "-":
            json_path.write_text(result.to_json() + "\n", encoding="utf-8")
    finally:  # a disk that is full takes nothing from who reads
        if str(json_path) == "-":
            load_view.print_troubles(result)
            print(result.to_json())
        else:
            load_view.print_result(result)
    if report_path is not None:
        output.err.print(f"written: {report.write(result, report_path)}")


def _status(result: Result) -> int:
    """1 where something failed unexpectedly, or where figures or answers must not be relied on."""
    failed = any(not error.expected for _, error in result.errors())
    useless = any(phase.lag.bottleneck or not phase.counts.completed for phase in result.phases)
    useless |= any(phase.keeps_pages and not phase.counts.unfinished for phase in result.phases)
    useless |= not result.sweeps and any(phase.counts.unfinished for phase in result.phases)  # a sweep goes too far
    check = result.verification
    return int(failed or useless or (check is not None and check.alike < check.asked))
