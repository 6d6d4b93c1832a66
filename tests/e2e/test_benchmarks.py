"""The benchmarks run, and their JSON has what their tables show."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


def run(script: str, out: Path, *options: str) -> tuple[str, Any]:
    """What it printed, and its JSON."""
    command = (sys.executable, str(TESTS / script), *options, "--out", str(out))
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(out.read_text())


def test_prefix_cache_in_both_places_with_both_bodies(tmp_path: Path) -> None:
    small = ("--engine", "cpu", "--model", "tiny", "--rounds", "1", "--new-tokens", "3")
    asked = ("--prefix", "70", "--requests", "2", "4", "--max-no-cache", "3")
    printed, measured = run("bench_prefix_cache.py", tmp_path / "folder" / "out.json", *small, *asked)
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


def test_cache_modes_side_by_side() -> None:
    small = ("--prefix", "70", "--rounds", "1", "--rows", "1", "2", "--modes", "fp16", "h-int4")
    command = (sys.executable, str(TESTS / "bench_cache_modes.py"), *small)
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    lines = {line.split(" | ")[0]: line.split(" | ") for line in done.stdout.splitlines() if " | " in line}
    assert lines.keys() == {"mode", "fp16", "h-int4"}
    assert {len(cells) for cells in lines.values()} == {7}
    pages = 2 * 10  # two blocks of ten layers
    assert lines["fp16"][1] == f"{pages * 64 * 384 * 4 / 2**20:.2f} MiB", "K and V of 384 values, fp16"
    assert lines["h-int4"][1] == f"{pages * 64 * (192 + 6 * 4) / 2**20:.2f} MiB", "six groups of 64 channels"


def test_what_watching_costs() -> None:
    command = (sys.executable, str(TESTS / "bench_observe.py"), "--rows", "2", "--new-tokens", "5", "--rounds", "1")
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    parts = [line.split("  ")[0] for line in done.stdout.splitlines()[1:]]
    assert parts == ["unwatched", "watched", "a piece", "a step", "a call", "a scrape"]


def test_kernels_in_emulation(tmp_path: Path) -> None:
    printed, measured = run("bench_kernels.py", tmp_path / "out.json", "--emulated")
    profiles = {profile["title"]: profile["lines"] for profile in measured["profiles"]}
    assert profiles.keys() == {
        "prefill of 20", "step of 1 rows, prefix 70", "step of 3 rows, prefix 70", "opening 3 rows, prefix 70",
    }  # fmt: skip
    attention = {line["label"]: line for line in profiles["step of 3 rows, prefix 70"]}["decode_attention"]
    page_bytes = 2 * 64 * 64 * 2  # K and V, tokens, head_dim, fp16
    assert attention["launches"] == 3, "one in each cache layer"
    assert attention["cost"]["memory_bytes"] == 3 * (1 + 3) * page_bytes, "the shared page once, own ones for each row"
    weights = 64 * 192 // 2 + 64 // 64 * 192 * 2  # nibbles and scales
    qkv = {line["label"]: line for line in profiles["step of 1 rows, prefix 70"]}["linear_qkv 64→192"]
    assert qkv["cost"]["memory_bytes"] == 2 * weights, "of two blocks; the loop's second pass finds them in the cache"
    assert "step, prefix 70, 8 a plan, 3 rows" in printed


def test_attention_in_emulation(tmp_path: Path) -> None:
    printed, measured = run("bench_kernels.py", tmp_path / "out.json", "--emulated", "--attention")
    assert {mode: [profile["title"] for profile in profiles] for mode, profiles in measured["attention"].items()} == {
        mode: ["prefill of 20", "step of 1 rows, prefix 70", "step of 3 rows, prefix 70"] for mode in ("fp16", "int8")
    }
    labels = {line["label"] for profiles in measured["attention"].values() for p in profiles for line in p["lines"]}
    assert labels == {"prefill_attention", "decode_attention", "decode_attention_merge", "append_int8"}
    assert "of the first" in printed
