"""What watching costs: microseconds a step and a token, with and without metrics, on an engine that costs nothing.

    python tests/bench_observe.py [--rows 50] [--new-tokens 200] [--rounds 7]

First the scheduler in process, without an observer and with a server's, taking turns; then the parts alone: what a
stream does with the tokens of a plan, a step, a call with and without its trace, a scrape.  All of it CPU time of the
process, so that a busy machine matters less.  Formulas: CPU seconds of a round / steps of a round, and / tokens of a
round; of the parts the least of five runs.  The engine is the fake one: what differs is Python alone.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

try:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing}: this needs the developers' install, pip install -e '.[dev]'") from None

from tinyloop_service.bench import describe_machine
from tinyloop_service.engine.fake import FAKE_LIMITS, FakeEngine
from tinyloop_service.observe import traces
from tinyloop_service.observe.exposition import families
from tinyloop_service.observe.hub import Observation
from tinyloop_service.observe.logs import configure_logging
from tinyloop_service.observer import UNWATCHED, CallRecord, Observer, RequestRecord
from tinyloop_service.scheduler.events import Admitted, Sampled
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.scheduler.stream import Stream
from tinyloop_service.settings import LogLevel, SchedulerSettings, ServerSettings
from tinyloop_service.types import GenerationRequest, PrefixDefinition, Stops

CALLS = 5_000
LIMITS = replace(FAKE_LIMITS, num_pages=60_000, max_rows=256)


def observation(**settings: Any) -> Observation:
    """As a server with a metrics port has it; the port itself is not opened."""
    return Observation(ServerSettings(metrics_listen="127.0.0.1:0", **settings), "here")


async def seconds_of_a_round(observer: Observer, rows: int, new_tokens: int) -> float:
    """CPU seconds of `rows` requests off one prefix at once, one step a plan."""
    scheduler = Scheduler(FakeEngine(LIMITS), SchedulerSettings(steps_per_plan=1), observer=observer)
    await scheduler.start()
    await scheduler.create_prefix(PrefixDefinition(tuple(range(1, 65))), name="p")

    async def read(i: int) -> None:
        request = GenerationRequest((1 + i,), new_tokens, prefix="p", stops=Stops(ignore_eos=True), want_text=False)
        async with scheduler.generate(request) as stream:
            async for _ in stream:
                pass

    began = time.process_time()
    await asyncio.gather(*map(read, range(rows)))
    seconds = time.process_time() - began
    await scheduler.close()
    return seconds


@dataclass
class Alone:
    """What a stream asks of a scheduler."""

    observer: Observer

    def now_ns(self) -> int:
        return 0

    def cancel(self, request: int) -> None:
        pass


def microseconds(act: Callable[[int], object], times: int = CALLS) -> float:
    """CPU time of one `act`, the least of five runs."""
    best = float("inf")
    for _ in range(5):
        began = time.process_time()
        for i in range(1, times + 1):
            act(i)
        best = min(best, (time.process_time() - began) / times * 1e6)
    return best


def piece(observer: Observer) -> float:
    """A stream takes one plan's tokens."""
    stream = Stream(GenerationRequest((1,), 10**9, want_text=False), 0, Alone(observer), None)
    stream.deliver_start(Admitted(1, 0, 1, 1))
    return microseconds(lambda i: stream.deliver_tokens(Sampled(1, 0, (5,), (), None, 1000 * i), 10**7))


def call(watching: Observation) -> float:
    """A call ends; its log line is below the level."""
    request = RequestRecord("t", "p", 1, 1000, 0, 0, 2000, 3000, 4000, 10, 8, 5, ["length"])
    record = CallRecord("tinyloop.v1.GenerationService", "Generate", "id", 900, (), "t", "p", request)
    record.end_ns = 5000
    return microseconds(lambda i: watching.call_ended(record), 200)


def milliseconds_of_a_scrape(watching: Observation) -> tuple[float, float]:
    """On the event loop; on the port's own thread."""
    began = time.process_time()
    snapshot = watching.snapshot()
    between = time.process_time()
    list(families(snapshot))
    return (between - began) * 1e3, (time.process_time() - between) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    configure_logging(ServerSettings(log_level=LogLevel.ERROR))
    traces.otlp_exporter = lambda endpoint: InMemorySpanExporter()
    watching = observation()
    sides: dict[str, tuple[Observer, list[float]]] = {"unwatched": (UNWATCHED, []), "watched": (watching, [])}
    for _ in range(args.rounds):
        for observer, seconds in sides.values():
            seconds.append(asyncio.run(seconds_of_a_round(observer, args.rows, args.new_tokens)))
    print(f"{args.rows} rows × {args.new_tokens} tokens, {args.rounds} rounds, on {describe_machine()}")
    for name, (_, seconds) in sides.items():
        per_step = sorted(each / args.new_tokens * 1e6 for each in seconds)
        median = statistics.median(per_step)
        spread = f"{per_step[0]:.0f}–{per_step[-1]:.0f}"
        print(f"{name:10s} {median:7.0f} µs a step ({spread}), {median / args.rows:6.2f} µs a token")
    print(f"a piece    {piece(UNWATCHED):.2f} µs for a stream, watched {piece(watching):.2f}")
    print(f"a step     {microseconds(lambda i: watching.step((50,), 0, 2_500_000)):.2f} µs")
    print(f"a call     {call(watching):.1f} µs, traced {call(observation(otlp_endpoint='http://127.0.0.1:9')):.1f}")
    on_loop, beside = milliseconds_of_a_scrape(watching)
    print(f"a scrape   {on_loop:.2f} ms on the event loop, {beside:.2f} ms beside it")


if __name__ == "__main__":
    main()
