"""Making prefixes, for CreatePrefix and for a Generate that creates what is missing.

Idempotency keys: a key stands for the prefix id of its first request, and once that was answered for the prefix itself.
A repeated request joins the build, or gets the prefix as it is now: later changes stay, and what was deleted stays
deleted.  The last `MAX_KEYS` keys of each tenant are remembered, by this process.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, replace

from tinyloop_service.errors import InvalidArgument, PrefixNotFound
from tinyloop_service.pb import prefix_pb2
from tinyloop_service.rpc.backend import Backend
from tinyloop_service.rpc.caller import caller
from tinyloop_service.rpc.convert_prefix import Creation, new_prefix_id, read_creation
from tinyloop_service.types import PrefixDefinition, PrefixInfo, PrefixState

MAX_KEYS = 10_000


@dataclass(frozen=True, slots=True)
class Order:
    """A creation whose name is chosen and whose text is tokens."""

    name: str
    definition: PrefixDefinition
    creation: Creation


@dataclass(frozen=True, slots=True)
class _First:
    """The first request with a key."""

    digest: bytes
    name: str
    uid: str | None  # of the prefix it was answered with


class PrefixCreator:
    """One per server: it holds the idempotency keys."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._keys: dict[str, OrderedDict[str, _First]] = {}  # by tenant, then request_id

    async def read(self, message: prefix_pb2.CreatePrefixRequest) -> Order:
        """Check and tokenise; no work is done yet."""
        creation = read_creation(message, self._backend.limits, self._backend.scheduler.now_ns())
        name = self._name(creation, message)
        tokens = await self._backend.encode(creation.content, "input.text", bos=creation.parent is None)
        if not tokens:
            raise InvalidArgument("input", "is empty, expected at least one token")
        definition = PrefixDefinition(tokens, creation.loops, creation.cache_window, creation.parent)
        return Order(name, definition, creation)

    async def check(self, order: Order) -> PrefixInfo:
        """What the prefix would be; raises what a create would raise."""
        creation = order.creation
        return await self._backend.names.validate(
            order.definition,
            tenant=caller().tenant,
            name=order.name,
            expire_time_ns=creation.expiration.at(self._backend.scheduler.now_ns()),
            pinned=creation.pinned,
        )

    async def create(self, order: Order) -> PrefixInfo:
        """Build it, or join who builds it; with build_async, only see to it that it is built."""
        creation = order.creation
        made = await self._made_before(order)
        if made is not None and made.state is PrefixState.READY:
            return made
        now_ns = self._backend.scheduler.now_ns()
        info = await self._backend.names.create(
            order.definition,
            tenant=caller().tenant,
            name=order.name,
            expire_time_ns=made.expire_time_ns if made else creation.expiration.at(now_ns),
            pinned=made.pinned if made else creation.pinned,
            wait=not creation.build_async,
            detached=creation.build_async,
        )
        if (first := self._known().get(creation.request_id)) is not None:
            self._known()[creation.request_id] = replace(first, uid=info.uid)
        return info

    def _known(self) -> OrderedDict[str, _First]:
        """The caller's keys."""
        return self._keys.setdefault(caller().tenant, OrderedDict())

    async def _made_before(self, order: Order) -> PrefixInfo | None:
        """The prefix that the first request with the same key was answered with.  PrefixNotFound if it is gone."""
        first = self._known().get(order.creation.request_id)
        if first is None or first.uid is None:
            return None
        info = await self._backend.names.get(order.name, tenant=caller().tenant)
        if info.uid != first.uid:
            raise PrefixNotFound(
                f"the prefix {order.name!r} of this request_id is gone; to make one, use a new request_id"
            )
        return info

    def _name(self, creation: Creation, message: prefix_pb2.CreatePrefixRequest) -> str:
        """The id asked for, that of the first request with the same key, or a new one."""
        name = creation.prefix_id or new_prefix_id()
        if not creation.request_id or creation.validate_only:
            return name
        digest = hashlib.sha256(message.SerializeToString(deterministic=True)).digest()
        known = self._known()
        first = known.setdefault(creation.request_id, _First(digest, name, None))
        if first.digest != digest:
            raise InvalidArgument("request_id", "was used for another request; make a new one for each request")
        if len(known) > MAX_KEYS:
            known.popitem(last=False)
        return first.name
