"""What the core knows of the registry: read when it is needed, followed while others change it, never half applied.

    look      read one record and make the core agree
    known     a name is about to be used: look if the core has none, or wait if the last look at changes is too old
    alone     whoever looks and then changes a name does so while nobody else does, in this process
    whole     what was begun is finished, also when the caller goes away

In: names.  Out: the core in agreement, RegistryUnavailable.  It refuses to know what callers want to change.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from tinyloop_service.errors import PrefixDamaged, RegistryUnavailable
from tinyloop_service.registry.api import Key, Registry
from tinyloop_service.scheduler.loop import CLOSED, Scheduler
from tinyloop_service.types import PrefixRecord

T = TypeVar("T")
MAX_AGE_S = 1.0  # of what the core knows when a name is used
_POLL_S = 0.25
_PURGE_S = 60.0
_REMEMBER_EXPIRED_NS = 3600 * 10**9  # so that every replica can say that a name has expired
_log = structlog.get_logger("tinyloop.registry")


@dataclass(slots=True)
class _Turn:
    """Who is alone with a name, and how many are or want to be."""

    lock: asyncio.Lock
    num_takers: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """What the registry has of a name."""

    record: PrefixRecord | None  # while its time is not over
    etag: str | None  # of the record, expired or not: what a write replaces


class Mirror:
    """Between one scheduler and one registry.  Not thread-safe: call it from the scheduler's event loop."""

    def __init__(self, scheduler: Scheduler, registry: Registry) -> None:
        self._scheduler = scheduler
        self._registry = registry
        self._turns: dict[Key, _Turn] = {}
        self._abandoned: set[str] = set()  # uids of prefixes that nobody waits for; their records are on the way out
        self._tasks: set[asyncio.Task[Any]] = set()
        self._position: int | None = None
        self._looked_at_s = 0.0  # when the last complete look at changes began
        self._looked = asyncio.Event()  # set, and then another, after each look
        self._is_down = False

    async def start(self) -> None:
        """Raises RegistryUnavailable."""
        self._looked_at_s = time.monotonic()
        self._position = (await self._registry.changes(None)).position
        if self._registry.is_shared:
            self._spawn(self._follow(), "tinyloop-follow-registry")
        self._spawn(self._tidy(), "tinyloop-tidy-registry")

    async def close(self) -> None:
        for task in self._tasks:
            if task.get_name().startswith("tinyloop-"):
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- one name

    @asynccontextmanager
    async def alone(self, tenant: str, name: str) -> AsyncIterator[None]:
        turn = self._turns.setdefault((tenant, name), _Turn(asyncio.Lock()))
        turn.num_takers += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.num_takers -= 1
            if not turn.num_takers:
                del self._turns[tenant, name]

    async def look(self, tenant: str, name: str) -> Found:
        """Only while `alone`.  Raises PrefixDamaged; the core then knows no such name."""
        try:
            record = await self._registry.read(tenant, name)
            etag = record.etag if record is not None else None
            now_ns, adoption = self._scheduler.now_ns(), self._scheduler.adoption
            if record is not None and record.uid in self._abandoned:
                record = None
            if record is None:
                adoption.forget(tenant, name)
            else:
                adoption.adopt(record, now_ns)
        except PrefixDamaged:
            self._scheduler.adoption.forget(tenant, name)
            raise
        finally:
            self._scheduler.changed()
        return Found(None if record is None or record.is_expired(now_ns) else record, etag)

    async def known(self, tenant: str, name: str) -> None:
        """Until this returns the core may not know the name, or another one under it; the caller uses it at once."""
        if self._knows(tenant, name):
            await self._fresh()
        if not self._knows(tenant, name):
            async with self.alone(tenant, name):
                if not self._knows(tenant, name):  # nobody was faster
                    await self.look(tenant, name)

    def whole(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that goes on when its caller is cancelled: await it through `asyncio.shield`."""
        return self._spawn(work, "whole")

    def abandon(self, uid: str) -> None:
        """From now on its record counts as gone."""
        self._abandoned.add(uid)

    def settled(self, uid: str) -> None:
        """Its record is gone."""
        self._abandoned.discard(uid)

    def is_there(self, record: PrefixRecord) -> bool:
        """Its time is not over, and it is not on the way out."""
        return record.uid not in self._abandoned and not record.is_expired(self._scheduler.now_ns())

    # ---- following

    async def _fresh(self) -> None:
        """Return when the last look is new enough, or the registry is down: then what is in memory goes on serving."""
        while self._registry.is_shared and not self._is_down and time.monotonic() - self._looked_at_s > MAX_AGE_S:
            await self._looked.wait()

    async def _follow(self) -> None:
        with suppress(*CLOSED):
            while True:
                try:
                    await self._look_at_changes()
                finally:  # also in the end: nobody waits for a look that never comes
                    self._looked.set()
                    self._looked = asyncio.Event()
                await self._registry.wait(_POLL_S)

    async def _look_at_changes(self) -> None:
        began_s = time.monotonic()
        try:
            await self._catch_up()
        except RegistryUnavailable as error:
            self._set_down(True, str(error))
        except (*CLOSED, asyncio.CancelledError):
            self._is_down = True
            raise
        except Exception:  # a bug of ours: serve on, and say so
            _log.exception("following the registry failed")
            self._set_down(True, "a failure of our own")
        else:
            self._looked_at_s = began_s
            self._set_down(False, "")

    async def _catch_up(self) -> None:
        changes = await self._registry.changes(self._position)
        adoption = self._scheduler.adoption
        if changes.etags is None:
            changed = adoption.names()
        else:
            changed = [key for key, etag in changes.etags.items() if adoption.etag_of(*key) not in (None, etag)]
        for tenant, name in changed:
            async with self.alone(tenant, name):
                if self._knows(tenant, name):
                    with suppress(PrefixDamaged):
                        await self.look(tenant, name)
        self._position = changes.position

    async def _tidy(self) -> None:
        while True:
            with suppress(RegistryUnavailable):
                await self._registry.purge(self._scheduler.now_ns() - _REMEMBER_EXPIRED_NS)
            await asyncio.sleep(_PURGE_S)

    def _set_down(self, is_down: bool, why: str) -> None:
        if is_down and not self._is_down:
            _log.error("the registry is down: names in memory go on serving, changes fail", why=why)
        elif self._is_down and not is_down:
            _log.info("the registry is back")
        self._is_down = is_down

    # ---- helpers

    def _knows(self, tenant: str, name: str) -> bool:
        return self._scheduler.adoption.knows(tenant, name, self._scheduler.now_ns())

    def _spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller has it, or went away and does not want it
