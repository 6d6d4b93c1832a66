"""Names as callers use them: each change is made in the registry first, then in the core, then answered.

    create   look ─► propose ─► write ─► create in the core ─► wait for the build
    update   look ─► check   ─► write ─► adopt
    delete   look ─► check   ─► remove ─► forget
    use      known ─► the scheduler, in one go

From look to the core's change a name is held alone, and the work is done whole even if the caller goes away.  Who lost
against another replica looks again.  A create that is abandoned before it was ever READY takes its record back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, replace

import structlog

from tinyloop_service.errors import PrefixExists, RegistryUnavailable, Unavailable
from tinyloop_service.registry.api import Registry
from tinyloop_service.registry.mirror import Found, Mirror
from tinyloop_service.scheduler.loop import CLOSED, Scheduler, Unchanged
from tinyloop_service.scheduler.stream import Stream
from tinyloop_service.types import GenerationRequest, PrefixDefinition, PrefixInfo, PrefixRecord

_ATTEMPTS = 8  # others change the same name between our look and our write
_BUSY = "others change this prefix at the same time; try again"
_log = structlog.get_logger("tinyloop.registry")


@dataclass(frozen=True, slots=True)
class _Creation:
    """What a create asks for."""

    definition: PrefixDefinition
    tenant: str
    name: str
    expire_time_ns: int | None
    pinned: bool
    wait: bool
    detached: bool
    replaces_other: bool

    def propose(self, scheduler: Scheduler) -> PrefixRecord:
        return scheduler.catalog.propose(
            self.definition,
            tenant=self.tenant,
            name=self.name,
            expire_time_ns=self.expire_time_ns,
            pinned=self.pinned,
            now_ns=scheduler.now_ns(),
        )

    def begin(self, scheduler: Scheduler, record: PrefixRecord) -> str:
        return scheduler.catalog.create(
            self.definition,
            tenant=self.tenant,
            name=self.name,
            expire_time_ns=self.expire_time_ns,
            pinned=self.pinned,
            wait=self.wait,
            detached=self.detached,
            now_ns=scheduler.now_ns(),
            record=record,
        )


class Names:
    """The named prefixes of one scheduler and one registry, from `start` to `close`."""

    def __init__(self, scheduler: Scheduler, registry: Registry) -> None:
        self._scheduler = scheduler
        self._registry = registry
        self._mirror = Mirror(scheduler, registry)

    async def start(self) -> None:
        """Raises RegistryUnavailable."""
        await self._mirror.start()

    async def close(self) -> None:
        """After the scheduler; what was begun is finished."""
        await self._mirror.close()
        await self._registry.close()

    # ---- what callers do

    async def create(
        self,
        definition: PrefixDefinition,
        *,
        tenant: str = "",
        name: str,
        expire_time_ns: int | None = None,
        pinned: bool = False,
        wait: bool = True,
        detached: bool = False,
        replaces_other: bool = False,
    ) -> PrefixInfo:
        """As `Scheduler.create_prefix`.  `replaces_other`: a prefix of other content gives way."""
        if definition.parent is not None:
            await self._mirror.known(tenant, definition.parent)
        creation = _Creation(definition, tenant, name, expire_time_ns, pinned, wait, detached, replaces_other)
        claim = self._mirror.whole(self._claim(creation))
        try:
            info = await asyncio.shield(claim)
        except asyncio.CancelledError:
            self._mirror.whole(self._leave(creation, claim))
            raise
        try:
            return await self._scheduler.built_prefix(info.uid) if wait else info
        except BaseException:
            self._withdraw_if_abandoned(creation, info.uid)
            raise

    async def validate(
        self, definition: PrefixDefinition, *, tenant: str = "", name: str, expire_time_ns: int | None, pinned: bool
    ) -> PrefixInfo:
        """As `Scheduler.validate_prefix`."""
        for known in (definition.parent, name):
            if known is not None:
                await self._mirror.known(tenant, known)
        return self._scheduler.validate_prefix(
            definition, tenant=tenant, name=name, expire_time_ns=expire_time_ns, pinned=pinned
        )

    async def get(self, name: str, *, tenant: str = "") -> PrefixInfo:
        await self._mirror.known(tenant, name)
        return self._scheduler.get_prefix(name, tenant=tenant)

    async def page(self, *, tenant: str = "", after: str = "", limit: int) -> list[PrefixInfo]:
        """By name, the first `limit` of those beyond `after`; those not in memory are EVICTED."""
        found: list[PrefixInfo] = []
        while len(found) < limit:
            records = await self._registry.page(tenant, after=after, limit=limit - len(found))
            if not records:
                break
            after = records[-1].name
            found += [self._info(record) for record in records if self._mirror.is_there(record)]
        return found

    async def update(
        self,
        name: str,
        *,
        tenant: str = "",
        expire_time_ns: int | Unchanged | None,
        pinned: bool | Unchanged,
        etag: str | None = None,
    ) -> PrefixInfo:
        await asyncio.shield(self._mirror.whole(self._update(name, tenant, expire_time_ns, pinned, etag)))
        return self._scheduler.get_prefix(name, tenant=tenant)

    async def delete(self, name: str, *, tenant: str = "", etag: str | None = None) -> None:
        await asyncio.shield(self._mirror.whole(self._delete(name, tenant, etag)))

    async def watch(self, name: str, *, tenant: str = "") -> AsyncIterator[PrefixInfo]:
        await self._mirror.known(tenant, name)
        async for info in self._scheduler.watch_prefix(name, tenant=tenant):
            yield info

    async def generate(self, request: GenerationRequest) -> Stream:
        """As `Scheduler.generate`, after a look at the name."""
        if request.prefix is not None:
            await self._mirror.known(request.tenant, request.prefix)
        return self._scheduler.generate(request)

    # ---- changes, each of a name alone

    async def _claim(self, creation: _Creation) -> PrefixInfo:
        """The prefix, written down and known to the core, its build asked for."""
        tenant, name = creation.tenant, creation.name
        async with self._mirror.alone(tenant, name):
            for _ in range(_ATTEMPTS):
                found = await self._mirror.look(tenant, name)
                record = self._propose(creation)
                if await self._registry.write(record, replaces=found.etag):
                    return await self._begin(creation, record, found)
        raise Unavailable(_BUSY)

    def _propose(self, creation: _Creation) -> PrefixRecord:
        try:
            return creation.propose(self._scheduler)
        except PrefixExists:
            if not creation.replaces_other:
                raise
            self._scheduler.adoption.forget(creation.tenant, creation.name)
            return creation.propose(self._scheduler)

    async def _begin(self, creation: _Creation, record: PrefixRecord, found: Found) -> PrefixInfo:
        try:
            if found.record is not None and found.record.uid == record.uid:  # it may have expired here meanwhile
                self._scheduler.adoption.adopt(record, self._scheduler.now_ns())
            uid = creation.begin(self._scheduler, record)
        except BaseException:  # the queue is full, the parent is gone: what was free a moment ago
            await self._take_back(record, found.record)
            raise
        self._scheduler.changed()
        info = self._scheduler.catalog.peek(uid)
        assert info is not None, "a prefix that was just made is gone"
        return info

    async def _take_back(self, record: PrefixRecord, before: PrefixRecord | None) -> None:
        try:
            if before is not None and before.uid == record.uid:
                await self._registry.write(before, replaces=record.etag)
            else:
                await self._registry.remove(record.tenant, record.name, etag=record.etag)
            await self._mirror.look(record.tenant, record.name)
        except (RegistryUnavailable, *CLOSED) as error:
            _log.warning("a refused create stays in the registry", prefix=record.name, error=str(error))

    async def _update(
        self, name: str, tenant: str, expire_time_ns: int | Unchanged | None, pinned: bool | Unchanged, etag: str | None
    ) -> None:
        async with self._mirror.alone(tenant, name):
            for _ in range(_ATTEMPTS):
                before = (await self._mirror.look(tenant, name)).record
                catalog, now_ns = self._scheduler.catalog, self._scheduler.now_ns()
                catalog.check_update(tenant, name, expire_time_ns, pinned, etag, now_ns)
                assert before is not None, "the core knows a name that the registry does not"
                after = replace(before, revision=before.next_revision(now_ns))
                if not isinstance(expire_time_ns, Unchanged):
                    after = replace(after, expire_time_ns=expire_time_ns)
                if not isinstance(pinned, Unchanged):
                    after = replace(after, pinned=pinned)
                if await self._registry.write(after, replaces=before.etag):
                    self._scheduler.adoption.adopt(after, self._scheduler.now_ns())
                    self._scheduler.changed()
                    return
        raise Unavailable(_BUSY)

    async def _delete(self, name: str, tenant: str, etag: str | None) -> None:
        async with self._mirror.alone(tenant, name):
            for _ in range(_ATTEMPTS):
                found = await self._mirror.look(tenant, name)
                self._scheduler.catalog.check_delete(tenant, name, etag, self._scheduler.now_ns())
                assert found.etag is not None, "the core knows a name that the registry does not"
                if await self._registry.remove(tenant, name, etag=found.etag):
                    self._scheduler.adoption.forget(tenant, name)
                    self._scheduler.changed()
                    return
        raise Unavailable(_BUSY)

    # ---- creates that nobody waits for

    async def _leave(self, creation: _Creation, claim: asyncio.Task[PrefixInfo]) -> None:
        """The caller went away while its claim was written down."""
        with suppress(Exception):
            uid = (await claim).uid
            if creation.wait:
                self._scheduler.catalog.leave(uid)
                self._scheduler.changed()
                self._withdraw_if_abandoned(creation, uid)

    def _withdraw_if_abandoned(self, creation: _Creation, uid: str) -> None:
        """The last waiter has left a build, and with it went the name: its record follows."""
        with suppress(*CLOSED):
            if self._scheduler.catalog.peek(uid) is None:
                self._mirror.abandon(uid)
                self._mirror.whole(self._withdraw(creation.tenant, creation.name, uid))

    async def _withdraw(self, tenant: str, name: str, uid: str) -> None:
        try:
            async with self._mirror.alone(tenant, name):
                record = await self._registry.read(tenant, name)
                if record is not None and record.uid == uid:
                    await self._registry.remove(tenant, name, etag=record.etag)
        except RegistryUnavailable as error:
            _log.warning("an abandoned create stays in the registry", prefix=name, error=str(error))
        finally:
            self._mirror.settled(uid)

    def _info(self, record: PrefixRecord) -> PrefixInfo:
        """As it is in memory, unless it was changed elsewhere a moment ago."""
        known = self._scheduler.catalog.peek(record.uid)
        is_same = known is not None and (known.name, known.etag) == (record.name, record.etag)
        return known if known is not None and is_same else self._scheduler.adoption.describe(record)
