"""Delivery: who is told what happened.

In: the core's events.  Out: tokens in streams, ends of builds to those who wait for them, changes to watchers.  It
refuses to know plans and the engine.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable

from tinyloop_service.errors import PrefixNotFound, TinyLoopError
from tinyloop_service.observer import BuildRecord, Observer
from tinyloop_service.scheduler.core import Core
from tinyloop_service.scheduler.events import (
    Admitted,
    BuildEnded,
    Failed,
    PrefixChanged,
    Sampled,
    SnapshotExpires,
    SnapshotTaken,
    SnapshotUnwanted,
)
from tinyloop_service.scheduler.saved import Keeper
from tinyloop_service.scheduler.stream import Stream
from tinyloop_service.types import PrefixInfo, PrefixState

_LAG_NS = 1_000_000  # of the event loop, that makes intervals longer by their length
_MANY = 20  # rows; more make intervals longer in proportion, so that pieces come no more often than those of so many
_LONGEST = 10  # intervals of an event loop that is not behind, with few rows
_OF_STREAMS = (Sampled, Admitted, Failed)


class Delivery:
    """Every stream, waiter and watcher."""

    def __init__(self, core: Core, stream_interval_ns: int, observer: Observer) -> None:
        """stream_interval_ns: tokens of a stream that come sooner after others wait for later ones, but no longer.

        They wait longer while many rows run, or the event loop is behind: messages are what it is behind with, and
        every one costs it as much as some ten rows of a step.
        """
        self._core = core
        self._interval_ns = stream_interval_ns
        self.lag_ns = 0  # how far the event loop is behind
        self._observer = observer
        self.keeper: Keeper | None = None  # of what is saved
        self._streams: dict[int, Stream] = {}
        self._held: set[int] = set()  # streams, some of whose tokens wait for later ones; a timer runs while there are
        self._waiters: dict[str, set[asyncio.Future[PrefixInfo]]] = {}
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._end: TinyLoopError | None = None  # what everybody hears from now on

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    @property
    def interval_ns(self) -> int:
        """Between two pieces of a stream, as things stand."""
        longer = max(1.0 + self.lag_ns / _LAG_NS, self._core.num_rows / _MANY)
        return round(self._interval_ns * min(longer, _LONGEST))

    def add(self, stream: Stream) -> None:
        self._streams[stream.request] = stream

    def remove(self, request: int) -> None:
        self._streams.pop(request, None)

    def deliver(self) -> None:
        """Hand out all events; text stops found on the way go back to the core."""
        events = self._core.take_events()
        if not events:
            return
        interval_ns = self.interval_ns
        for event in events:
            if isinstance(event, _OF_STREAMS):
                if (stream := self._streams.get(event.request)) is not None:
                    self._tell_stream(stream, event, interval_ns)
            elif isinstance(event, PrefixChanged):
                self._tell_prefix(event.uid)
            elif isinstance(event, BuildEnded):
                reason = event.error.reason if event.error is not None else None
                self._observer.build_ended(
                    BuildRecord(event.tenant, event.name, event.num_tokens, event.build_ns, reason, event.snapshot)
                )
            else:
                self._tell_keeper(event)

    def fail_all(self, error: TinyLoopError) -> None:
        """Tell everybody the same without asking the core; for good."""
        self._end = error
        for stream in self._streams.values():
            stream.deliver_error(copy.copy(error))
        for waiter in [waiter for waiters in self._waiters.values() for waiter in waiters]:
            if not waiter.done():
                waiter.set_exception(copy.copy(error))
        for watcher in [watcher for watchers in self._watchers.values() for watcher in watchers]:
            watcher.set()
        self._streams.clear()
        self._waiters.clear()

    async def built(self, uid: str) -> PrefixInfo:
        """Wait for the end of a build that the core counts the caller as a waiter of."""
        waiter: asyncio.Future[PrefixInfo] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(uid, set()).add(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter in self._waiters.get(uid, ()):  # else the build has ended at the same moment
                self._waiters[uid].discard(waiter)
                self._core.catalog.leave(uid)
            raise

    async def watch(self, name: str, look_up: Callable[[], PrefixInfo]) -> AsyncIterator[PrefixInfo]:
        """The prefix now and after every change, several at a time as one, up to READY or FAILED."""
        info = look_up()
        uid, changed = info.uid, asyncio.Event()
        self._watchers.setdefault(uid, set()).add(changed)
        try:
            yield info
            while info.state not in (PrefixState.READY, PrefixState.FAILED):
                await changed.wait()
                changed.clear()
                if self._end is not None:
                    raise copy.copy(self._end)
                before, info = info, look_up()
                if info.uid != uid:
                    raise PrefixNotFound(f"prefix {name!r} was deleted, and made again since")
                if info != before:
                    yield info
        finally:
            self._watchers[uid].discard(changed)
            if not self._watchers[uid]:
                del self._watchers[uid]

    def _tell_stream(self, stream: Stream, event: Admitted | Sampled | Failed, interval_ns: int) -> None:
        was_held = stream.is_held
        if isinstance(event, Sampled):
            if stream.deliver_tokens(event, interval_ns):
                self._core.finish(event.request, event.choice)
        elif isinstance(event, Admitted):
            stream.deliver_start(event)
        else:
            stream.deliver_error(event.error)
        if stream.is_held and not was_held:
            self._hold(stream)
        if stream.is_over:
            del self._streams[stream.request]

    def _tell_keeper(self, event: SnapshotTaken | SnapshotExpires | SnapshotUnwanted) -> None:
        if self.keeper is None:
            return
        if isinstance(event, SnapshotTaken):
            self.keeper.keep(event.digest, event.state, event.expire_time_ns)
        elif isinstance(event, SnapshotExpires):
            self.keeper.expires(event.digest, event.expire_time_ns)
        else:
            self.keeper.drop(event.digest)

    def _hold(self, stream: Stream) -> None:
        """Its next tokens will show it; if they are long in coming, a timer does."""
        if not self._held:
            asyncio.get_running_loop().call_later(self.interval_ns / 1e9, self._show_held)
        self._held.add(stream.request)

    def _show_held(self) -> None:
        held, self._held = self._held, set()
        for request in held:
            if (stream := self._streams.get(request)) is not None:
                stream.show(self.interval_ns)
                if stream.is_held:
                    self._hold(stream)

    def _tell_prefix(self, uid: str) -> None:
        for watcher in self._watchers.get(uid, ()):
            watcher.set()
        if uid not in self._waiters or self._core.catalog.outcome(uid) is None:
            return
        for waiter in self._waiters.pop(uid):
            outcome = self._core.catalog.outcome(uid)  # each its own error
            if waiter.done():
                continue
            if isinstance(outcome, PrefixInfo):
                waiter.set_result(outcome)
            elif outcome is not None:
                waiter.set_exception(outcome)
