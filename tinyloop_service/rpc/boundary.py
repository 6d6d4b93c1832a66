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
from collections.abc import Awaitable, Callable
from types import TracebackType
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


class answering:
    """Around the body of one RPC; the table is in the module's docstring."""

    def __init__(self, context: Context, method: str) -> None:
        self._context = context
        self._method = method
        self._begin_ns = time.monotonic_ns()
        self._request_id = _request_id(context)

    async def __aenter__(self) -> None:
        structlog.contextvars.bind_contextvars(request_id=self._request_id, method=self._method)
        self._context.set_trailing_metadata(((REQUEST_ID_KEY, self._request_id),))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        took = {"ms": round((time.monotonic_ns() - self._begin_ns) / 1e6, 3)}
        if error is None:
            _log.info("answered", **took)
        elif isinstance(error, asyncio.CancelledError) and _cancelled_by_caller():
            _log.info("cancelled", **took)
        elif isinstance(error, Exception | asyncio.CancelledError):
            await self._refuse(error, took)

    async def _refuse(self, error: BaseException, took: dict[str, float]) -> None:
        """Log `error` once and end the call with its status.  Always raises."""
        status = to_status(error, self._request_id)
        facts = {"code": status.code.name, "reason": status.reason, **took}
        if not isinstance(error, TinyLoopError):
            _log.error("failed", **facts, exc_info=error)
        elif status.code is grpc.StatusCode.INTERNAL:
            _log.error("failed", **facts, error=str(error))
        else:
            _log.info("refused", **facts)
        trailers = (*status.trailers, (REQUEST_ID_KEY, self._request_id))
        await self._context.abort(status.code, status.message, trailers)


class RefuseMalformed(grpc.aio.ServerInterceptor):
    """Answers bytes that are no valid request with INVALID_ARGUMENT; gRPC alone would call them INTERNAL."""

    def __init__(self) -> None:
        self._handlers: dict[str, Any] = {}  # by method

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        if method not in self._handlers:
            handler = await continuation(handler_call_details)
            if handler is None or handler.request_streaming or handler.request_deserializer is None:
                return handler
            self._handlers[method] = _refusing_malformed(handler, method)
        return self._handlers[method]


class _Malformed:
    """Stands for a request that could not be parsed."""


def _refusing_malformed(handler: Any, method: str) -> Any:
    kind = "unary_stream" if handler.response_streaming else "unary_unary"
    behaviour = _refusing(getattr(handler, kind), method)
    return handler._replace(**{"request_deserializer": _tolerant(handler.request_deserializer), kind: behaviour})


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
