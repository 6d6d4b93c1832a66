"""What watching costs: microseconds a step and a token, with and without metrics, on an engine that costs nothing.

    python tests/bench_observe.py [--rows 50] [--new-tokens 200] [--rounds 7]

Three views: the scheduler in process, without an observer and with a server's, taking turns; the observer's calls
alone; a scrape.  All of it CPU time of the process, so that a busy machine matters less.  Formulas: CPU seconds of a
round / steps of a round, and / tokens of a round.  The engine is the fake one: what differs is Python alone.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import replace

from tinyloop_service.bench import describe_machine
from tinyloop_service.engine.fake import FAKE_LIMITS, FakeEngine
from tinyloop_service.observe.exposition import families
from tinyloop_service.observe.hub import Observation
from tinyloop_service.observer import UNWATCHED, Observer
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.settings import SchedulerSettings, ServerSettings
from tinyloop_service.types import GenerationRequest, PrefixDefinition, Stops

CALLS = 200_000
LIMITS = replace(FAKE_LIMITS, num_pages=60_000, max_rows=256)


def observation() -> Observation:
    """As a server with a metrics port has it; the port itself is not opened."""
    return Observation(ServerSettings(metrics_listen="127.0.0.1:0"), "here")


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


def microseconds_of_a_call(observer: Observer) -> tuple[float, float]:
    """generated, step."""
    began = time.process_time()
    for _ in range(CALLS):
        observer.generated("", 1, 1, 2.5e6)
    between = time.process_time()
    for _ in range(CALLS):
        observer.step(50, 1, 0, 2_500_000)
    return (between - began) / CALLS * 1e6, (time.process_time() - between) / CALLS * 1e6


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
    generated, step = microseconds_of_a_call(watching)
    print(f"alone      generated {generated:.2f} µs, step {step:.2f} µs a call")
    on_loop, beside = milliseconds_of_a_scrape(watching)
    print(f"a scrape   {on_loop:.2f} ms on the event loop, {beside:.2f} ms beside it")


if __name__ == "__main__":
    main()
