"""One line for each call: who asked for what, how it ended, how long it took; a slow one says where the time went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from rpc_harness import collect, ids, serving, until
from scraping import scrape

from tinyloop_service.engine.api import Plan
from tinyloop_service.engine.fake import FakeEngine
from tinyloop_service.errors import EngineFault
from tinyloop_service.observe.logs import log_call
from tinyloop_service.observer import CallRecord, RequestRecord
from tinyloop_service.pb import generation_pb2 as g
from tinyloop_service.pb import prefix_pb2 as p
from tinyloop_service.settings import NamesSettings, SchedulerSettings

PROMPT = tuple(1 + i * 7 % 500 for i in range(100))
MS = 10**6
Logs = list[dict[str, Any]]


def lines(logs: Logs, *events: str) -> Logs:
    return [log for log in logs if log["event"] in events]


def request(*tokens: int, **fields: Any) -> g.GenerateRequest:
    return g.GenerateRequest(input=ids(*tokens), **{"ignore_eos": True, "max_tokens": 6, **fields})


async def test_the_line_of_a_generation(quiet_logs: Logs) -> None:
    async with serving() as served:
        await served.prefixes.CreatePrefix(p.CreatePrefixRequest(prefix_id="p", input=ids(*PROMPT)))
        named = (("x-request-id", "mine"),)
        await collect(served.generation.Generate(request(1, 2, prefix="prefixes/p", n=2), metadata=named))
    create, generate = lines(quiet_logs, "answered")
    assert (create["method"], create["prefix"], create["log_level"]) == ("CreatePrefix", "p", "info")
    assert generate["request_id"] == "mine" != create["request_id"]
    facts = {
        name: generate[name] for name in ("method", "prefix", "finish", "tokens", "prompt_tokens", "cached_tokens")
    }
    assert facts == {
        "method": "Generate",
        "prefix": "p",
        "finish": "length",
        "tokens": 12,
        "prompt_tokens": 102,
        "cached_tokens": 100,
    }
    assert 0 <= generate["queue_ms"] <= generate["ttft_ms"] <= generate["ms"]
    assert "code" not in generate and "tenant" not in generate, "what does not apply is left out"


async def test_builds_have_lines_also_those_that_a_request_caused(quiet_logs: Logs) -> None:
    async with serving(scheduler=SchedulerSettings(max_prefixes=1)) as served:
        for name in ("p", "q"):
            create = p.CreatePrefixRequest(prefix_id=name, input=ids(*PROMPT))
            await served.prefixes.CreatePrefix(create)
        await collect(served.generation.Generate(request(1, 2, prefix="prefixes/p")))
    assert [(log["prefix"], log["tokens"]) for log in lines(quiet_logs, "built")] == [
        ("p", 100),
        ("q", 100),
        ("p", 100),
    ]
    assert all(log["ms"] > 0 for log in lines(quiet_logs, "built"))


async def test_what_came_from_a_snapshot_is_not_said_to_be_built(quiet_logs: Logs, tmp_path: Path) -> None:
    """Nor counted among the builds: milliseconds among seconds would make them look fast."""
    lives = []
    for _ in range(2):
        async with serving(names=NamesSettings(snapshot_dir=str(tmp_path)), metrics_listen="127.0.0.1:0") as served:
            await served.prefixes.CreatePrefix(p.CreatePrefixRequest(prefix_id="p", input=ids(*PROMPT)))
            lives.append(await scrape(served.app.metrics_address))
    [kept] = [path for path in tmp_path.iterdir() if path.suffix == ".safetensors"]  # noqa: ASYNC240
    [built], [restored] = lines(quiet_logs, "built"), lines(quiet_logs, "restored")
    assert built["prefix"] == restored["prefix"] == "p" and "digest" not in built
    assert (restored["digest"], restored["tokens"]) == (kept.stem, 100) and restored["ms"] > 0
    counts = [(seen("prefix_build_seconds_count"), seen("prefix_restore_seconds_count")) for seen in lives]
    assert counts == [(1, 0), (0, 1)]


async def test_the_lines_of_what_went_otherwise(quiet_logs: Logs) -> None:
    def fault(plan: Plan) -> EngineFault | None:
        return EngineFault("the card is on fire") if len(plan.prefill) and plan.prefill[0].tokens[0] == 13 else None

    async with serving(FakeEngine(fault=fault)) as served:
        call = served.generation.Generate(request(9, 9, max_tokens=1900))
        await call.read()
        call.cancel()
        await until(lambda: bool(lines(quiet_logs, "cancelled")))
        for bad in (request(1, prefix="prefixes/none"), request(13)):
            with pytest.raises(grpc.aio.AioRpcError):
                await collect(served.generation.Generate(bad))
    [cancelled], [refused], [failed] = (lines(quiet_logs, event) for event in ("cancelled", "refused", "failed"))
    assert (cancelled["finish"], cancelled["prompt_tokens"]) == ("cancelled", 2)
    assert (refused["code"], refused["reason"], refused["prefix"]) == ("NOT_FOUND", "PREFIX_NOT_FOUND", "none")
    assert "finish" not in refused
    assert (failed["reason"], failed["finish"], failed["log_level"]) == ("ENGINE_FAULT", "error", "error")
    assert failed["error"] == "the card is on fire"


async def test_a_slow_request_says_where_its_time_went(quiet_logs: Logs) -> None:
    async with serving(FakeEngine(step_s=0.005), slow_request_s=0.02) as served:
        create = p.CreatePrefixRequest(prefix_id="p", input=ids(*PROMPT, *PROMPT, *PROMPT, *PROMPT, *PROMPT, *PROMPT))
        using = request(1, 2, prefix="prefixes/p", max_tokens=60)
        using.create_if_missing.CopyFrom(create)
        await collect(served.generation.Generate(using))
        await collect(served.prefixes.WatchPrefix(p.WatchPrefixRequest(name="prefixes/p")))
    [slow] = lines(quiet_logs, "slow request")
    assert (slow["log_level"], slow["outcome"], slow["prefix"]) == ("warning", "answered", "p")
    assert slow["build_ms"] >= 3 * 5, "three chunks of the prefix"
    assert slow["decode_ms"] >= 7 * 5 and slow["prefill_ms"] >= 5
    phases = sum(slow[name] for name in ("build_ms", "prefill_ms", "decode_ms", "delivery_ms"))
    assert phases <= slow["ms"] + 0.01
    assert [log["method"] for log in lines(quiet_logs, "answered")] == ["WatchPrefix"]


async def test_no_slow_line_where_none_is_wanted(quiet_logs: Logs) -> None:
    async with serving(FakeEngine(step_s=0.001), slow_request_s=None) as served:
        await collect(served.generation.Generate(request(1, 2, max_tokens=20)))
    assert len(lines(quiet_logs, "answered")) == 1 and not lines(quiet_logs, "slow request")


def call_of(method: str, took_ns: int) -> CallRecord:
    record = RequestRecord("team", "p", 1, 0, 0, 0, 3 * MS, 8 * MS, 20 * MS, 12, 10, 4, ["length"])
    call = CallRecord("tinyloop.v1.GenerationService", method, "id", 0, (), "team", "p", record)
    call.end_ns = took_ns
    return call


@pytest.mark.parametrize(
    ("method", "took_ms", "event"),
    [("Generate", 30, "slow request"), ("Generate", 29.9, "answered"), ("WatchPrefix", 10**6, "answered")],
)
def test_what_is_slow(quiet_logs: Logs, method: str, took_ms: float, event: str) -> None:
    log_call(call_of(method, int(took_ms * MS)), 30 * MS, "cafe")
    [line] = quiet_logs
    assert (line["event"], line["tenant"], line["trace_id"], line["ms"]) == (event, "team", "cafe", took_ms)
    assert (line["queue_ms"], line["ttft_ms"], line["tokens"]) == (3, 8, 4)
    if event == "slow request":
        assert (line["prefill_ms"], line["decode_ms"], line["delivery_ms"]) == (5, 12, 10)
