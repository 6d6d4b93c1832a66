"""Handles: the prefix behind each is renewed at a third of its time to live, and deleted when the handle is gone.

What cannot be deleted, because the server is away, expires by itself.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from contextlib import suppress

from tinyloop_service.client import calls
from tinyloop_service.client.calls import HANDLE_TTL_NS
from tinyloop_service.client.transports import AsyncTransport, Transport
from tinyloop_service.errors import TinyLoopError

_RENEW_S = HANDLE_TTL_NS / 3e9
_GOODBYE_S = 2.0  # for one prefix to be deleted


class Keeper:
    """Renews the prefixes of living handles and deletes those of dead ones, in a thread that starts with the first."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._dropped: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # safe to use while garbage is collected
        self._renew_at: dict[str, float] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def keep(self, prefix_id: str) -> None:
        with self._lock:
            self._renew_at[prefix_id] = time.monotonic() + _RENEW_S
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="tinyloop-handles", daemon=True)
                self._thread.start()

    def drop(self, prefix_id: str) -> None:
        """From any thread, at any time."""
        self._dropped.put(prefix_id)

    def close(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._dropped.put(None)
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                wait_s = min(self._renew_at.values(), default=time.monotonic() + _RENEW_S) - time.monotonic()
            try:
                dropped = self._dropped.get(timeout=max(wait_s, 0.0))
            except queue.Empty:
                self._renew_due()
                continue
            with self._lock:
                gone = list(self._renew_at) if dropped is None else [dropped]
                for prefix_id in gone:
                    self._renew_at.pop(prefix_id, None)
            self._delete(gone)
            if dropped is None:
                return

    def _renew_due(self) -> None:
        now = time.monotonic()
        with self._lock:
            due = [prefix_id for prefix_id, at in self._renew_at.items() if at <= now]
            self._renew_at.update(dict.fromkeys(due, now + _RENEW_S))
        for prefix_id in due:
            try:
                self._transport.run(calls.renew(prefix_id))
            except KeyError:  # deleted by someone else; its next use says so
                with self._lock:
                    self._renew_at.pop(prefix_id, None)
            except TinyLoopError:  # two more tries fit into its time to live
                continue

    def _delete(self, prefix_ids: list[str]) -> None:
        """What cannot be deleted now expires by itself."""
        for prefix_id in prefix_ids:
            try:
                self._transport.run(calls.delete_prefix(prefix_id), limit_s=_GOODBYE_S)
            except KeyError:
                continue
            except TinyLoopError:
                return


class AsyncKeeper:
    """Renews the prefixes of living handles and deletes those of dead ones, in a task that starts with the first."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport
        self._dropped: asyncio.Queue[str] = asyncio.Queue()
        self._renew_at: dict[str, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    def keep(self, prefix_id: str) -> None:
        if self._task is None:
            self._loop = asyncio.get_running_loop()
            self._task = self._loop.create_task(self._work(), name="tinyloop-handles")
        assert self._loop is not None
        self._renew_at[prefix_id] = self._loop.time() + _RENEW_S

    def drop(self, prefix_id: str) -> None:
        """From any thread, at any time."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._dropped.put_nowait, prefix_id)

    async def close(self) -> None:
        if self._task is None:
            return
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self._delete(list(self._renew_at))
        self._renew_at.clear()

    async def _work(self) -> None:
        assert self._loop is not None
        while True:
            wait_s = min(self._renew_at.values(), default=self._loop.time() + _RENEW_S) - self._loop.time()
            try:
                async with asyncio.timeout(max(wait_s, 0.0)):
                    dropped = await self._dropped.get()
            except TimeoutError:
                await self._renew_due()
            else:
                self._renew_at.pop(dropped, None)
                await self._delete([dropped])

    async def _renew_due(self) -> None:
        assert self._loop is not None
        now = self._loop.time()
        for prefix_id in [prefix_id for prefix_id, at in self._renew_at.items() if at <= now]:
            self._renew_at[prefix_id] = now + _RENEW_S
            try:
                await self._transport.run(calls.renew(prefix_id))
            except KeyError:  # deleted by someone else; its next use says so
                self._renew_at.pop(prefix_id, None)
            except TinyLoopError:  # two more tries fit into its time to live
                continue

    async def _delete(self, prefix_ids: list[str]) -> None:
        """What cannot be deleted now expires by itself."""
        for prefix_id in prefix_ids:
            try:
                await self._transport.run(calls.delete_prefix(prefix_id), limit_s=_GOODBYE_S)
            except KeyError:
                continue
            except TinyLoopError:
                return
