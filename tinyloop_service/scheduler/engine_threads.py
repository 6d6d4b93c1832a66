"""The two threads of an engine: one hands plans over, one waits for results.

In: plans, in order.  Out: for each a future of its result.  It refuses to know what a plan says.

    submit ──plan──► engine's thread ──pending──► waiting thread ──result──► the future, on its event loop
                            └──────────────a result that is there already──────────────┘

Only the first thread calls the engine.  The second one is there so that a further plan can be handed to the device
while the one before is waited for.  Each of them has a queue of calls and nothing more, and a plan wakes the event loop
once: between short steps it is threads waking each other that takes time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

from tinyloop_service.engine.api import Engine, Finished, Pending, Plan, StepResult

_NUM_LAGS = 4  # that are kept

_Calls = SimpleQueue[Callable[[], None] | None]  # None: the last one


class NotRun(Exception):
    """The plan was behind one that could not be submitted."""


class NotSubmitted(Exception):
    """The engine did not take the plan; its cause says why."""


class EngineThreads:
    """Owns the engine until `close`; its threads start with the first plan."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._submitting: _Calls = SimpleQueue()
        self._waiting: _Calls = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lags_ns: deque[int] = deque(maxlen=_NUM_LAGS)
        self.submit_failed = False  # set on the engine's thread; until the owner clears it, plans are not submitted

    @property
    def lag_ns(self) -> int:
        """From when a plan's outcome was there to when the event loop came to it: the least of the last few, for a
        thread that wakes late once, the cores being taken, is behind with nothing."""
        return min(self._lags_ns, default=0)

    def submit(self, plan: Plan) -> asyncio.Future[StepResult]:
        """What the plan gave.  Raises what waiting for it raised, NotSubmitted for what handing it over raised, NotRun
        behind such a plan."""
        if not self._threads:
            self._threads = [_start("tinyloop-engine", self._submitting), _start("tinyloop-wait", self._waiting)]
        outcome: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        self._submitting.put(partial(self._submit, plan, outcome))
        return outcome

    async def close(self) -> None:
        """The engine closes on the thread that ran it; both threads end."""
        if not self._threads:
            self._engine.close()
            return
        closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._submitting.put(partial(self._close, closed))
        self._submitting.put(None)
        self._waiting.put(None)
        await closed
        for thread in self._threads:
            thread.join()

    # ---- on the engine's thread

    def _submit(self, plan: Plan, outcome: asyncio.Future[StepResult]) -> None:
        if self.submit_failed:
            self._tell(outcome, NotRun())
            return
        try:
            pending = self._engine.submit(plan)
        except Exception as error:
            self.submit_failed = True
            failure = NotSubmitted()
            failure.__cause__ = error
            self._tell(outcome, failure)
            return
        if isinstance(pending, Finished):
            self._tell(outcome, pending.result())
        else:
            self._waiting.put(partial(self._wait, pending, outcome))

    def _close(self, closed: asyncio.Future[None]) -> None:
        try:
            self._engine.close()
        except Exception as error:
            self._tell(closed, error)
        else:
            self._tell(closed, None)

    # ---- on the waiting thread

    def _wait(self, pending: Pending, outcome: asyncio.Future[StepResult]) -> None:
        try:
            result = pending.result()
        except Exception as error:
            self._tell(outcome, error)
        else:
            self._tell(outcome, result)

    # ---- back to the event loop

    def _tell(self, future: asyncio.Future[Any], outcome: object) -> None:
        """A result, or an exception."""
        with suppress(RuntimeError):  # the event loop was closed; there is nobody left to hear it
            future.get_loop().call_soon_threadsafe(self._settle, future, outcome, time.monotonic_ns())

    def _settle(self, future: asyncio.Future[Any], outcome: object, told_ns: int) -> None:
        self._lags_ns.append(time.monotonic_ns() - told_ns)
        if future.done():  # its waiter was cancelled
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _start(name: str, calls: _Calls) -> threading.Thread:
    """A thread that makes the calls.  A daemon: a step that cannot be interrupted keeps no process from ending."""
    thread = threading.Thread(target=_make, args=(calls,), name=name, daemon=True)
    thread.start()
    return thread


def _make(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # a plan and its result are not kept until the next one comes
