"""The edge of every RPC: request id, one log line, errors to statuses.

`answering(context, method)` goes around a method's whole body, streaming ones included:

    our errors             → abort with their status (status.py)
    anything unforeseen    → INTERNAL that says nothing of itself; the log has the traceback
    the caller's cancel    → re-raised: swallowing it leaks the call (also deadline and lost connection)
    a stray CancelledError → INTERNAL: let out, it would leave the caller hanging

A request id comes from the caller's `x-request-id` or is made here; it is in every log line, in ErrorInfo and in the
trailers.  It never travels as initial metadata: that would end the caller's right to retry.  No prompt text is logged.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import structlog

from tinyloop_service.errors import InvalidArgument, TinyLoopError
from tinyloop_service.rpc.status import to_status

REQUEST_ID_KEY = "x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_log = structlog.get_logger("tinyloop.rpc")

Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[Any, Context], Awaitable[Any]]


@asynccontextmanager
async def answering(context: Context, method: str) -> AsyncIterator[None]:
    """Around the body of one RPC; the table is in the module's docstring."""
    begin_ns = time.monotonic_ns()
    request_id = _request_id(context)
    structlog.contextvars.bind_contextvars(request_id=request_id, method=method)
    context.set_trailing_metadata(((REQUEST_ID_KEY, request_id),))
    try:
        yield
    except asyncio.CancelledError as error:
        if _cancelled_by_caller():
            _log.info("cancelled", ms=_since_ms(begin_ns))
            raise
        await _refuse(context, error, request_id, begin_ns)
    except Exception as error:
        await _refuse(context, error, request_id, begin_ns)
    else:
        _log.info("answered", ms=_since_ms(begin_ns))


class RefuseMalformed(grpc.aio.ServerInterceptor):
    """Answers bytes that are no valid request with INVALID_ARGUMENT; gRPC alone would call them INTERNAL."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        behaviour = _refusing(getattr(handler, kind), handler_call_details.method)
        return handler._replace(**{"request_deserializer": _tolerant(handler.request_deserializer), kind: behaviour})


class _Malformed:
    """Stands for a request that could not be parsed."""


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except Exception:  # DecodeError, UnicodeDecodeError: what protobuf raises differs between its backends
            return _Malformed()

    return read


def _refusing(behaviour: Behaviour, method: str) -> Behaviour:
    async def call(request: Any, context: Context) -> Any:
        if isinstance(request, _Malformed):
            async with answering(context, method.rpartition("/")[2]):
                raise InvalidArgument("request", "is not a valid message of this method; strings must be UTF-8")
        return await behaviour(request, context)

    return call


def _request_id(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and isinstance(value, str) and _REQUEST_ID.fullmatch(value):
            return value
    return uuid.uuid4().hex


def _cancelled_by_caller() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _since_ms(begin_ns: int) -> float:
    return round((time.monotonic_ns() - begin_ns) / 1e6, 3)


async def _refuse(context: Context, error: BaseException, request_id: str, begin_ns: int) -> None:
    """Log `error` once and end the call with its status.  Always raises."""
    status = to_status(error, request_id)
    if isinstance(error, TinyLoopError):
        level = _log.error if status.code is grpc.StatusCode.INTERNAL else _log.info
        level("refused", code=status.code.name, reason=status.reason, ms=_since_ms(begin_ns))
    else:
        _log.error("failed", code=status.code.name, ms=_since_ms(begin_ns), exc_info=error)
    await context.abort(status.code, status.message, (*status.trailers, (REQUEST_ID_KEY, request_id)))
