"""Logs: how they are written, and one line for each call, with who asked for what and how long it took.

In: records of calls.  Out: structured lines on standard error, which nobody waits for.  No line has prompt text, token
ids or generated text: what callers wrote stays out, but for the ids of prefixes, tenants and requests.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from typing import Any, TextIO, cast

import structlog

from tinyloop_service.observe.lines import Lines, Stream
from tinyloop_service.observer import BuildRecord, CallRecord
from tinyloop_service.settings import LogFormat, ServerSettings

_log = structlog.get_logger("tinyloop.rpc")
_ENDLESS = ("WatchPrefix",)  # lasts as long as what it watches
_CALLER_GONE = "ExecuteBatchError raised in core"  # gRPC, with a traceback, of an answer whose caller had just left
_STDERR = 2  # the process's, whatever Python's stream of that name is at the moment
_lines: Lines | None = None  # this process's, once it is configured


def configure_logging(settings: ServerSettings) -> None:
    """structlog to standard error, one line an event; JSON or for people.  What else is said there goes the same way:
    of what a process ends, an error and its traceback are the last words, and would be waited for as well."""
    global _lines
    _lines = lines = Lines(_STDERR)
    if sys.stderr is sys.__stderr__ or isinstance(sys.stderr, Stream):  # nobody has turned it elsewhere
        sys.stderr = cast(TextIO, Stream(lines))
        atexit.register(_hand_back)
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    chain: list[Any] = [
        lines.admit,
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if settings.log_format is LogFormat.JSON:
        chain += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        plain = structlog.dev.plain_traceback  # the rich one prints local variables, prompts among them
        chain.append(structlog.dev.ConsoleRenderer(colors=os.isatty(_STDERR), exception_formatter=plain))
    structlog.configure(
        processors=chain,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, lines)),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(handlers=[_Forward()], level=logging.WARNING, force=True)


def _hand_back() -> None:
    """At the end of the process, before the rest of the log leaves: what is said still later goes out by itself."""
    if isinstance(sys.stderr, Stream):
        sys.stderr.flush()
        sys.stderr = cast(TextIO, sys.__stderr__)


def dropped_lines() -> int:
    """How many of the log there was no room for, because nobody read it, or that could not be written."""
    return _lines.dropped if _lines is not None else 0


def settle_log() -> None:
    """For who ends the process at once: wait for what was logged to leave, for a second at most."""
    if _lines is not None:
        _lines.settle()


class _Forward(logging.Handler):
    """What libraries have to say comes in the same form, but for what callers may do as they like."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(_CALLER_GONE):
            return
        structlog.get_logger(record.name).log(record.levelno, record.getMessage(), exc_info=record.exc_info)


def log_build(build: BuildRecord) -> None:
    """A prefix was built or restored, asked for by name or because a request needed it again; or it could not be."""
    facts: dict[str, Any] = {"prefix": build.name, "tokens": build.num_tokens}
    if build.tenant:
        facts["tenant"] = build.tenant
    if build.snapshot:
        facts["digest"] = build.snapshot
    if build.error is None:
        _log.info("restored" if build.snapshot else "built", **facts, ms=_ms(build.build_ns))
    else:
        _log.warning("restore failed" if build.snapshot else "build failed", **facts, reason=build.error)


def log_call(call: CallRecord, slow_ns: float, trace_id: str | None) -> None:
    """answered, cancelled, refused or failed; a call longer than `slow_ns` gets a warning instead, with its phases."""
    facts = _facts(call)
    if trace_id is not None:
        facts["trace_id"] = trace_id
    if call.error is not None:
        _log_failure(call, facts)
        return
    event = "refused" if call.reason else {"OK": "answered"}.get(call.code, "cancelled")
    if call.duration_ns >= slow_ns and call.method not in _ENDLESS:
        _log.warning("slow request", outcome=event, **{**facts, **_phases(call)})
    else:
        _log.info(event, **facts)


def _log_failure(call: CallRecord, facts: dict[str, Any]) -> None:
    if call.reason == "INTERNAL":  # nobody foresaw it
        _log.error("failed", **facts, exc_info=call.error)
    else:
        _log.error("failed", **facts, error=str(call.error))


def _facts(call: CallRecord) -> dict[str, Any]:
    """What every line has; what does not apply is left out."""
    facts: dict[str, Any] = {"request_id": call.request_id, "method": call.method}
    if call.tenant:
        facts["tenant"] = call.tenant
    if call.prefix is not None:
        facts["prefix"] = call.prefix
    if call.reason:
        facts |= {"code": call.code, "reason": call.reason}
    facts["ms"] = _ms(call.duration_ns)
    if (request := call.request) is not None:
        facts["finish"] = ",".join(sorted(set(request.finish_reasons)))
        facts["tokens"] = request.generated_tokens
        if request.admitted_ns:
            facts |= {"prompt_tokens": request.prompt_tokens, "cached_tokens": request.cached_tokens}
            facts["queue_ms"] = _ms(request.queue_ns)
        if request.first_token_ns:
            facts["ttft_ms"] = _ms(request.ttft_ns)
    return facts


def _phases(call: CallRecord) -> dict[str, float]:
    """Where the time of a call went, as far as it came."""
    build_start_ns, build_end_ns = call.build_times()
    phases = {"build_ms": _ms(build_end_ns - build_start_ns)} if build_end_ns else {}
    for name, start_ns, end_ns in call.request.phases(call.end_ns) if call.request is not None else ():
        phases[f"{name}_ms"] = _ms(end_ns - start_ns)
    return phases


def _ms(duration_ns: int) -> float:
    return round(duration_ns / 1e6, 3)
