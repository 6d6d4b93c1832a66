"""What a scheduler makes of an engine: requests of mixed lengths with prompts of their own, off shared prefixes.

    python tests/bench_traffic.py [--engine auto] [--model 407m] [--prefix 1024] [--prefixes 1] [--rates 100 300 500]
        [--workers 16 64] [--seconds 3] [--requests 12] [--prompt 8 64] [--new-tokens 16 128] [--out FILE.json]
    on a CPU: --engine cpu --model demo --rates 5 --workers 16 --requests 3

The defaults are a GPU's, and take it half a minute.

open RATE      requests come at random moments, RATE a second for --seconds, whether others are done or not
closed N       N callers; each asks --requests times, one request after the other
TTFT           from sending to the first token; "a token": of a request, (last − first token) / (tokens − 1)

Prompts and answers have lengths drawn evenly from the two ranges; all are greedy.  In process, through the scheduler.
Milliseconds: median and 99th percentile over requests.  Same requests in every run.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from bench_report import milliseconds, print_table, versions, write_json

from tinyloop_service.arguments import parameters
from tinyloop_service.bench import describe_machine, prompt_tokens
from tinyloop_service.bench.rounds import Timeline, follow
from tinyloop_service.bench.service import Ask, InProcess
from tinyloop_service.demo import MODEL_PATH
from tinyloop_service.engine.api import Engine
from tinyloop_service.engine.spec import SIZES
from tinyloop_service.engine.weights import random_model, read_model
from tinyloop_service.errors import TinyLoopError
from tinyloop_service.loading import build_engine
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.settings import EngineKind, EngineSettings, SchedulerSettings

WARM_UP_S = 0.3


@dataclass(slots=True)
class Figures:
    """Of one kind of traffic; milliseconds: median, 99th percentile."""

    traffic: str
    tokens_per_s: float
    requests_per_s: float
    ttft_ms: tuple[float, float]
    token_ms: tuple[float, float]

    def cells(self) -> list[str]:
        spans = [f"{milliseconds(middle)} ({milliseconds(most)})" for middle, most in (self.ttft_ms, self.token_ms)]
        return [self.traffic, f"{self.tokens_per_s:.0f}", f"{self.requests_per_s:.1f}", *spans]


@dataclass(slots=True)
class Callers:
    """Sends requests, and remembers what came of them."""

    service: InProcess
    vocab_size: int
    num_prefixes: int
    prompt: tuple[int, int]
    new_tokens: tuple[int, int]
    lines: list[Timeline] = field(default_factory=list)

    async def ask(self, rng: random.Random) -> None:
        """One request, drawn from `rng`, to its end."""
        tokens = tuple(rng.randrange(3, self.vocab_size) for _ in range(rng.randint(*self.prompt)))
        line = Timeline()
        self.lines.append(line)
        wanted = parameters(rng.randint(*self.new_tokens), ignore_eos=True)
        prefix = _prefix_name(rng.randrange(self.num_prefixes) if self.num_prefixes > 1 else 0)
        await follow(self.service, Ask(tokens, wanted, prefix), line)

    async def open(self, rate: float, seconds: float) -> None:
        rng, began, at = random.Random(7), time.perf_counter(), 0.0
        asked: list[asyncio.Task[None]] = []
        while (at := at + rng.expovariate(rate)) < seconds:
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            asked.append(asyncio.create_task(self.ask(random.Random(len(asked)))))
        await asyncio.gather(*asked)

    async def closed(self, workers: int, requests: int) -> None:
        async def one_after_the_other(worker: int) -> None:
            rng = random.Random(worker)
            for _ in range(requests):
                await self.ask(rng)

        await asyncio.gather(*map(one_after_the_other, range(workers)))

    async def measured(self, traffic: str, run: Callable[[], Awaitable[None]]) -> Figures:
        print(f"{traffic} ...", file=sys.stderr, flush=True)
        self.lines.clear()
        began = time.perf_counter()
        await run()
        took = time.perf_counter() - began
        ttft = [(line.arrivals[0][0] - line.sent_ns) / 1e6 for line in self.lines]
        token = [
            (line.arrivals[-1][0] - line.arrivals[0][0]) / 1e6 / (len(line.token_ids) - 1)
            for line in self.lines
            if len(line.token_ids) > 1
        ]
        num_tokens = sum(len(line.token_ids) for line in self.lines)
        return Figures(traffic, num_tokens / took, len(self.lines) / took, _spread(ttft), _spread(token))


def _prefix_name(nth: int) -> str:
    return f"traffic-{nth}"


def _spread(values: list[float]) -> tuple[float, float]:
    return median(values), sorted(values)[int(0.99 * (len(values) - 1))]


async def measure(engine: Engine, args: argparse.Namespace) -> list[Figures]:
    """Closes the engine."""
    scheduler = Scheduler(engine, SchedulerSettings())
    await scheduler.start()
    try:
        service, vocab_size = InProcess(scheduler), engine.limits.vocab_size
        callers = Callers(service, vocab_size, args.prefixes, tuple(args.prompt), tuple(args.new_tokens))
        for nth in range(args.prefixes):
            tokens = prompt_tokens(vocab_size, args.prefix + nth)[nth:]  # each its own
            await service.create_prefix(_prefix_name(nth), tokens)
        gc.collect()
        gc.freeze()  # as a server does when it is ready
        if args.rates:
            await callers.open(args.rates[0], WARM_UP_S)
        runs = [(f"open {rate:g}", partial(callers.open, rate, args.seconds)) for rate in args.rates]
        runs += [(f"closed {n}", partial(callers.closed, n, args.requests)) for n in args.workers]
        return [await callers.measured(traffic, run) for traffic, run in runs]
    finally:
        await scheduler.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=EngineKind, default=EngineKind.AUTO, choices=list(EngineKind), help="auto")
    parser.add_argument("--model", default="407m", help="a size of `tinyloop init`, demo, or a path; 407m")
    parser.add_argument("--kv-memory", type=int, default=8 << 30, help="bytes; 8 GiB")
    parser.add_argument("--prefix", type=int, default=1024, help="tokens of each; 1024")
    parser.add_argument("--prefixes", type=int, default=1, help="that requests are spread over; 1")
    parser.add_argument(
        "--rates", type=float, nargs="*", default=[100, 300, 500], help="requests a second; 100 300 500"
    )
    parser.add_argument("--workers", type=int, nargs="*", default=[16, 64], help="callers of each closed load; 16 64")
    parser.add_argument("--seconds", type=float, default=3.0, help="that requests come, of each rate; 3")
    parser.add_argument("--requests", type=int, default=12, help="of each caller; 12")
    parser.add_argument(
        "--prompt", type=int, nargs=2, default=(8, 64), help="least and most tokens of a request's own; 8 64"
    )
    parser.add_argument(
        "--new-tokens", type=int, nargs=2, default=(16, 128), help="least and most of an answer; 16 128"
    )
    parser.add_argument("--out", type=Path, help="figures as JSON")
    args = parser.parse_args()
    if not (1 <= args.prompt[0] <= args.prompt[1] and 1 <= args.new_tokens[0] <= args.new_tokens[1]):
        parser.error("--prompt and --new-tokens are the least and the most, from 1 on")
    try:
        path = MODEL_PATH if args.model == "demo" else Path(args.model)
        weights = random_model(SIZES[args.model], 0) if args.model in SIZES else read_model(path)
        engine = build_engine(weights, EngineSettings(engine=args.engine, kv_memory=args.kv_memory))
    except (TinyLoopError, OSError) as error:
        sys.exit(f"error: {error}")
    name = engine.name
    figures = asyncio.run(measure(engine, args))
    print_table(
        f"{args.model}, {name} on {describe_machine()}: {args.prefixes} × {args.prefix} tokens shared, prompts of "
        f"{args.prompt[0]} to {args.prompt[1]}, answers of {args.new_tokens[0]} to {args.new_tokens[1]}",
        ["traffic", "tokens/s", "requests/s", "TTFT, ms (p99)", "a token, ms (p99)"],
        [each.cells() for each in figures],
    )
    if args.out:
        facts = {"machine": describe_machine(), "engine": name, "command": sys.argv[1:], "versions": versions()}
        write_json(args.out, {**facts, "traffic": [asdict(each) for each in figures]})


if __name__ == "__main__":
    main()
