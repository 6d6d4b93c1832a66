"""The engine's side of the calls that come through one front.

A handler sees them as grpc.aio would show them: the same interceptors in front of it, a context that is asked for the
same things, a task that is cancelled when the caller goes.  It refuses to know what is called.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from tinyloop_service.rpc.fronts.pipe import Down, Event, Pipe, Up

_MOST_UNWRITTEN = 8  # messages of one call in a front's hands; beyond them a handler waits, and a slow reader's grow
_log = structlog.get_logger("tinyloop.fronts")

Metadata = tuple[tuple[str, str | bytes], ...]
FindHandler = Callable[["CallDetails"], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class CallDetails:
    """What interceptors and services choose a handler by."""

    method: str
    invocation_metadata: Metadata


class Call:
    """One call; to a handler its context: as much of `grpc.aio.ServicerContext` as ours ask for."""

    def __init__(self, pipe: Pipe, number: int, metadata: Metadata) -> None:
        self.task: asyncio.Task[None] | None = None
        self.serialize: Callable[[Any], bytes] | None = None
        self.is_over = False
        self._pipe = pipe
        self._number = number
        self._metadata = metadata
        self._trailers: Metadata = ()
        self._room = asyncio.Semaphore(_MOST_UNWRITTEN)
        self._next: asyncio.Future[bytes | None] | None = None  # the request that was asked for

    # ---- the handler's side

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def set_trailing_metadata(self, trailers: Metadata) -> None:
        self._trailers = tuple(trailers)

    async def write(self, message: Any) -> None:
        await self._room.acquire()
        self._pipe.send(Down.MESSAGE, self._number, self.serialize(message) if self.serialize else message)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> None:
        """Always raises."""
        self.end(code, details, trailing_metadata)
        raise grpc.aio.AbortError

    async def requests(self, deserialize: Callable[[bytes], Any] | None) -> AsyncIterator[Any]:
        while (request := await self.next_request()) is not None:
            yield deserialize(request) if deserialize else request

    async def next_request(self) -> bytes | None:
        """Asked for one by one, so that no caller is ahead of its handler.  None: no more will come."""
        self._pipe.send(Down.NEXT, self._number)
        self._next = asyncio.get_running_loop().create_future()
        return await self._next

    # ---- the front's side

    def end(self, code: grpc.StatusCode, details: str = "", trailers: Metadata = ()) -> None:
        """Nothing more is said of the call; a second end is none."""
        if not self.is_over:
            self.is_over = True
            self._pipe.send(Down.ENDED, self._number, code.value[0], details, tuple(trailers) or self._trailers)

    def written(self) -> None:
        self._room.release()

    def asked(self, request: bytes | None) -> None:
        if self._next is not None and not self._next.done():
            self._next.set_result(request)

    def cancel(self) -> None:
        self.is_over = True  # whatever is said now, nobody hears it
        if self.task is not None:
            self.task.cancel()


class Calls:
    """All that run through one front."""

    def __init__(self, pipe: Pipe, find: FindHandler) -> None:
        """find: the handler of a method, as an interceptor's continuation gives it; None where there is none."""
        self._pipe = pipe
        self._find = find
        self._running: dict[int, Call] = {}

    def take(self, event: Event) -> None:
        """What a front says of a call."""
        kind, number = event[:2]
        if kind == Up.CALL:
            _, _, method, metadata, request = event
            self._running[number] = new = Call(self._pipe, number, metadata)
            new.task = asyncio.create_task(self._answer(new, CallDetails(method, metadata), request), name=method)
            new.task.add_done_callback(lambda _: self._running.pop(number))
        elif (call := self._running.get(number)) is not None:  # else it has just ended
            if kind == Up.WRITTEN:
                call.written()
            elif kind == Up.CANCELLED:
                call.cancel()
            elif kind == Up.REQUEST:
                call.asked(event[2])

    def cancel(self) -> None:
        """The front is gone, and all its callers' connections with it."""
        for call in list(self._running.values()):
            call.cancel()

    async def _answer(self, call: Call, details: CallDetails, request: bytes | None) -> None:
        try:
            handler = await self._find(details)
            if handler is None:
                call.end(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
                return
            call.serialize = handler.response_serializer
            await _behave(handler, request, call)
            call.end(grpc.StatusCode.OK)
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            call.end(grpc.StatusCode.CANCELLED)
            raise
        except Exception as error:
            _log.exception("a handler failed", method=details.method)
            call.end(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}")


async def _behave(handler: Any, request: bytes | None, call: Call) -> None:
    """Do what the handler of a call does, whatever its kind."""
    argument: Any
    if handler.request_streaming:
        argument = call.requests(handler.request_deserializer)
    else:
        argument = request if request is not None else await call.next_request()
        if argument is None:
            await call.abort(grpc.StatusCode.INTERNAL, "no request has come")
        argument = handler.request_deserializer(argument) if handler.request_deserializer else argument
    if not handler.response_streaming:
        behaviour = handler.stream_unary if handler.request_streaming else handler.unary_unary
        await call.write(await behaviour(argument, call))
        return
    behaviour = handler.stream_stream if handler.request_streaming else handler.unary_stream
    answering = behaviour(argument, call)
    if hasattr(answering, "__aiter__"):
        async for message in answering:
            await call.write(message)
    else:
        await answering
