"""What the service costs beside the engine: streams through gRPC and in process, tokens per second and CPU time.

    python tests/bench_streams.py [--engine fake] [--model PATH] [--streams 1 16 64 256] [--new-tokens 32 512]
        [--plan-ms 0] [--grpc-processes 0] [--sittings 2] [--seconds 2]

All streams of a round start at once, off one shared prefix of the demo's text that is built already; rounds follow each
other for --seconds, and the two sides take turns, --sittings times.

in process   the scheduler on an event loop of this process, without an observer; "engine": what of it the engine's
             thread used
gRPC         a server in another process of this machine, as it is deployed (a line of log a call, metrics switched on);
             one client of one connection in this process, which reads messages and counts their ids
tokens/s     streams × new tokens / (last token − first request sent), median of the rounds
CPU          of the process that serves, over all its threads and rounds, / tokens and / requests; it depends less than
             wall time on who else uses the machine.  "loop": of the event loop's thread alone
messages     a request's, which is what gRPC takes CPU for: the slower a stream, the more there are of them

The fake engine (`engine/fake.py`) has the demo's tokenizer and a CUDA engine's plans: 256 rows, 8 steps, 4 when busy.
With --plan-ms it sleeps in each, as a device would: 2.4 is four steps of 50 rows on an H200.  The blank one is the
same without its arithmetic, and what is left of the figures is the service's: a row has the same tokens every time.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from subprocess import DEVNULL, PIPE

import grpc
from bench_report import print_table

from tinyloop_service.app import App, run_process
from tinyloop_service.bench import describe_machine
from tinyloop_service.client import AsyncClient
from tinyloop_service.demo import MODEL_PATH, PREFIX_TEXT, SUFFIXES
from tinyloop_service.engine.api import Engine, Pending, Plan, RowOutput, SequenceId
from tinyloop_service.engine.fake import FAKE_LIMITS, FakeEngine
from tinyloop_service.engine.weights import read_model
from tinyloop_service.loading import LoadedModel, load_model
from tinyloop_service.observe.logs import configure_logging
from tinyloop_service.pb import generation_pb2, generation_pb2_grpc, input_pb2
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.settings import EngineSettings, LogFormat, SchedulerSettings, ServerSettings, Settings
from tinyloop_service.text import Tokenizer
from tinyloop_service.types import Delta, GenerationRequest, PrefixDefinition, Sampling, Stops

PREFIX = "bench"
TOKENS = tuple(300 + i * 997 % 1500 for i in range(FAKE_LIMITS.max_steps))
FAKE = replace(FAKE_LIMITS, num_pages=60_000, max_rows=256, busy_steps=4, goes_on=64, vocab_size=4096)


class BlankEngine(FakeEngine):
    """Costs nothing."""

    def _decode(self, seq: SequenceId, num_steps: int) -> RowOutput:
        sequence = self._sequence(seq)
        assert sequence.opened.end is not None
        count = min(num_steps, sequence.opened.end - sequence.length)
        sequence.length += count
        return RowOutput(seq, TOKENS[:count])


FAKES = {"fake": FakeEngine, "blank": BlankEngine}


@dataclass(slots=True)
class Figures:
    """Of one side and one load."""

    rates: list[float] = field(default_factory=list)  # tokens/s, one a round
    requests: int = 0
    messages: int = 0
    cpu_s: float = 0.0
    part_s: float = 0.0  # of it, one thread's

    @property
    def rate(self) -> float:
        return median(self.rates)


def load(kind: str, path: Path, plan_ms: float = 0.0) -> LoadedModel:
    if kind not in FAKES:
        return load_model(path, EngineSettings(engine=kind))
    weights = read_model(path)
    assert weights.tokenizer is not None and weights.spec.vocab_size <= FAKE.vocab_size
    limits = replace(FAKE, vocab_size=weights.spec.vocab_size)
    return LoadedModel(
        FAKES[kind](limits, step_s=plan_ms / 1e3), Tokenizer(weights.tokenizer, weights.spec.bos_token_id), {}
    )


async def repeat(round_: Callable[[], Awaitable[int]], streams: int, seconds: float, figures: Figures) -> None:
    """Rounds for that long; `round_` gives the number of tokens that came."""
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        tokens = await round_()
        figures.rates.append(tokens / (time.perf_counter() - began))
        figures.requests += streams


# ---- in process


class Timed:
    """An engine, and the CPU seconds of the thread that hands it plans."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.limits, self.name, self.step, self.close = engine.limits, engine.name, engine.step, engine.close
        self.cpu_s = 0.0

    def submit(self, plan: Plan) -> Pending:
        began = time.thread_time()
        pending = self._engine.submit(plan)
        self.cpu_s += time.thread_time() - began
        return pending


async def in_process(loaded: LoadedModel, streams: int, new_tokens: int, seconds: float, figures: Figures) -> None:
    assert loaded.tokenizer is not None
    tokenizer, engine = loaded.tokenizer, Timed(loaded.engine)
    scheduler = Scheduler(engine, SchedulerSettings(), tokenizer=tokenizer)
    await scheduler.start()
    await scheduler.create_prefix(PrefixDefinition(tokenizer.encode(PREFIX_TEXT, bos=True)), name=PREFIX)

    async def read(index: int) -> int:
        suffix = tokenizer.encode(SUFFIXES[index % len(SUFFIXES)], bos=False)
        sampling = Sampling(temperature=0.7, seed=index)
        request = GenerationRequest(suffix, new_tokens, prefix=PREFIX, sampling=sampling, stops=Stops(ignore_eos=True))
        async with scheduler.generate(request) as stream:
            return sum(
                len(output.token_ids) for outputs in [o async for o in stream] for output in outputs
                if isinstance(output, Delta)
            )  # fmt: skip

    async def round_() -> int:
        return sum(await asyncio.gather(*map(read, range(streams))))

    await round_()  # warms up
    cpu_s, engine.cpu_s = time.process_time(), 0.0
    await repeat(round_, streams, seconds, figures)
    figures.cpu_s += time.process_time() - cpu_s
    figures.part_s += engine.cpu_s
    await scheduler.close()


# ---- through gRPC


def serve(kind: str, path: Path, plan_ms: float, grpc_processes: int) -> None:
    """The server, in a process of its own; says "serving ADDRESS" on standard output."""
    server = ServerSettings(
        listen="127.0.0.1:0",
        health_listen=None,
        grpc_processes=grpc_processes,
        metrics_listen="127.0.0.1:0",
        log_format=LogFormat.JSON,
    )
    configure_logging(server)
    app = App(Settings(server=server), lambda: load(kind, path, plan_ms))
    run_process(app, lambda app: print("serving", app.address, flush=True))


@asynccontextmanager
async def served(args: argparse.Namespace) -> AsyncIterator[tuple[str, int]]:
    """Its address and process."""
    given = {name: getattr(args, name) for name in ("engine", "model", "plan_ms", "grpc_processes")}
    options = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = (sys.executable, __file__, "--serve", *options)
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL)
    try:
        assert process.stdout is not None
        words = (await process.stdout.readline()).split()
        assert len(words) == 2, "the server ended before it was ready"
        yield words[1].decode(), process.pid
    finally:
        process.terminate()
        await process.wait()


def cpu_seconds(process: int) -> tuple[float, float]:
    """Of all threads that live, and of the main one."""
    tasks = Path(f"/proc/{process}/task")
    seconds = {task.name: int((task / "schedstat").read_text().split()[0]) / 1e9 for task in tasks.iterdir()}
    return sum(seconds.values()), seconds[str(process)]


async def remote(address: str, process: int, streams: int, new_tokens: int, seconds: float, figures: Figures) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        async def read(index: int) -> int:
            request = generation_pb2.GenerateRequest(
                prefix=f"prefixes/{PREFIX}",
                input=input_pb2.Input(text=SUFFIXES[index % len(SUFFIXES)]),
                max_tokens=new_tokens,
                sampling=generation_pb2.Sampling(temperature=0.7),
                seed=index,
                ignore_eos=True,
                packed=True,
            )
            messages = [message async for message in stub.Generate(request)]
            figures.messages += len(messages)
            return sum(len(part.delta.token_ids) for message in messages for part in (message, *message.further))

        async def round_() -> int:
            return sum(await asyncio.gather(*map(read, range(streams))))

        counted = figures.messages
        await round_()  # warms up
        figures.messages, before = counted, cpu_seconds(process)
        await repeat(round_, streams, seconds, figures)
        after = cpu_seconds(process)
        figures.cpu_s += after[0] - before[0]
        figures.part_s += after[1] - before[1]


# ---- both


async def measure(args: argparse.Namespace) -> dict[tuple[int, int], tuple[Figures, Figures]]:
    """In process and through gRPC, by streams and new tokens."""
    loads = [(streams, new_tokens) for new_tokens in args.new_tokens for streams in args.streams]
    found = {load: (Figures(), Figures()) for load in loads}
    async with served(args) as (address, process):
        async with AsyncClient(address) as client:
            await client.create_prefix(PREFIX, PREFIX_TEXT)
        for _ in range(args.sittings):
            for (streams, new_tokens), (inside, outside) in found.items():
                await in_process(load(args.engine, args.model, args.plan_ms), streams, new_tokens, args.seconds, inside)
                await remote(address, process, streams, new_tokens, args.seconds, outside)
    return found


COLUMNS = (
    "streams", "tokens", "in process: tokens/s", "CPU/token", "engine/token",
    "gRPC: tokens/s", "of it", "CPU/token", "CPU/request", "loop/request", "messages/request",
)  # fmt: skip


def row(streams: int, new_tokens: int, inside: Figures, outside: Figures) -> list[str]:
    """Of the table: in process, then gRPC; CPU in µs."""

    def micros(seconds: float, count: int) -> str:
        us = seconds / count * 1e6
        return f"{us:.2f}" if us < 100 else f"{us:,.0f}"

    return [
        str(streams), str(new_tokens),
        f"{inside.rate:,.0f}",
        micros(inside.cpu_s, inside.requests * new_tokens),
        micros(inside.part_s, inside.requests * new_tokens),
        f"{outside.rate:,.0f}",
        f"{outside.rate / inside.rate:.2f}",
        micros(outside.cpu_s, outside.requests * new_tokens),
        micros(outside.cpu_s, outside.requests),
        micros(outside.part_s, outside.requests),
        f"{outside.messages / outside.requests:.1f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="fake", help="fake, blank, cpu, cuda or auto")
    parser.add_argument("--model", type=Path, default=MODEL_PATH)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[32, 512])
    parser.add_argument("--sittings", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="of rounds, for each side, in each sitting")
    parser.add_argument("--plan-ms", type=float, default=0.0, help="sleep of the fake engine, without the GIL")
    parser.add_argument("--grpc-processes", type=int, default=0, help="as of `tinyloop serve`")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.engine, args.model, args.plan_ms, args.grpc_processes)
    busy = Path("/proc/loadavg").read_text().split()[0]
    found = asyncio.run(measure(args))
    print_table(
        f"{args.engine} engine on {describe_machine()}; CPU in µs; load average {busy} before",
        COLUMNS,
        [row(*load, *figures) for load, figures in found.items()],
    )


if __name__ == "__main__":
    main()
