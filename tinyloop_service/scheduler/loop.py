"""The scheduler: an asyncio shell around the pure core, and the facade that everything above it calls.

In: definitions, requests, names.  Out: snapshots, streams, errors.  It refuses to decide anything: the core does, and
this file carries plans to the engine's thread and results back.

    callers ──► core ──plan──► engine thread ──pending──► waiting thread ──result──► core ──events──► streams, …

All of it runs on one event loop, except what `engine_threads` has.  Times are nanoseconds since the Unix epoch, by one
clock that never goes back.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from contextlib import suppress

import structlog

from tinyloop_service.engine.api import Engine, Plan, StepResult
from tinyloop_service.errors import DeviceLost, Draining, EngineFault, ModelClosed, TinyLoopError
from tinyloop_service.observer import EPOCH_NS, UNWATCHED, Observer
from tinyloop_service.scheduler.adoption import Adoption
from tinyloop_service.scheduler.catalog import UNCHANGED, Catalog, Unchanged
from tinyloop_service.scheduler.core import Core
from tinyloop_service.scheduler.delivery import Delivery
from tinyloop_service.scheduler.engine_threads import EngineThreads, NotRun
from tinyloop_service.scheduler.request import Counters
from tinyloop_service.scheduler.saved import Keeper, SavedStates
from tinyloop_service.scheduler.stream import Stream
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.text import Tokenizer
from tinyloop_service.types import GenerationRequest, Load, PrefixDefinition, PrefixInfo, Quota

__all__ = ["UNCHANGED", "Scheduler", "Unchanged"]

_log = structlog.get_logger(__name__)
_Flight = tuple[Plan, int, asyncio.Future[Future[StepResult]]]  # since when; what submitting and then waiting give


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
        self.fault: DeviceLost | None = None
        self._settings = settings
        self._core = Core(engine.limits, settings)
        self._delivery = Delivery(self._core, settings.stream_interval_ns, observer)
        self._epoch_ns = EPOCH_NS
        self._threads = EngineThreads(engine)
        self._in_flight: deque[_Flight] = deque()
        self._free_ns = 0  # when the engine was done with the last plan
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._faulted = asyncio.Event()
        self._is_draining = self._is_closed = False
        self.is_stopped = False  # closed, and the engine's thread has ended

    # ---- lifetime

    async def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def drain(self, grace_s: float) -> None:
        """Refuse what is new; return when all that was taken has ended, or after `grace_s`."""
        self._core.refuse(Draining("the server is draining; try another replica"))
        self._is_draining = True
        self._wake.set()
        try:
            await asyncio.wait_for(self._drained.wait(), grace_s)
        except TimeoutError:
            _log.warning("drain ran out of time", requests=self._delivery.num_streams)
        else:
            if self.fault is None:
                self._core.check()

    async def close(self) -> None:
        """End everything with ModelClosed, then stop."""
        if self._is_closed:
            return
        self._is_closed = True
        # 1. nothing new comes in, and every stream and waiter hears of it
        self._core.refuse(ModelClosed())
        if self.fault is None:
            self._core.abort(ModelClosed())
        self.changed()
        self._delivery.fail_all(ModelClosed())  # watchers, who wait for no work
        # 2. the loop lets the plans in flight finish, for a step cannot be interrupted
        if self._task is not None:
            await self._task
        # 3. the engine closes on the thread that ran it; both threads end
        await self._threads.close()
        self.is_stopped = True

    async def wait_fault(self) -> None:
        """Return when the device is lost."""
        await self._faulted.wait()

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

    # ---- the loop

    async def _run(self) -> None:
        try:
            while True:
                self._submit_plans()
                if self._in_flight:
                    await self._settle(*self._in_flight.popleft())
                elif self._is_closed:
                    return
                else:
                    await self._sleep()
        except Exception:  # a bug of ours: nobody must hang
            _log.exception("the scheduler's loop failed")
            self._give_up(DeviceLost("the scheduler failed; the process must be started again"))

    def _submit_plans(self) -> None:
        while not self._threads.submit_failed and len(self._in_flight) < self._settings.plans_in_flight:
            plan = self._core.plan(self.now_ns())
            self._delivery.deliver()
            if plan is None:
                return
            self._send(plan)

    def _send(self, plan: Plan) -> None:
        self._in_flight.append((plan, self.now_ns(), self._threads.submit(plan)))

    async def _settle(self, plan: Plan, sent_ns: int, submitted: asyncio.Future[Future[StepResult]]) -> None:
        """Apply what became of the oldest plan in flight."""
        try:
            waiting = await submitted
        except NotRun:
            self._threads.submit_failed = False
            if self.fault is None:
                self._send(self._core.amend(plan))
            return
        except Exception as error:
            self._threads.submit_failed = bool(self._in_flight)  # the plan behind it was not submitted; it clears this
            self._fail(plan, error)
        else:
            await self._take_result(plan, sent_ns, waiting)
        self._delivery.deliver()

    async def _take_result(self, plan: Plan, sent_ns: int, waiting: Future[StepResult]) -> None:
        try:
            result = await asyncio.wrap_future(waiting)
        except Exception as error:
            self._fail(plan, error)  # the plan behind it runs as it was submitted
            return
        now_ns = self.now_ns()
        step_ns = now_ns - max(sent_ns, self._free_ns)
        self.observer.step(plan.num_rows, plan.num_steps, plan.num_prompt_tokens, step_ns)
        self._free_ns = now_ns
        self._core.commit(plan, result, now_ns)

    def _fail(self, plan: Plan, error: Exception) -> None:
        if self.fault is not None:  # a plan behind the one that lost the device
            return
        if isinstance(error, DeviceLost):
            _log.error("device lost", plan=plan.number)
            self._lose(error)
            return
        if not isinstance(error, EngineFault):
            _log.error("unexpected error in an engine step", plan=plan.number, exc_info=error)
            error = EngineFault("the engine failed in a step; the request may be tried again")
        if not plan.sequences():  # an engine that cannot even forget would be asked the same for ever
            _log.error("the engine fails without work", plan=plan.number)
            self._lose(DeviceLost("the engine cannot run any more; the process must be started again"))
            return
        self._core.fail(plan, error)

    def _lose(self, error: DeviceLost) -> None:
        self.fault = error
        self._core.lose(error)
        self._delivery.deliver()
        self._faulted.set()

    def _give_up(self, error: DeviceLost) -> None:
        """The core cannot be trusted any more; tell everybody without it."""
        self.fault = error
        self._core.refuse(error)
        self._delivery.fail_all(error)
        self._drained.set()
        self._faulted.set()

    async def _sleep(self) -> None:
        """Until somebody calls, or the core has something to do by itself."""
        if self._is_draining and self._core.is_idle:
            self._drained.set()
        wake_ns = self._core.next_wake_ns
        delay_s = None if wake_ns is None else max(0.0, (wake_ns - self.now_ns()) / 1e9)
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._wake.wait()
        self._wake.clear()

    def changed(self) -> None:
        """Somebody has talked to the core: tell who waits for it, and go on."""
        self._delivery.deliver()
        self._wake.set()

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
        """Say `changed` afterwards.  Raises ModelClosed."""
        if self._is_closed:
            raise ModelClosed
        return self._core.catalog

    @property
    def adoption(self) -> Adoption:
        """Say `changed` afterwards.  Raises ModelClosed."""
        if self._is_closed:
            raise ModelClosed
        return self._core.adoption
