"""What each cache mode costs and saves on this machine: stored bytes, prefill, making active, decode steps.

    python tests/bench_cache_modes.py [--engine cpu] [--model PATH|407m] [--prefix 1024] [--rows 1 10] [--rounds 3]
        [--modes MODE ...]
    on a GPU: --engine cuda --model 407m --rows 1 50 --rounds 20

All modes' engines stand side by side and take turns in every round, so that they share what else the machine does.
Medians, in brackets the least and the most.  The stored bytes are those of the pages that the prefix was given; the
share is that of the making active in the prefill of the same round.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median

from tinyloop_service.bench import Workload, describe_machine, kv_memory_for
from tinyloop_service.bench.direct import Direct
from tinyloop_service.bench.workload import prompt_tokens
from tinyloop_service.demo import MODEL_PATH
from tinyloop_service.engine.spec import SIZES
from tinyloop_service.engine.tensors import ModelWeights
from tinyloop_service.engine.weights import random_model, read_model
from tinyloop_service.loading import build_engine
from tinyloop_service.settings import EngineKind, EngineSettings
from tinyloop_service.types import CacheMode

MOST_STEPS = 8  # of a plan, as the scheduler asks for while nothing waits, if the engine takes so many
PLANS = 4  # timed of each number of rows and round, after one that is not


class Side:
    """One mode's engine, and what was measured of it."""

    def __init__(self, weights: ModelWeights, kind: EngineKind, mode: CacheMode, workload: Workload) -> None:
        settings = EngineSettings(engine=kind, cache_mode=mode, kv_memory=kv_memory_for(weights.spec, workload))
        engine = build_engine(weights, settings)
        self._steps = min(MOST_STEPS, engine.limits.max_steps)
        self._workload = workload
        self._direct = Direct(engine, engine.limits.default_loops)
        self._tokens = prompt_tokens(engine.limits.vocab_size, workload.prefix_len)
        self.prefix_bytes = 0
        self.samples: dict[str, list[float]] = defaultdict(list)  # milliseconds; "share": of one

    def run(self) -> None:
        """One round."""
        direct, samples = self._direct, self.samples
        prefill = direct.prefill(self._tokens)
        self.prefix_bytes = direct.pages_taken * direct.engine.limits.page_bytes
        samples["prefill"].append(prefill)
        if direct.engine.limits.has_active_form:
            activation = direct.activate()
            samples["active"].append(activation)
            samples["share"].append(activation / prefill)
        for count in self._workload.rows:
            rows = direct.open_rows(len(self._tokens), count, room=(1 + PLANS) * self._steps)
            samples[f"step, {count}"] += [direct.decode(rows, self._steps) for _ in range(1 + PLANS)][1:]
            direct.close_rows()
        direct.clear()

    def line(self) -> str:
        def figure(what: str) -> str:
            times = self.samples[what]
            if not times:
                return "–"  # the stored form is what is read
            return f"{rounded(median(times))} ({rounded(min(times))}–{rounded(max(times))})"

        steps = [figure(f"step, {count}") for count in self._workload.rows]
        shares = self.samples["share"]
        share = f"{100 * median(shares):.1f}%" if shares else "–"
        cells = [f"{self.prefix_bytes / 2**20:.2f} MiB", figure("prefill"), figure("active"), share, *steps]
        return " | ".join(cells)


def rounded(ms: float) -> str:
    """Three digits, or all that are before the point."""
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def weights_of(model: str, needed: int) -> ModelWeights:
    """A file's, or random ones of a size of `SIZES`, which then takes sequences of `needed` tokens."""
    if model not in SIZES:
        return read_model(model)
    spec = SIZES[model]
    return random_model(replace(spec, max_seq_len=max(spec.max_seq_len, needed)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=EngineKind, choices=list(EngineKind), default=EngineKind.CPU)
    parser.add_argument("--model", default=str(MODEL_PATH), help=f"a file, or {' or '.join(SIZES)} with random weights")
    parser.add_argument("--prefix", type=int, default=1024, help="tokens")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--modes", type=CacheMode, nargs="+", default=list(CacheMode))
    args = parser.parse_args()
    new_tokens = (1 + PLANS) * MOST_STEPS
    weights = weights_of(args.model, args.prefix + new_tokens)
    workload = Workload(args.prefix, tuple(args.rows), new_tokens=new_tokens, rounds=args.rounds)
    sides = {mode: Side(weights, args.engine, mode, workload) for mode in args.modes}
    for _ in range(args.rounds):
        for side in sides.values():
            side.run()
    print(
        f"{Path(args.model).name}, {args.prefix} tokens, {args.rounds} rounds on {describe_machine()}; milliseconds\n"
    )
    steps = [f"step, {count} rows" for count in args.rows]
    print(" | ".join(["mode", "stored", "prefill", "made active", "share of the prefill", *steps]))
    for mode, side in sides.items():
        print(f"{mode.value} | {side.line()}")


if __name__ == "__main__":
    main()
