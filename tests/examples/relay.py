"""A relay before a server: passes calls on, byte for byte, and remembers what a proxy sees of them.

It also holds a stream back behind its first piece of text, until it is told that the caller has shown that piece.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from tinyloop_service.pb import generation_pb2


@dataclass(slots=True)
class Call:
    method: str  # without its service
    headers: dict[str, str]
    time_limit_s: float | None = None
    was_cancelled: bool = False


@dataclass(slots=True)
class Relay(grpc.GenericRpcHandler):  # type: ignore[misc]
    """`first_text`: of the first stream, when it is on its way to the caller; nothing follows until `shown` is set."""

    server: grpc.aio.Channel
    calls: list[Call] = field(default_factory=list)
    first_text: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    shown: asyncio.Event = field(default_factory=asyncio.Event)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        headers = {str(key): str(value) for key, value in details.invocation_metadata}
        call = Call(details.method.rpartition("/")[2], headers)
        self.calls.append(call)
        return grpc.unary_stream_rpc_method_handler(functools.partial(self._pass_on, call, details.method))

    async def _pass_on(self, call: Call, path: str, request: bytes, context: Any) -> AsyncIterator[bytes]:
        call.time_limit_s = context.time_remaining()
        upstream = self.server.unary_stream(path)(request, metadata=_own(call.headers))
        try:
            async for message in upstream:
                yield message
                if call.method == "Generate" and not self.shown.is_set():
                    await self._hold_back(message)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details(), tuple(error.trailing_metadata()))
        except (asyncio.CancelledError, GeneratorExit):
            call.was_cancelled = True
            raise
        finally:
            upstream.cancel()

    async def _hold_back(self, message: bytes) -> None:
        text = generation_pb2.GenerateResponse.FromString(message).delta.text
        if text:
            self.first_text.set_result(text)
            await self.shown.wait()


def _own(headers: dict[str, str]) -> Sequence[tuple[str, str]]:
    """What the caller set, without what gRPC did."""
    return [(key, value) for key, value in headers.items() if key in ("authorization", "x-tinyloop-prefix")]


@asynccontextmanager
async def relaying(address: str) -> AsyncIterator[tuple[Relay, str]]:
    """A relay before the server at `address`, and its own address."""
    async with grpc.aio.insecure_channel(address) as channel:
        relay, front = Relay(channel), grpc.aio.server()
        front.add_generic_rpc_handlers((relay,))
        port = front.add_insecure_port("127.0.0.1:0")
        await front.start()
        try:
            yield relay, f"127.0.0.1:{port}"
        finally:
            await front.stop(None)
