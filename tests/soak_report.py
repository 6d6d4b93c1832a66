"""What a soak has seen, as one value, and as a page."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass

from soak_load import Ledger
from soak_watch import LIMIT_MS, Memory, Probe, Slope, quantile

from tinyloop_service.bench.machine import describe_machine
from tinyloop_service.pb import model_pb2

MOST_GROWTH = 30.0  # MiB per hour that a slope may have without being called growth; ten minutes show no less
STRETCHES = 30  # at most, whose medians a slope goes through
WARM_UP = 0.25  # of the run, before the slope begins: caches fill, names are made for the first time


@dataclass
class Result:
    minutes: float
    seed: int
    workers: int
    ledger: Ledger
    last_load: model_pb2.Load  # before the names were deleted
    probes: list[Probe]
    memory: list[Memory]
    machine_loads: list[float]
    num_breaths: int
    num_compared: int = 0  # recipes
    num_wrong_answers: int | None = None  # not compared yet

    @property
    def slope(self) -> Slope:
        """Through medians of stretches: an allocator gives back and takes again by the second."""
        after = self.memory[int(WARM_UP * len(self.memory)) :]
        length = -(-len(after) // STRETCHES)
        stretches = [after[i : i + length] for i in range(0, len(after), length)]
        return Slope.through(
            [stretch[0].at_s for stretch in stretches],
            [statistics.median(sample.resident_mib for sample in stretch) for stretch in stretches],
        )

    @property
    def is_flat(self) -> bool:
        """No growth above MOST_GROWTH is certain."""
        return self.slope.low < MOST_GROWTH

    @property
    def late(self) -> list[Probe]:
        """Where health took too long by more than what machine and probe took."""
        return [probe for probe in self.probes if probe.server_ms - probe.own_ms > LIMIT_MS or not probe.is_serving]

    @property
    def holds(self) -> bool:
        return not (self.num_wrong_answers is None or self.num_wrong_answers or self.ledger.wrong or self.late) and (
            self.is_flat
        )


def write_report(result: Result, command: str, commit: str) -> str:
    ledger, probes, memory, loads = result.ledger, result.probes, result.memory, sorted(result.machine_loads)
    load, first, last = result.last_load, memory[int(WARM_UP * len(memory))], memory[-1]
    server, control, late, ready = (
        [getattr(probe, f"{name}_ms") for probe in probes] for name in ("server", "control", "late", "ready")
    )
    over = sum(value > LIMIT_MS for value in server)
    lines = [
        "# A soak of the server",
        "",
        f"`{command}`",
        "",
        f"Commit {commit}; {describe_machine()}; load average {loads[len(loads) // 2]:.1f} in the middle, "
        f"{loads[0]:.1f} to {loads[-1]:.1f}. The demo model on the CPU engine, {result.workers} workers for "
        f"{result.minutes:.1f} minutes, seed {result.seed}; {load.pages_total * load.page_bytes / 2**20:.0f} MiB of "
        "pages. What is asserted, and how, is at the head of `tests/soak.py`.",
        "",
        "| | seen |",
        "|---|---|",
        f"| whole answers, compared bit for bit with what {result.num_compared} requests give alone | "
        f"{ledger.num_whole} |",
        f"| beginnings of answers that were cancelled or ran out of time, compared too | {ledger.num_parts} |",
        f"| **wrong answers** | **{result.num_wrong_answers}** |",
        f"| **statuses or pages that must not be** (pages counted {result.num_breaths + 2} times at rest) | "
        f"**{len(ledger.wrong)}** |",
        f"| evictions; prompt tokens, of them read from a prefix; tokens generated | {load.prefix_evictions}; "
        f"{load.prompt_tokens}, {load.cached_tokens}; {load.generated_tokens} |",
        f"| resident memory after the warm-up ({WARM_UP:.0%}) and at the end | {first.resident_mib:.0f}, "
        f"{last.resident_mib:.0f} MiB |",
        f"| **its slope** through medians of {(last.at_s - first.at_s) / STRETCHES:.0f} s, with 95% confidence | "
        f"**{result.slope}** |",
        f"| open files, threads: after the warm-up and at the end | {first.num_files}, {first.num_threads}; "
        f"{last.num_files}, {last.num_threads} |",
        f"| health, {len(probes)} times: p50 / p99 / longest | {_spread(server)} ms |",
        f"| a server of health alone, asked at the same times | {_spread(control)} ms |",
        f"| the probe woke up late by | {_spread(late)} ms |",
        f"| the server's threads stood ready without a core meanwhile, all together | {_spread(ready)} ms |",
        f"| health over {LIMIT_MS:.0f} ms; **beyond what machine and probe took** | {over}; **{len(result.late)}** |",
        "",
        "| operation | how it ended |",
        "|---|---|",
    ]
    by_deed: dict[str, list[str]] = defaultdict(list)
    for (deed, status), count in sorted(ledger.statuses.items()):
        by_deed[deed].append(f"{status} {count}")
    lines += [f"| {deed} | {', '.join(endings)} |" for deed, endings in by_deed.items()]
    lines += ["", *(f"- {wrong}" for wrong in ledger.wrong[:20])]
    return "\n".join(lines).rstrip() + "\n"


def _spread(values: list[float]) -> str:
    return " / ".join(f"{value:.1f}" for value in (quantile(values, 0.5), quantile(values, 0.99), max(values)))
