"""A front's side of its calls: whatever comes over gRPC goes into the pipe, whatever comes back goes to the caller.

In: calls of any method, as bytes.  Out: events of `Up`, and what `Down` says of each call.
"""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from typing import Any

import grpc

from tinyloop_service.rpc.fronts.pipe import Down, Event, Pipe, Up
from tinyloop_service.rpc.fronts.shapes import SHAPES, Shape
from tinyloop_service.rpc.tokens import digest_of

Context = grpc.aio.ServicerContext[Any, Any]
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Relay(grpc.GenericRpcHandler):
    """Every call goes through the pipe, of a stranger or to a method that nobody knows too: whom to answer with what is
    decided there.  Until then nothing of theirs is read, so that strangers fill no memory."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._callers: frozenset[bytes] | None = None
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Queue[Event]] = {}
        self._handlers: dict[tuple[str, Shape], grpc.RpcMethodHandler[Any, Any]] = {}

    def set_callers(self, digests: frozenset[bytes] | None) -> None:
        """SHA-256 of tokens; None: nobody needs one."""
        self._callers = digests

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        method = handler_call_details.method
        known = SHAPES.get(method, Shape.STREAMS)
        shape = known if self._is_known(handler_call_details.invocation_metadata) else Shape.STREAMS
        handler = self._handlers.get((method, shape)) or _handler(shape, partial(self._hand_on, method, shape))
        if method in SHAPES:  # strangers' words are not kept
            self._handlers[method, shape] = handler
        return handler

    def take(self, event: Event) -> None:
        """What the engine's process says of a call."""
        answer = self._answers.get(event[1])
        if answer is not None:  # else its caller has gone meanwhile
            answer.put_nowait(event)

    def _is_known(self, metadata: Any) -> bool:
        if self._callers is None:
            return True
        return any(key == "authorization" and digest_of(value) in self._callers for key, value in metadata or ())

    async def _hand_on(self, method: str, shape: Shape, request: Any, context: Context) -> bytes | None:
        """One call, from its first byte to its status."""
        if shape is not Shape.STREAMS:
            await self._pipe.room_for(request)
        number, reply = next(self._numbers), None
        answer = self._answers[number] = asyncio.Queue()
        metadata = tuple((key, value) for key, value in context.invocation_metadata() or ())
        requests, request = (request, None) if shape is Shape.STREAMS else (None, request)
        self._pipe.send(Up.CALL, number, method, metadata, request)
        del request  # which may be large
        asking: asyncio.Task[None] | None = None
        try:
            while (event := await answer.get())[0] != Down.ENDED:
                if event[0] == Down.NEXT:
                    asking = asyncio.create_task(self._ask(number, requests))
                elif shape is Shape.UNARY:
                    reply = event[2]
                else:
                    await context.write(event[2])
                    self._pipe.send(Up.WRITTEN, number)
        except BaseException:  # the caller is gone, or its deadline is over
            self._pipe.send(Up.CANCELLED, number)
            raise
        finally:
            del self._answers[number]
            if asking is not None:
                asking.cancel()
        _, _, code, words, trailers = event
        if code:
            await context.abort(_CODES[code], words, trailers)
        context.set_trailing_metadata(trailers)
        return reply

    async def _ask(self, number: int, requests: Any) -> None:
        """The next request of a caller's, an async iterator."""
        request: bytes | None = await anext(requests, None)
        if request is not None:
            await self._pipe.room_for(request)
        self._pipe.send(Up.REQUEST, number, request)


def _handler(shape: Shape, behaviour: Any) -> grpc.RpcMethodHandler[Any, Any]:
    """Without serializers: bytes."""
    make = {
        Shape.UNARY: grpc.unary_unary_rpc_method_handler,
        Shape.ANSWERS: grpc.unary_stream_rpc_method_handler,
        Shape.STREAMS: grpc.stream_stream_rpc_method_handler,
    }[shape]
    return make(behaviour)
