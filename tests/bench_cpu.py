"""TinyLoop on this CPU, with llama.cpp beside it: `tinyloop bench` and tests/bench_llama_cpp.py, taking turns.

    python tests/bench_cpu.py [--models demo 407m] [--prefix 1024] [--rows 1 10 50] [--sittings 2]
        [--llama-python build/llama_cpp/bin/python] [--out build/bench/cpu.json]              `make bench` does it
    quick: --models tiny --prefix 128 --rows 1 2 --new-tokens 4 --sittings 1

A sitting is one process of each, one after the other.  Means of the sittings; in brackets each of them.  Ratio:
TinyLoop's time over llama.cpp's, below 1 is faster.  NO_CACHE is up to ten requests of TinyLoop's, above that scaled,
and one of llama.cpp's, scaled.  Threads, unless given: llama.cpp all cores, TinyLoop what it takes by itself.  Tables
are Markdown, as docs/benchmarks.md has them; without llama.cpp's environment its column is empty.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from bench_prefix_cache import model_file
from bench_report import milliseconds, versions, write_json

from tinyloop_service.bench import describe_machine
from tinyloop_service.engine.cgroup import usable_cores
from tinyloop_service.engine.weights import read_model

PEER = Path(__file__).with_name("bench_llama_cpp.py")
Sitting = Mapping[str, Any]  # the JSON of either side; both have these names:
FIGURES = {"decode_step_ms": "decode step", "shared_ms": "SHARED", "no_cache_ms": "NO_CACHE"}


def figures(sitting: Sitting) -> dict[str, float]:
    """Milliseconds by what is measured."""
    counted = {f"{name}, {rows}": ms for field, name in FIGURES.items() for rows, ms in sitting[field].items()}
    return {"prefill": sitting["prefill_ms"], **counted}


def lines(ours: Sequence[Sitting], theirs: Sequence[Sitting]) -> list[dict[str, Any]]:
    """One quantity each, in milliseconds by sitting."""
    sides = {"tinyloop": [*map(figures, ours)], "llama_cpp": [*map(figures, theirs)]}
    names = [name for name in sides["tinyloop"][0] if all(name in each for each in sides["llama_cpp"])]
    return [
        {"quantity": name, **{side: [each[name] for each in found] for side, found in sides.items()}} for name in names
    ]


def markdown(title: str, measured: Sequence[Mapping[str, Any]]) -> str:
    rows = [f"**{title}**", "", "| | TinyLoop | llama.cpp | ratio |", "|---|---|---|---|"]
    for line in measured:
        ours, theirs = line["tinyloop"], line["llama_cpp"]
        ratio = f"{fmean(ours) / fmean(theirs):.2f}" if theirs else "–"
        rows.append(f"| {line['quantity']} | {_cell(ours)} | {_cell(theirs)} | {ratio} |")
    return "\n".join(rows)


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "–"
    each = f" ({', '.join(map(milliseconds, values))})" if len(values) > 1 else ""
    return milliseconds(fmean(values)) + each


def run(command: Sequence[str | Path]) -> Sitting:
    print("…", *command, file=sys.stderr)
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def measure(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All sittings of a model."""
    model = model_file(name, folder)
    weights = read_model(model)
    spec = folder / f"{name}.json"
    spec.write_text(weights.spec.to_json())
    size = ("--prefix", str(args.prefix), "--new-tokens", str(args.new_tokens), "--rounds", str(args.rounds))
    rows = ("--rows", *map(str, args.rows))
    threads = ("--threads", str(args.threads)) if args.threads else ()
    own = (sys.executable, "-m", "tinyloop_service.cli", "bench", "--engine", "cpu", "--model", model, "--json")
    peer = (
        args.llama_python,
        PEER,
        spec,
        "--folder",
        args.out.parent,
        "--threads",
        str(args.threads or usable_cores()),
    )
    ours: list[Sitting] = []
    theirs: list[Sitting] = []
    for _ in range(args.sittings):
        ours.append(run((*own, *size, *threads, *rows)))
        if args.llama_python.exists():
            theirs.append(run((*peer, *size, *rows)))
    found = lines(ours, theirs)
    engines = " beside ".join(each[0]["engine"] for each in (ours, theirs) if each)
    lengths = f"{ours[0]['loops']} loops, prefix {args.prefix}, {args.new_tokens} new tokens"
    print("\n" + markdown(f"{name}, {lengths}; {engines}; milliseconds", found), flush=True)
    return {"model": name, "lines": found, "tinyloop": ours, "llama_cpp": theirs}


def commit() -> str:
    """Of the checkout; empty where there is none."""
    done = subprocess.run(("git", "describe", "--always", "--dirty"), cwd=PEER.parent, capture_output=True, text=True)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["demo", "407m"], help="demo, a size of `tinyloop init`, a path")
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 10, 50])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1, help="of each process")
    parser.add_argument("--sittings", type=int, default=2)
    parser.add_argument("--threads", type=int, help="of either side")
    parser.add_argument("--llama-python", type=Path, default=Path("build/llama_cpp/bin/python"))
    parser.add_argument("--out", type=Path, default=Path("build/bench/cpu.json"))
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    facts = {"machine": describe_machine(), "time": datetime.now(UTC).isoformat(timespec="seconds")}
    facts |= {"commit": commit(), "command": " ".join(sys.argv)}
    print(f"{facts['machine']}; {facts['time']}; commit {facts['commit']}")
    with tempfile.TemporaryDirectory() as folder:
        models = [measure(name, args, Path(folder)) for name in args.models]
    write_json(args.out, {**facts, "versions": versions(), "models": models})


if __name__ == "__main__":
    main()
