"""A server behind gRPC as the service of a measurement.

Its channel does not retry: what a server refuses is an error here, and what gRPC would hide by trying again is part of
what is measured.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Self

from tinyloop_service.bench.service import Answering, Ask, Content, Outputs
from tinyloop_service.client import ModelInfo, Tls, calls, wire
from tinyloop_service.client.calls import Call
from tinyloop_service.client.transports import AsyncTransport
from tinyloop_service.types import Load


class Remote:
    """One channel to `target`; belongs to the event loop that first uses it.  An async context manager."""

    def __init__(
        self,
        target: str,
        *,
        token: str | None = None,
        tls: Tls | bool = False,
        timeout: float | None = None,
        affinity: bool = False,
    ) -> None:
        self._transport = AsyncTransport(target, token, tls, affinity, timeout, retries=False)

    async def create_prefix(
        self, name: str, content: Content, *, loops: int | None = None, ttl_s: float | None = None
    ) -> int:
        steps = calls.create_prefix(
            name, content, loops=loops, cache_window=None, ttl=ttl_s, pinned=False, parent=None, wait=True
        )
        return (await self._transport.run(steps)).size_bytes

    async def delete_prefix(self, name: str) -> None:
        await self._transport.run(calls.delete_prefix(name))

    def ask(self, ask: Ask) -> Answering:
        return aclosing(self._outputs(ask))

    async def load(self) -> Load:
        return await self._transport.run(calls.load())

    async def model(self) -> ModelInfo:
        return await self._transport.run(calls.model())

    async def tokenize(self, text: str, *, bos: bool) -> list[int]:
        return await self._transport.run(calls.tokenize(text, bos=bos))

    async def close(self) -> None:
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def _outputs(self, ask: Ask) -> AsyncGenerator[Outputs, None]:
        request = wire.write_generate(ask.prefix, ask.content, ask.parameters, omit_text=not ask.want_text, packed=True)
        call = Call("GenerationService", "Generate", request, ask.prefix)
        async with aclosing(self._transport.stream(call)) as messages:
            async for message in messages:
                yield tuple(wire.read_outputs(message))
