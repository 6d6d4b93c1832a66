"""`tinyloop load`: a load test of a server, or of the engine in this process."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
import tomllib
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinyloop_service.cli import output
from tinyloop_service.cli.connection import Connection, client_options
from tinyloop_service.cli.options import parse_duration, read_settings
from tinyloop_service.load.results import Driving, Metadata, Result, Slo, Way

if TYPE_CHECKING:
    from tinyloop_service.client import ModelInfo
    from tinyloop_service.load.run import Plan, Target
    from tinyloop_service.load.workload import Workload

VERIFIED = 16  # answers, with --verify
MOST_LOADS = 32
MOST_REQUESTS = 5_000_000  # of a phase: they are drawn ahead
MOST_CALLERS = 100_000
_BOUND = re.compile(r"(ttft|itl|e2e)=(\S+)")


def parse_loads(value: str | tuple[float, ...]) -> tuple[float, ...]:
    """ "4" or "1,2,4" → (1.0, 2.0, 4.0)."""
    if isinstance(value, tuple):
        return value
    try:
        loads = tuple(float(item) for item in value.split(","))
    except ValueError:
        loads = ()
    if not loads or len(loads) > MOST_LOADS or not all(0 < load <= 1e6 for load in loads):
        raise click.BadParameter(f"{value!r} is neither a number above 0 nor a list of them; examples: 4 and 1,2,4")
    return loads


def parse_slo(value: str | Slo) -> Slo:
    """ "ttft=200ms,itl=30ms" → Slo(200.0, 30.0)."""
    if isinstance(value, Slo):
        return value
    bounds: dict[str, float] = {}
    for item in value.split(","):
        found = _BOUND.fullmatch(item.strip())
        if not found or f"{found[1]}_ms" in bounds:
            raise click.BadParameter(
                f"{item!r} is no bound, or a second one; expected ttft=, itl= or e2e= with a duration, as in itl=30ms"
            )
        bounds[f"{found[1]}_ms"] = bound_ms = parse_duration(found[2]).total_seconds() * 1e3
        if not bound_ms:
            raise click.BadParameter(f"{item!r} is kept by nothing; expected a duration above 0")
    return Slo(**bounds)


def parse_change(value: str | tuple[str, Any]) -> tuple[str, Any]:
    """ "prefixes=8" → ("prefixes", 8); the value is as a workload's file has it."""
    if isinstance(value, tuple):
        return value
    key, _, text = value.partition("=")
    try:
        return key.strip(), tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        raise click.BadParameter(f"{value!r} is no KEY=VALUE as a workload's file has it; text needs quotes") from None


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
    help="Open loop: so many requests a second, whether answers come or not.",
)
@click.option(
    "--concurrency",
    "-c",
    type=parse_loads,
    metavar="C[,C]...",
    help="Closed loop: so many callers, each waits for its answer.  [default: 8]",
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
def load(
    name: str,
    changes: tuple[tuple[str, Any], ...],
    rate: tuple[float, ...] | None,
    concurrency: tuple[float, ...] | None,
    server: Connection,
    json_path: Path | None,
    report_path: Path | None,
    **options: Any,
) -> int:
    """Load a server as its users would, and say how it did: latencies, throughput, what sharing is worth.

    Workloads: rag, chat-template, few-shot, gsp, prefix-repetition, zipf-churn, cancel-heavy, one-huge-build, or a
    file like theirs.  Prefixes are made before, and deleted afterwards.  Ends with 1 where latencies
    are the harness's own, where no request was completed, or where an answer differs.

    \b
    Examples:
      tinyloop load --workload rag --concurrency 32 --compare --verify
      tinyloop load --workload chat-template --rate 4 --slo ttft=200ms,itl=30ms --json run.json
      tinyloop load --sweep --rate 1 --duration 20s --report curves
      tinyloop load --in-process model.tinyloop --set prefix_len=512 --set output_len=[8,64]
    """
    if find_spec("hdrh") is None:
        raise click.UsageError("load tests need hdrhistogram: pip install 'tinyloop-service[load]'")
    from tinyloop_service.load import report
    from tinyloop_service.load.workload import read_workload
    from tinyloop_service.plotting import can_plot

    driving, loads = _loads(rate, concurrency, sweep=options["sweep"])
    _check_options(options, json_path)
    _check_loads(driving, max(loads), options["warmup"] + options["duration"])
    if report_path is not None and not can_plot():
        raise click.UsageError("--report needs matplotlib: pip install 'tinyloop-service[plot]'")
    workload = read_workload(name, dict(changes))
    from tinyloop_service.cli import load_view

    with load_view.watching(workload.name) as tell:
        result = asyncio.run(_run(workload, driving, loads, server, options, tell))
    try:
        if json_path is not None and str(json_path) != "-":
            json_path.write_text(result.to_json() + "\n", encoding="utf-8")
    finally:  # a disk that is full takes nothing from who reads
        if str(json_path) == "-":
            print(result.to_json())
        else:
            load_view.print_result(result)
    if report_path is not None:
        output.err.print(f"written: {report.write(result, report_path)}")
    return _status(result)


def _loads(
    rate: tuple[float, ...] | None, concurrency: tuple[float, ...] | None, *, sweep: bool
) -> tuple[Driving, tuple[float, ...]]:
    if rate is not None and concurrency is not None:
        raise click.UsageError("give --rate (open loop) or --concurrency (closed loop), not both")
    driving = Driving.CLOSED if rate is None else Driving.OPEN
    loads = rate or concurrency or ((1.0,) if sweep else (8.0,))
    if sweep and len(loads) > 1:
        raise click.UsageError("--sweep finds the loads itself; give it one to start from, or a list without --sweep")
    if driving is Driving.CLOSED and not all(load.is_integer() for load in loads):
        raise click.UsageError("--concurrency counts callers; give whole numbers")
    return driving, loads


def _check_options(options: dict[str, Any], json_path: Path | None) -> None:
    """Before minutes are spent."""
    context = click.get_current_context()
    if options["compare"] and options["no_share"]:
        raise click.UsageError("--compare runs both ways; leave out --no-share")
    if options["duration"] <= timedelta():
        raise click.UsageError("--duration must be above 0")
    if options["in_process"] is not None:
        if options["processes"] > 1:
            raise click.UsageError("--in-process has one process; leave out --processes")
        if context.get_parameter_source("target") is not click.core.ParameterSource.DEFAULT:
            raise click.UsageError("give --target or --in-process, not both")
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise click.UsageError(f"--json {json_path}: {json_path.parent} is no directory; make it first")


def _check_loads(driving: Driving, most: float, length: timedelta) -> None:
    if driving is Driving.CLOSED and most > MOST_CALLERS:
        raise click.UsageError(f"--concurrency {most:.0f} is above {MOST_CALLERS} callers")
    requests = most * length.total_seconds()
    if driving is Driving.OPEN and requests > MOST_REQUESTS:
        raise click.UsageError(
            f"--rate {most:g} for {length.total_seconds():g} s is {requests:.3g} requests, at most {MOST_REQUESTS:.0e};"
            " give a lower rate, or a shorter --duration"
        )


async def _run(
    workload: Workload,
    driving: Driving,
    loads: tuple[float, ...],
    server: Connection,
    options: dict[str, Any],
    tell: Callable[[Any], None],
) -> Result:
    from tinyloop_service.load.fleet import Endpoint, Fleet, Here, Processes
    from tinyloop_service.load.local import Local
    from tinyloop_service.load.prompts import Prompts
    from tinyloop_service.load.run import LoadTest, Status
    from tinyloop_service.load.search import comparisons

    started = datetime.now(UTC)
    endpoint = Endpoint(server.target, server.token, server.tls, server.timeout, server.affinity)
    async with AsyncExitStack() as stack:
        tell(Status("looking at the model"))
        path: Path | None = options["in_process"]
        local = None if path is None else await Local.opened(path, read_settings({}))
        target: Target = await stack.enter_async_context(endpoint.connect() if local is None else local)
        model = await target.model()
        plan = await _plan(workload.scaled(model.max_seq_len), driving, loads, options, target, model)
        fleet: Fleet = Here(target, Prompts(plan.workload, plan.seed, plan.vocabulary))
        if options["processes"] > 1:
            fleet = Processes(options["processes"], endpoint, plan.workload, plan.seed, plan.vocabulary)
        await stack.enter_async_context(fleet)
        found = await LoadTest(plan, target, fleet, tell).run()
    return Result(
        metadata=_metadata(plan, model, server.target if path is None else f"in process: {path}", started, options),
        phases=found.phases,
        comparisons=tuple(comparisons(found.phases)),
        economy=found.economy,
        setup=found.setup,
        sweeps=found.sweeps,
        verification=found.verification,
    )


async def _plan(
    workload: Workload,
    driving: Driving,
    loads: tuple[float, ...],
    options: dict[str, Any],
    target: Target,
    model: ModelInfo,
) -> Plan:
    from tinyloop_service.load.run import Plan, vocabulary_of

    ways = tuple(Way) if options["compare"] else (Way.NO_SHARE if options["no_share"] else Way.SHARED,)
    return Plan(
        workload=workload,
        vocabulary=await vocabulary_of(target, model, workload),
        seed=options["seed"],
        driving=driving,
        loads=loads,
        search_phases=options["phases"] if options["sweep"] else 0,
        ways=ways,
        warmup_s=options["warmup"].total_seconds(),
        measured_s=options["duration"].total_seconds(),
        slo=options["slo"],
        verify=VERIFIED if options["verify"] else 0,
        own_loop=options["in_process"] is None,
    )


def _metadata(plan: Plan, model: ModelInfo, target: str, started: datetime, options: dict[str, Any]) -> Metadata:
    from tinyloop_service.bench import describe_machine, versions

    return Metadata(
        command=f"tinyloop {shlex.join(sys.argv[1:])}",
        start_time=started.isoformat(timespec="seconds").replace("+00:00", "Z"),
        target=target,
        machine=describe_machine(),
        versions=versions(),
        server=output.plain(model),
        workload=plan.workload.as_data(),
        seed=plan.seed,
        processes=options["processes"],
        slo=plan.slo,
    )


def _status(result: Result) -> int:
    """1 where figures or answers must not be relied on."""
    failed = any(phase.lag.bottleneck or not phase.counts.completed for phase in result.phases)
    check = result.verification
    return int(failed or (check is not None and check.alike < check.asked))
