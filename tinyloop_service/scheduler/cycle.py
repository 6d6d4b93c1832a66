"""The cycle: plan → engine → commit → deliver, for as long as there is something to do.

    core ──plan──► engine's threads ──result──► core ──events──► delivery
      ▲                                                             │
      └──────────────────── text stops ─────────────────────────────┘

In: a core that callers change, and `wake` when they have.  Out: plans to the engine, results to the core.  It refuses
to know callers.  What an engine that fails takes with it is decided here: a plan, or everything.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import structlog

from tinyloop_service.engine.api import Engine, Plan, StepResult
from tinyloop_service.errors import DeviceLost, EngineFault
from tinyloop_service.observer import Observer
from tinyloop_service.scheduler.core import Core
from tinyloop_service.scheduler.delivery import Delivery
from tinyloop_service.scheduler.engine_threads import EngineThreads, NotRun, NotSubmitted

_log = structlog.get_logger(__name__)
_Flight = tuple[Plan, int, asyncio.Future[StepResult]]  # since when


class Cycle:
    """Owns the engine.  `run` is one task; everything is called on its event loop."""

    def __init__(
        self,
        engine: Engine,
        core: Core,
        delivery: Delivery,
        observer: Observer,
        plans_in_flight: int,
        now_ns: Callable[[], int],
    ) -> None:
        self.fault: DeviceLost | None = None
        self.faulted = asyncio.Event()
        self.drained = asyncio.Event()  # after `drain`, nothing is left to do
        self._core = core
        self._delivery = delivery
        self._observer = observer
        self._plans_in_flight = plans_in_flight
        self._now_ns = now_ns
        self._threads = EngineThreads(engine)
        self._in_flight: deque[_Flight] = deque()
        self._free_ns = 0  # when the engine was done with the last plan
        self._wake = asyncio.Event()
        self._is_draining = self._is_stopping = False

    def wake(self) -> None:
        """The core was changed."""
        self._wake.set()

    def drain(self) -> None:
        """From now on `drained` says when the core is idle."""
        self._is_draining = True
        self._wake.set()

    def stop(self) -> None:
        """`run` returns when the plans in flight have ended, for a step cannot be interrupted."""
        self._is_stopping = True
        self._wake.set()

    async def close(self) -> None:
        """After `run` has returned: the engine closes, its threads end."""
        await self._threads.close()

    async def run(self) -> None:
        try:
            while True:
                self._submit_plans()
                if self._in_flight:
                    await self._settle(*self._in_flight.popleft())
                elif self._is_stopping:
                    return
                else:
                    await self._sleep()
        except Exception:  # a bug of ours: nobody must hang
            _log.exception("the scheduler's loop failed")
            self._give_up(DeviceLost("the scheduler failed; the process must be started again"))

    def _submit_plans(self) -> None:
        while not self._threads.submit_failed and len(self._in_flight) < self._plans_in_flight:
            plan = self._core.plan(self._now_ns())
            self._delivery.deliver()
            if plan is None:
                return
            self._send(plan)

    def _send(self, plan: Plan) -> None:
        self._in_flight.append((plan, self._now_ns(), self._threads.submit(plan)))

    async def _settle(self, plan: Plan, sent_ns: int, outcome: asyncio.Future[StepResult]) -> None:
        """Apply what became of the oldest plan in flight."""
        try:
            result = await outcome
        except NotRun:
            self._threads.submit_failed = False
            if self.fault is None:
                self._send(self._core.amend(plan))
            return
        except NotSubmitted as refused:
            self._threads.submit_failed = bool(self._in_flight)  # the plan behind it was not submitted; it clears this
            assert isinstance(refused.__cause__, Exception)
            self._fail(plan, refused.__cause__)
        except Exception as error:
            self._fail(plan, error)  # the plan behind it runs as it was submitted
        else:
            self._commit(plan, sent_ns, result)
        self._delivery.lag_ns = self._threads.lag_ns
        self._delivery.deliver()

    def _commit(self, plan: Plan, sent_ns: int, result: StepResult) -> None:
        now_ns = self._now_ns()
        step_ns = now_ns - max(sent_ns, self._free_ns)
        self._observer.step(result.rows_by_step(plan), plan.num_prompt_tokens, step_ns)
        self._free_ns = now_ns
        self._core.commit(plan, result, now_ns, step_ns)

    def _fail(self, plan: Plan, error: Exception) -> None:
        self._free_ns = self._now_ns()
        if self.fault is not None:  # a plan behind the one that lost the device
            return
        if isinstance(error, DeviceLost):
            _log.error("device lost", plan=plan.number)
            self._lose(error)
            return
        if not isinstance(error, EngineFault):
            _log.error("unexpected error in an engine step", plan=plan.number, exc_info=error)
            error = EngineFault("the engine failed in a step; the request may be tried again")
        if not (plan.sequences() or plan.save):  # an engine that cannot even forget would be asked the same for ever
            _log.error("the engine fails without work", plan=plan.number)
            self._lose(DeviceLost("the engine cannot run any more; the process must be started again"))
            return
        self._core.fail(plan, error)

    def _lose(self, error: DeviceLost) -> None:
        self.fault = error
        self._core.lose(error)
        self._delivery.deliver()
        self.faulted.set()

    def _give_up(self, error: DeviceLost) -> None:
        """The core cannot be trusted any more; tell everybody without it."""
        self.fault = error
        self._core.refuse(error)
        self._delivery.fail_all(error)
        self.drained.set()
        self.faulted.set()

    async def _sleep(self) -> None:
        """Until somebody calls, or the core has something to do by itself."""
        if self._is_draining and self._core.is_idle:
            self.drained.set()
        wake_ns = self._core.next_wake_ns
        delay_s = None if wake_ns is None else max(0.0, (wake_ns - self._now_ns()) / 1e9)
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._wake.wait()
        self._wake.clear()
