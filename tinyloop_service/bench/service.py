"""Who answers the requests of a measurement: one seam for the scheduler of this process and for a server.

In: names, prompts, requests.  Out: outputs as `types.Output`, in the groups in which they came.  The scheduler is here,
a server is in `load/remote.py`; what measures knows neither.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from tinyloop_service.arguments import Parameters
from tinyloop_service.errors import InvalidArgument
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.scheduler.stream import Stream
from tinyloop_service.types import Load, Output, PrefixDefinition, TokenIds

Content = str | TokenIds
Outputs = tuple[Output, ...]  # what came at the same time
Answering = AbstractAsyncContextManager[AsyncIterator[Outputs]]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    content: Content  # what follows the prefix, else the whole prompt
    parameters: Parameters
    prefix: str | None = None  # name
    want_text: bool = False


class Service(Protocol):
    """Errors are those of `errors.py`."""

    async def create_prefix(
        self, name: str, content: Content, *, loops: int | None = None, ttl_s: float | None = None
    ) -> int:
        """Returns when it is READY, with its stored bytes."""

    async def delete_prefix(self, name: str) -> None: ...

    def ask(self, ask: Ask) -> Answering:
        """Leaving the context cancels the request."""

    async def load(self) -> Load: ...


class InProcess:
    """A scheduler of this process, on the running event loop."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    async def create_prefix(
        self, name: str, content: Content, *, loops: int | None = None, ttl_s: float | None = None
    ) -> int:
        expire_ns = None if ttl_s is None else self._scheduler.now_ns() + round(ttl_s * 1e9)
        definition = PrefixDefinition(self._ids(content, bos=True), loops=loops)
        info = await self._scheduler.create_prefix(definition, name=name, expire_time_ns=expire_ns)
        return info.size_bytes

    async def delete_prefix(self, name: str) -> None:
        self._scheduler.delete_prefix(name)

    def ask(self, ask: Ask) -> Stream:
        tokens = self._ids(ask.content, bos=ask.prefix is None)
        return self._scheduler.generate(ask.parameters.request(tokens, prefix=ask.prefix, want_text=ask.want_text))

    async def load(self) -> Load:
        return self._scheduler.load()

    def _ids(self, content: Content, *, bos: bool) -> TokenIds:
        if not isinstance(content, str):
            return content
        if self._scheduler.tokenizer is None:
            raise InvalidArgument("content", "is text, but this model has no tokenizer; give token ids")
        return self._scheduler.tokenizer.encode(content, bos=bos)
