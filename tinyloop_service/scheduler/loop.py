"""The scheduler: the facade on an event loop that everything above it calls.

In: definitions, requests, names.  Out: snapshots, streams, errors.  It refuses to decide anything, which the core does,
and to carry plans and results, which `cycle` does.

    callers ──► core ◄──► cycle ◄──► the engine's threads
                 └──events──► delivery ──► streams, waiters, watchers

All of it runs on one event loop, except what `engine_threads` has.  Times are nanoseconds since the Unix epoch, by one
clock that never goes back.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Mapping

import structlog

from tinyloop_service.engine.api import Engine
from tinyloop_service.errors import DeviceLost, Draining, ModelClosed, TinyLoopError, Unavailable
from tinyloop_service.observer import EPOCH_NS, UNWATCHED, Observer
from tinyloop_service.scheduler.adoption import Adoption
from tinyloop_service.scheduler.catalog import UNCHANGED, Catalog, Unchanged
from tinyloop_service.scheduler.core import Core
from tinyloop_service.scheduler.cycle import Cycle
from tinyloop_service.scheduler.delivery import Delivery
from tinyloop_service.scheduler.request import Counters
from tinyloop_service.scheduler.saved import Keeper, SavedStates
from tinyloop_service.scheduler.stream import Stream
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.text import Tokenizer
from tinyloop_service.types import GenerationRequest, Load, PrefixDefinition, PrefixInfo, Quota

__all__ = ["CLOSED", "UNCHANGED", "Scheduler", "Unchanged"]

CLOSED = (Draining, ModelClosed)  # what a closed scheduler says
_log = structlog.get_logger(__name__)


class Scheduler:
    """Owns the engine from `start` to `close`.  Not thread-safe: call it from its event loop."""

    def __init__(
        self,
        engine: Engine,
        settings: SchedulerSettings,
        *,
        tokenizer: Tokenizer | None = None,
        observer: Observer = UNWATCHED,
    ) -> None:
        self.limits = engine.limits
        self.tokenizer = tokenizer
        self.observer = observer
        self.engine_name = engine.name
        self._core = Core(engine.limits, settings)
        self._delivery = Delivery(self._core, settings.stream_interval_ns, observer)
        self._epoch_ns = EPOCH_NS
        self._cycle = Cycle(engine, self._core, self._delivery, observer, settings.plans_in_flight, self.now_ns)
        self._task: asyncio.Task[None] | None = None
        self._refusal: Unavailable = ModelClosed()  # for who comes when it is closed
        self._is_closed = False
        self.is_stopped = False  # closed, and the engine's thread has ended

    # ---- lifetime

    async def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._cycle.run())

    async def drain(self, grace_s: float) -> None:
        """Refuse what is new, from now on; return when all that was taken has ended, or after `grace_s`."""
        self._refusal = Draining()
        self._core.refuse(self._refusal)
        self._cycle.drain()
        try:
            await asyncio.wait_for(self._cycle.drained.wait(), grace_s)
        except TimeoutError:
            if not self._core.is_idle:
                _log.warning("drain ran out of time", requests=self._delivery.num_streams)
        else:
            if self.fault is None:
                self._core.check()

    async def close(self) -> None:
        """End everything with ModelClosed, then stop.  What is new is refused with that too, or as since `drain`."""
        if self._is_closed:
            return
        self._is_closed = True
        # 1. nothing new comes in, and every stream and waiter hears of it
        if self.fault is None:
            self._core.abort(ModelClosed())
        self._core.refuse(self._refusal)
        self.changed()
        self._delivery.fail_all(ModelClosed())  # watchers, who wait for no work
        # 2. the plans in flight finish
        self._cycle.stop()
        if self._task is not None:
            await self._task
        # 3. the engine closes
        await self._cycle.close()
        self.is_stopped = True

    @property
    def fault(self) -> DeviceLost | None:
        """Why nothing runs any more."""
        return self._cycle.fault

    async def wait_fault(self) -> None:
        """Return when the device is lost."""
        await self._cycle.faulted.wait()

    def now_ns(self) -> int:
        """The one clock by which prefixes expire: it started with the wall clock and never jumps."""
        return self._epoch_ns + time.monotonic_ns()

    # ---- prefixes

    async def create_prefix(
        self,
        definition: PrefixDefinition,
        *,
        tenant: str = "",
        name: str | None = None,
        expire_time_ns: int | None = None,
        pinned: bool = False,
        wait: bool = True,
        detached: bool = False,
    ) -> PrefixInfo:
        """The prefix, READY; with `wait` False as it is now.

        Who is cancelled while waiting leaves; the last one ends the build unless it is `detached` or was asked for
        without waiting.  Without a name the prefix is held by its uid until `release_prefix`.
        """
        uid = self.catalog.create(
            definition,
            tenant=tenant,
            name=name,
            expire_time_ns=expire_time_ns,
            pinned=pinned,
            wait=wait,
            detached=detached,
            now_ns=self.now_ns(),
        )
        self.changed()
        try:
            return await self.built_prefix(uid) if wait else self._peek(uid)
        except BaseException:
            if name is None:  # nobody will know its uid
                self.release_prefix(uid)
            raise

    async def built_prefix(self, uid: str) -> PrefixInfo:
        """For who waits by the catalog's `create`: the prefix, READY, also when its build has ended since."""
        outcome = self._core.catalog.outcome(uid)
        if isinstance(outcome, TinyLoopError):
            raise outcome
        return outcome or await self._delivery.built(uid)

    def validate_prefix(
        self,
        definition: PrefixDefinition,
        *,
        tenant: str = "",
        name: str | None = None,
        expire_time_ns: int | None = None,
        pinned: bool = False,
    ) -> PrefixInfo:
        """What `create_prefix` would refuse, or what it would make (with an empty uid), without work."""
        return self.catalog.preview(definition, tenant, name, expire_time_ns, pinned, self.now_ns())

    def get_prefix(self, name: str, *, tenant: str = "") -> PrefixInfo:
        return self.catalog.get(tenant, name, self.now_ns())

    def list_prefixes(self, *, tenant: str = "", after: str = "", limit: int | None = None) -> list[PrefixInfo]:
        """Named ones, by name, the first `limit` of those beyond `after`."""
        return self.catalog.named(tenant, self.now_ns(), after, limit)

    def update_prefix(
        self,
        name: str,
        *,
        tenant: str = "",
        expire_time_ns: int | Unchanged | None = UNCHANGED,
        pinned: bool | Unchanged = UNCHANGED,
        etag: str | None = None,
    ) -> PrefixInfo:
        info = self.catalog.update(tenant, name, expire_time_ns, pinned, etag, self.now_ns())
        self.changed()
        return info

    def delete_prefix(self, name: str, *, tenant: str = "", etag: str | None = None) -> None:
        """The name ends at once; what runs on it finishes."""
        self.catalog.delete(tenant, name, etag, self.now_ns())
        self.changed()

    def release_prefix(self, uid: str) -> None:
        """Let go of a nameless prefix; unknown uids are ignored."""
        self._core.catalog.release(uid)
        self.changed()

    def watch_prefix(self, name: str, *, tenant: str = "") -> AsyncIterator[PrefixInfo]:
        """Its state now and after every change, several at a time as one; ends with READY or FAILED.  Iterating raises
        PrefixNotFound, PrefixExpired when there is no such name, or it ends."""
        return self._delivery.watch(name, lambda: self.get_prefix(name, tenant=tenant))

    # ---- generation

    def generate(self, request: GenerationRequest) -> Stream:
        """Queue it; refusals are raised here, before any work."""
        now_ns = self.now_ns()
        stream = Stream(request, now_ns, self, self.tokenizer)
        stream.request = self._core.submit(request, now_ns)
        self._delivery.add(stream)
        self.changed()
        return stream

    def cancel(self, request: int) -> None:
        """What Stream.leave calls."""
        self._core.cancel(request)
        self._delivery.remove(request)
        self.changed()

    def set_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """By tenant, in place of those before; a tenant without an entry has no bounds."""
        self._core.set_quotas(quotas, self.now_ns())
        self.changed()

    def load(self, tenant: str | None = None) -> Load:
        """Of one tenant: its own part, as if it had the server to itself."""
        return self._core.load(tenant)

    @property
    def counters(self) -> Counters:
        """Token counts since the start; read only."""
        return self._core.counters

    def changed(self) -> None:
        """Somebody has talked to the core: tell who waits for it, and go on."""
        self._delivery.deliver()
        self._cycle.wake()

    def _peek(self, uid: str) -> PrefixInfo:
        info = self._core.catalog.peek(uid)
        assert info is not None, "a prefix that was just made is gone"
        return info

    def keep_snapshots(self, keeper: Keeper) -> None:
        """From now on `keeper` is handed what is built and worth saving; no call of it may block."""
        self._delivery.keeper = keeper
        self._core.snapshots.keep()

    def save_again(self, digest: str) -> bool:
        """The keeper could not keep it, and will try again.  Whether it is handed it at once, not at the next build."""
        is_on_its_way = self._core.save_again(digest)
        self.changed()
        return is_on_its_way

    @property
    def snapshots(self) -> SavedStates:
        """What builds may be restored from."""
        return self._core.snapshots

    @property
    def catalog(self) -> Catalog:
        """Say `changed` afterwards.  Raises one of CLOSED."""
        self._check_open()
        return self._core.catalog

    @property
    def adoption(self) -> Adoption:
        """Say `changed` afterwards.  Raises one of CLOSED."""
        self._check_open()
        return self._core.adoption

    def _check_open(self) -> None:
        if self._is_closed:
            raise copy.copy(self._refusal)
