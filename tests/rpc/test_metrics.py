"""The metrics port of a real server, read after real requests: every value is what was sent."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from rpc_harness import CONFIG, SERVER, Served, byte_tokenizer, collect, expected_tokens, ids, serving, until
from scraping import Scrape, scrape
from tenants_harness import STRANGER, A, B, write_tokens

from tinyloop_service.app import App
from tinyloop_service.client import AsyncClient
from tinyloop_service.engine.api import Open, Plan
from tinyloop_service.engine.fake import FakeEngine
from tinyloop_service.errors import EngineFault, InvalidArgument, PrefixNotFound
from tinyloop_service.loading import LoadedModel
from tinyloop_service.observe.exposition import FAMILIES
from tinyloop_service.pb import generation_pb2 as g
from tinyloop_service.pb import model_pb2
from tinyloop_service.pb import prefix_pb2 as p
from tinyloop_service.settings import SchedulerSettings, Settings

PROMPT = tuple(1 + i * 7 % 500 for i in range(100))
PORT = "127.0.0.1:0"


def watched(*arguments: Any, **options: Any) -> Any:
    return serving(*arguments, metrics_listen=PORT, **options)


async def scraped(served: Served) -> Scrape:
    return await scrape(served.app.metrics_address)


def request(*tokens: int, **fields: Any) -> g.GenerateRequest:
    return g.GenerateRequest(input=ids(*tokens), **{"ignore_eos": True, **fields})


async def test_tokens_and_times_of_requests() -> None:
    async with watched() as served, served.client() as client:
        await client.create_prefix("p", PROMPT)
        warm = await client.complete_batch("p", [(i, i + 1) for i in range(1, 11)], max_tokens=6, ignore_eos=True)
        cold = await client.complete((1, 2, 3), max_tokens=1, ignore_eos=True)
        both = await client.complete((1, 2), max_tokens=4, n=2, temperature=1.0, ignore_eos=True)
        seen = await scraped(served)
    everything = [*warm, cold, both]
    prompt = sum(c.usage.prompt_tokens for c in everything)
    assert prompt == 10 * 102 + 3 + 2
    assert seen("prefix_cache_queries_total", tenant="") == seen("prompt_tokens_total", tenant="") == prompt
    assert seen("prefix_cache_hits_total", tenant="") == 10 * 100
    assert seen("generation_tokens_total", tenant="") == 10 * 6 + 1 + 2 * 4
    assert seen("prefilled_tokens_total") == 100 + 10 * 2 + 3 + 2
    assert seen.by("choices_finished_total", "finish_reason") == {"length": 13}
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert seen(f"{name}_count") == seen(f"{name}_bucket", le="+Inf") == len(everything)
    ttft, e2e = seen("time_to_first_token_seconds_sum"), seen("e2e_request_latency_seconds_sum")
    choices = [choice for completion in everything for choice in completion.choices]
    assert 0 < seen("request_queue_time_seconds_sum") <= ttft <= e2e
    assert e2e == pytest.approx(sum(max(c.timings.total_ns for c in each.choices) / 1e9 for each in everything))
    assert ttft == pytest.approx(sum(min(c.timings.ttft_ns for c in each.choices) / 1e9 for each in everything))
    gaps = sum(len(choice.token_ids) - 1 for choice in choices)
    assert seen("inter_token_latency_seconds_count") == gaps == 10 * 5 + 0 + 2 * 3
    decoding = sum((c.timings.total_ns - c.timings.ttft_ns) / 1e9 for c in choices)
    assert seen("inter_token_latency_seconds_sum") == pytest.approx(decoding)
    assert seen("prefix_build_seconds_count") == 1
    assert 0 < seen("prefix_build_seconds_sum") <= seen("step_time_seconds_sum")
    assert seen("step_rows_sum") >= seen("step_rows_count") == seen("step_time_seconds_count") > 0
    assert seen.by("calls_total", "method", "code") == {("CreatePrefix", "OK"): 1, ("GenerateUnary", "OK"): 12}


async def test_gaps_do_not_depend_on_messages() -> None:
    """Tokens that leave together in one message count one by one."""
    slow = SchedulerSettings(stream_interval_ns=10**12)  # the first token, and all others with the last
    async with watched(scheduler=slow) as served:
        messages = await collect(served.generation.Generate(request(1, 2, max_tokens=50)))
        first, others = [len(m.delta.token_ids) for m in messages if m.HasField("delta")]
        assert first + others == 50 and others > 30, "the first message has what had come when it was read"
        seen = await scraped(served)
        assert seen("inter_token_latency_seconds_count") == 49
        assert seen("inter_token_latency_seconds_bucket", le="5.0") == 49, "gaps are the engine's, not the messages'"


async def test_every_end_has_its_reason() -> None:
    def next_token(opened: Open, position: int, token: int) -> int:
        return 0 if position == 6 else token or 1

    engine = FakeEngine(next_token=next_token)
    async with watched(engine, tokenizer=byte_tokenizer()) as served:
        eos = await collect(served.generation.Generate(request(1, 2, max_tokens=20, ignore_eos=False)))
        assert eos[-1].completed.finish_reason == g.FINISH_REASON_EOS
        first = eos[1].delta.token_ids[0]
        await collect(served.generation.Generate(request(1, 2, max_tokens=20, stop_token_ids=[first])))
        await collect(served.generation.Generate(request(1, 2, max_tokens=3, n=2, ignore_eos=False)))
        call = served.generation.Generate(request(9, 9, max_tokens=1900, n=3))
        await call.read()
        call.cancel()
        await served.settled()
        seen = await scraped(served)
    ends = seen.by("choices_finished_total", "finish_reason")
    assert ends == {"eos": 1, "stop": 1, "length": 2, "cancelled": 3}
    assert seen("e2e_request_latency_seconds_count") == 3
    assert seen.by("calls_total", "method", "code") == {("Generate", "OK"): 3, ("Generate", "CANCELLED"): 1}
    assert seen.series("rejections_total") == {}


async def test_rejections_have_the_reasons_of_their_statuses() -> None:
    async with watched() as served, served.client() as client:
        await client.create_prefix("p", PROMPT)
        for bad in (
            served.generation.Generate(request(1, max_tokens=0)),
            served.generation.Generate(request(600)),
            served.generation.Generate(request(1, max_tokens=5000)),
            served.generation.Generate(request(1, prefix="prefixes/p", loops=7)),
            served.generation.Generate(request(1, prefix="prefixes/none")),
        ):
            with pytest.raises(grpc.aio.AioRpcError):
                await collect(bad)
        for _ in range(2):
            with pytest.raises(PrefixNotFound):
                await client.get_prefix("none")
        with pytest.raises(ValueError):
            await client.create_prefix("p", (1, 2))
        malformed = served.channel.unary_unary("/tinyloop.v1.PrefixService/GetPrefix")
        with pytest.raises(grpc.aio.AioRpcError):
            await malformed(b"\xff\xff")
        seen = await scraped(served)
    assert seen.by("rejections_total", "reason") == {
        "INVALID_ARGUMENT": 3,
        "SEQUENCE_TOO_LONG": 1,
        "LOOPS_MISMATCH": 1,
        "PREFIX_NOT_FOUND": 3,
        "PREFIX_EXISTS": 1,
    }
    assert seen("prompt_tokens_total", tenant="") == seen("generation_tokens_total", tenant="") == 0
    assert seen.by("choices_finished_total", "finish_reason") == {}


async def test_a_fault_is_an_error_and_no_rejection() -> None:
    def fault(plan: Plan) -> EngineFault | None:
        return EngineFault("broken") if plan.prefill else None

    async with watched(FakeEngine(fault=fault)) as served:
        with pytest.raises(grpc.aio.AioRpcError):
            await collect(served.generation.Generate(request(1, 2, max_tokens=5)))
        with pytest.raises(grpc.aio.AioRpcError):
            await served.prefixes.CreatePrefix(p.CreatePrefixRequest(prefix_id="p", input=ids(*PROMPT)))
        seen = await scraped(served)
    assert seen.by("choices_finished_total", "finish_reason") == {"error": 1}
    assert seen.by("prefix_builds_failed_total", "reason") == {"ENGINE_FAULT": 1}
    assert seen("prefix_build_seconds_count") == 0
    assert seen.series("rejections_total") == {}
    assert seen("prefixes", state="failed") == 1


def num_requests(served: Served) -> int:
    load = served.scheduler.load()
    return load.requests_running + load.requests_waiting


async def test_gauges_while_the_engine_stands_still() -> None:
    gate = threading.Event()
    async with watched(FakeEngine(gate=gate)) as served:
        idle = await scraped(served)
        total = served.engine.limits.num_pages
        assert idle.by("kv_pages", "state") == {"free": total}
        assert (idle("requests_running"), idle("requests_waiting"), idle("ready")) == (0, 0, 1)
        running = [asyncio.create_task(collect(served.generation.Generate(request(1, 2, n=2)))) for _ in range(3)]
        await until(lambda: served.scheduler.load().requests_running > 0)
        building = served.prefixes.CreatePrefix(p.CreatePrefixRequest(prefix_id="p", input=ids(*PROMPT)))
        await until(lambda: served.scheduler.load().prefixes_building == 1)
        waiting = [
            asyncio.create_task(collect(served.generation.Generate(request(5, prefix="prefixes/p")))) for _ in range(4)
        ]
        await until(lambda: num_requests(served) == 7)
        load, busy = served.scheduler.load(), await scraped(served)
        gate.set()
        await asyncio.gather(*running, *waiting)
        await building
        await served.settled()
        after = await scraped(served)
    seen = (busy("requests_running"), busy("rows_running"), busy("requests_waiting"))
    assert seen == (load.requests_running, load.rows_running, load.requests_waiting)
    assert seen[0] + seen[2] == 7 and seen[1] == 2 * seen[0] > 0
    assert busy.by("prefixes", "state") == {"building": 1}
    pages = busy.by("kv_pages", "state")
    assert pages["requests"] > 0
    assert sum(pages.values()) == sum(after.by("kv_pages", "state").values()) == total
    assert after.by("prefixes", "state") == {"ready": 1}
    held = after("kv_pages", state="prefixes")
    assert after("prefix_bytes") == held * served.engine.limits.page_bytes > 0
    assert after("kv_pages", state="requests") == after("requests_running") == after("requests_waiting") == 0


async def test_prompt_tokens_are_counted_once_whatever_happens() -> None:
    """T16: hits and misses add up to the admitted prompts, over evictions, rebuilds, cancels and refusals."""
    few = SchedulerSettings(max_prefixes=1)
    async with watched(scheduler=few) as served, served.client() as client:
        usages = []
        for turn in range(4):  # each use evicts the other one, and so is a miss that builds again
            for name in ("a", "b"):
                await client.create_prefix(name, (*PROMPT, 7 if name == "a" else 9))
                usages.append((await client.complete(prefix=name, suffix=(turn,), max_tokens=2)).usage)
        usages += [(await client.complete(prefix=name, suffix=(5,), max_tokens=2)).usage for name in ("a", "b")]
        queued = served.generation.Generate(request(*PROMPT, max_tokens=1000))
        await queued.read()  # admitted: its tokens count, once
        queued.cancel()
        await served.settled()
        with pytest.raises(PrefixNotFound):
            await client.complete(prefix="c", suffix=(1,))
        seen = await scraped(served)
    queries, hits = seen("prefix_cache_queries_total", tenant=""), seen("prefix_cache_hits_total", tenant="")
    assert queries == sum(usage.prompt_tokens for usage in usages) + len(PROMPT)
    assert hits == sum(usage.cached_tokens for usage in usages) < sum(usage.prompt_tokens for usage in usages)
    assert seen("prefix_evictions_total") == served.scheduler.load().prefix_evictions > 4
    counters = served.scheduler.counters
    assert (counters.prompt_hits, counters.prompt_hits + counters.prompt_misses) == (hits, queries)


async def test_tenants_are_counted_apart(tmp_path: Path) -> None:
    async with watched(tokens_file=str(write_tokens(tmp_path / "tokens.toml"))) as served:
        async with served.client(token=A) as a, served.client(token=B) as b:
            await a.create_prefix("p", PROMPT)
            await a.complete(prefix="p", suffix=(1,), max_tokens=4, ignore_eos=True)
            await b.complete((1, 2), max_tokens=2, ignore_eos=True)
            with pytest.raises(PrefixNotFound):
                await b.complete(prefix="p")
        async with served.client(token=STRANGER) as stranger:
            with pytest.raises(PermissionError):
                await stranger.complete((1, 2))
        seen = await scraped(served)
    assert seen.by("prompt_tokens_total", "tenant") == {"a": 101, "b": 2}
    assert seen.by("prefix_cache_hits_total", "tenant") == {"a": 100}
    assert seen.by("generation_tokens_total", "tenant") == {"a": 4, "b": 2}
    assert seen.by("choices_finished_total", "tenant") == {"a": 1, "b": 1}
    assert seen.by("rejections_total", "tenant", "reason") == {("b", "PREFIX_NOT_FOUND"): 1, ("", "UNAUTHENTICATED"): 1}


async def generate_one(app: App) -> None:
    async with AsyncClient(app.address) as client:
        assert len((await client.complete((1, 2), max_tokens=3, ignore_eos=True)).token_ids) == 3


async def test_before_the_model_is_loaded_and_while_draining() -> None:
    gate, held = threading.Event(), threading.Event()

    def load() -> LoadedModel:
        gate.wait()
        return LoadedModel(FakeEngine(gate=held), None, CONFIG)

    app = App(Settings(server=replace(SERVER, metrics_listen=PORT)), load)
    await app.start()
    try:
        warming = await scrape(app.metrics_address)
        assert warming("ready") == 0 and not warming.series("kv_pages") and not warming.series("build_info")
        assert warming("generation_tokens_total", tenant="") == 0
        async with grpc.aio.insecure_channel(app.address) as channel:
            call = channel.unary_unary("/tinyloop.v1.ModelService/GetLoad")
            with pytest.raises(grpc.aio.AioRpcError):
                await call(model_pb2.GetLoadRequest().SerializeToString())
        assert (await scrape(app.metrics_address)).by("rejections_total", "reason") == {"WARMING_UP": 1}
        gate.set()
        await app.ready()
        ready = await scrape(app.metrics_address)
        assert ready("ready") == 1
        [labels] = ready.series("build_info")
        facts = dict(labels)
        assert (facts["engine"], facts["replica"], facts["cache_mode"]) == ("fake", "replica-0", "fp16")
        assert facts["model_id"] == "fake" and facts["version"]
        running = asyncio.create_task(generate_one(app))
        await until(lambda: app._backend.scheduler.load().requests_running == 1)
        draining = asyncio.create_task(app.stop(grace_s=10.0))
        await until(lambda: not app._observation.snapshot().is_ready)
        assert (await scrape(app.metrics_address))("ready") == 0
        held.set()
        await running
        await draining
    finally:
        gate.set()
        held.set()
        await app.stop(grace_s=0.0)
    with pytest.raises(OSError):
        await scrape(app.metrics_address)


async def test_a_taken_port_is_refused_by_its_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = replace(SERVER, metrics_listen=f"127.0.0.1:{taken.getsockname()[1]}")
        app = App(Settings(server=server), lambda: LoadedModel(FakeEngine(), None, CONFIG))
        with pytest.raises(InvalidArgument, match="another port") as caught:
            await app.start()
        assert caught.value.field == "metrics_listen"
        await app.stop(grace_s=0.0)


async def test_a_metrics_port_holds_few_connections_none_for_long_and_logs_nothing_of_them(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whoever reaches it may connect, say nothing and break off."""
    monkeypatch.setattr("tinyloop_service.observe.scrapes.MOST_CONNECTIONS", 3)
    monkeypatch.setattr("tinyloop_service.observe.scrapes._Handler.timeout", 0.2)
    async with watched() as served:
        host, _, port = served.app.metrics_address.rpartition(":")

        def ask() -> None:
            idle = [socket.create_connection((host, int(port)), timeout=20) for _ in range(8)]
            for connection in idle:  # those that there is no room for at once, the others in their time
                assert connection.recv(1) == b""
            for _ in range(5):
                with socket.create_connection((host, int(port)), timeout=20) as rude:
                    rude.sendall(b"no HTTP\r\n")
                    rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close as a reset
            for connection in idle:
                connection.close()

        await asyncio.to_thread(ask)
        async with asyncio.timeout(20):
            while True:
                with suppress(OSError):  # there may be no room for a moment yet
                    await scraped(served)
                    break
    assert "Traceback" not in capfd.readouterr().err


async def test_who_says_a_little_now_and_then_does_not_keep_the_metrics_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait for him is short, and there are many."""
    monkeypatch.setattr("tinyloop_service.observe.scrapes._LONGEST_S", 0.5)
    async with watched() as served:
        host, _, port = served.app.metrics_address.rpartition(":")

        def dribble() -> bool:
            with socket.create_connection((host, int(port)), timeout=0.05) as slow:
                for _ in range(200):
                    try:
                        slow.sendall(b"G")
                        if slow.recv(1) == b"":
                            return True
                    except TimeoutError:
                        continue
                    except OSError:
                        return True
                return False

        assert await asyncio.to_thread(dribble), "he is connected after ten seconds"
        assert (await scraped(served))("requests_running") == 0


async def test_every_metric_is_there_from_the_start_or_has_labels_to_come() -> None:
    """What a dashboard asks for is found on an idle server, but for what is named by its first event."""
    async with watched() as served:
        seen = await scraped(served)
    names = {name for name, _ in seen.values}
    absent = [f.name for f in FAMILIES if not {f.name, f"{f.name}_count"} & names]
    assert absent == ["tinyloop_rejections_total"]
    assert seen("calls_total", method="Generate", code="INTERNAL") == 0
    assert "process_resident_memory_bytes" in names


async def test_a_server_without_a_metrics_port_counts_nothing() -> None:
    async with serving() as served:
        messages = await collect(served.generation.Generate(request(1, 2, max_tokens=3)))
        assert tuple(t for m in messages for t in m.delta.token_ids) == expected_tokens((1, 2), 3)
        assert served.app.metrics_address == ""
        assert sum(served.app._observation.snapshot().metrics.generated_tokens.values()) == 0
