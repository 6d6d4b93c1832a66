"""Where the time of a step and of a prefill goes: every kernel, its floor, and whole steps of the engine. Needs a GPU.

    python tests/bench_kernels.py [--model 407m] [--rows 1 10 50] [--prefix 1024 1000 1087] [--prompt 1024 500]
        [--body int4] [--cache-mode fp16] [--rounds 20] [--out FILE.json]
    python tests/bench_kernels.py --attention --prefix 1024 4096 --prompt 1024     attention alone, int8 beside fp16
    here, to see that it runs: --emulated

The launches are those of the engine, recorded and repeated as CUDA graphs (`recorded_launches.py`).

in place      a sequence of launches less the same without these: what they cost among the others, with the cache as the
              others leave it
alone         these launches, again and again; what they read stays in the cache if it fits
floor         the larger of bytes / bandwidth and flops / rate.  Bytes: weights come out of memory (4.5 TB/s) once in a
              step, keys and values once in a layer; all else out of the L2 cache (8.3 TB/s).  Rate: 700 TFLOP/s, fp16
of ceiling    floor / in place
engine        the same step or prefill as plans of the engine, host included; one step and several steps a plan
promise       the one place where equal bits for every length cost speed: a short prompt's product over many inputs is
              given more rows than it has

Microseconds, medians of the rounds; in brackets the least and the most.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench_report import print_table, versions, write_json
from recorded_launches import Cost, Costs, Launched, RecordingDevice

from tinyloop_service.bench import Workload, describe_machine, kv_memory_for, prompt_tokens
from tinyloop_service.bench.direct import Direct, measure_prefill, measure_steps
from tinyloop_service.engine.cuda import CudaEngine, open_device
from tinyloop_service.engine.cuda.products import ROW_MULTIPLE
from tinyloop_service.engine.spec import ModelSpec, Quant
from tinyloop_service.engine.tensors import with_fp16_blocks
from tinyloop_service.engine.weights import ModelWeights, random_model, read_model
from tinyloop_service.types import CacheMode

MEMORY, CACHE, RATE = 4.5e12, 8.3e12, 700e12  # bytes/s, bytes/s, flop/s: measured on an H200
REPLAYS = 3  # of a graph, for every sample
LAUNCHES = 60  # at least, in a graph of launches alone
ATTENTION = ("decode_attention", "prefill_attention")  # begin the names of its kernels
NEW_TOKENS = 32
SMALL = ModelSpec(
    vocab_size=96, d_model=64, n_heads=1, n_kv_heads=1, head_dim=64, d_ff=128, pre_blocks=1, loop_blocks=1,
    post_blocks=0, default_loops=2, max_loops=2, max_seq_len=256, quant=Quant(4, 64),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    rows: tuple[int, ...]
    prefixes: tuple[int, ...]  # the first in full, of others whole steps and attention
    prompts: tuple[int, ...]
    rounds: int
    replays: int
    launches: int


@dataclass(frozen=True, slots=True)
class Line:
    """Of a profile: all launches of one label; microseconds, of all of them together."""

    label: str
    launches: int
    in_place_us: float
    alone_us: float
    cost: Cost

    @property
    def floor_us(self) -> float:
        moving = self.cost.memory_bytes / MEMORY + self.cost.cache_bytes / CACHE
        return max(moving, self.cost.flops / RATE) * 1e6

    @property
    def share(self) -> float | None:
        """Of the ceiling; None where the floor is not known or the time is within the noise."""
        return self.floor_us / self.in_place_us if self.floor_us and self.in_place_us > 0 else None

    def cells(self) -> list[str]:
        moved = self.cost.memory_bytes + self.cost.cache_bytes
        return [
            self.label,
            str(self.launches),
            f"{self.in_place_us:.1f}",
            f"{self.alone_us:.1f}",
            f"{self.alone_us / self.launches:.2f}",
            f"{moved / 1e6:.1f}",
            f"{self.cost.flops / 1e9:.2f}",
            f"{self.floor_us:.1f}",
            "–" if self.share is None else f"{self.share:.0%}",
        ]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "floor_us": self.floor_us, "share_of_ceiling": self.share}


COLUMNS = ("kernel", "launches", "in place", "alone", "each alone", "MB", "GFLOP", "floor", "of ceiling")


class Clock:
    """Times sequences of launches on one device."""

    def __init__(self, device: Any, scale: Scale) -> None:
        self._device, self._scale = device, scale

    def samples_us(self, launches: Iterable[Callable[[], None]]) -> list[float]:
        """Of the whole sequence, once for every round."""
        sequence = list(launches)
        if not sequence:
            return [0.0]
        graph = self._device.capture(lambda: [run() for run in sequence])
        graph.launch()
        self._device.synchronize()
        return [self._sample_us(graph) for _ in range(self._scale.rounds)]

    def _sample_us(self, graph: Any) -> float:
        began = time.perf_counter()
        for _ in range(self._scale.replays):
            graph.launch()
        self._device.synchronize()
        return (time.perf_counter() - began) * 1e6 / self._scale.replays

    def alone_us(self, launches: Sequence[Launched]) -> float:
        """Of one pass through `launches`, in a graph of many."""
        times = -(-self._scale.launches // len(launches))
        return median(self.samples_us(each.again for _ in range(times) for each in launches)) / times

    def profile(self, title: str, launches: Sequence[Launched]) -> dict[str, Any]:
        """Prints a table; the same for JSON."""
        costs, groups = Costs(self._device), dict.fromkeys(each.label for each in launches)
        cost_of = {id(each): costs.of(each) for each in launches}
        whole = self.samples_us(each.again for each in launches)
        lines = []
        for label in groups:
            group = [each for each in launches if each.label == label]
            without = self.samples_us(each.again for each in launches if each.label != label)
            cost = sum((cost_of[id(each)] for each in group), Cost())
            lines.append(Line(label, len(group), median(whole) - median(without), self.alone_us(group), cost))
        floor = sum(line.floor_us for line in lines)
        print_table(
            f"{title}: {figure(whole)} µs as a graph, floor {floor:.1f}", COLUMNS, [line.cells() for line in lines]
        )
        return {"title": title, "whole_us": whole, "floor_us": floor, "lines": [line.as_dict() for line in lines]}


def figure(samples: Sequence[float]) -> str:
    return f"{median(samples):.1f} ({min(samples):.1f}–{max(samples):.1f})"


class Bench:
    """One engine behind a recorder, and what is asked of it."""

    def __init__(self, weights: ModelWeights, device: Any, scale: Scale, **engine: Any) -> None:
        """engine: further arguments of `CudaEngine`."""
        self._device, self._scale, self._clock = device, scale, Clock(device, scale)
        self._recorder = RecordingDevice(device)
        self._spec = weights.spec
        longest = Workload(prefix_len=max(*scale.prefixes, *scale.prompts), rows=scale.rows, new_tokens=NEW_TOKENS)
        self._engine = CudaEngine(
            weights,
            device=self._recorder,  # type: ignore[arg-type]  # what it lacks, its device has
            kv_memory=kv_memory_for(self._spec, longest),
            **engine,
        )
        self._direct = Direct(self._engine, self._spec.default_loops)

    def run(self) -> dict[str, Any]:
        promise = self._promise()
        profiles = self._profiles(in_full=True)
        whole = {str(prefix): self._whole_steps(prefix) for prefix in self._scale.prefixes}
        prefills = {str(length): self._whole_prefill(length) for length in self._scale.prompts}
        self._engine.close()
        return {
            "profiles": profiles,
            "engine_steps_us": whole,
            "engine_prefill_us": prefills,
            "promise_us": promise,
        }

    def attention(self) -> list[dict[str, Any]]:
        """Its profiles alone, of prefills and steps."""
        profiles = self._profiles(in_full=False)
        self._engine.close()
        return profiles

    def _profiles(self, *, in_full: bool) -> list[dict[str, Any]]:
        profiles = [p for length in self._scale.prompts for p in self._profile_prefill(length, in_full=in_full)]
        for prefix in self._scale.prefixes:
            for rows in self._scale.rows:
                first = prefix == self._scale.prefixes[0]
                profiles += self._profile_step(prefix, rows, in_full=in_full and first, opening=in_full)
        return profiles

    def _tokens(self, length: int) -> tuple[int, ...]:
        return prompt_tokens(self._spec.vocab_size, length)

    def _profile_prefill(self, length: int, *, in_full: bool) -> list[dict[str, Any]]:
        """The prefill, and where what is stored is not what is read, the making of that out of it."""
        if length > (most := self._engine.limits.max_chunk):  # a second pass would replace the first one's tables
            raise SystemExit(f"--prompt {length}: a profile is of one pass, which has at most {most} tokens")
        self._recorder.take()
        self._direct.prefill(self._tokens(length))
        launches = self._recorder.take()
        profiles = [self._clock.profile(f"prefill of {length}", launches if in_full else attention_of(launches))]
        if in_full and self._engine.limits.has_active_form:
            self._direct.activate()
            profiles.append(self._clock.profile(f"activation of {length}", self._recorder.take()))
        self._direct.clear()
        return profiles

    def _profile_step(self, prefix: int, num_rows: int, *, in_full: bool, opening: bool) -> list[dict[str, Any]]:
        """One step off a prefix or its attention alone, and the opening of the rows."""
        self._direct.prefill(self._tokens(prefix))
        self._recorder.take()
        rows = self._direct.open_rows(prefix, num_rows, room=NEW_TOKENS)
        launches = self._recorder.take()
        for _ in range(NEW_TOKENS // 4):  # to the middle of the request
            self._direct.decode(rows, 2)
        step = self._recorder.last_graph
        named = f"{num_rows} rows, prefix {prefix}"
        profiles = [self._clock.profile(f"step of {named}", step if in_full else attention_of(step))]
        if opening and prefix % 64 and num_rows == max(self._scale.rows):
            profiles.append(self._clock.profile(f"opening {named}", launches))
        self._direct.clear()
        return profiles

    def _whole_steps(self, prefix: int) -> dict[str, Any]:
        """Samples per number of rows, for plans of one step and of as many as there may be."""
        result = {}
        for at_once in (1, self._engine.limits.max_steps):
            workload = Workload(
                prefix_len=prefix,
                rows=self._scale.rows,
                new_tokens=NEW_TOKENS,
                steps=self._scale.rounds,
                steps_at_once=at_once,
            )
            steps = measure_steps(self._direct, self._tokens(prefix), workload, lambda _: None)
            result[f"{at_once} a plan"] = {rows: [ms * 1e3 for ms in samples] for rows, samples in steps.items()}
        return result

    def _whole_prefill(self, length: int) -> list[float]:
        times = measure_prefill(self._direct, self._tokens(length), self._scale.rounds + 1, lambda _: None)
        return [ms * 1e3 for ms in times[1:]]

    def _promise(self) -> dict[str, list[float]]:
        """The product of `down` of a short prompt: of its rows alone, and of as many as it is given."""
        self._recorder.take()
        self._direct.prefill(self._tokens(ROW_MULTIPLE))
        down = next(
            each for each in self._recorder.take() if each.name == "gemm" and each.args[0].shape[1] == self._spec.d_ff
        )
        self._direct.clear()
        x, weight, out = down.args
        alone = partial(self._device.gemm, x[:ROW_MULTIPLE], weight, out[:ROW_MULTIPLE], accumulate=True)
        return {"alone": self._clock.samples_us([alone]), f"{len(x)} rows": self._clock.samples_us([down.again])}


def attention_of(launches: Sequence[Launched]) -> list[Launched]:
    return [each for each in launches if each.name.startswith(ATTENTION)]


def print_beside(by_mode: dict[str, list[dict[str, Any]]]) -> None:
    """What all layers' attention takes in each mode, and in the second as a part of the first."""
    rows = []
    for first, second in zip(*by_mode.values(), strict=True):
        share = median(second["whole_us"]) / median(first["whole_us"])
        rows.append([first["title"], figure(first["whole_us"]), figure(second["whole_us"]), f"{share:.0%}"])
    print_table("attention of all layers, µs", ("what", *by_mode, "of the first"), rows)


def print_whole(measured: dict[str, Any]) -> None:
    rows = [
        [f"step, prefix {prefix}, {plans}, {count} rows", figure(samples)]
        for prefix, by_plans in measured["engine_steps_us"].items()
        for plans, by_rows in by_plans.items()
        for count, samples in by_rows.items()
    ]
    rows += [[f"prefill of {length}", figure(us)] for length, us in measured["engine_prefill_us"].items()]
    rows += [[f"promise: down, {how}", figure(us)] for how, us in measured["promise_us"].items()]
    print_table(f"engine, µs, on {measured['machine']}", ("what", "median (least–most)"), rows)


def weights_of(name: str, body: str, longest: int) -> ModelWeights:
    """`longest`: tokens of a sequence, which the model has room for or is given it."""
    weights = read_model(name) if Path(name).is_file() else random_model(name)
    if body == "fp16":
        weights = with_fp16_blocks(weights)
    return replace(weights, spec=replace(weights.spec, max_seq_len=max(weights.spec.max_seq_len, longest)))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {}
    opened: Callable[[], Any]  # a device for each engine, which closes it
    if args.emulated:
        from emulation.device import EmulatedDevice

        weights, opened = random_model(SMALL), EmulatedDevice
        scale = Scale(rows=(1, 3), prefixes=(70,), prompts=(20,), rounds=1, replays=1, launches=1)
        options = {"row_counts": (1, 8), "max_chunk": 128}  # few kernels, for each is compiled
    else:
        weights = weights_of(args.model, args.body, max(*args.prefix, *args.prompt) + NEW_TOKENS)
        opened = partial(open_device, weights.spec)
        scale = Scale(tuple(args.rows), tuple(args.prefix), tuple(args.prompt), args.rounds, REPLAYS, LAUNCHES)
    measured = {
        "machine": describe_machine(),
        "versions": versions(),
        "model": args.model,
        "body": args.body,
    }
    if args.attention:
        modes = (CacheMode.FP16, CacheMode.INT8)
        by_mode = {m.value: Bench(weights, opened(), scale, cache_mode=m, **options).attention() for m in modes}
        print_beside(by_mode)
        return measured | {"attention": by_mode}
    measured["cache_mode"] = args.cache_mode
    measured |= Bench(weights, opened(), scale, cache_mode=CacheMode(args.cache_mode), **options).run()
    print_whole(measured)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="407m", help="a size of `tinyloop init`, or a path")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 10, 50])
    parser.add_argument("--prefix", type=int, nargs="+", default=[1024, 1000, 1087])
    parser.add_argument("--prompt", type=int, nargs="+", default=[1024, 500])
    parser.add_argument("--body", default="int4", choices=["int4", "fp16"])
    parser.add_argument("--cache-mode", default="fp16", choices=[mode.value for mode in CacheMode])
    parser.add_argument("--attention", action="store_true", help="nothing but attention, in fp16 and in int8")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--emulated", action="store_true", help="a tiny model in emulation: figures mean nothing")
    parser.add_argument("--out", type=Path, default=Path("build/bench_kernels.json"))
    args = parser.parse_args()
    write_json(args.out, measure(args))


if __name__ == "__main__":
    main()
