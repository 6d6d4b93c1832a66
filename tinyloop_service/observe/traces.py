"""Traces for OpenTelemetry: one span a call, and below it one for each phase of what it did.

    Generate                                   SERVER; child of the caller's span, if it sent `traceparent`
    ├── queue     arrival → admission
    │   └── build   of the prefix, where the request waited for that
    ├── prefill   admission → first token
    ├── decode    first token → end of the last choice
    └── delivery  end of the last choice → end of the call

In: records of calls that have ended; spans are made then, with the times that were noted on the way, so a call costs
nothing while it runs.  Out: spans, to an OTLP receiver.  A span ends with an error where the call was cancelled or the
server was at fault; a caller's own mistake is none, as OpenTelemetry's conventions for gRPC have it.  No prompt text.

The library comes with the extra `otel`; this module is imported only where an endpoint is set.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import grpc
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tinyloop_service.observer import CallRecord, RequestRecord

_CLOSE_S = 2.0  # for the last spans to leave
_FAULTS = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "CANCELLED"}
Attributes = Mapping[str, str | int | tuple[str, ...]]


def otlp_exporter(endpoint: str) -> SpanExporter:
    """http:// is plaintext, https:// TLS; what else OTEL_EXPORTER_OTLP_* variables say, the library reads."""
    return OTLPSpanExporter(endpoint=endpoint)


class Traces:
    """Makes spans of calls and hands them to `exporter` from a thread of its own."""

    def __init__(self, exporter: SpanExporter, *, share: float, replica: str, version: str) -> None:
        """share: of the calls whose caller does not say whether to trace them."""
        facts = {SERVICE_NAME: "tinyloop", SERVICE_INSTANCE_ID: replica, SERVICE_VERSION: version}
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(share)), resource=Resource.create(facts), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tinyloop", version)
        self._propagator = TraceContextTextMapPropagator()

    def call_ended(self, call: CallRecord) -> str | None:
        """The trace's id in hex; None where this call is not traced."""
        parent = self._propagator.extract(dict(call.trace_headers))
        name = f"{call.service}/{call.method}"
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, _of_call(call), start_time=call.begin_ns)
        if not span.is_recording():
            return None
        inside = trace.set_span_in_context(span, parent)
        if call.build_end_ns:
            self._add_build(call, inside)
        if call.request is not None:
            self._add_phases(call, call.request, inside)
        _end(span, call.end_ns, call.code if call.code in _FAULTS else "")
        return trace.format_trace_id(span.get_span_context().trace_id)

    def close(self) -> None:
        """Send what is left, and wait a moment for that; a receiver that does not answer holds up nobody."""
        closing = threading.Thread(target=self._provider.shutdown, name="tinyloop-traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)

    def _add_build(self, call: CallRecord, inside: Context) -> None:
        """A build that the call itself asked for: it waits, and then it is built."""
        started_ns = max(call.begin_ns, call.build_start_ns)
        self._add("queue", inside, call.begin_ns, started_ns, {})
        self._add("build", inside, started_ns, call.build_end_ns, {})

    def _add_phases(self, call: CallRecord, request: RequestRecord, inside: Context) -> None:
        facts: dict[str, Attributes] = {
            "prefill": {"tinyloop.tokens": request.prompt_tokens - request.cached_tokens},
            "decode": {"tinyloop.tokens": request.generated_tokens},
        }
        phases = request.phases(call.end_ns)
        for name, start_ns, end_ns in phases:
            is_cut = not request.is_complete and name == phases[-1][0]
            span = self._add(name, inside, start_ns, end_ns, facts.get(name, {}), call.code if is_cut else "")
            if name == "queue" and request.build_end_ns:
                within = trace.set_span_in_context(span, inside)
                self._add("build", within, max(start_ns, request.build_start_ns), request.build_end_ns, {})

    def _add(
        self, name: str, inside: Context, start_ns: int, end_ns: int, facts: Attributes, trouble: str = ""
    ) -> Span:
        span = self._tracer.start_span(name, inside, attributes=facts, start_time=start_ns)
        _end(span, end_ns, trouble)
        return span


def _end(span: Span, end_ns: int, trouble: str) -> None:
    if trouble:
        span.set_status(Status(StatusCode.ERROR, trouble))
    span.end(end_ns)


def _of_call(call: CallRecord) -> Attributes:
    """OpenTelemetry's names where it has one, else our own."""
    facts: dict[str, str | int | tuple[str, ...]] = {
        "rpc.system": "grpc",
        "rpc.service": call.service,
        "rpc.method": call.method,
        "rpc.grpc.status_code": grpc.StatusCode[call.code].value[0],
        "tinyloop.request_id": call.request_id,
        "tinyloop.tenant": call.tenant,
    }
    if call.prefix is not None:
        facts["tinyloop.prefix"] = call.prefix
    if call.reason:
        facts["error.type"] = call.reason
    if (request := call.request) is not None:
        facts["gen_ai.usage.input_tokens"] = request.prompt_tokens
        facts["gen_ai.usage.output_tokens"] = request.generated_tokens
        facts["gen_ai.response.finish_reasons"] = tuple(request.finish_reasons)
        facts["tinyloop.cached_tokens"] = request.cached_tokens
    return facts
