"""What a shared prefix is worth: NO_CACHE / SHARED / speed-up / predicted, in process and through gRPC.

    python tests/bench_prefix_cache.py [--engine auto] [--model 407m] [--prefix 500 1024] [--requests 10 50]
        [--bodies int4 fp16] [--places process grpc] [--rounds 20] [--max-no-cache 10] [--out FILE.json]
    quick, on a CPU: --engine cpu --model tiny --bodies int4 --rounds 1

NO_CACHE(N)    N requests, each with its own prefill, one after the other; above --max-no-cache requests N times the
               median one, marked ≈
SHARED(N)      one prefill, then N requests at once, up to the last token of the last
predicted(N)   (P + D) / (P/N + D): P the prefill, D what a lone request needs after its first token
process        through the scheduler, in this process
grpc           N streams of one client to a server in another process of this machine, the create included
start          from starting that server's process until it is ready, and until it has given a token; its kernels were
               compiled before, if "process" is measured too
body fp16      TINYLOOP_EXPERIMENTAL_FP16_BODY: the blocks' INT4 weights made fp16 at load

Requests are greedy and have no suffix; the depth is the model's.  Milliseconds, medians of the rounds; in brackets the
least and the most.  The JSON beside the table holds also prefill, decode steps and bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench_report import milliseconds, print_table, spread, versions, write_json

from tinyloop_service.arguments import parameters
from tinyloop_service.bench import (
    Rounds,
    Workload,
    describe_machine,
    kv_memory_for,
    measure_rounds,
    no_cache_totals,
    predicted_speedup,
    prompt_tokens,
    run_bench,
    run_no_cache,
)
from tinyloop_service.cli.local_server import local_server
from tinyloop_service.demo import MODEL_PATH
from tinyloop_service.engine.spec import SIZES, ModelSpec
from tinyloop_service.engine.weights import random_model, read_model, write_model
from tinyloop_service.load.remote import Remote
from tinyloop_service.loading import build_engine
from tinyloop_service.settings import Settings

Variables = dict[str, str]  # TINYLOOP_ settings


@dataclass(frozen=True, slots=True)
class Line:
    """Of the table; milliseconds."""

    body: str
    place: str
    prefix_len: int
    requests: int
    no_cache_ms: float
    shared_ms: float
    speedup: float
    predicted: float
    no_cache_scaled: bool
    no_cache_spread_ms: tuple[float, float]
    shared_spread_ms: tuple[float, float]

    def cells(self) -> list[str]:
        scaled = "≈" if self.no_cache_scaled else ""
        return [
            f"{self.body} {self.place}",
            str(self.prefix_len),
            str(self.requests),
            f"{scaled}{milliseconds(self.no_cache_ms)} ({spread(self.no_cache_spread_ms)})",
            f"{milliseconds(self.shared_ms)} ({spread(self.shared_spread_ms)})",
            f"{scaled}{self.speedup:.2f}×",
            f"{self.predicted:.2f}×",
        ]


COLUMNS = ("body, place", "prefix", "requests", "NO_CACHE", "SHARED", "speed-up", "predicted")


@dataclass(frozen=True, slots=True)
class Start:
    """Of a server; milliseconds."""

    ready_ms: float  # from starting the process
    first_token_ms: float  # from there to the first token of a request with the prefix as its prompt


def in_process(model: Path, body: str, workload: Workload, variables: Variables) -> tuple[list[Line], dict[str, Any]]:
    """Lines, and the whole report."""
    settings = Settings.from_environment({**os.environ, **variables}).engine
    report = run_bench(build_engine(model, settings), workload)
    lines = [
        Line(
            body,
            "process",
            workload.prefix_len,
            int(key),
            report.no_cache_ms[key],
            report.shared_ms[key],
            report.speedup[key],
            report.predicted_speedup[key],
            key in report.no_cache_scaled,
            report.spread_ms["no_cache"][key],
            report.spread_ms["shared"][key],
        )
        for key in report.shared_ms
    ]
    return lines, report.as_dict()


async def through_grpc(
    model: Path, body: str, spec: ModelSpec, workloads: list[Workload], variables: Variables
) -> tuple[list[Line], Start]:
    """Lines of all workloads against one server, and its start."""
    began = time.perf_counter()
    async with local_server(model, variables) as address, Remote(address) as server:
        ready = time.perf_counter()
        first = prompt_tokens(spec.vocab_size, workloads[0].prefix_len)
        await run_no_cache(server, [first], parameters(1, ignore_eos=True, seed=0))
        start = Start((ready - began) * 1e3, (time.perf_counter() - ready) * 1e3)
        lines = []
        for workload in workloads:
            tokens = prompt_tokens(spec.vocab_size, workload.prefix_len)
            rounds = await measure_rounds(server, tokens, workload, warm_up=1)
            lines += lines_of(rounds, body, workload)
        return lines, start


def lines_of(rounds: Rounds, body: str, workload: Workload) -> list[Line]:
    totals, scaled = no_cache_totals(rounds.singles, workload.rows)
    decode = median(run.decode_ms for run in rounds.no_cache)
    build = median(run.build_ms for runs in rounds.shared.values() for run in runs)
    lines = []
    for key, times in rounds.samples.items():
        without = totals[key]
        lines.append(
            Line(
                body,
                "grpc",
                workload.prefix_len,
                int(key),
                median(without),
                median(times),
                median(without) / median(times),
                predicted_speedup(build, decode, int(key)),
                key in scaled,
                (min(without), max(without)),
                (min(times), max(times)),
            )
        )
    return lines


def model_file(name: str, folder: Path) -> Path:
    """Of a size, with random weights written to `folder`; of the demo; or the path that `name` is."""
    if name in SIZES:
        path = folder / f"{name}.tinyloop"
        write_model(path, random_model(name))
        return path
    return MODEL_PATH if name == "demo" else Path(name)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All that is asked for, printed."""
    model = model_file(args.model, folder)
    spec = read_model(model).spec
    workload = Workload(
        rows=tuple(args.requests),
        new_tokens=args.new_tokens,
        rounds=args.rounds,
        steps=args.rounds,
        max_no_cache=args.max_no_cache,
        no_cache_rounds=args.rounds,
    )
    workloads = [replace(workload, prefix_len=length) for length in args.prefix]
    lines: list[Line] = []
    reports, starts = [], {}
    for body in args.bodies:
        variables = {
            "TINYLOOP_ENGINE": args.engine,
            "TINYLOOP_KV_MEMORY": str(max(kv_memory_for(spec, each) for each in workloads)),
            "TINYLOOP_EXPERIMENTAL_FP16_BODY": str(body == "fp16"),
        }
        for each in workloads if "process" in args.places else []:
            new, report = in_process(model, body, each, variables)
            lines += told(new)
            reports.append({"body": body, **report})
        if "grpc" in args.places:
            new, starts[body] = asyncio.run(through_grpc(model, body, spec, workloads, variables))
            lines += told(new)
    print_lines(lines, reports, starts, args)
    return {
        "machine": describe_machine(),
        "versions": versions(),
        "model": args.model,
        "new_tokens": args.new_tokens,
        "rounds": args.rounds,
        "lines": [asdict(line) for line in lines],
        "reports": reports,
        "starts": {body: asdict(start) for body, start in starts.items()},
    }


def told(lines: list[Line]) -> list[Line]:
    """The lines, printed to stderr as they come: a run that is cut short has shown what it had."""
    for line in lines:
        print("; ".join(f"{name} {cell}" for name, cell in zip(COLUMNS, line.cells(), strict=True)), file=sys.stderr)
    return lines


def print_lines(
    lines: list[Line], reports: list[dict[str, Any]], starts: dict[str, Start], args: argparse.Namespace
) -> None:
    title = f"{args.model}, {args.new_tokens} new tokens, medians of {args.rounds} rounds, ms, on {describe_machine()}"
    print_table(title, COLUMNS, [line.cells() for line in lines])
    for report in reports:
        steps = ", ".join(f"{rows}: {milliseconds(ms)}" for rows, ms in report["decode_step_ms"].items())
        prefix = f"prefix {report['prefix_len']} ({report['prefix_bytes'] / 2**20:.1f} MiB)"
        prefill = milliseconds(report["prefill_ms"])
        print(f"{report['engine']} {report['body']}, {prefix}: prefill {prefill} ms; step of rows {steps} ms")
    for body, start in starts.items():
        print(
            f"{body}: server ready after {start.ready_ms:.0f} ms, its first token {start.first_token_ms:.0f} ms later"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--model", default="407m", help="a size of `tinyloop init`, demo, or a path")
    parser.add_argument("--prefix", type=int, nargs="+", default=[500, 1024])
    parser.add_argument("--requests", type=int, nargs="+", default=[10, 50])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--bodies", nargs="+", default=["int4", "fp16"], choices=["int4", "fp16"])
    parser.add_argument("--places", nargs="+", default=["process", "grpc"], choices=["process", "grpc"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--max-no-cache", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("build/bench_prefix_cache.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_json(args.out, measure(args, Path(folder)))


if __name__ == "__main__":
    main()
