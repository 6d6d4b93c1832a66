"""The benchmarks run, and their JSON has what their tables show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench_cpu
import pytest
from scaling_report import Fit, Series

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


def test_a_table_of_this_cpu_without_llama_cpp(tmp_path: Path) -> None:
    small = ("--models", "tiny", "--prefix", "64", "--rows", "1", "2", "--new-tokens", "3", "--sittings", "1")
    printed, measured = run("bench_cpu.py", tmp_path / "out.json", *small, "--llama-python", str(tmp_path / "none"))
    [model] = measured["models"]
    names = ["prefill", *(f"{what}, {rows}" for what in ("decode step", "SHARED", "NO_CACHE") for rows in (1, 2))]
    assert [line["quantity"] for line in model["lines"]] == names
    assert all(line["tinyloop"][0] > 0 and line["llama_cpp"] == [] for line in model["lines"])
    assert "| prefill | " in printed and printed.count(" | – | – |") == len(names)


def test_llama_cpp_beside() -> None:
    sitting = {
        "prefill_ms": 100.0,
        "decode_step_ms": {"1": 4.0},
        "shared_ms": {"1": 130.0},
        "no_cache_ms": {"1": 140.0},
    }
    peer = {**sitting, "prefill_ms": 200.0, "decode_step_ms": {"1": 2.0}}
    found = bench_cpu.lines([sitting, {**sitting, "prefill_ms": 300.0}], [peer, peer])
    assert found[0] == {"quantity": "prefill", "tinyloop": [100.0, 300.0], "llama_cpp": [200.0, 200.0]}
    table = bench_cpu.markdown("both", found).splitlines()
    assert table[4] == "| prefill | 200 (100, 300) | 200 (200, 200) | 1.00 |"
    assert table[5] == "| decode step, 1 | 4.00 (4.00, 4.00) | 2.00 (2.00, 2.00) | 2.00 |"


def test_without_the_developers_install_what_watching_costs_is_one_sentence(tmp_path: Path) -> None:
    """A file of its name stands for a package that is not there."""
    (tmp_path / "opentelemetry.py").write_text("raise ModuleNotFoundError(\"No module named 'opentelemetry'\")")
    command = (sys.executable, str(TESTS / "bench_observe.py"))
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=path)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "developers' install, pip install -e '.[dev]'" in done.stderr


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


def test_scaling_along_every_axis(tmp_path: Path) -> None:
    points = {"prefix": "64 128 192", "rows": "1 2 3", "loops": "1 2 3", "prefixes": "1 2 3", "names": "50 55 60"}
    asked = [word for axis, values in points.items() for word in (f"--{axis}", *values.split())]
    small = ("--model", "tiny", "--prefix-len", "64", "--budget", "0", *asked)
    printed, measured = run("bench_scaling.py", tmp_path / "out.json", *small)
    series = {(each["axis"], each["name"]): each for each in measured["series"]}
    assert {axis for axis, _ in series} == points.keys()
    for each in series.values():
        assert list(each["median"]) == points[each["axis"]].split(), "three points are measured whatever the budget"
        assert all(value > 0 for value in each["median"].values())
    step, a_token = (series["rows", name]["median"] for name in ("decode step", "decode, a token"))
    assert {rows: a_token[rows] * int(rows) for rows in a_token} == pytest.approx(step)
    assert series["rows", "decode, a token"]["fit"] is None, "a hyperbola"
    assert series["names", "get"]["fit"].keys() == {"at_zero", "slope", "slope_error"}
    assert "names, fake engine, through gRPC" in printed
    picture = (tmp_path / "out.svg").read_text()
    assert all(f"<!-- {name} -->" in picture for _, name in series)


def test_a_line_through_points_and_its_doubt() -> None:
    exact = Series("a", "tokens", "step", "ms", 1000, {x: [5 + 0.002 * x] for x in (100, 200, 400)})
    assert exact.fit == Fit(pytest.approx(5), pytest.approx(0.002), pytest.approx(0, abs=1e-9))
    noisy = Series("a", "tokens", "step", "ms", 1000, {100: [5.0, 5.6, 5.4], 200: [5.0], 400: [6.1]})
    assert noisy.medians == {100: 5.4, 200: 5.0, 400: 6.1}
    said = "step: 4.84 ms + 2.69 ± 2.63 ms per 1000 tokens; from 100 to 400 tokens × 1.16 ± 0.15"
    assert noisy.sentence() == said
    assert Series("a", "tokens", "step", "ms", 1000, {100: [1.0], 200: [2.0]}).fit is None


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
    assert labels == {"prefill_attention", "decode_attention", "decode_attention_merge"}
    assert "of the first" in printed


def test_a_pool_full_of_prefixes_that_all_answer(tmp_path: Path) -> None:
    """As many as memory has room for, beside what one of them is read in and a request."""
    small = ("--engine", "cpu", "--model", "tiny", "--kv-memory", "4MiB", "--cache-mode", "h-int4", "--prefix", "70")
    printed, measured = run("bench_pool.py", tmp_path / "out.json", *small, "--cold", "2")
    layers, blocks = 6, 2
    stored, read = 64 * (256 // 2 + 256 // 64 * 4), 64 * 2 * 256 * 2  # a page
    in_use = blocks * layers * read + layers * (stored + read)
    assert measured["prefix_bytes"] == blocks * layers * stored
    assert abs(measured["prefixes"] - (measured["pool_bytes"] - in_use) // measured["prefix_bytes"]) <= 1
    assert measured["stored_bytes"] == measured["prefixes"] * measured["prefix_bytes"]
    assert not (measured["evictions"] or measured["changed"] or measured["cold_changed"]) and measured["cold_runs"] == 2
    assert f"the same again                {measured['prefixes']} of {measured['prefixes']}" in printed
