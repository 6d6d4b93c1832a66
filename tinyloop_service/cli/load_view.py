"""What `tinyloop load` shows: how it goes, on standard error, and what it found, with what each figure means.

In: `Status` as it comes, and a `Result`.  Out: text for people.  It refuses to compute: every figure is the result's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from tinyloop_service.cli import output
from tinyloop_service.load.definitions import used
from tinyloop_service.load.results import Distribution, ErrorCount, Phase, Result, Sweep
from tinyloop_service.load.run import Status

_LATENCIES = ("queue", "ttft", "itl", "tpot", "e2e")
_LATENCY_COLUMNS = ("TTFT p50", "TTFT p95", "TTFT p99", "ITL p50", "ITL p99", "E2E p50", "E2E p99")


@contextmanager
def watching(workload: str) -> Iterator[Callable[[Status], None]]:
    """Yields a function that shows what goes on: on a terminal as it moves, elsewhere a line now and then."""
    if not output.err.is_terminal:
        with output.waiting(f"{workload}: starting") as say:
            yield lambda status: say(f"{workload}: {_one_line(status)}")
        return
    with Live(console=output.err, transient=True, refresh_per_second=8) as live:
        yield lambda status: live.update(_moving(workload, status))


def _one_line(status: Status) -> str:
    if not status.length_s:
        return status.doing
    counted = status.counted
    return (
        f"{status.doing}, {_time(status)}, {counted.sent} sent, {counted.completed} completed, {counted.failed} failed"
    )


def _time(status: Status) -> str:
    """Of the phase; what it waits for once that is over."""
    elapsed_s = max(0.0, (time.monotonic_ns() - status.started_ns) / 1e9)
    rest = "" if elapsed_s <= status.length_s else ", waiting for the last answers"
    return f"{min(elapsed_s, status.length_s):.0f} of {status.length_s:.0f} s{rest}"


def _moving(workload: str, status: Status) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row(Text(f"tinyloop load  {workload}", style="bold"), Text(status.doing))
    if not status.length_s:
        return table
    table.add_row("time", _time(status))
    counted = status.counted
    failed = Text(f"{counted.failed} failed", style="bold red" if counted.failed else "")
    running = counted.sent - counted.completed - counted.failed - counted.hung_up
    requests = f"{counted.sent} sent, {running} running, {counted.completed} completed, {counted.hung_up} cancelled, "
    table.add_row("requests", Text.assemble(requests, failed))
    if (load := status.load) is not None:
        held = (load.pages_total - load.pages_free) / max(1, load.pages_total)
        table.add_row(
            "server", f"{load.rows_running} rows, {load.requests_waiting} waiting, {held:.0%} of its pages held"
        )
        table.add_row("generated", f"{status.tokens_per_s:,.0f} tokens/s")
    return table


def print_troubles(result: Result) -> None:
    """On standard error, where standard output is a script's."""
    for line in _troubles(result):
        output.err.print(line)


def print_result(result: Result) -> None:
    """Errors first, then figures, then what they mean."""
    for line in _troubles(result):
        output.print_sentence(line)
    output.out.print()
    _print_facts(result)
    output.out.print()
    for number, table in enumerate(_phases(result)):
        if number:
            output.out.print()
        output.print_table(table)
    if len(result.phases) <= 2:
        for phase in result.phases:
            _print_latencies(phase)
    output.out.print()
    for line in (*_worth(result), *_found(result)):
        output.print_sentence(line)
    output.out.print()
    output.print_facts(used(result))


def _troubles(result: Result) -> Iterator[Text]:
    """What has to be known before any figure is believed."""
    for phase in result.phases:
        if phase.keeps_pages:
            pages = f"requests hold {phase.pages_after} pages afterwards, {phase.pages_before} before"
            yield Text(f"{phase.name}: {pages}; somebody else's, or lost", style="bold red")
    counted: dict[tuple[str, str], list[ErrorCount]] = {}
    for _, error in result.errors():
        counted.setdefault((error.code, error.reason), []).append(error)
    kinds = [(errors[0].expected, -sum(error.count for error in errors), errors[0]) for errors in counted.values()]
    for expected, number, one in sorted(kinds, key=lambda kind: kind[:2]):
        note, style = (", expected", "yellow") if expected else ("", "bold red")
        kind = f"{one.code} {one.reason}".strip()
        yield Text.assemble((f"{-number} errors {kind}{note}: ", style), one.example)
    for phase in result.phases:
        if phase.counts.unfinished:
            yield Text(f"{phase.name}: {phase.counts.unfinished} requests had not ended when waiting ended", "bold red")
        if not phase.counts.completed:
            yield Text(f"{phase.name}: no request was completed", style="bold red")
        if phase.lag.bottleneck:
            yield Text(
                f"{phase.name}: no latencies and no goodput, the harness was the bottleneck: {phase.lag.bottleneck}",
                "bold red",
            )
        if phase.pages_after < 0:
            yield Text(f"{phase.name}: the server did not say what requests hold afterwards", style="bold yellow")
    check = result.verification
    for line in check.differing if check is not None else ():
        yield Text.assemble(("differs: ", "bold red"), line)


def _print_facts(result: Result) -> None:
    metadata = result.metadata
    server, asked = metadata.server, metadata.workload
    lengths = [_length(asked[key]) for key in ("prefix_len", "suffix_len", "output_len")]
    output.print_facts(
        {
            "target": f"{metadata.target}, {server['engine']} {server['cache_mode']}, {server['default_loops']} loops, "
            f"model {server['model_id'][:8]}",
            "workload": f"{asked['name']}: {asked['prefixes']} prefixes of {lengths[0]} tokens, suffixes of "
            f"{lengths[1]}, outputs of {lengths[2]}",
            "harness": f"{metadata.processes} process{'es' * (metadata.processes > 1)} on {metadata.machine}, "
            f"seed {metadata.seed}",
        }
    )


def _length(data: object) -> str:
    match data:
        case [low, high]:
            return f"{low} to {high}"
        case {"median": median, "most": most}:
            return f"around {median:g}, at most {most}"
    return str(data)


def _phases(result: Result) -> Sequence[Table]:
    """One line each: in one table where the terminal is wide enough for it, else in two, the second of latencies."""
    columns = _columns(result)
    whole = _table(result, "times in ms", columns)
    width = output.out.width if output.out.is_terminal else output.UNBROKEN
    unbroken = output.out.options.update(max_width=output.UNBROKEN)
    if Measurement.get(output.out, unbroken, whole).maximum <= width:
        return (whole,)
    counts = {name: cells for name, cells in columns.items() if name not in _LATENCY_COLUMNS}
    latencies = {name: columns[name] for name in _LATENCY_COLUMNS}
    return (_table(result, "", counts), _table(result, "times in ms", latencies))


def _columns(result: Result) -> dict[str, Sequence[str]]:
    """Heading → a cell for each phase."""
    rates, times = [phase.throughput for phase in result.phases], [phase.latencies for phase in result.phases]
    cached = [phase.cached_token_rate for phase in result.phases]
    columns: dict[str, Sequence[str]] = {
        "requests": [str(phase.counts.offered) for phase in result.phases],
        "req/s": [f"{rate.requests_per_s:.2f}" for rate in rates],
        "tokens/s": [f"{rate.tokens_per_s:,.0f}" for rate in rates],
    }
    for name in _LATENCY_COLUMNS:
        what, figure = name.lower().split()
        columns[name] = [_ms(None if each is None else getattr(each, what), figure) for each in times]
    columns["cached"] = ["–" if rate is None else f"{rate:.1%}" for rate in cached]
    if result.metadata.slo is not None:
        columns["goodput"] = [
            "–" if rate.goodput_per_s is None else f"{rate.goodput_per_s:.2f}/s {rate.goodput_share:.0%}"
            for rate in rates
        ]
    return columns


def _table(result: Result, corner: str, columns: Mapping[str, Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(corner, no_wrap=True)
    for name in columns:  # "TTFT p50" says it for those that follow
        table.add_column(name if name.endswith("p50") else name.split()[-1], justify="right")
    for phase, *cells in zip(result.phases, *columns.values(), strict=True):
        table.add_row(phase.name, *cells)
    return table


def _print_latencies(phase: Phase) -> None:
    """All percentiles of one phase, and what else is known of it."""
    if (times := phase.latencies) is None:
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(f"{phase.name}, ms")
    figures = ("p50", "p90", "p95", "p99", "max")
    for column in figures:
        table.add_column(column, justify="right")
    for name in (*_LATENCIES, "gap"):
        label = name if name in ("queue", "gap") else name.upper()
        table.add_row(label, *(_ms(getattr(times, name), figure) for figure in figures))
    table.add_row("lag, event loop", *(_ms(phase.lag.loop, figure) for figure in figures), style="dim")
    table.add_row("lag, sending", *(_ms(phase.lag.send, figure) for figure in figures), style="dim")
    output.out.print()
    output.print_table(table)
    counts = phase.counts
    told = f"{counts.completed} completed, {counts.cancelled} cancelled, {counts.failed} failed"
    if (made := phase.builds) is not None:
        told += f"; {made.count} builds, {made.mean_ms:.0f} ms in the mean, {made.max_ms:.0f} at most"
    if times.stall is not None:
        told += f"; largest ITL = {times.stall:.1f} × its median"
    held = "" if phase.pages_after < 0 else f"; requests held {phase.pages_after} pages afterwards"
    output.print_sentence(f"{told}{held}, {phase.pages_before} before" if held else told)


def _ms(of: Distribution | None, figure: str) -> str:
    """Three digits that matter."""
    if of is None:
        return "–"
    value: float = getattr(of, figure)
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _worth(result: Result) -> Iterator[Text]:
    """What sharing is worth."""
    for each in result.comparisons:
        factors = {
            "tokens/s": each.tokens_per_s,
            "TTFT p50": each.ttft_p50,
            "p95": each.ttft_p95,
            "E2E p50": each.e2e_p50,
        }
        told = ", ".join(f"{name} {factor:.2f}×" for name, factor in factors.items() if factor is not None)
        yield Text.assemble((f"shared beside no-share at {each.load:g}: ", "bold"), told)
    if (economy := result.economy) is not None:
        sizes = f"{economy.prefix_tokens} + {economy.suffix_tokens} tokens, {economy.new_tokens} new ones"
        costs = f"build {economy.build_ms:.0f} ms, warm {economy.warm_ms:.0f}, cold {economy.cold_ms:.0f}"
        pays = "warm is no faster" if economy.break_even is None else f"break-even N = {economy.break_even:.2f}"
        yield Text.assemble(("alone: ", "bold"), f"{sizes}: {costs}; {pays}")


def _found(result: Result) -> Iterator[Text]:
    for sweep in result.sweeps:
        yield Text.assemble((f"{sweep.way.value}: ", "bold"), "; ".join((_knee(sweep), *_goodput(sweep, result))))
    if (check := result.verification) is not None:
        style = "green" if check.alike == check.asked else "bold red"
        yield Text.assemble(
            ("asked again alone: ", "bold"), (f"{check.alike} of {check.asked} alike, bit for bit", style)
        )


def _knee(sweep: Sweep) -> str:
    if sweep.knee is None:
        return "the knee is above every load that was tried"
    return f"knee at {sweep.knee:g}" if sweep.knee else "already the lowest load is too much"


def _goodput(sweep: Sweep, result: Result) -> Iterator[str]:
    known = result.is_goodput_known(sweep.way)
    of = "" if all(known) else ", of those that the harness kept up with"
    if result.metadata.slo is None:
        return
    if not any(known):
        yield "goodput unknown: the harness kept up with no load"
    elif sweep.best_load is None:
        yield f"at no load {sweep.share_needed:.0%} of the requests kept the SLO{of}"
    else:
        yield f"most goodput {sweep.best_goodput_per_s:.2f}/s, at {sweep.best_load:g}{of}"
