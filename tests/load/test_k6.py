"""integrations/k6: the script runs against a server, counts what the server sends, and fails where requests do."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from scaling_axes import fake_server

SCRIPT = Path(__file__).parents[2] / "integrations" / "k6" / "tinyloop.js"
K6 = Path(sys.executable).with_name("k6")


async def run(folder: Path, address: str, **settings: str | int) -> tuple[int, dict[str, Any]]:
    """Its status, and its metrics by name."""
    given = {"TARGET": address, "DURATION": "1s", **settings}
    options = [word for name, value in given.items() for word in ("-e", f"{name}={value}")]
    summary = folder / "summary.json"
    command = (str(K6), "run", "--quiet", "--no-usage-report", f"--summary-export={summary}", *options, str(SCRIPT))
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    status = await asyncio.wait_for(process.wait(), 60)
    return status, json.loads(summary.read_text())["metrics"]


@pytest.mark.parametrize(("shared", "load"), [(1, {"RATE": 10}), (0, {"VUS": 2})], ids=["open, shared", "closed, cold"])
async def test_streams_are_counted(tmp_path: Path, shared: int, load: dict[str, int]) -> None:
    async with fake_server() as address:
        status, metrics = await run(tmp_path, address, SHARED=shared, PREFIX_LEN=64, NEW_TOKENS=5, **load)
    requests = metrics["iterations"]["count"]
    assert status == 0 and requests >= 2
    assert metrics["tokens"]["count"] == 5 * requests
    assert metrics["prompt_tokens"]["count"] == (64 + 16) * requests
    assert metrics["cached_tokens"]["count"] == (64 * requests if shared else 0)
    assert metrics["failed"]["value"] == 0 and metrics["ttft"]["max"] <= metrics["e2e"]["max"]


async def test_a_refused_request_fails_the_run(tmp_path: Path) -> None:
    async with fake_server() as address:
        status, metrics = await run(tmp_path, address, VUS=1, PREFIX_LEN=64, NEW_TOKENS=10**6)
    assert status == 99, "a threshold was not kept"
    assert metrics["failed"]["value"] == 1
