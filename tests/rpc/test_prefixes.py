"""PrefixService on a real server: names, pages of names, changes, watches, single builds, deletion under use."""

from __future__ import annotations

import asyncio
import threading
import uuid
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from rpc_harness import Served, collect, expected_tokens, field_of, ids, reason_of, refusal, serving, until

from tinyloop_service.client.calls import UNSET
from tinyloop_service.engine.fake import FakeEngine
from tinyloop_service.errors import (
    EngineFault,
    EtagMismatch,
    ModelClosed,
    ParentMismatch,
    PinBudgetExceeded,
    PrefixExists,
    PrefixExpired,
    PrefixNotFound,
)
from tinyloop_service.pb import generation_pb2 as g
from tinyloop_service.pb import prefix_pb2 as p
from tinyloop_service.registry.memory import MemoryRegistry
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.types import PrefixState

PROMPT = tuple(range(1, 201))
Gated = tuple[Served, threading.Event]


async def test_a_created_prefix_is_described_in_full(served: Served) -> None:
    created = await served.prefixes.CreatePrefix(
        p.CreatePrefixRequest(prefix_id="a.b-c_1", input=ids(*PROMPT), loops=3, cache_window=0, pinned=True)
    )
    assert (created.name, created.state, created.token_count) == ("prefixes/a.b-c_1", p.PREFIX_STATE_READY, 200)
    assert (created.loops, created.pinned, created.tokens_built) == (3, True, 200)
    assert created.uid and created.etag and len(created.content_sha256) == 64 and created.size_bytes > 0
    assert created.cache_mode == p.CACHE_MODE_FP16 and created.build_duration.ToNanoseconds() > 0
    assert not created.HasField("expire_time") and not created.HasField("input")
    full = await served.prefixes.GetPrefix(p.GetPrefixRequest(name=created.name, view=p.PREFIX_VIEW_FULL))
    assert tuple(full.input.tokens.ids) == PROMPT


async def test_the_same_content_is_no_work_and_takes_the_new_ttl(served: Served) -> None:
    async with served.client() as client:
        first = await client.create_prefix("p", PROMPT)
        steps = served.engine.tokens_prefilled
        again = await client.create_prefix("p", PROMPT, ttl=60.0, pinned=True)
        assert again.uid == first.uid and again.expire_time is not None and again.pinned
        assert served.engine.tokens_prefilled == steps
        with pytest.raises(PrefixExists):
            await client.create_prefix("p", PROMPT[:-1])
        with pytest.raises(PrefixExists):
            await client.create_prefix("p", PROMPT, loops=3)


async def test_parallel_creates_are_one_build(gated: Gated) -> None:
    served, gate = gated
    async with served.client() as client:
        tasks = [asyncio.create_task(client.create_prefix("p", PROMPT)) for _ in range(16)]
        await until(lambda: served.scheduler.load().prefixes_building == 1)
        with pytest.raises(PrefixExists):
            await client.create_prefix("p", PROMPT[1:])
        gate.set()
        created = await asyncio.gather(*tasks)
    assert len({prefix.uid for prefix in created}) == 1
    assert served.engine.tokens_prefilled == len(PROMPT)


async def test_a_failed_build_wakes_every_waiter_and_the_next_create_replaces_it() -> None:
    gate, broken = threading.Event(), [True]
    engine = FakeEngine(
        gate=gate, fault=lambda plan: EngineFault("secret kernel text") if broken[0] and plan.prefill else None
    )
    async with serving(engine) as served, served.client() as client:
        tasks = [asyncio.create_task(client.create_prefix("p", PROMPT)) for _ in range(5)]
        await until(lambda: served.scheduler.load().prefixes_building == 1)
        gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [EngineFault] * 5
        assert not any("secret" in str(result) for result in results)
        failed = await client.get_prefix("p")
        assert failed.state is PrefixState.FAILED and failed.error
        assert "secret" not in failed.error
        broken[0] = False
        assert (await client.create_prefix("p", PROMPT)).state is PrefixState.READY


async def test_an_asynchronous_build_is_watched_to_its_end(gated: Gated) -> None:
    served, gate = gated
    async with served.client() as client:
        begun = await client.create_prefix("p", tuple(range(1, 500)) * 2, wait=False)
        assert begun.state is PrefixState.BUILDING and begun.tokens_built == 0
        states = []

        async def watch() -> None:
            async for state in client.watch_prefix("p"):
                states.append(state)  # noqa: PERF401, what came before an error counts

        watching = asyncio.create_task(watch())
        await until(lambda: bool(states))
        gate.set()
        await watching
        built = [state.tokens_built for state in states]
        assert states[-1].state is PrefixState.READY and built == sorted(built) and built[-1] == 998
        assert [state async for state in client.watch_prefix("p")] == [await client.get_prefix("p")]


async def test_a_watch_ends_when_the_prefix_is_deleted(gated: Gated) -> None:
    served, gate = gated
    async with served.client() as client:
        await client.create_prefix("p", PROMPT, wait=False)
        states = client.watch_prefix("p")
        assert (await anext(states)).state is PrefixState.BUILDING
        await client.delete_prefix("p")
        gate.set()
        with pytest.raises(PrefixNotFound):
            await collect(states)


async def test_listing_goes_by_name_in_pages(served: Served) -> None:
    names = sorted(f"p{i:02}" for i in range(7))
    async with served.client() as client:
        for name in reversed(names):
            await client.create_prefix(name, (1, 2, 3))
        assert [prefix.id for prefix in await client.list_prefixes()] == names
    seen, token, pages = [], "", 0
    while True:
        page = await served.prefixes.ListPrefixes(p.ListPrefixesRequest(page_size=3, page_token=token))
        seen += [prefix.name.removeprefix("prefixes/") for prefix in page.prefixes]
        pages, token = pages + 1, page.next_page_token
        if not token:
            break
    assert seen == names and pages == 3
    everything = await served.prefixes.ListPrefixes(p.ListPrefixesRequest(page_size=2**31 - 1))
    assert len(everything.prefixes) == 7 and everything.next_page_token == ""


@pytest.mark.parametrize("token", ["x", "MTo=", "MTpB", "é", "MTpwMDI", "=" * 500])
async def test_a_page_token_that_is_none_is_refused(served: Served, token: str) -> None:
    error = await refusal(served.prefixes.ListPrefixes(p.ListPrefixesRequest(page_token=token)))
    assert reason_of(error) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT") and field_of(error) == "page_token"


async def test_updates_change_what_the_mask_names(served: Served) -> None:
    async with served.client() as client:
        first = await client.create_prefix("p", PROMPT, ttl=1000)
        pinned = await client.update_prefix("p", pinned=True)
        assert pinned.pinned and pinned.expire_time == first.expire_time and pinned.etag != first.etag
        forever = await client.update_prefix("p", ttl=None)
        assert forever.pinned and forever.expire_time is None
        both = await client.update_prefix("p", ttl=5, pinned=False, etag=forever.etag)
        assert not both.pinned and both.expire_time is not None
        with pytest.raises(EtagMismatch):
            await client.update_prefix("p", pinned=True, etag=forever.etag)
        with pytest.raises(EtagMismatch):
            await client.delete_prefix("p", etag=first.etag)
        with pytest.raises(PrefixNotFound):
            await client.update_prefix("q", ttl=UNSET, pinned=True)
        await client.delete_prefix("p", etag=both.etag)
        with pytest.raises(PrefixNotFound):
            await client.delete_prefix("p")


@pytest.mark.parametrize(
    ("update", "field"),
    [
        (p.UpdatePrefixRequest(), "prefix.name"),
        (p.UpdatePrefixRequest(prefix=p.Prefix(name="p")), "prefix.name"),
        (
            p.UpdatePrefixRequest(prefix=p.Prefix(name="prefixes/p"), update_mask=FieldMask(paths=["loops"])),
            "update_mask",
        ),
        (
            p.UpdatePrefixRequest(prefix=p.Prefix(name="prefixes/p"), update_mask=FieldMask(paths=["nonsense"])),
            "update_mask",
        ),
        (
            p.UpdatePrefixRequest(
                prefix=p.Prefix(name="prefixes/p", ttl=Duration(seconds=-1)), update_mask=FieldMask(paths=["ttl"])
            ),
            "ttl",
        ),
    ],
)
async def test_an_update_that_makes_no_sense_names_its_field(
    served: Served, update: p.UpdatePrefixRequest, field: str
) -> None:
    error = await refusal(served.prefixes.UpdatePrefix(update))
    assert reason_of(error) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT") and field_of(error) == field


async def test_a_ttl_that_runs_out_before_the_server_comes_to_it_is_no_fault_of_the_request(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = MemoryRegistry.read

    async def slowly(self: MemoryRegistry, tenant: str, name: str) -> Any:
        await asyncio.sleep(0.01)
        return await read(self, tenant, name)

    await served.prefixes.CreatePrefix(p.CreatePrefixRequest(prefix_id="p", input=ids(1)))
    monkeypatch.setattr(MemoryRegistry, "read", slowly)
    ttl = Duration(nanos=10**6)
    for call in (
        served.prefixes.CreatePrefix(p.CreatePrefixRequest(prefix_id="new", input=ids(1), ttl=ttl)),
        served.prefixes.UpdatePrefix(p.UpdatePrefixRequest(prefix=p.Prefix(name="prefixes/p", ttl=ttl))),
    ):
        assert reason_of(await refusal(call)) == ("NOT_FOUND", "PREFIX_EXPIRED")
    assert (await served.prefixes.GetPrefix(p.GetPrefixRequest(name="prefixes/p"))).state == p.PREFIX_STATE_READY


async def test_without_a_mask_what_is_set_is_changed(served: Served) -> None:
    await served.prefixes.CreatePrefix(p.CreatePrefixRequest(prefix_id="p", input=ids(1)))
    changed = await served.prefixes.UpdatePrefix(
        p.UpdatePrefixRequest(prefix=p.Prefix(name="prefixes/p", ttl=Duration(seconds=100)))
    )
    assert changed.HasField("expire_time") and not changed.pinned
    star = p.UpdatePrefixRequest(prefix=p.Prefix(name="prefixes/p", pinned=True), update_mask=FieldMask(paths=["*"]))
    changed = await served.prefixes.UpdatePrefix(star)
    assert changed.pinned and not changed.HasField("expire_time")


async def test_a_request_id_makes_a_create_idempotent(served: Served) -> None:
    request = p.CreatePrefixRequest(input=ids(1, 2, 3), request_id=str(uuid.uuid4()))
    first, second = await asyncio.gather(*(served.prefixes.CreatePrefix(request) for _ in range(2)))
    assert first.name == second.name and first.uid == second.uid
    assert uuid.UUID(first.name.removeprefix("prefixes/"))
    request.input.CopyFrom(ids(1, 2))
    error = await refusal(served.prefixes.CreatePrefix(request))
    assert reason_of(error)[0] == "INVALID_ARGUMENT" and field_of(error) == "request_id"
    error = await refusal(served.prefixes.CreatePrefix(p.CreatePrefixRequest(input=ids(1), request_id="again")))
    assert field_of(error) == "request_id"


async def test_a_repeated_create_undoes_nothing(served: Served) -> None:
    request = p.CreatePrefixRequest(prefix_id="p", input=ids(1, 2, 3), request_id=str(uuid.uuid4()))
    await served.prefixes.CreatePrefix(request)
    mask = FieldMask(paths=["pinned", "ttl"])
    changed = await served.prefixes.UpdatePrefix(
        p.UpdatePrefixRequest(
            prefix=p.Prefix(name="prefixes/p", pinned=True, ttl=Duration(seconds=900)), update_mask=mask
        )
    )
    assert await served.prefixes.CreatePrefix(request) == changed  # etag, pin and expiry as they are now
    await served.prefixes.DeletePrefix(p.DeletePrefixRequest(name="prefixes/p"))
    error = await refusal(served.prefixes.CreatePrefix(request))
    assert reason_of(error) == ("NOT_FOUND", "PREFIX_NOT_FOUND")
    again = p.CreatePrefixRequest(prefix_id="p", input=ids(1, 2, 3), request_id=str(uuid.uuid4()))
    made = await served.prefixes.CreatePrefix(again)
    assert made.uid != changed.uid
    error = await refusal(served.prefixes.CreatePrefix(request))  # the name is another prefix's now
    assert reason_of(error) == ("NOT_FOUND", "PREFIX_NOT_FOUND") and "new request_id" in error.details()


async def test_validate_only_checks_and_does_nothing(served: Served) -> None:
    checked = await served.prefixes.CreatePrefix(
        p.CreatePrefixRequest(prefix_id="p", input=ids(*PROMPT), validate_only=True)
    )
    assert checked.name == "prefixes/p" and checked.token_count == 200 and checked.loops == 2
    assert served.engine.num_steps == 0
    assert not (await served.prefixes.ListPrefixes(p.ListPrefixesRequest())).prefixes
    bad = p.CreatePrefixRequest(prefix_id="p", input=ids(), validate_only=True)
    assert field_of(await refusal(served.prefixes.CreatePrefix(bad))) == "input"


async def test_a_parent_binds_its_children(served: Served) -> None:
    async with served.client() as client:
        await client.create_prefix("mother", PROMPT, loops=4)
        child = await client.create_prefix("child", (7, 8), parent="mother")
        assert (child.loops, child.token_count, child.parent) == (4, 202, "mother")
        assert child.shared_bytes > 0 and (await client.get_prefix("child", tokens=True)).tokens == (*PROMPT, 7, 8)
        await client.delete_prefix("mother")
        generated = await client.generate_from_prefix_cache("child", 4, ignore_eos=True)
        assert tuple(generated[202:]) == expected_tokens((*PROMPT, 7, 8), 4, loops=4)
        await client.create_prefix("mother", PROMPT, loops=4)
        with pytest.raises(ParentMismatch):
            await client.create_prefix("other", (1,), parent="mother", loops=3)
        with pytest.raises(PrefixNotFound):
            await client.create_prefix("orphan", (1,), parent="nobody")


async def test_a_ttl_ends_the_name(served: Served) -> None:
    async with served.client() as client:
        await client.create_prefix("p", PROMPT, ttl=0.05)

        async def expired() -> str:
            while True:
                try:
                    await client.get_prefix("p")
                except PrefixNotFound as error:
                    return type(error).__name__

        assert await asyncio.wait_for(expired(), 10) in (PrefixExpired.__name__, PrefixNotFound.__name__)
        assert await client.list_prefixes() == []


@pytest.mark.parametrize("hours", [-1, 1])
async def test_a_ttl_runs_by_one_clock_even_if_the_walls_is_set_anew(served: Served, hours: int) -> None:
    served.scheduler._epoch_ns += hours * 3600 * 10**9  # as if the wall clock had been set by that since the start
    async with served.client() as client:
        await client.create_prefix("p", PROMPT, ttl=60.0)
        await client.update_prefix("p", ttl=60.0)
        expires = served.scheduler.get_prefix("p").expire_time_ns
        assert expires is not None and 0 < expires - served.scheduler.now_ns() <= 60 * 10**9


async def test_pins_have_a_budget() -> None:
    async with serving(scheduler=SchedulerSettings(pin_fraction=0.0)) as served, served.client() as client:
        with pytest.raises(PinBudgetExceeded):
            await client.create_prefix("p", PROMPT, pinned=True)
        request = p.CreatePrefixRequest(prefix_id="p", input=ids(1), pinned=True)
        assert reason_of(await refusal(served.prefixes.CreatePrefix(request))) == ("RESOURCE_EXHAUSTED", "PIN_BUDGET")


@pytest.mark.parametrize("how", ["delete", "expire", "close"])
async def test_a_prefix_may_end_while_32_streams_use_it(gated: Gated, how: str) -> None:
    served, gate = gated
    async with served.client() as client:
        await asyncio.gather(client.create_prefix("p", PROMPT), asyncio.to_thread(gate.set))
        gate.clear()
        requests = [
            g.GenerateRequest(prefix="prefixes/p", input=ids(i), max_tokens=20, ignore_eos=True) for i in range(1, 33)
        ]
        streams = [asyncio.create_task(collect(served.generation.Generate(request))) for request in requests]
        await until(lambda: served.num_open() == 32)
        match how:
            case "delete":
                await client.delete_prefix("p")
            case "expire":
                await client.update_prefix("p", ttl=0.001)
            case "close":
                closing = asyncio.create_task(served.app.stop(grace_s=0.0))
                await until(lambda: served.num_open() == 0)
        if how != "close":
            while True:
                try:
                    await client.get_prefix("p")
                except PrefixNotFound:
                    break
        gate.set()
        results = await asyncio.gather(*streams, return_exceptions=True)
        if how == "close":
            await closing
            assert {reason_of(error) for error in results} == {("UNAVAILABLE", ModelClosed.reason)}
            return
        for i, messages in enumerate(results, 1):
            assert not isinstance(messages, BaseException), messages
            received = tuple(token for message in messages for token in message.delta.token_ids)
            assert received == expected_tokens((*PROMPT, i), 20)
        await served.settled()
        assert served.scheduler.load().pages_prefixes == 0
