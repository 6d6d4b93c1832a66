"""What stands behind the servicers: scheduler and names, once the model is loaded; who watches; text to ids."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Mapping
from typing import Any

from tinyloop_service.engine.api import Limits
from tinyloop_service.errors import Draining, InvalidArgument, Unavailable, WarmingUp
from tinyloop_service.observer import UNWATCHED, Observer
from tinyloop_service.registry.names import Names
from tinyloop_service.rpc.boundary import Context, answering
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.text import Tokenizer
from tinyloop_service.types import TokenIds

_SHORT_TEXT = 2000  # characters that are tokenised at once, in well under a millisecond
_QUIET_S = 0.02  # without a call: whoever was refused stays away for a second


class Backend:
    """Empty while the server warms up, and when it ends; filled once by `open`."""

    def __init__(self, replica: str, observer: Observer = UNWATCHED) -> None:
        self.replica = replica
        self.observer = observer
        self.config: Mapping[str, Any] = {}
        self._num_calls = 0
        self._scheduler: Scheduler | None = None
        self._names: Names | None = None
        self._refusal: Unavailable = WarmingUp("the server is loading its model; try again in a moment")

    def open(self, scheduler: Scheduler, names: Names, config: Mapping[str, Any]) -> None:
        """From now on calls are served.  `config`: the configuration in the model file."""
        self._scheduler, self._names = scheduler, names
        self.config = config

    def close(self) -> None:
        """From now on calls hear what those have heard that came while the server drained."""
        self._scheduler = self._names = None
        self._refusal = Draining()

    async def quiet(self, limit_s: float) -> None:
        """Return when no call has come for a moment, or after `limit_s`."""
        end_s, before = time.monotonic() + limit_s, -1
        while self._num_calls != before and time.monotonic() < end_s:
            before = self._num_calls
            await asyncio.sleep(_QUIET_S)

    def answering(self, context: Context, method: str) -> answering:
        """What goes around the body of a method, Service/Method."""
        self._num_calls += 1
        return answering(context, method, self.observer)

    @property
    def scheduler(self) -> Scheduler:
        """Raises WarmingUp or Draining while there is none."""
        if self._scheduler is None:
            raise copy.copy(self._refusal)
        return self._scheduler

    @property
    def names(self) -> Names:
        """Raises WarmingUp or Draining while there are none."""
        if self._names is None:
            raise copy.copy(self._refusal)
        return self._names

    @property
    def limits(self) -> Limits:
        return self.scheduler.limits

    def tokenizer(self, field: str) -> Tokenizer:
        """Raises InvalidArgument on `field` where the model takes no text."""
        tokenizer = self.scheduler.tokenizer
        if tokenizer is None:
            raise InvalidArgument(field, "is text, but the model file has no tokenizer; send token ids")
        return tokenizer

    async def encode(self, content: str | TokenIds, field: str, *, bos: bool) -> TokenIds:
        """Ids of text; ids as they are.  `bos`: put BOS before text, if the model has one."""
        if not isinstance(content, str):
            return content
        if not content and not bos:
            return ()
        tokenizer = self.tokenizer(field)
        if len(content) <= _SHORT_TEXT:
            return tokenizer.encode(content, bos=bos)
        return await asyncio.to_thread(tokenizer.encode, content, bos=bos)

    async def decode(self, ids: TokenIds, field: str) -> str:
        return await asyncio.to_thread(self.tokenizer(field).decode, ids)
