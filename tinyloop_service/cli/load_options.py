"""What the options of `tinyloop load` ask for: each read by itself, then all held against one another.

In: words of a command line.  Out: `Asked`, or a usage error before minutes are spent.  It refuses to know servers.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from tinyloop_service.cli.options import parse_duration
from tinyloop_service.errors import InvalidArgument, install
from tinyloop_service.load.results import Driving, Slo, Way
from tinyloop_service.load.workload import Workload, read_workload
from tinyloop_service.plotting import can_plot

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


@dataclass(frozen=True, slots=True)
class Asked:
    """A load test, but for what only the server can say."""

    workload: Workload  # not yet scaled to the model
    driving: Driving
    loads: tuple[float, ...]
    search_phases: int  # 0: no sweep
    ways: tuple[Way, ...]
    warmup_s: float
    measured_s: float
    slo: Slo | None
    verify: int
    seed: int
    processes: int
    model: Path | None  # to be asked in this process; None: a server


def asked(options: dict[str, Any], json_path: Path | None, report_path: Path | None) -> Asked:
    """Of the command's options.  Raises click.UsageError, OSError."""
    driving, loads = _loads(options["rate"], options["concurrency"], sweep=options["sweep"])
    _check_options(options, json_path)
    _check_loads(driving, max(loads), options["warmup"] + options["duration"])
    if report_path is not None and not can_plot():
        raise click.UsageError(f"--report needs matplotlib: {install('plot')}")
    return Asked(
        workload=_workload(options["name"], dict(options["changes"])),
        driving=driving,
        loads=loads,
        search_phases=options["phases"] if options["sweep"] else 0,
        ways=tuple(Way) if options["compare"] else (Way.NO_SHARE if options["no_share"] else Way.SHARED,),
        warmup_s=options["warmup"].total_seconds(),
        measured_s=options["duration"].total_seconds(),
        slo=options["slo"],
        verify=VERIFIED if options["verify"] else 0,
        seed=options["seed"],
        processes=options["processes"],
        model=options["in_process"],
    )


def _workload(name: str, changes: dict[str, Any]) -> Workload:
    try:
        return read_workload(name, changes)
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from None


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
