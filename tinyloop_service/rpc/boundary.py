"""The edge of every RPC: request id, errors to statuses, and what the observer hears of it.

`answering(context, method, observer)` goes around a method's whole body, streaming ones included:

    our errors             → abort with their status (status.py)
    anything unforeseen    → INTERNAL that says nothing of itself; the observer gets the exception
    the caller's cancel    → re-raised: swallowing it leaks the call (also deadline and lost connection)
    a write that fails     → the same: gRPC has found out first that the caller is gone
    a stray CancelledError → INTERNAL: let out, it would leave the caller hanging

A request id comes from the caller's `x-request-id` or is made here; it is in every log line, in ErrorInfo and in the
trailers.  It never travels as initial metadata: that would end the caller's right to retry.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Collection, Sequence
from types import TracebackType
from typing import Any

import grpc
import structlog

from tinyloop_service.errors import InvalidArgument, TinyLoopError
from tinyloop_service.observer import CallRecord, Observer, now_ns
from tinyloop_service.rpc.caller import caller
from tinyloop_service.rpc.status import to_status

REQUEST_ID_KEY = "x-request-id"
TRACE_KEYS = ("traceparent", "tracestate")  # W3C trace context
PACKAGE = "tinyloop.v1"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[Any, Context], Awaitable[Any]]


class answering:
    """Around the body of one RPC; the table is in the module's docstring.  Entering it gives the call's record, for the
    body to say which prefix and which request it is about."""

    def __init__(self, context: Context, method: str, observer: Observer) -> None:
        """method: Service/Method, for example "PrefixService/GetPrefix"."""
        self._context = context
        self._observer = observer
        service, _, name = method.partition("/")
        given = _metadata(context, (REQUEST_ID_KEY, *TRACE_KEYS))
        wanted = given.pop(REQUEST_ID_KEY, "")
        request_id = wanted if _REQUEST_ID.fullmatch(wanted) else secrets.token_hex(16)
        self._call = CallRecord(
            f"{PACKAGE}.{service}", name, request_id, now_ns(), tuple(given.items()), tenant=caller().tenant
        )

    async def __aenter__(self) -> CallRecord:
        call = self._call
        structlog.contextvars.bind_contextvars(request_id=call.request_id, method=call.method)
        self._context.set_trailing_metadata(((REQUEST_ID_KEY, call.request_id),))
        return call

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._ended()
        elif _is_callers_end(error):
            self._call.code = grpc.StatusCode.CANCELLED.name
            self._ended()
        elif isinstance(error, Exception | asyncio.CancelledError):
            await self._refuse(error)

    async def _refuse(self, error: BaseException) -> None:
        """End the call with the status of `error`.  Always raises."""
        call, status = self._call, to_status(error, self._call.request_id)
        call.code, call.reason = status.code.name, status.reason
        if status.code is grpc.StatusCode.INTERNAL or not isinstance(error, TinyLoopError):
            call.error = error
        self._ended()
        trailers = (*status.trailers, (REQUEST_ID_KEY, call.request_id))
        await self._context.abort(status.code, status.message, trailers)

    def _ended(self) -> None:
        """The observer hears of it when what is ready to be sent is on its way."""
        self._call.end_ns = now_ns()
        asyncio.get_running_loop().call_soon(self._observer.call_ended, self._call)


class Methods(grpc.GenericRpcHandler):
    """The methods of our services: generated code adds them here as it would to a server, and a server has this.

    Bytes that are no valid request are answered with INVALID_ARGUMENT; gRPC alone would call them INTERNAL.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._services: list[Any] = []
        self._handlers: dict[str, Any] = {}  # by method

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._services += handlers

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        if method not in self._handlers:
            found = (service.service(handler_call_details) for service in self._services)
            handler = next((handler for handler in found if handler is not None), None)
            if handler is None:
                return None
            self._handlers[method] = _refusing_malformed(handler, method, self._observer)
        return self._handlers[method]


class _Malformed:
    """Stands for a request that could not be parsed."""


def _refusing_malformed(handler: Any, method: str, observer: Observer) -> Any:
    kind = "unary_stream" if handler.response_streaming else "unary_unary"
    behaviour = _refusing(getattr(handler, kind), method.removeprefix(f"/{PACKAGE}."), observer)
    return handler._replace(**{"request_deserializer": _tolerant(handler.request_deserializer), kind: behaviour})


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except Exception:  # DecodeError, UnicodeDecodeError: what protobuf raises differs between its backends
            return _Malformed()

    return read


def _refusing(behaviour: Behaviour, method: str, observer: Observer) -> Behaviour:
    async def call(request: Any, context: Context) -> Any:
        if isinstance(request, _Malformed):
            async with answering(context, method, observer):
                raise InvalidArgument("request", "is not a valid message of this method; strings must be UTF-8")
        return await behaviour(request, context)

    return call


def _metadata(context: Context, keys: Collection[str]) -> dict[str, str]:
    """What the caller sent under these keys, as text."""
    sent = context.invocation_metadata() or ()
    return {key: value for key, value in sent if key in keys and isinstance(value, str)}


def _is_callers_end(error: BaseException) -> bool:
    if isinstance(error, grpc.aio.InternalError):  # of gRPC's own operations: messages, status
        return True
    return isinstance(error, asyncio.CancelledError) and _cancelled_by_caller()


def _cancelled_by_caller() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
