"""The benchmark of shared prefixes runs, and its JSON has what its table shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_both_places_and_bodies(tmp_path: Path) -> None:
    out = tmp_path / "folder" / "out.json"
    small = ("--engine", "cpu", "--model", "tiny", "--rounds", "1", "--new-tokens", "3")
    asked = ("--prefix", "70", "--requests", "2", "4", "--max-no-cache", "3", "--out", str(out))
    command = (sys.executable, str(TESTS / "bench_prefix_cache.py"), *small, *asked)
    printed = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    measured = json.loads(out.read_text())
    found = [(line["body"], line["place"], line["requests"], line["no_cache_scaled"]) for line in measured["lines"]]
    assert found == [
        (body, place, requests, requests > 3)
        for body in ("int4", "fp16")
        for place in ("process", "grpc")
        for requests in (2, 4)
    ]
    assert all(0 < line["shared_spread_ms"][0] <= line["shared_ms"] for line in measured["lines"])
    assert [report["prefix_bytes"] for report in measured["reports"]] == 2 * [2 * 6 * 64 * 256 * 2 * 2]
    assert measured["starts"].keys() == {"int4", "fp16"}
    assert "int4 grpc" in printed
