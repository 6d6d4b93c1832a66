"""Where a Model's scheduler lives: one event loop in a thread of its own, which any thread may call.

    your threads ──run, release, leave──► the loop's thread: Scheduler ──plans──► the engine's thread

In: coroutines to run, handles and streams that were dropped.  Out: their results, in the calling thread.  It refuses
to know what is asked; it knows closing, collection, interpreter exit and forks.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from tinyloop_service.errors import ModelClosed
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.scheduler.stream import Stream

T = TypeVar("T")
CLOSE_WAIT_S = 10.0  # for calls in flight to end with their error


class Runtime:
    """One event loop in a thread of its own, with a scheduler on it; any thread may call."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._loop = asyncio.new_event_loop()
        self._open = True
        self._process = os.getpid()
        self._lock = threading.Lock()  # between "is it open" and "hand it over"
        self._thread = threading.Thread(target=self._loop.run_forever, name="tinyloop-model", daemon=True)
        self._thread.start()
        self.run(scheduler.start)

    def check_open(self) -> None:
        if not self._open:
            raise ModelClosed()
        if self._is_inherited:
            raise ModelClosed("model was made before this process was forked; construct a new Model")

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of the coroutine that `work` makes, run on the loop; the calling thread waits."""
        with self._lock:
            self.check_open()
            future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return future.result()
        except BaseException:  # KeyboardInterrupt in the waiting thread: the request leaves the batch
            future.cancel()
            raise

    def release(self, uid: str) -> None:
        """A handle was collected.  From any thread, at any time."""
        self._post(lambda: self.scheduler.release_prefix(uid))

    def leave(self, stream: Stream) -> None:
        """A stream is not read any more."""
        self._post(stream.leave)

    def close(self) -> None:
        """From any thread but the loop's and the engine's."""
        if self._is_inherited:
            return
        with self._lock:
            if not self._open:
                return
            self._open = False
        asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _shut_down(self) -> None:
        await self.scheduler.close()
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        if calls:  # each ends with ModelClosed; its thread gets that
            await asyncio.wait(calls, timeout=CLOSE_WAIT_S)

    @property
    def _is_inherited(self) -> bool:
        """This process was forked from the one that has the threads."""
        return os.getpid() != self._process

    def _post(self, call: Callable[[], object]) -> None:
        if self._open and not self._is_inherited:
            with suppress(RuntimeError):  # the loop was closed just now
                self._loop.call_soon_threadsafe(call)


def close_elsewhere(runtime: Runtime) -> None:
    """A Model was collected, by whatever thread: it may be one that the close has to wait for."""
    if threading.main_thread().is_alive():
        threading.Thread(target=runtime.close, name="tinyloop-close").start()
    else:  # the interpreter ends, and starts no threads
        runtime.close()
