"""The two threads of an engine: one hands plans over, one waits for results.

In: plans, in order.  Out: for each a future of what waits for its result.  It refuses to know what a plan says.

Only the first thread calls the engine.  The second one is there so that a further plan can be handed to the device
while the one before is waited for.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor

from tinyloop_service.engine.api import Engine, Plan, StepResult


class NotRun(Exception):
    """The plan was behind one that could not be submitted."""


class EngineThreads:
    """Owns the engine until `close`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._submitting = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="engine-wait")
        self.submit_failed = False  # set on the engine's thread; until the owner clears it, plans are not submitted

    def submit(self, plan: Plan) -> asyncio.Future[Future[StepResult]]:
        """What handing it over gives: what waiting for it gives.  The outer one raises what the engine raised, or
        NotRun behind a plan that failed so."""
        return asyncio.get_running_loop().run_in_executor(self._submitting, self._submit, plan)

    async def close(self) -> None:
        """The engine closes on the thread that ran it; both threads end."""
        await asyncio.get_running_loop().run_in_executor(self._submitting, self._engine.close)
        self._submitting.shutdown()
        self._waiting.shutdown()

    def _submit(self, plan: Plan) -> Future[StepResult]:
        if self.submit_failed:
            raise NotRun
        try:
            pending = self._engine.submit(plan)
        except BaseException:
            self.submit_failed = True
            raise
        return self._waiting.submit(pending.result)
