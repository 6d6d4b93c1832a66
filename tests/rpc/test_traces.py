"""Traces of a real server: a span a call, its phases below it, the caller's trace above it; and OTLP to a receiver."""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from rpc_harness import Served, collect, ids, serving, until
from tenants_harness import STRANGER, bearer, write_tokens

from tinyloop_service.engine.api import Plan
from tinyloop_service.engine.fake import FakeEngine
from tinyloop_service.errors import EngineFault, InvalidArgument, install
from tinyloop_service.observe import traces
from tinyloop_service.observe.hub import Observation
from tinyloop_service.pb import generation_pb2 as g
from tinyloop_service.pb import prefix_pb2 as p
from tinyloop_service.settings import ServerSettings

PROMPT = tuple(1 + i * 7 % 500 for i in range(100))
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
Logs = list[dict[str, Any]]


class Spans:
    """What was exported, children of the span that is asked about."""

    def __init__(self, exporter: InMemorySpanExporter, served: Served) -> None:
        self._exporter = exporter
        self._served = served

    def all(self) -> list[ReadableSpan]:
        traced = self._served.app._observation._traces
        assert traced is not None
        traced._provider.force_flush()
        return list(self._exporter.get_finished_spans())

    def call(self, method: str) -> ReadableSpan:
        [found] = [span for span in self.all() if span.name.endswith(f"/{method}")]
        return found

    def below(self, parent: ReadableSpan) -> list[ReadableSpan]:
        """In the order in which they began."""
        wanted = parent.get_span_context().span_id
        found = [span for span in self.all() if span.parent is not None and span.parent.span_id == wanted]
        return sorted(found, key=lambda span: span.start_time or 0)

    def __call__(self, method: str) -> dict[str, ReadableSpan]:
        """Phases of the one call of a method, by name."""
        return {span.name: span for span in self.below(self.call(method))}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    made = InMemorySpanExporter()
    monkeypatch.setattr(traces, "otlp_exporter", lambda endpoint: made)
    return made


@asynccontextmanager
async def traced(
    exporter: InMemorySpanExporter, engine: FakeEngine | None = None, **options: Any
) -> AsyncIterator[tuple[Served, Spans]]:
    async with serving(engine, otlp_endpoint="http://127.0.0.1:4317", **options) as served:
        yield served, Spans(exporter, served)


def request(*tokens: int, **fields: Any) -> g.GenerateRequest:
    return g.GenerateRequest(input=ids(*tokens), **{"ignore_eos": True, "max_tokens": 6, **fields})


def milliseconds(span: ReadableSpan) -> float:
    assert span.end_time is not None and span.start_time is not None
    return (span.end_time - span.start_time) / 1e6


async def test_a_call_and_its_phases(exporter: InMemorySpanExporter, quiet_logs: Logs) -> None:
    async with traced(exporter, FakeEngine(step_s=0.002)) as (served, spans):
        began_ns = time.time_ns()
        await collect(served.generation.Generate(request(1, 2, max_tokens=40), metadata=(("x-request-id", "mine"),)))
        whole, phases = spans.call("Generate"), spans("Generate")
    assert list(phases) == ["queue", "prefill", "decode", "delivery"]
    assert (whole.name, whole.kind) == ("tinyloop.v1.GenerationService/Generate", SpanKind.SERVER)
    assert whole.status.status_code is StatusCode.UNSET, "as OpenTelemetry has it for a call that went well"
    assert began_ns - 10**7 <= whole.start_time and whole.end_time <= time.time_ns() + 10**7  # type: ignore[operator]
    edges = [(span.start_time, span.end_time) for span in phases.values()]
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(edges)), "phases follow on one another"
    assert whole.start_time <= edges[0][0] and edges[-1][1] == whole.end_time  # type: ignore[operator]
    assert milliseconds(phases["decode"]) >= 5 * 2
    facts = dict(whole.attributes or {})
    assert facts["rpc.grpc.status_code"] == 0 and facts["tinyloop.request_id"] == "mine"
    assert (facts["gen_ai.usage.input_tokens"], facts["gen_ai.usage.output_tokens"]) == (2, 40)
    assert facts["gen_ai.response.finish_reasons"] == ("length",)
    [line] = [log for log in quiet_logs if log["event"] == "answered"]
    assert line["trace_id"] == f"{whole.get_span_context().trace_id:032x}"


async def test_the_callers_trace_goes_on(exporter: InMemorySpanExporter) -> None:
    async with traced(exporter) as (served, spans):
        sent = (("traceparent", f"00-{TRACE}-{CALLER}-01"), ("tracestate", "vendor=1"))
        await collect(served.generation.Generate(request(1, 2), metadata=sent))
        whole = spans.call("Generate")
        assert f"{whole.get_span_context().trace_id:032x}" == TRACE
        assert whole.parent is not None and f"{whole.parent.span_id:016x}" == CALLER and whole.parent.is_remote
        assert {span.get_span_context().trace_id for span in spans.all()} == {int(TRACE, 16)}


async def test_a_caller_that_does_not_trace_is_not_traced(exporter: InMemorySpanExporter, quiet_logs: Logs) -> None:
    async with traced(exporter) as (served, spans):
        for header in (f"00-{TRACE}-{CALLER}-00", "00-nonsense"):
            await collect(served.generation.Generate(request(1, 2), metadata=(("traceparent", header),)))
        assert len({span.get_span_context().trace_id for span in spans.all()}) == 1, "nonsense counts as none"
    assert ["trace_id" in log for log in quiet_logs if log["event"] == "answered"] == [False, True]


async def test_a_share_of_nothing_leaves_it_to_callers(exporter: InMemorySpanExporter) -> None:
    async with traced(exporter, trace_share=0.0) as (served, spans):
        await collect(served.generation.Generate(request(1, 2)))
        assert spans.all() == []
        sent = (("traceparent", f"00-{TRACE}-{CALLER}-01"),)
        await collect(served.generation.Generate(request(1, 2), metadata=sent))
        assert len(spans.all()) == 5


async def test_a_cancelled_stream_is_an_error_in_the_phase_it_was_in(exporter: InMemorySpanExporter) -> None:
    async with traced(exporter, FakeEngine(step_s=0.002)) as (served, spans):
        call = served.generation.Generate(request(1, 2, max_tokens=1900))
        while not (await call.read()).HasField("delta"):
            pass
        call.cancel()
        await until(lambda: bool(spans.all()))
        whole, phases = spans.call("Generate"), spans("Generate")
    assert list(phases) == ["queue", "prefill", "decode"]
    assert (whole.status.status_code, whole.status.description) == (StatusCode.ERROR, "CANCELLED")
    assert dict(whole.attributes or {})["gen_ai.response.finish_reasons"] == ("cancelled",)
    ends = {name: span.status.status_code for name, span in phases.items()}
    assert ends == {"queue": StatusCode.UNSET, "prefill": StatusCode.UNSET, "decode": StatusCode.ERROR}


async def test_a_request_cancelled_in_the_queue(exporter: InMemorySpanExporter) -> None:
    gate = threading.Event()
    async with traced(exporter, FakeEngine(gate=gate)) as (served, spans):
        running = asyncio.create_task(collect(served.generation.Generate(request(1))))
        await until(lambda: served.scheduler.load().rows_running == 1)  # and the plan behind it is made too
        call = served.generation.Generate(request(1, 2, 3))
        await until(lambda: served.scheduler.load().requests_waiting == 1)
        call.cancel()
        await until(lambda: bool(spans.all()))
        [queue] = spans("Generate").values()
        assert (queue.name, queue.status.status_code) == ("queue", StatusCode.ERROR)
        gate.set()
        await running


async def test_builds_are_where_they_were_waited_for(exporter: InMemorySpanExporter) -> None:
    async with traced(exporter, FakeEngine(step_s=0.005)) as (served, spans):
        create = p.CreatePrefixRequest(prefix_id="p", input=ids(*PROMPT, *PROMPT, *PROMPT))
        making = asyncio.ensure_future(served.prefixes.CreatePrefix(create))
        await until(lambda: served.scheduler.load().prefixes_building == 1)
        await collect(served.generation.Generate(request(1, prefix="prefixes/p")))
        await making
        made = spans("CreatePrefix")
        assert list(made) == ["queue", "build"] and milliseconds(made["build"]) >= 2 * 5
        [build] = spans.below(spans("Generate")["queue"])
        assert build.name == "build" and build.end_time == made["build"].end_time
        exporter.clear()
        await served.prefixes.CreatePrefix(create)
        assert spans("CreatePrefix") == {}, "it was there"
        exporter.clear()
        using = request(1, prefix="prefixes/q")
        using.create_if_missing.input.CopyFrom(ids(5, 6, 7))
        await collect(served.generation.Generate(using))
        below = [span.name for span in spans.below(spans.call("Generate"))]
        assert sorted(below) == ["build", "decode", "delivery", "prefill", "queue", "queue"]


async def test_faults_are_errors_and_refusals_are_not(exporter: InMemorySpanExporter) -> None:
    def fault(plan: Plan) -> EngineFault | None:
        return EngineFault("the card is on fire") if plan.prefill else None

    async with traced(exporter, FakeEngine(fault=fault)) as (served, spans):
        for bad in (request(13), request(1, prefix="prefixes/none")):
            with pytest.raises(grpc.aio.AioRpcError):
                await collect(served.generation.Generate(bad))
        failed, refused = [span for span in spans.all() if span.kind is SpanKind.SERVER]
        assert failed.status.status_code is StatusCode.ERROR and "fire" not in repr(failed.to_json())
        assert dict(failed.attributes or {})["error.type"] == "ENGINE_FAULT"
        assert refused.status.status_code is StatusCode.UNSET
        facts = dict(refused.attributes or {})
        assert (facts["error.type"], facts["rpc.grpc.status_code"]) == ("PREFIX_NOT_FOUND", 5)


async def test_strangers_are_traced_as_such(exporter: InMemorySpanExporter, tmp_path: Path) -> None:
    tokens = str(write_tokens(tmp_path / "tokens.toml"))
    async with traced(exporter, tokens_file=tokens) as (served, spans):
        with pytest.raises(grpc.aio.AioRpcError):
            await collect(served.generation.Generate(request(1), metadata=bearer(STRANGER)))
        assert dict(spans.call("Generate").attributes or {})["error.type"] == "UNAUTHENTICATED"


async def test_no_span_has_a_word_of_a_prompt(exporter: InMemorySpanExporter) -> None:
    async with traced(exporter) as (served, spans):
        await served.prefixes.CreatePrefix(p.CreatePrefixRequest(prefix_id="p", input=ids(499, 498, 497)))
        await collect(served.generation.Generate(request(496, 495, prefix="prefixes/p")))
        everything = "".join(span.to_json() for span in spans.all())
    assert not {"499", "498", "497", "496", "495"} & {word.strip('",[]') for word in everything.split()}


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]  # generated code has no types
    def __init__(self) -> None:
        self.names: list[str] = []
        self.facts: dict[str, str] = {}

    async def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            self.facts = {fact.key: fact.value.string_value for fact in resource.resource.attributes}
            self.names += [span.name for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_spans_arrive_at_a_receiver_before_the_server_ends() -> None:
    receiver, server = Receiver(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with serving(otlp_endpoint=f"http://127.0.0.1:{port}") as served:
            await collect(served.generation.Generate(request(1, 2)))
    finally:
        await server.stop(None)
    assert sorted(receiver.names) == [
        "decode", "delivery", "prefill", "queue", "tinyloop.v1.GenerationService/Generate",
    ]  # fmt: skip
    assert (receiver.facts["service.name"], receiver.facts["service.instance.id"]) == ("tinyloop", "replica-0")


async def test_a_receiver_that_is_not_there_holds_up_nobody() -> None:
    async with serving(otlp_endpoint="http://127.0.0.1:9") as served:
        await collect(served.generation.Generate(request(1, 2)))
        stopping_s = time.monotonic()
        await served.app.stop(grace_s=0.0)
        assert time.monotonic() - stopping_s < 30


def test_without_the_extra_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tinyloop_service.observe.traces", None)
    monkeypatch.delattr("tinyloop_service.observe.traces")
    with pytest.raises(InvalidArgument, match=re.escape(install("otel"))) as caught:
        Observation(ServerSettings(otlp_endpoint="http://127.0.0.1:4317"), "here")
    assert caught.value.field == "otlp_endpoint"
