"""A result made by formulas, for who draws and tests reports: `python tests/load/load_example.py` writes example.json.

A server with eight seats and a queue, so that rates up to six a second are served and ten are not.  Nothing of it was
measured, which its metadata says.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from tinyloop_service.load.results import (
    Builds,
    Comparison,
    Counts,
    Distribution,
    Driving,
    Economy,
    ErrorCount,
    Lag,
    Latencies,
    Metadata,
    Phase,
    Result,
    Second,
    Slo,
    Sweep,
    Throughput,
    Verification,
    Way,
)

PATH = Path(__file__).with_name("example.json")
RATES = (1.0, 2.0, 4.0, 6.0, 10.0)
SECONDS, WARMUP = 30, 5
CAPACITY = {Way.SHARED: 7.0, Way.NO_SHARE: 2.5}  # requests per second
SERVICE_MS = {Way.SHARED: 40.0, Way.NO_SHARE: 420.0}  # until the first token of a lone request
NEW_TOKENS, PROMPT = 32, 1100


def distribution(median: float, spread: float, count: int) -> Distribution:
    """As if log-normal: median, and the ratio of the 84th percentile to it."""

    def at(deviations: float) -> float:
        return round(median * spread**deviations, 3)

    shares = [(index + 0.5) / 24 for index in range(24)]
    points = [(at(1.7 * math.log(share / (1 - share)) / 2.95), round(share, 4)) for share in shares]
    cdf = (*points, (at(3.0), 1.0))
    return Distribution(count, at(0.2), at(0), at(1.28), at(1.64), at(2.33), at(3.0), cdf)


def phase(way: Way, rate: float) -> Phase:
    load = rate / CAPACITY[way]
    served, waiting = min(rate, CAPACITY[way]), max(0.0, rate - CAPACITY[way])
    measured = SECONDS - WARMUP
    offered = round(rate * measured)
    failed = round(waiting * measured / 4)
    unfinished = round(waiting * measured / 8)
    completed = offered - failed - unfinished
    queue = 2.0 / max(0.05, 1 - load)
    step = 12.0 + 8.0 * min(load, 1.0)
    ttft = SERVICE_MS[way] + queue
    errors = (ErrorCount("UNAVAILABLE", "QUEUE_FULL", failed, False, "the queue is full (64 requests)"),)
    kept = None if load > 1 else round(served * (1 - load**4 / 3), 3)
    return Phase(
        way=way,
        driving=Driving.OPEN,
        load=rate,
        warmup_s=float(WARMUP),
        measured_s=float(measured),
        counts=Counts(offered, completed, 0, failed, unfinished),
        latencies=Latencies(
            queue=distribution(queue, 2.0, completed),
            ttft=distribution(ttft, 1.5, completed),
            itl=distribution(step, 1.15, completed * (NEW_TOKENS - 1)),
            gap=distribution(step * 1.4, 1.3, completed * 20),
            tpot=distribution(step, 1.1, completed),
            e2e=distribution(ttft + step * (NEW_TOKENS - 1), 1.2, completed),
        ),
        throughput=Throughput(
            served, served * NEW_TOKENS, served * PROMPT, kept or 0.0, round((kept or 0.0) / rate, 3)
        ),
        cached_token_rate=0.93 if way is Way.SHARED else 0.0,
        builds=None,
        errors=errors if failed else (),
        lag=Lag(distribution(0.2, 1.5, 3000), distribution(0.3, 1.6, offered), 0.12, None),
        series=tuple(second(way, rate, at) for at in range(1, SECONDS + 1)),
        pages_before=0,
        pages_after=0,
    )


def slowed(one: Phase, why: str) -> Phase:
    """As it is reported where the harness was the bottleneck."""
    throughput = replace(one.throughput, goodput_per_s=None, goodput_share=None)
    return replace(one, latencies=None, throughput=throughput, lag=replace(one.lag, bottleneck=why))


def second(way: Way, rate: float, at: int) -> Second:
    load = rate / CAPACITY[way]
    rise = 1 - math.exp(-at / 2)
    wave = 1 + 0.1 * math.sin(at * 1.7)
    rows = min(8.0, 8 * load) * rise * wave
    waiting = max(0.0, rate - CAPACITY[way]) * at * 0.6
    prefixes = 0.2 if way is Way.SHARED else 0.0
    held = min(1.0, prefixes + 0.06 * rows)
    generated = min(rate, CAPACITY[way]) * NEW_TOKENS * rise * wave
    gauges = (round(value, 3) for value in (rows, rows, waiting, held, prefixes, 0.0, 4.0 if prefixes else 0.0))
    return Second(float(at), *gauges, evictions=0, tokens_per_s=round(generated, 3))


def comparison(rate: float) -> Comparison:
    shared, alone = phase(Way.SHARED, rate), phase(Way.NO_SHARE, rate)
    assert shared.latencies and shared.latencies.ttft and shared.latencies.e2e
    assert alone.latencies and alone.latencies.ttft and alone.latencies.e2e
    return Comparison(
        rate,
        shared.throughput.tokens_per_s / alone.throughput.tokens_per_s,
        alone.latencies.ttft.p50 / shared.latencies.ttft.p50,
        alone.latencies.ttft.p95 / shared.latencies.ttft.p95,
        alone.latencies.e2e.p50 / shared.latencies.e2e.p50,
    )


def example() -> Result:
    server = {
        "model_id": "0" * 64,
        "engine": "cpu",
        "server_version": "0.1.0",
        "replica": "example",
        "default_loops": 8,
        "max_loops": 16,
        "max_seq_len": 2048,
        "max_rows": 64,
        "cache_mode": "fp16",
        "has_tokenizer": True,
        "eos_token_ids": [0],
    }
    return Result(
        metadata=Metadata(
            command="python tests/load/load_example.py",
            start_time="2026-01-01T00:00:00Z",
            target="127.0.0.1:50051",
            machine="none: every number here comes from a formula",
            versions={"python": "3.11", "grpcio": "1.85"},
            server={**server, "config": {"d_model": 256, "default_loops": 8}},
            workload={"name": "rag", "prefixes": 4, "prefix_len": 1024, "suffix_len": 76, "output_len": NEW_TOKENS},
            seed=0,
            processes=1,
            slo=Slo(ttft_ms=200.0, itl_ms=30.0),
        ),
        phases=tuple(phase(way, rate) for rate in RATES for way in Way),
        comparisons=tuple(map(comparison, RATES)),
        economy=Economy(1024, 76, NEW_TOKENS, 400.0, 440.0, 820.0, 400.0 / 380.0),
        setup=Builds(4, 4 * 1024, 400.0, 430.0),
        sweeps=(
            Sweep(Way.SHARED, 6.0, 6.0, phase(Way.SHARED, 6.0).throughput.goodput_per_s, 0.9),
            Sweep(Way.NO_SHARE, 2.0, None, None, 0.9),
        ),
        verification=Verification(16, 15, ("request 7, shared: token 3 is 41, alone 40",)),
    )


if __name__ == "__main__":
    PATH.write_text(example().to_json() + "\n", encoding="utf-8")
