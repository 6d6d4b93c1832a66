"""Making prefixes, for CreatePrefix and for a Generate that creates what is missing.

Idempotency keys: a key stands for the prefix id of its first request, so that a repeated request meets the prefix that
the first one made or is still making; the scheduler does no work twice for one name and content.  The last
`MAX_KEYS` keys are remembered, by this process.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from tinyloop_service.errors import InvalidArgument
from tinyloop_service.pb import prefix_pb2
from tinyloop_service.rpc.backend import TENANT, Backend
from tinyloop_service.rpc.convert_prefix import Creation, new_prefix_id, read_creation
from tinyloop_service.types import PrefixDefinition, PrefixInfo

MAX_KEYS = 10_000


@dataclass(frozen=True, slots=True)
class Order:
    """A creation whose name is chosen and whose text is tokens."""

    name: str
    definition: PrefixDefinition
    creation: Creation


class PrefixCreator:
    """One per server: it holds the idempotency keys."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._keys: OrderedDict[str, tuple[bytes, str]] = OrderedDict()  # request_id → (digest of the request, name)

    async def read(self, message: prefix_pb2.CreatePrefixRequest) -> Order:
        """Check and tokenise; no work is done yet."""
        creation = read_creation(message, self._backend.limits, self._backend.scheduler.now_ns())
        name = self._name(creation, message)
        tokens = await self._backend.encode(creation.content, "input.text", bos=creation.parent is None)
        if not tokens:
            raise InvalidArgument("input", "is empty, expected at least one token")
        definition = PrefixDefinition(tokens, creation.loops, creation.cache_window, creation.parent)
        return Order(name, definition, creation)

    def check(self, order: Order) -> PrefixInfo:
        """What the prefix would be; raises what a create would raise."""
        creation, scheduler = order.creation, self._backend.scheduler
        return scheduler.validate_prefix(
            order.definition,
            tenant=TENANT,
            name=order.name,
            expire_time_ns=creation.expiration.at(scheduler.now_ns()),
            pinned=creation.pinned,
        )

    async def create(self, order: Order) -> PrefixInfo:
        """Build it, or join who builds it; with build_async, only see to it that it is built."""
        creation, scheduler = order.creation, self._backend.scheduler
        return await scheduler.create_prefix(
            order.definition,
            tenant=TENANT,
            name=order.name,
            expire_time_ns=creation.expiration.at(scheduler.now_ns()),
            pinned=creation.pinned,
            wait=not creation.build_async,
            detached=creation.build_async,
        )

    def _name(self, creation: Creation, message: prefix_pb2.CreatePrefixRequest) -> str:
        """The id asked for, that of the first request with the same key, or a new one."""
        name = creation.prefix_id or new_prefix_id()
        if not creation.request_id or creation.validate_only:
            return name
        digest = hashlib.sha256(message.SerializeToString(deterministic=True)).digest()
        first_digest, first_name = self._keys.setdefault(creation.request_id, (digest, name))
        if first_digest != digest:
            raise InvalidArgument("request_id", "was used for another request; make a new one for each request")
        if len(self._keys) > MAX_KEYS:
            self._keys.popitem(last=False)
        return first_name
