"""What the service layer costs: tokens per second of N streams through gRPC, beside the same in process.

    python tests/bench_streams.py [--model PATH] [--streams 50] [--new-tokens 64] [--rounds 3]

Both sides run the same requests off one shared prefix of the demo's text, already built: in process through `Model`,
remote through `AsyncClient` against a server in another process on this machine.  The sides take turns; medians, and
all rounds.  Formula: streams × new_tokens / (last token − first request sent).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tinyloop_service import AsyncClient, Model
from tinyloop_service.bench import describe_machine
from tinyloop_service.cli.local_server import local_server
from tinyloop_service.demo import MODEL_PATH, PREFIX_TEXT, SUFFIXES


def requests_of(streams: int, new_tokens: int) -> list[dict[str, Any]]:
    """Keyword arguments of `stream`, all but the prefix."""
    return [
        {
            "suffix": SUFFIXES[i % len(SUFFIXES)],
            "seed": i,
            "temperature": 0.7,
            "max_tokens": new_tokens,
            "ignore_eos": True,
        }
        for i in range(streams)
    ]


def in_process(model_path: Path, requests: list[dict[str, Any]], rounds: int) -> list[float]:
    """Seconds of each round; the first, which warms up, is left out."""
    with Model(model_path) as model, ThreadPoolExecutor(len(requests)) as pool:
        prefix = model.build_prefix_cache(PREFIX_TEXT)
        seconds = []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            list(pool.map(lambda request: list(model.stream(prefix=prefix, **request)), requests))
            seconds.append(time.perf_counter() - began)
        return seconds[1:]


async def remote(model_path: Path, requests: list[dict[str, Any]], rounds: int) -> list[float]:
    """As `in_process`."""

    async def read(request: dict[str, Any]) -> None:
        async for _ in client.stream(prefix="bench", **request):
            pass

    async with local_server(model_path) as address, AsyncClient(address) as client:
        await client.create_prefix("bench", PREFIX_TEXT)
        seconds = []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            await asyncio.gather(*map(read, requests))
            seconds.append(time.perf_counter() - began)
        return seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL_PATH)
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="of each side, in each of two sittings")
    args = parser.parse_args()
    requests = requests_of(args.streams, args.new_tokens)
    seconds: dict[str, list[float]] = {"in process": [], "gRPC": []}
    for _ in range(2):
        seconds["in process"] += in_process(args.model, requests, args.rounds)
        seconds["gRPC"] += asyncio.run(remote(args.model, requests, args.rounds))
    print(f"{args.streams} streams × {args.new_tokens} tokens on {describe_machine()}")
    rates = {side: [args.streams * args.new_tokens / s for s in times] for side, times in seconds.items()}
    for side, values in rates.items():
        print(
            f"{side:10s}  median {statistics.median(values):7.0f} tokens/s   all {[round(v) for v in sorted(values)]}"
        )
    print(f"gRPC / in process: {statistics.median(rates['gRPC']) / statistics.median(rates['in process']):.2f}")


if __name__ == "__main__":
    main()
