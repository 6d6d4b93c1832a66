"""How costs grow: with the prefix, the rows of a step, the loops, the prefixes in memory, the names a server knows.

    python tests/bench_scaling.py [--engine cpu] [--model 407m | tiny | demo | PATH] [--axes prefix rows loops prefixes
        names] [--budget 300] [--out build/bench_scaling.json] [--svg build/bench_scaling.svg]
    quick: --model tiny --budget 20        a GPU: --engine cuda --model 407m

prefix     prefill of so many tokens, a token; then a decode step of one row, which gives one token
rows       a decode step of so many rows off one prefix, and the same a token
loops      prefill and decode step of one row at so many loops, off the same prefix
prefixes   so many prefixes of one page in memory; requests through the scheduler, in process: all of them off one
           prefix, and each off another; a token
names      so many names in a server with the fake engine, which computes nothing; calls through gRPC, one after the
           other, and a token of a stream

Each axis has its share of --budget seconds: its points are measured in rounds, the smallest first, until the time is
over; a point that would take longer than what is left is left out, and said so.  Medians of the rounds; in brackets
the least and the most.  Each table ends with straight lines (tests/scaling_report.py).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import grpc
from bench_prefix_cache import model_file
from bench_report import versions
from scaling_axes import Alone, Crowd, Names, fake_server, scheduling
from scaling_report import Series, draw, print_axis, write

from tinyloop_service.bench import Workload, describe_machine, kv_memory_for
from tinyloop_service.engine.api import PAGE_TOKENS, Engine
from tinyloop_service.engine.cgroup import usable_memory
from tinyloop_service.engine.weights import read_model
from tinyloop_service.loading import build_engine
from tinyloop_service.observe.logs import configure_logging
from tinyloop_service.settings import EngineSettings, LogLevel, ServerSettings

Sample = dict[str, float]  # figures by name
Samples = dict[int, list[Sample]]  # by point of an axis
Measure = Callable[[int], Awaitable[Sample]]
POINTS = {
    "prefix": (256, 512, 1024, 2048, 4096),
    "rows": (1, 2, 4, 8, 16, 32, 64, 128, 256),
    "loops": (1, 2, 4, 8, 12, 16),
    "prefixes": (1, 10, 100, 250, 500, 1000),
    "names": (50, 100, 250, 500, 1000),  # a list is of 50,
}
MOST_ROUNDS = 15


@dataclasses.dataclass(frozen=True)
class Axis:
    """What is measured, and how a table tells it."""

    name: str
    x_name: str
    title: str
    quantities: dict[str, tuple[str, int | None]]  # name → unit, and what x the slope is told for

    def series(self, samples: Samples) -> list[Series]:
        return [
            Series(self.name, self.x_name, name, unit, per, {x: [r[name] for r in got] for x, got in samples.items()})
            for name, (unit, per) in self.quantities.items()
        ]


async def visit(
    points: Sequence[int], seconds: float, measure: Measure, *, returns: bool = True
) -> tuple[Samples, list[int]]:
    """Samples by point; the points that there was no time for.  The first three are measured whatever they take.

    returns: a round is one sample of every point; False where coming back to a lesser point would cost more than it
    tells: then all samples of a point are taken before the next one's.
    """
    began = time.monotonic()
    samples: Samples = {}
    took: list[float] = []  # of the first sample of each point
    for place, x in enumerate(points):
        if place >= 3 and time.monotonic() - began + _expected(points[:place], took, x) > seconds:
            return samples, list(points[place:])
        since = time.monotonic()
        samples[x] = [await measure(x)]
        took.append(time.monotonic() - since)
        while not returns and len(samples[x]) < MOST_ROUNDS and time.monotonic() - since < seconds / len(points):
            samples[x].append(await measure(x))
        print(f"  {x}: {took[-1]:.1f} s", file=sys.stderr)
    round_s = time.monotonic() - began
    for _ in range(MOST_ROUNDS - 1 if returns else 0):
        since = time.monotonic()
        if since - began + round_s > seconds:
            break
        for x in samples:
            samples[x].append(await measure(x))
        round_s = time.monotonic() - since
    return samples, []


def _expected(points: Sequence[int], took: Sequence[float], x: int) -> float:
    """Seconds at x, on a line through the last two points."""
    (before, last), (first_s, last_s) = points[-2:], took[-2:]
    return last_s + max(0.0, last_s - first_s) / (last - before) * (x - last)


AXES = {
    "prefix": Axis("prefix", "prefix tokens", "prefix length", {
        "prefill, a token": ("ms", 1000), "decode step, 1 row": ("ms", 1000),
    }),
    "rows": Axis("rows", "rows", "rows of a step", {"decode step": ("ms", 1), "decode, a token": ("ms", None)}),
    "loops": Axis("loops", "loops", "loops", {"prefill, a token": ("ms", 1), "decode step, 1 row": ("ms", 1)}),
    "prefixes": Axis("prefixes", "prefixes", "prefixes in memory", {
        "requests off one prefix": ("ms a token", 1000), "requests off many": ("ms a token", 1000),
    }),
    "names": Axis("names", "names", "names, fake engine, through gRPC", {
        "create": ("µs", 1000), "get": ("µs", 1000), "list of 50": ("µs", 1000), "delete": ("µs", 1000),
        "a token of a stream": ("µs", 1000),
    }),
}  # fmt: skip


class Session:
    """Measures axes one after the other, prints each table as it comes, and keeps all for the picture and the JSON."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._seconds = args.budget / len(args.axes)
        self.series: list[Series] = []
        self.left_out: list[str] = []

    async def engine_axes(self, engine: Engine) -> None:
        """Closes the engine."""
        names = [name for name in ("prefix", "rows", "loops") if name in self._args.axes]
        async with scheduling(engine) as scheduler:  # idle until the last axis: an engine has one owner at a time
            alone = Alone(engine, self._args.prefix_len)
            for name in names:
                points, why = alone.possible(name, getattr(self._args, name))
                await self._axis(name, points, why, getattr(alone, name))
            if "prefixes" in self._args.axes:
                crowd = Crowd(scheduler)
                points, why = crowd.possible(self._args.prefixes)
                await self._axis("prefixes", points, why, crowd.prefixes, returns=False)

    async def names_axis(self) -> None:
        async with fake_server() as address, grpc.aio.insecure_channel(address) as channel:
            await self._axis("names", self._args.names, [], Names(channel).names, returns=False)

    async def _axis(
        self, name: str, points: Sequence[int], left_out: list[str], measure: Measure, returns: bool = True
    ) -> None:
        axis = AXES[name]
        print(axis.title, file=sys.stderr)
        samples, no_time = await visit(points, self._seconds, measure, returns=returns)
        left_out += [f"{x} {axis.x_name}: left out, no time within --budget" for x in no_time]
        series = axis.series(samples)
        print_axis(axis.title, series, left_out)
        self.series += series
        self.left_out += left_out


def build(args: argparse.Namespace, model: Path) -> Engine:
    """With memory for every point that has a chance."""
    weights = read_model(model)
    spec = dataclasses.replace(weights.spec, default_loops=weights.spec.max_loops)
    workload = Workload(min(max(args.prefix), spec.max_seq_len), tuple(args.rows))
    wanted = max(kv_memory_for(spec, workload), max(args.prefixes) * spec.max_loops * PAGE_TOKENS * spec.kv_dim * 4)
    memory = args.kv_memory or (None if args.engine == "cuda" else min(wanted, usable_memory() // 2))
    settings = EngineSettings(engine=args.engine, kv_memory=memory)
    return build_engine(weights, settings, progress=lambda what: print(what, file=sys.stderr))


async def measure(args: argparse.Namespace, folder: Path) -> Session:
    session = Session(args)
    if {*args.axes} - {"names"}:
        await session.engine_axes(build(args, model_file(args.model, folder)))
    if "names" in args.axes:
        await session.names_axis()
    return session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="cpu", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--model", default="407m", help="a size of `tinyloop init`, demo, or a path")
    parser.add_argument("--axes", nargs="+", default=list(AXES), choices=list(AXES))
    for name, points in POINTS.items():
        parser.add_argument(f"--{name}", type=int, nargs="+", default=points, help=f"{AXES[name].x_name} to measure at")
    parser.add_argument("--prefix-len", type=int, default=256, help="of the prefix of other axes; 256")
    parser.add_argument("--kv-memory", type=int, help="bytes; on a CPU what is needed, up to half of the memory")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds, beside loading the model")
    parser.add_argument("--out", type=Path, default=Path("build/bench_scaling.json"))
    parser.add_argument("--svg", type=Path, help="of the plots; default: beside --out")
    args = parser.parse_args()
    configure_logging(ServerSettings(log_level=LogLevel.WARNING))
    with tempfile.TemporaryDirectory() as folder:
        session = asyncio.run(measure(args, Path(folder)))
    facts = {
        "machine": describe_machine(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "command": " ".join(sys.argv),
        "engine": args.engine,
        "model": args.model,
        "prefix_len": args.prefix_len,
    }
    write(args.out, facts, session.series, session.left_out)
    picture = args.svg or args.out.with_suffix(".svg")
    draw(session.series, f"{args.model}, engine {args.engine}, {facts['machine']}", picture)
    print(f"\nwritten: {args.out}, {picture}")


if __name__ == "__main__":
    main()
