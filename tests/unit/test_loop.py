"""The scheduler on a real event loop and a real engine thread, with the fake engine."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import threading
import time
import weakref

import pytest
import structlog
from loop_harness import WIDE, collect, ids, is_settled, last, running, until
from scheduler_driver import tokens

from tinyloop_service.engine.api import Plan
from tinyloop_service.engine.fake import FakeEngine, expected_tokens
from tinyloop_service.errors import (
    Draining,
    InvalidArgument,
    ModelClosed,
    PrefixExpired,
    PrefixNotFound,
)
from tinyloop_service.scheduler.loop import UNCHANGED, Scheduler
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.types import (
    Completed,
    Delta,
    FinishReason,
    GenerationRequest,
    PrefixDefinition,
    PrefixState,
    Sampling,
    Started,
    Stops,
)


async def test_a_stream_starts_deltas_and_completes() -> None:
    async with running() as scheduler:
        info = await scheduler.create_prefix(PrefixDefinition(tokens(100)), name="p")
        assert info.state is PrefixState.READY and scheduler.list_prefixes() == [info]
        request = GenerationRequest((1, 2), 20, prefix="p", sampling=Sampling(logprobs=2, seed=5), n=2)
        messages = await collect(scheduler.generate(request))
        flat = [output for outputs in messages for output in outputs]
        assert flat[0] == Started(100, 102, flat[0].queue_ns, 5)
        assert ids(messages) == expected_tokens([((*tokens(100), 1, 2), 0)], 20, request.sampling, 1, WIDE)
        for choice in range(2):
            deltas = [o for o in flat if isinstance(o, Delta) and o.choice == choice]
            assert [d.first_index for d in deltas] == [
                sum(len(e.token_ids) for e in deltas[:i]) for i in range(len(deltas))
            ]
            assert all(len(d.logprobs) == len(d.token_ids) and not d.text for d in deltas)
            (completed,) = [o for o in flat if isinstance(o, Completed) and o.choice == choice]
            assert completed.finish_reason is FinishReason.LENGTH
            assert dataclasses.astuple(completed.usage) == (102, 100, 20)
            assert 0 <= completed.timings.queue_ns <= completed.timings.ttft_ns <= completed.timings.total_ns
        assert isinstance(messages[-1][-1], Completed)
        assert scheduler.counters.prompt_hits == 100


async def test_concurrent_creates_are_one_build() -> None:
    """T10."""
    engine = FakeEngine(WIDE, strict=True)
    scheduler = Scheduler(engine, SchedulerSettings())
    await scheduler.start()
    infos = await asyncio.gather(*(scheduler.create_prefix(PrefixDefinition(tokens(100)), name="p") for _ in range(20)))
    assert {info.uid for info in infos} == {infos[0].uid} and engine.tokens_prefilled == 100
    await scheduler.close()
    assert engine.is_closed


async def test_the_last_waiter_that_is_cancelled_ends_the_build() -> None:
    gate = threading.Event()
    async with running(gate=gate) as scheduler:
        creates = [
            asyncio.create_task(scheduler.create_prefix(PrefixDefinition(tokens(300)), name="p")) for _ in range(3)
        ]
        nameless = asyncio.create_task(scheduler.create_prefix(PrefixDefinition(tokens(300))))
        await asyncio.sleep(0)
        for task in (creates[0], creates[1]):
            task.cancel()
        await asyncio.wait(creates[:2])
        assert scheduler.get_prefix("p").state is PrefixState.BUILDING
        for task in (creates[2], nameless):
            task.cancel()
        await asyncio.wait([creates[2], nameless])
        with pytest.raises(PrefixNotFound):
            scheduler.get_prefix("p")
        assert scheduler.load().prefixes_building == 0
        assert scheduler.load().pages_free == scheduler.load().pages_total


async def test_a_build_without_waiting_goes_on_and_can_be_watched() -> None:
    gate = threading.Event()
    async with running(gate=gate) as scheduler:
        info = await scheduler.create_prefix(PrefixDefinition(tokens(300)), name="p", wait=False)
        assert info.state is PrefixState.BUILDING
        states = scheduler.watch_prefix("p")
        first = await anext(states)
        assert first.uid == info.uid and first.tokens_built == 0
        gate.set()
        rest = [state async for state in states]
        assert rest[-1].state is PrefixState.READY and rest[-1].tokens_built == 300
        built = [state.tokens_built for state in rest]
        assert built == sorted(built)


async def test_watching_a_name_that_ends_raises() -> None:
    gate = threading.Event()
    async with running(gate=gate) as scheduler:
        with pytest.raises(PrefixNotFound):
            await anext(scheduler.watch_prefix("never"))
        waiting = asyncio.create_task(scheduler.create_prefix(PrefixDefinition(tokens(300)), name="p"))
        await asyncio.sleep(0)
        states = scheduler.watch_prefix("p")
        await anext(states)
        scheduler.delete_prefix("p")
        with pytest.raises(PrefixNotFound):
            await anext(states)
        with pytest.raises(PrefixNotFound, match="while it was built"):
            await waiting


async def test_who_watched_a_deleted_name_does_not_take_the_watchers_of_its_successor_along() -> None:
    gate = threading.Event()
    async with running(gate=gate) as scheduler:
        await scheduler.create_prefix(PrefixDefinition(tokens(300)), name="p", wait=False)
        old = asyncio.create_task(last(scheduler.watch_prefix("p")))
        await until(lambda: scheduler.get_prefix("p").uid in scheduler._delivery._watchers)
        scheduler.delete_prefix("p")
        await scheduler.create_prefix(PrefixDefinition(tokens(300)), name="p", wait=False)
        new = asyncio.create_task(last(scheduler.watch_prefix("p")))
        with pytest.raises(PrefixNotFound, match="made again since"):
            await old
        gate.set()
        assert (await new).state is PrefixState.READY
        assert not scheduler._delivery._watchers


async def test_two_readers_of_one_stream_both_end() -> None:
    gate = threading.Event()
    async with running(gate=gate) as scheduler:
        stream = scheduler.generate(GenerationRequest((1, 2), 20))
        readers = [asyncio.create_task(collect(stream)) for _ in range(2)]
        await asyncio.sleep(0)
        gate.set()
        async with asyncio.timeout(20):
            first, second = await asyncio.gather(*readers)
        tokens_read = [o.token_ids for outputs in (*first, *second) for o in outputs if isinstance(o, Delta)]
        assert sum(map(len, tokens_read)) == 20


async def test_an_idle_scheduler_lets_prefixes_expire() -> None:
    async with running() as scheduler:
        info = await scheduler.create_prefix(PrefixDefinition(tokens(100)), name="p")
        assert scheduler.load().pages_free < scheduler.load().pages_total
        scheduler.update_prefix("p", expire_time_ns=time.time_ns() + 20_000_000, pinned=UNCHANGED, etag=info.etag)
        await until(
            lambda: scheduler.load().pages_free == scheduler.load().pages_total, 0.001
        )  # only the clock moves it
        with pytest.raises(PrefixExpired):
            scheduler.get_prefix("p")


async def test_calls_answer_while_the_engine_is_held() -> None:
    """T21: every one of these returns although no step ends."""
    gate = threading.Event()
    async with running(gate=gate) as scheduler:
        await scheduler.create_prefix(PrefixDefinition(tokens(300)), name="p", wait=False)
        stream = scheduler.generate(GenerationRequest((1,), 5))
        await asyncio.sleep(0)
        assert scheduler.get_prefix("p").state is PrefixState.BUILDING
        assert [info.name for info in scheduler.list_prefixes()] == ["p"]
        assert scheduler.load().prefixes_building == 1
        assert scheduler.validate_prefix(PrefixDefinition(tokens(10)), name="q").state is PrefixState.BUILDING
        scheduler.update_prefix("p", pinned=True)
        stream.leave()
        scheduler.delete_prefix("p")


async def test_leaving_a_stream_cancels_it() -> None:
    """T11."""
    async with running() as scheduler:
        async with scheduler.generate(GenerationRequest(tokens(100), 250)) as stream:
            async for outputs in stream:
                if any(isinstance(output, Delta) for output in outputs):
                    break
        assert scheduler.load().rows_running == 0 and scheduler.load().pages_free == scheduler.load().pages_total
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_a_reader_that_is_cancelled_leaves_the_stream() -> None:
    gate = threading.Event()
    async with running(gate=gate) as scheduler:
        stream = scheduler.generate(GenerationRequest(tokens(100), 250))
        reader = asyncio.create_task(collect(stream))
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert scheduler.load().rows_running == scheduler.load().requests_waiting == 0


async def test_a_slow_reader_gets_fewer_larger_messages() -> None:
    """T20: what it did not read is one message, and others were not held up."""
    async with running() as scheduler:
        slow = scheduler.generate(GenerationRequest((1,), 200, n=2))
        fast = [collect(scheduler.generate(GenerationRequest((2, i), 200))) for i in range(8)]
        assert all(len(ids(messages)) == 200 for messages in await asyncio.gather(*fast))
        await until(lambda: is_settled(scheduler))
        messages = await collect(slow)
        assert len(messages) == 1
        assert [type(output) for output in messages[0]] == [Started, Delta, Delta, Completed, Completed]
        assert len(ids(messages)) == len(ids(messages, 1)) == 200


async def test_ten_thousand_cancelled_streams_leave_no_memory() -> None:
    """T20."""
    async with running(settings=SchedulerSettings(max_queue=100)) as scheduler:
        await scheduler.create_prefix(PrefixDefinition(tokens(70)), name="p")
        streams = []
        for i in range(10_000):
            stream = scheduler.generate(GenerationRequest((i % 97,), 50, prefix="p"))
            if i % 100 == 0:
                await asyncio.sleep(0)
                streams.append(weakref.ref(stream))
            stream.leave()
        del stream
        await until(lambda: is_settled(scheduler))
        gc.collect()
        assert not [ref for ref in streams if ref() is not None]
        load = scheduler.load()
        assert load.pages_free + load.pages_prefixes == load.pages_total


async def test_tokens_between_the_first_and_the_last_wait_for_each_other() -> None:
    async with running(settings=SchedulerSettings(stream_interval_ns=3600 * 10**9)) as scheduler:
        messages = await collect(scheduler.generate(GenerationRequest((1, 2), 30)))
    assert [[type(output) for output in outputs] for outputs in messages] == [[Started, Delta], [Delta, Completed]]
    assert ids(messages) == expected_tokens([((1, 2), 0)], 30, Sampling(), 1, WIDE)


async def test_tokens_do_not_wait_for_an_engine_that_stands_still() -> None:
    may_go_on = threading.Event()

    def stand_still(plan: Plan) -> None:
        if plan.number == 3:
            may_go_on.wait()

    async with (
        running(fault=stand_still, settings=SchedulerSettings(plans_in_flight=1)) as scheduler,
        scheduler.generate(GenerationRequest((1, 2), 30)) as stream,
    ):
        shown = []
        while len(ids(shown)) < 2:  # plans 1 and 2 gave that many or more
            shown.append(await anext(stream))
        may_go_on.set()
        shown += [outputs async for outputs in stream]
    assert ids(shown) == expected_tokens([((1, 2), 0)], 30, Sampling(), 1, WIDE)


async def test_id_stops_cut_and_free_the_row() -> None:
    """The stop is the 5th and 6th token of what the request gives without it."""
    plain = expected_tokens([((1, 2), 0)], 60, Sampling(), 1, WIDE)
    async with running() as scheduler:
        request = GenerationRequest((1, 2), 300, stops=Stops(token_sequences=(plain[4:6],)))
        messages = await collect(scheduler.generate(request))
        assert ids(messages) == plain[:4]
        completed = messages[-1][-1]
        assert isinstance(completed, Completed) and completed.finish_reason is FinishReason.STOP
        assert completed.usage.completion_tokens == 4
        await until(lambda: is_settled(scheduler))
        assert scheduler.counters.generated < 100, "the row has left"
        with pytest.raises(InvalidArgument, match="stop_sequences"):
            scheduler.generate(GenerationRequest((1,), 5, stops=Stops(strings=("x",))))
        assert scheduler.load().requests_waiting == 0


async def test_closing_ends_who_watches_a_prefix_that_nobody_builds() -> None:
    async with running(settings=SchedulerSettings(max_prefixes=1)) as scheduler:
        for i, name in enumerate("ab"):
            await scheduler.create_prefix(PrefixDefinition(tokens(70, i)), name=name)
        assert scheduler.get_prefix("a").state is PrefixState.EVICTED
        watching = asyncio.create_task(last(scheduler.watch_prefix("a")))
        await until(lambda: bool(scheduler._delivery._watchers))
        await scheduler.close()
        async with asyncio.timeout(20):
            with pytest.raises(ModelClosed):
                await watching


async def test_drain_refuses_the_new_and_finishes_the_old() -> None:
    """T23, the scheduler's part."""
    async with running() as scheduler:
        streams = [asyncio.create_task(collect(scheduler.generate(GenerationRequest((i,), 200)))) for i in range(8)]
        await asyncio.sleep(0)
        drain = asyncio.create_task(scheduler.drain(60))
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            scheduler.generate(GenerationRequest((1,), 5))
        with pytest.raises(Draining):
            await scheduler.create_prefix(PrefixDefinition(tokens(70)), name="p")
        await drain
        assert all(len(ids(messages)) == 200 for messages in await asyncio.gather(*streams))


async def test_who_comes_late_to_a_drained_scheduler_hears_what_others_heard() -> None:
    async with running() as scheduler:
        for grace_s in (0.0, 60.0):
            await scheduler.drain(grace_s)
        await scheduler.close()
        for call in (
            lambda: scheduler.generate(GenerationRequest((1,), 5)),
            lambda: scheduler.get_prefix("p"),
            lambda: scheduler.adoption,
        ):
            with pytest.raises(Draining):
                call()


@pytest.mark.parametrize("is_busy", [False, True])
async def test_a_drain_without_grace_complains_of_what_it_leaves_and_of_nothing_else(is_busy: bool) -> None:
    gate = threading.Event()
    async with running(gate=gate) as scheduler:
        if is_busy:
            scheduler.generate(GenerationRequest((1,), 5))
        with structlog.testing.capture_logs() as found:
            await scheduler.drain(0.0)
        assert [entry["event"] for entry in found] == ["drain ran out of time"] * is_busy


async def test_drain_gives_up_after_its_grace() -> None:
    gate = threading.Event()
    async with running(gate=gate) as scheduler:
        stream = asyncio.create_task(collect(scheduler.generate(GenerationRequest((1,), 200))))
        await asyncio.sleep(0)
        await scheduler.drain(0.01)
        gate.set()
        await scheduler.close()
        with pytest.raises(ModelClosed):
            await stream


async def test_close_ends_32_streams_with_its_error() -> None:
    """T5."""
    async with running() as scheduler:
        await scheduler.create_prefix(PrefixDefinition(tokens(100)), name="p")
        streams = [
            asyncio.create_task(collect(scheduler.generate(GenerationRequest((i,), 290, prefix="p"))))
            for i in range(32)
        ]
        await until(lambda: scheduler.load().rows_running > 0)
        await scheduler.close()
        results = await asyncio.gather(*streams, return_exceptions=True)
        assert {type(result) for result in results} == {ModelClosed}
        for call in (scheduler.list_prefixes, lambda: scheduler.generate(GenerationRequest((1,), 5))):
            with pytest.raises(ModelClosed, match="model was closed"):
                call()
        scheduler.release_prefix("unknown")
        await scheduler.close()


async def test_a_nameless_prefix_lives_by_its_handle() -> None:
    async with running() as scheduler:
        info = await scheduler.create_prefix(PrefixDefinition(tokens(100)))
        messages = await collect(scheduler.generate(GenerationRequest((), 5, prefix_uid=info.uid)))
        assert len(ids(messages)) == 5
        scheduler.release_prefix(info.uid)
        with pytest.raises(PrefixNotFound):
            scheduler.generate(GenerationRequest((), 5, prefix_uid=info.uid))
        assert scheduler.load().pages_free == scheduler.load().pages_total
