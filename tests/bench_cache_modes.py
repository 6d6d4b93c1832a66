"""What each cache mode costs and saves on this machine's CPU: stored bytes, prefill, making active, decode steps.

    python tests/bench_cache_modes.py [--model PATH] [--prefix 1024] [--rows 1 10] [--rounds 3] [--modes MODE ...]

All modes' engines stand side by side and take turns in every round, so that they share what else the machine does.
Medians, in brackets the least and the most.  The stored bytes are those of the pages that the prefix was given; the
share is that of the making active in the prefill of the same round.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import median

from tinyloop_service.app import build_engine
from tinyloop_service.bench import Workload, describe_machine, kv_memory_for
from tinyloop_service.bench.direct import Direct
from tinyloop_service.bench.workload import prompt_tokens
from tinyloop_service.demo import MODEL_PATH
from tinyloop_service.engine.tensors import ModelWeights
from tinyloop_service.engine.weights import read_model
from tinyloop_service.settings import EngineKind, EngineSettings
from tinyloop_service.types import CacheMode

STEPS = 4  # of a plan, as the scheduler asks for while nothing waits
PLANS = 4  # timed of each number of rows and round, after one that is not


class Side:
    """One mode's engine, and what was measured of it."""

    def __init__(self, weights: ModelWeights, mode: CacheMode, workload: Workload) -> None:
        settings = EngineSettings(
            engine=EngineKind.CPU, cache_mode=mode, kv_memory=kv_memory_for(weights.spec, workload)
        )
        engine = build_engine(weights, settings)
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
        activation = direct.activate()
        samples["prefill"].append(prefill)
        samples["active"].append(activation)
        samples["share"].append(activation / prefill)
        for count in self._workload.rows:
            rows = direct.open_rows(len(self._tokens), count, room=(1 + PLANS) * STEPS)
            samples[f"step, {count}"] += [direct.decode(rows, STEPS) for _ in range(1 + PLANS)][1:]
            direct.close_rows()
        direct.clear()

    def line(self) -> str:
        def figure(what: str) -> str:
            times = self.samples[what]
            return f"{median(times):.0f} ({min(times):.0f}–{max(times):.0f})"

        steps = [figure(f"step, {count}") for count in self._workload.rows]
        share = f"{100 * median(self.samples['share']):.1f}%"
        cells = [f"{self.prefix_bytes / 2**20:.2f} MiB", figure("prefill"), figure("active"), share, *steps]
        return " | ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL_PATH)
    parser.add_argument("--prefix", type=int, default=1024, help="tokens")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--modes", type=CacheMode, nargs="+", default=list(CacheMode))
    args = parser.parse_args()
    weights = read_model(args.model)
    workload = Workload(args.prefix, tuple(args.rows), new_tokens=(1 + PLANS) * STEPS, rounds=args.rounds)
    sides = {mode: Side(weights, mode, workload) for mode in args.modes}
    for _ in range(args.rounds):
        for side in sides.values():
            side.run()
    print(f"{args.model.name}, {args.prefix} tokens, {args.rounds} rounds on {describe_machine()}; milliseconds\n")
    steps = [f"step, {count} rows" for count in args.rows]
    print(" | ".join(["mode", "stored", "prefill", "made active", "share of the prefill", *steps]))
    for mode, side in sides.items():
        print(f"{mode.value} | {side.line()}")


if __name__ == "__main__":
    main()
