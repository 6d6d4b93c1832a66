"""`tinyloop top`: what a frame says of two samples, at any width."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console

from tinyloop_service.cli.top_view import Frame, Sample, render
from tinyloop_service.client import Prefix
from tinyloop_service.client.results import ModelInfo
from tinyloop_service.types import CacheMode, Load, PrefixState

MODEL = ModelInfo("cafe" * 16, "cpu", "1", "replica-0", 8, 16, 4096, 64, CacheMode.FP16, True, (0,), {})
IDLE = Load(0, 0, 1000, 1000, 0, 0, 0, 2**20, 0, 0, 0, accepting=True)
BUSY = replace(
    IDLE,
    rows_running=32,
    requests_running=30,
    requests_waiting=3,
    pages_free=400,
    pages_prefixes=300,
    pages_requests=299,
    pages_active=1,
    prefixes_ready=2,
    prefixes_building=1,
    prefix_evictions=7,
    prompt_tokens=10_000,
    cached_tokens=9_000,
    generated_tokens=5_000,
)


def prefix(name: str, size: int, **fields: Any) -> Prefix:
    now = datetime.now(UTC)
    fixed: dict[str, Any] = {
        "uid": name, "etag": "e", "state": PrefixState.READY, "error": None, "token_count": 1234, "loops": 8,
        "cache_window": 0, "cache_mode": CacheMode.FP16, "shared_bytes": 0, "content_sha256": "", "parent": None,
        "pinned": False, "create_time": now, "expire_time": None, "last_use_time": now - timedelta(seconds=100),
        "use_count": 0, "build_duration": timedelta(0), "tokens_built": 1234,
    }  # fmt: skip
    return Prefix(id=name, size_bytes=size, **{**fixed, **fields})


def text(frame: Frame, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(render(frame))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def frame(before: Load | None, now: Load, *prefixes: Prefix, seconds: float = 2.0, **fields: Any) -> Frame:
    old = Sample(10.0, before, [replace(p, use_count=0) for p in prefixes]) if before is not None else None
    return Frame("host:1", MODEL, Sample(10.0 + seconds, now, prefixes), old, **fields)


def line(shown: str, word: str) -> str:
    [found] = [line for line in shown.splitlines() if line.startswith(word)]
    return found


def test_a_frame_says_what_the_server_says() -> None:
    shown = text(frame(None, BUSY))
    assert "host:1" in shown and "replica-0" in shown and "8 loops" in shown
    assert line(shown, "rows").count("█") == 15 and line(shown, "rows").endswith("32 of 64")
    assert "30 running, 3 waiting" in shown
    assert line(shown, "memory").endswith("60% of 1000.0 MiB")
    assert line(shown, "memory").count("█") == 9 + 9 + 1, "a single page is a cell too"
    assert "prefixes 300.0 MiB" in shown and "free 400.0 MiB" in shown
    assert "2 ready  1 building  0 evicted  7 evictions since the start" in shown


def test_rates_are_differences_over_time() -> None:
    later = replace(BUSY, prompt_tokens=12_000, cached_tokens=10_500, generated_tokens=8_000)
    shown = text(frame(BUSY, later))
    assert line(shown, "generated").endswith("1,500 tokens/s")
    assert line(shown, "prompts").endswith("1,000 tokens/s") and "75% from prefixes" in shown


def test_without_a_second_sample_there_is_no_rate() -> None:
    shown = text(frame(None, BUSY))
    assert line(shown, "generated").endswith("– tokens/s")
    assert "90% from prefixes since start" in shown


def test_a_server_that_started_anew_has_no_negative_rate() -> None:
    assert line(text(frame(BUSY, IDLE)), "generated").endswith(" 0 tokens/s")


@pytest.mark.parametrize(
    ("order", "names"), [("size", ["b", "a", "c"]), ("use", ["c", "a", "b"]), ("name", ["a", "b", "c"])]
)
def test_prefixes_are_ordered_as_asked(order: str, names: list[str]) -> None:
    prefixes = [prefix("c", 2**20, use_count=9), prefix("b", 2**30, use_count=1), prefix("a", 2**22, use_count=4)]
    rows = text(frame(BUSY, BUSY, *prefixes, order=order)).splitlines()
    first = next(i for i, row in enumerate(rows) if row.startswith("NAME")) + 1
    assert [row.split()[0] for row in rows[first : first + 3]] == names
    assert "by " + order in rows[first - 1]


def test_a_prefix_s_row() -> None:
    made = prefix("rag", 80 * 2**20, pinned=True, use_count=5, expire_time=datetime.now(UTC) + timedelta(minutes=31))
    shown = line(text(frame(BUSY, BUSY, made)), "rag")
    assert " ".join(shown.split()) == "rag pinned ready 1,234 8 80.0 MiB 5 2.5 2 min ago in 31 min"
    half = prefix("new", 0, state=PrefixState.BUILDING, tokens_built=617)
    shown = line(text(frame(BUSY, BUSY, half)), "new")
    assert " ".join(shown.split()) == "new building 50% 1,234 8 – 0 – – never"


@pytest.mark.parametrize("width", [80, 110, 200])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    prefixes = [prefix(f"{i}-{'long' * 15}", 2**30, use_count=10**6, pinned=True) for i in range(9)]
    shown = text(frame(BUSY, BUSY, *prefixes, rows=4, keys="q quit", history=[1.0, 0.0, 100.0]), width)
    rows = shown.splitlines()
    assert max(map(len, rows)) <= width
    assert sum("long" in row for row in rows) == 4 and "and 5 more" in shown
    assert len(rows) == 18, "so that a frame fits the height it was made for"


def test_an_operator_without_names_is_not_told_to_make_one() -> None:
    assert "no names of yours" in text(frame(BUSY, BUSY)) and "no names; make one" in text(frame(None, IDLE))


def test_trouble_is_said_and_the_last_frame_stays() -> None:
    shown = text(frame(None, BUSY, trouble="no answer, trying again"))
    assert "no answer, trying again" in shown.splitlines()[0] and "32 of 64" in shown
    assert "no answer" in text(Frame("host:1", None, None, None, trouble="no answer")), "before the first answer too"
    closed = text(frame(None, replace(IDLE, accepting=False)))
    assert "takes no new requests" in closed.splitlines()[0] and "no names; make one" in closed
