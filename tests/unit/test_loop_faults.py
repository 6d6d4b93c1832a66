"""The scheduler on a real event loop when the fake engine fails: whose requests end, and what they hear."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any

import pytest
from loop_harness import WIDE, collect, ids, is_settled, running, until
from scheduler_driver import tokens

from tinyloop_service.engine.api import Limits, Pending, Plan, StepResult
from tinyloop_service.engine.fake import FakeEngine, FaultAt
from tinyloop_service.errors import (
    DeviceLost,
    EngineFault,
)
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.types import (
    GenerationRequest,
    PrefixDefinition,
    PrefixState,
)


async def test_an_engine_that_fails_every_plan_is_lost_and_does_not_keep_close_waiting() -> None:
    async with running(fault=lambda plan: EngineFault("always")) as scheduler:
        with pytest.raises(EngineFault, match="always"):
            await collect(scheduler.generate(GenerationRequest(tokens(5))))
        await asyncio.wait_for(scheduler.wait_fault(), 10)  # the plan that only closes failed too
        assert isinstance(scheduler.fault, DeviceLost)
    # leaving closed the scheduler: it returned


async def test_a_fault_ends_its_requests_and_no_others() -> None:
    faults = 0

    def fault(plan: Plan) -> EngineFault | None:
        nonlocal faults
        if any(prefill.tokens == (66,) for prefill in plan.prefill):
            faults += 1
            return EngineFault("a fault")
        return None

    async with running(fault=fault) as scheduler:
        await scheduler.create_prefix(PrefixDefinition(tokens(70)), name="p")
        for _ in range(3):
            with pytest.raises(EngineFault, match="a fault"):
                await collect(scheduler.generate(GenerationRequest((66,), 50, prefix="p")))
            good = await collect(scheduler.generate(GenerationRequest((5,), 50, prefix="p")))
            assert len(ids(good)) == 50
        assert faults == 3 and scheduler.fault is None
        assert scheduler.get_prefix("p").state is PrefixState.READY


class Keeper:
    """Keeps nothing."""

    def keep(self, digest: str, state: object, expire_time_ns: int | None) -> None:
        raise AssertionError("what failed to be saved is handed over")

    def expires(self, digest: str, expire_time_ns: int | None) -> None: ...

    def drop(self, digest: str) -> None: ...


async def test_state_that_cannot_be_saved_costs_nothing_else() -> None:
    """The plan has nothing but the saving in it; an engine that fails it is not lost."""
    failed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def fault(plan: Plan) -> EngineFault | None:
        if plan.save:
            loop.call_soon_threadsafe(failed.set)
            return EngineFault("no memory to save to")
        return None

    async with running(fault=fault) as scheduler:
        scheduler.keep_snapshots(Keeper())
        await scheduler.create_prefix(PrefixDefinition(tokens(70)), name="p")
        await failed.wait()
        assert len(ids(await collect(scheduler.generate(GenerationRequest((5,), 50, prefix="p"))))) == 50
        assert scheduler.fault is None


async def test_who_comes_to_wait_after_the_build_hears_how_it_ended() -> None:
    async with running(fault=lambda plan: EngineFault("a fault") if plan.prefill else None) as scheduler:
        uid = scheduler.catalog.create(
            PrefixDefinition(tokens(70)),
            tenant="",
            name="p",
            expire_time_ns=None,
            pinned=False,
            wait=True,
            detached=False,
            now_ns=scheduler.now_ns(),
        )
        scheduler.changed()
        await until(lambda: scheduler.get_prefix("p").state is PrefixState.FAILED)
        with pytest.raises(EngineFault, match="a fault"):
            await scheduler.built_prefix(uid)


class LateEngine(FakeEngine):
    """Results wait for `results`; `submitted` counts plans."""

    def __init__(self, limits: Limits, **options: Any) -> None:
        super().__init__(limits, strict=True, **options)
        self.results = threading.Event()
        self.submitted = threading.Semaphore(0)

    def submit(self, plan: Plan) -> Pending:
        pending = super().submit(plan)
        self.submitted.release()
        return _Late(self.results, pending)


@dataclasses.dataclass
class _Late:
    gate: threading.Event
    pending: Pending

    def result(self) -> StepResult:
        self.gate.wait()
        return self.pending.result()


async def test_a_further_plan_is_submitted_while_one_is_waited_for() -> None:
    engine = LateEngine(WIDE)
    scheduler = Scheduler(engine, SchedulerSettings())
    await scheduler.start()
    stream = asyncio.create_task(collect(scheduler.generate(GenerationRequest((1,), 50))))
    async with asyncio.timeout(20):
        for _ in range(2):  # no result came yet
            await asyncio.to_thread(engine.submitted.acquire)
        engine.results.set()
        assert len(ids(await stream)) == 50
    await scheduler.close()


async def test_a_plan_without_a_result_ends_its_requests_and_no_others() -> None:
    """The plan behind it, submitted before that showed, names the lost request and a good one."""

    def fault(plan: Plan) -> EngineFault | None:
        return EngineFault("a fault") if any(prefill.tokens == (66,) for prefill in plan.prefill) else None

    engine = LateEngine(WIDE, fault=fault, fault_at=FaultAt.RESULT)
    scheduler = Scheduler(engine, SchedulerSettings())
    await scheduler.start()
    lost = asyncio.create_task(collect(scheduler.generate(GenerationRequest((66,), 50))))
    async with asyncio.timeout(20):
        await asyncio.to_thread(engine.submitted.acquire)
        good = asyncio.create_task(collect(scheduler.generate(GenerationRequest((5,), 50))))
        await asyncio.to_thread(engine.submitted.acquire)
        engine.results.set()
        with pytest.raises(EngineFault, match="a fault"):
            await lost
        assert len(ids(await good)) == 50
    assert scheduler.fault is None
    await until(lambda: is_settled(scheduler))
    await scheduler.close()
    engine.check_idle()


async def test_a_device_lost_in_a_result_is_told_once() -> None:
    engine = LateEngine(WIDE, fault=lambda plan: DeviceLost("gone"), fault_at=FaultAt.RESULT)
    scheduler = Scheduler(engine, SchedulerSettings())
    await scheduler.start()
    stream = asyncio.create_task(collect(scheduler.generate(GenerationRequest((1,), 50))))
    async with asyncio.timeout(20):
        for _ in range(2):
            await asyncio.to_thread(engine.submitted.acquire)
        engine.results.set()
        with pytest.raises(DeviceLost, match="gone"):
            await stream
        await scheduler.wait_fault()
        await scheduler.close()


async def test_an_unexpected_error_of_the_engine_does_not_show_its_text() -> None:
    def fault(plan: Plan) -> EngineFault | None:
        if plan.decode:
            raise ZeroDivisionError("internal detail")
        return None

    async with running(fault=fault) as scheduler:
        with pytest.raises(EngineFault, match="the engine failed") as caught:
            await collect(scheduler.generate(GenerationRequest((1,), 50)))
        assert "internal detail" not in str(caught.value)
        assert len(ids(await collect(scheduler.generate(GenerationRequest((1,), 1))))) == 1


async def test_a_failed_build_wakes_every_waiter() -> None:
    """T10."""
    async with running(fault=lambda plan: EngineFault("a fault") if plan.number == 2 else None) as scheduler:
        creates = [scheduler.create_prefix(PrefixDefinition(tokens(300)), name="p") for _ in range(5)]
        results = await asyncio.gather(*creates, return_exceptions=True)
        assert [type(result) for result in results] == [EngineFault] * 5 and len(set(map(id, results))) == 5
        failed = scheduler.get_prefix("p")
        assert failed.state is PrefixState.FAILED and failed.error == "a fault"
        again = await scheduler.create_prefix(PrefixDefinition(tokens(300)), name="p")
        assert again.state is PrefixState.READY and again.uid != failed.uid


async def test_a_lost_device_ends_everything_and_is_shown() -> None:
    async with running(fault=lambda plan: DeviceLost("gone") if plan.decode else None) as scheduler:
        streams = [scheduler.generate(GenerationRequest((i,), 50)) for i in range(4)]
        results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
        assert [type(result) for result in results] == [DeviceLost] * 4
        await scheduler.wait_fault()
        assert isinstance(scheduler.fault, DeviceLost) and not scheduler.load().accepting
        with pytest.raises(DeviceLost):
            scheduler.generate(GenerationRequest((1,), 5))


async def test_a_bug_in_the_core_leaves_nobody_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    async with running(gate=gate) as scheduler:
        streams = [asyncio.create_task(collect(scheduler.generate(GenerationRequest((i,), 50)))) for i in range(3)]
        create = asyncio.create_task(scheduler.create_prefix(PrefixDefinition(tokens(70)), name="p"))
        await asyncio.sleep(0)
        monkeypatch.setattr(scheduler._core, "commit", lambda *_: 1 / 0)
        gate.set()
        results = await asyncio.gather(*streams, create, return_exceptions=True)
        assert [type(result) for result in results] == [DeviceLost] * 4
        assert scheduler.fault is not None
        async with asyncio.timeout(20):
            await scheduler.drain(3600)
