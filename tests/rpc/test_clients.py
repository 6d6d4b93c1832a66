"""The clients against a real server: thread-safe, with Model's exceptions; handles, retries, timeouts, closing."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from rpc_harness import CONFIG, SERVER, Served, expected_tokens, serving, until

from tinyloop_service import errors
from tinyloop_service.app import App
from tinyloop_service.client import AsyncClient, Client, RemotePrefixCache, channel, keepers
from tinyloop_service.client.calls import HANDLE_TTL_NS
from tinyloop_service.engine.fake import FakeEngine
from tinyloop_service.loading import LoadedModel
from tinyloop_service.observer import CallRecord
from tinyloop_service.rpc import boundary
from tinyloop_service.settings import SchedulerSettings, Settings
from tinyloop_service.types import FinishReason, PrefixState

PROMPT = tuple(range(1, 100))
GREEDY: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}


async def in_thread(served: Served, work: Callable[[Client], Any], **options: Any) -> Any:
    """Run `work` with a synchronous client, in a thread: the server needs this one."""

    def run() -> Any:
        with Client(served.address, **options) as client:
            return work(client)

    return await asyncio.to_thread(run)


async def test_the_synchronous_client_does_all_that_model_does(served: Served) -> None:
    def work(client: Client) -> None:
        assert client.config() == CONFIG and client.model().replica == "replica-0"
        prefix = client.build_prefix_cache(np.array(PROMPT), loops=3)
        assert isinstance(prefix, RemotePrefixCache) and (prefix.loops, prefix.cache_window) == (3, 0)
        assert prefix.prompt.dtype == np.int32 and tuple(prefix.prompt) == PROMPT and prefix.num_bytes > 0
        whole = client.generate((*PROMPT, 7), 6, 3, ignore_eos=True)
        assert whole == [*PROMPT, 7, *expected_tokens((*PROMPT, 7), 6, loops=3)]
        assert client.generate_from_prefix_cache(prefix, 6, suffix=(7,), ignore_eos=True) == whole
        completion = client.complete(prefix=prefix, suffix=[7], **GREEDY)
        assert completion.token_ids == tuple(whole[100:]) and completion.usage.cached_tokens == 99
        batch = client.complete_batch(prefix, [(7,), (8,), ()], **GREEDY)
        assert [c.token_ids for c in batch[:1]] == [completion.token_ids] and len(batch) == 3
        deltas = list(client.stream(prefix=prefix, suffix=(7,), **GREEDY))
        assert tuple(i for d in deltas for i in d.token_ids) == completion.token_ids
        assert deltas[-1].finish_reason is FinishReason.LENGTH and deltas[-1].usage == completion.usage
        assert client.complete_batch(prefix, []) == []

    await in_thread(served, work)


async def test_the_synchronous_client_names_prefixes(served: Served) -> None:
    def work(client: Client) -> None:
        created = client.create_prefix("p", "hello", ttl=100, pinned=True)
        assert created.state is PrefixState.READY and created.pinned and created.expire_time is not None
        assert client.get_prefix("p", tokens=True).tokens == tuple(client.tokenize("hello", bos=True))
        assert [prefix.id for prefix in client.list_prefixes()] == ["p"]
        assert client.update_prefix("p", ttl=None).expire_time is None
        assert [state.state for state in client.watch_prefix("p")] == [PrefixState.READY]
        from_name = client.generate_from_prefix_cache("p", 4, suffix=" you", ignore_eos=True)
        assert from_name == client.generate([*client.tokenize("hello you", bos=True)], 4, ignore_eos=True)
        client.delete_prefix("p")
        with pytest.raises(KeyError):
            client.get_prefix("p")

    await in_thread(served, work)


async def test_one_client_serves_many_threads(served: Served) -> None:
    def work(client: Client) -> None:
        client.create_prefix("p", PROMPT)
        with ThreadPoolExecutor(16) as pool:
            many = list(pool.map(lambda i: client.complete(prefix="p", suffix=(i,), **GREEDY), range(1, 65)))
        for i, completion in enumerate(many, 1):
            assert completion.token_ids == expected_tokens((*PROMPT, i), 6)

    await in_thread(served, work)


REFUSED: list[tuple[Callable[[Client], Any], type[Exception], str]] = [
    (lambda c: c.generate(()), ValueError, "prompt: "),
    (lambda c: c.generate((1, 512)), ValueError, "prompt[1]: "),
    (lambda c: c.generate((1, -1)), ValueError, "prompt[1]: "),
    (lambda c: c.generate((1,), 0), ValueError, "max_tokens: "),
    (lambda c: c.generate((1,), 4, 99), ValueError, "loops: "),
    (lambda c: c.generate((1,), 4, top_p=0.0), ValueError, "top_p: "),
    (lambda c: c.complete((1,), logit_bias={600: 1.0}), ValueError, "logit_bias[600]: "),
    (lambda c: c.complete(prefix="p", suffix=(1, 600)), ValueError, "suffix[1]: "),
    (lambda c: c.complete(), ValueError, "prompt: "),
    (lambda c: c.complete((1,), prefix="p"), ValueError, "prompt: "),
    (lambda c: c.complete((1,), suffix=(1,)), ValueError, "suffix: "),
    (lambda c: c.complete(prefix=object()), ValueError, "prefix: "),
    (lambda c: c.generate((1,), 5000), RuntimeError, "2048"),
    (lambda c: c.complete(prefix="p", loops=5), RuntimeError, "loops mismatch"),
    (lambda c: c.complete(prefix="nobody"), KeyError, "nobody"),
    (lambda c: next(c.stream(prefix="nobody")), KeyError, "nobody"),
    (lambda c: next(c.watch_prefix("nobody")), KeyError, "nobody"),
    (lambda c: c.create_prefix("P", (1,)), ValueError, "id: "),
    (lambda c: c.create_prefix("p", (1, 2)), ValueError, "'p'"),
    (lambda c: c.create_prefix("q", (1,), ttl=0), ValueError, "ttl: "),
    (lambda c: c.create_prefix("q", (700,)), ValueError, "tokens_or_text[0]: "),
    (lambda c: c.build_prefix_cache((700,)), ValueError, "prompt[0]: "),
    (lambda c: c.detokenize([700]), ValueError, "ids[0]: "),
]


async def test_refusals_are_the_exceptions_of_the_model(served: Served) -> None:
    def work(client: Client) -> None:
        client.create_prefix("p", PROMPT)
        for call, kind, text in REFUSED:
            with pytest.raises(kind) as caught:
                call(client)
            assert isinstance(caught.value, errors.TinyLoopError) and text in str(caught.value), (text, caught.value)

    await in_thread(served, work)


async def test_a_handle_keeps_its_prefix_and_takes_it_along(served: Served) -> None:
    async with served.client() as client:
        kept = await client.build_prefix_cache(PROMPT)
        dropped = await client.build_prefix_cache(PROMPT[:50])
        both = await client.list_prefixes()
        assert {prefix.id for prefix in both} == {kept.id, dropped.id}
        assert all(prefix.expire_time is not None for prefix in both)
        del dropped
        gc.collect()
        await until(lambda: len(served.scheduler.list_prefixes()) == 1)
        assert await client.generate_from_prefix_cache(kept, 3, ignore_eos=True)
    assert served.scheduler.list_prefixes() == []

    def work(client: Client) -> Any:
        kept, dropped = client.build_prefix_cache(PROMPT), client.build_prefix_cache(PROMPT)
        assert kept.id != dropped.id
        del dropped
        gc.collect()
        while len(client.list_prefixes()) > 1:
            pass
        return kept

    kept = await in_thread(served, work)
    assert served.scheduler.list_prefixes() == [] and tuple(kept.prompt) == PROMPT


async def test_a_handle_is_renewed_at_a_third_of_its_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pytest.approx(HANDLE_TTL_NS / 3e9) == keepers._RENEW_S
    monkeypatch.setattr(keepers, "_RENEW_S", 0.02)

    async def grows(expiry: Callable[[], int | None]) -> None:
        first = expiry()
        await until(lambda: (expiry() or 0) > (first or 0))

    def expiry() -> int | None:
        return served.scheduler.list_prefixes()[0].expire_time_ns

    async with served.client() as client:
        handle = await client.build_prefix_cache(PROMPT)
        await grows(expiry)
        await client.delete_prefix(handle.id)  # by someone else: renewing stops, and its use says so
        with pytest.raises(errors.PrefixNotFound):
            await client.complete(prefix=handle)
    with Client(served.address) as blocking:
        handle = await asyncio.to_thread(blocking.build_prefix_cache, PROMPT)
        await grows(expiry)
        await asyncio.to_thread(blocking.close)
    assert served.scheduler.list_prefixes() == []


async def test_the_routing_header_and_the_token_are_sent(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []
    enter = boundary.answering.__aenter__

    async def spy(self: boundary.answering) -> CallRecord:
        call = await enter(self)
        seen.append((call.method, dict(self._context.invocation_metadata())))
        return call

    monkeypatch.setattr(boundary.answering, "__aenter__", spy)
    async with served.client(token="secret") as client:
        await client.create_prefix("p", PROMPT)
        await client.complete(prefix="p", **GREEDY)
        [_ async for _ in client.stream(prefix="p", **GREEDY)]
        await client.get_prefix("p")
        await client.update_prefix("p", pinned=True)
        await client.delete_prefix("p")
        await client.generate(PROMPT, 1)
    assert all(headers["authorization"] == "Bearer secret" for _, headers in seen)
    assert [headers.get(channel.PREFIX_KEY) for _, headers in seen] == ["p"] * 6 + [None]


async def test_a_client_waits_for_a_server_that_warms_up(quiet_logs: list[dict[str, Any]]) -> None:
    gate = threading.Event()

    def load() -> LoadedModel:
        gate.wait()
        return LoadedModel(FakeEngine(), None, CONFIG)

    app = App(Settings(server=SERVER), load)
    await app.start()
    try:
        async with AsyncClient(app.address, timeout=30) as client:
            call = asyncio.create_task(client.complete(PROMPT, **GREEDY))
            streaming = asyncio.create_task(anext(client.stream(PROMPT, **GREEDY)))
            await until(lambda: sum(log["event"] == "refused" for log in quiet_logs) >= 2)
            gate.set()
            assert (await call).token_ids == expected_tokens(PROMPT, 6)
            assert (await streaming).token_ids
    finally:
        gate.set()
        await app.stop(0.0)


async def test_a_stream_that_has_begun_is_not_retried() -> None:
    engine = FakeEngine(step_s=0.005)
    async with serving(engine) as served, served.client() as client:
        stream = client.stream(PROMPT, max_tokens=1900, ignore_eos=True)
        assert (await anext(stream)).token_ids
        stopping = asyncio.create_task(served.app.stop(grace_s=0.0))
        with pytest.raises(errors.Unavailable):
            [_ async for _ in stream]
        await stopping
        assert engine.tokens_prefilled == len(PROMPT), "the request was sent a second time"


async def test_leaving_a_stream_cancels_it() -> None:
    async with serving(FakeEngine(step_s=0.002)) as served:
        async with served.client() as client:
            stream = client.stream(PROMPT, max_tokens=1900, ignore_eos=True)
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
            await served.settled()

        def work(client: Client) -> None:
            stream = client.stream(PROMPT, max_tokens=1900, ignore_eos=True)
            next(stream)
            stream.close()
            assert list(stream) == []
            abandoned = client.stream(PROMPT, max_tokens=1900, ignore_eos=True)
            next(abandoned)
            del abandoned
            gc.collect()
            while client.load().rows_running:
                pass

        await in_thread(served, work)


async def test_timeouts_are_timeout_errors(gated: tuple[Served, threading.Event]) -> None:
    served, gate = gated
    async with served.client(timeout=0.1) as client:
        with pytest.raises(TimeoutError):
            await client.complete(PROMPT)
        with pytest.raises(errors.DeadlineExceeded):
            [_ async for _ in client.stream(PROMPT)]

    def work(client: Client) -> None:
        with pytest.raises(TimeoutError):
            client.generate(PROMPT)
        with pytest.raises(TimeoutError):
            client.stream(PROMPT)

    await in_thread(served, work, timeout=0.1)
    gate.set()
    await served.settled()


async def test_a_server_that_is_not_there() -> None:
    async with AsyncClient("127.0.0.1:1", timeout=20) as client:
        with pytest.raises(errors.Unavailable, match="cannot be reached"):
            await client.delete_prefix("p")  # a method that is not retried


async def test_a_closed_client_says_so(served: Served) -> None:
    client = served.client()
    await client.close()
    with pytest.raises(RuntimeError, match="closed"):
        await client.load()
    with pytest.raises(errors.ModelClosed):
        [_ async for _ in client.stream(PROMPT)]

    def work() -> None:
        blocking = Client(served.address)
        blocking.close()
        blocking.close()
        for call in (blocking.load, lambda: blocking.stream(PROMPT), lambda: blocking.watch_prefix("p")):
            with pytest.raises(RuntimeError, match="closed"):
                call()

    await asyncio.to_thread(work)


async def test_closing_ends_calls_that_wait(gated: tuple[Served, threading.Event]) -> None:
    served, gate = gated
    client = Client(served.address)
    calls = [asyncio.create_task(asyncio.to_thread(client.complete, PROMPT)) for _ in range(3)]
    await until(lambda: served.num_open() == 3)
    await asyncio.to_thread(client.close)
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, errors.ModelClosed)
    gate.set()
    await served.settled()


async def test_a_forked_process_is_told_to_make_its_own_client(served: Served) -> None:
    client = Client(served.address)
    handle = await asyncio.to_thread(client.build_prefix_cache, PROMPT)

    def child() -> int:
        with pytest.raises(errors.ModelClosed, match="before this process was forked"):
            client.complete(prefix=handle)
        client.close()
        return 5

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
        process = os.fork()
    if process == 0:
        try:
            os._exit(child())
        finally:
            os._exit(99)
    _, status = await asyncio.to_thread(os.waitpid, process, 0)
    assert os.waitstatus_to_exitcode(status) == 5
    assert (await asyncio.to_thread(client.complete, prefix=handle, **GREEDY)).usage.cached_tokens == len(PROMPT)
    await asyncio.to_thread(client.close)


async def test_arguments_that_only_named_prefixes_have_are_checked_too(served: Served) -> None:
    async with served.client() as client:
        for field, call in {
            "pinned": client.create_prefix("p", PROMPT, pinned="no"),  # type: ignore[arg-type]
            "wait": client.create_prefix("p", PROMPT, wait=0),  # type: ignore[arg-type]
            "etag": client.delete_prefix("p", etag=b"x"),  # type: ignore[arg-type]
            "text": client.tokenize(b"bytes"),  # type: ignore[arg-type]
            "suffix": client.complete(PROMPT, suffix=3),  # type: ignore[arg-type]
        }.items():
            with pytest.raises(errors.InvalidArgument) as caught:
                await call
            assert caught.value.field == field
        assert await client.list_prefixes() == []


async def test_text_that_a_server_cannot_read_is_the_callers_argument() -> None:
    async with serving() as served, served.client() as client:
        for field, call in {
            "prompt": client.build_prefix_cache("text"),
            "suffix": client.generate_from_prefix_cache("p", suffix="text"),
            "tokens_or_text": client.create_prefix("q", "text"),
            "text": client.tokenize("text"),
        }.items():
            await client.create_prefix("p", PROMPT)
            with pytest.raises(errors.InvalidArgument) as caught:
                await call
            assert caught.value.field == field


async def test_affinity_sends_all_of_one_prefix_to_one_replica() -> None:
    async with serving(FakeEngine(), replica="a") as first, serving(FakeEngine(), replica="b") as second:
        target = "ipv4:" + ",".join((first.address, second.address))
        async with AsyncClient(target, affinity=True, timeout=20) as client:
            for i in range(12):
                await client.create_prefix(f"p{i}", PROMPT)
                for _ in range(3):
                    assert (await client.complete(prefix=f"p{i}", **GREEDY)).usage.cached_tokens == len(PROMPT)
        held = [len(server.scheduler.list_prefixes()) for server in (first, second)]
        assert sum(held) == 12 and min(held) > 0, f"prefixes are not spread: {held}"
        async with AsyncClient(target, timeout=20) as client:
            replicas = {(await client.model()).replica for _ in range(20)}
        assert replicas == {"a", "b"}


async def test_affinity_goes_round_a_replica_that_drains_or_warms_up() -> None:
    gate, names = threading.Event(), [f"p{i}" for i in range(12)]

    def load() -> LoadedModel:
        gate.wait()
        return LoadedModel(FakeEngine(), None, CONFIG)

    late = App(Settings(server=SERVER), load)
    await late.start()
    try:
        async with serving(FakeEngine(step_s=0.002)) as first, serving() as second:
            target = "ipv4:" + ",".join((first.address, second.address, late.address))
            async with AsyncClient(target, affinity=True, timeout=30) as client:
                for name in names:
                    await client.create_prefix(name, PROMPT)
                held = [{info.name for info in server.scheduler.list_prefixes()} for server in (first, second)]
                assert all(held) and sum(map(len, held)) == 12, "both have some, who is not ready has none"
                stream = client.stream(prefix=held[0].pop(), max_tokens=500, ignore_eos=True)
                pieces = [await anext(stream)]
                stopping = asyncio.create_task(first.app.stop(grace_s=30.0))
                await until(lambda: not first.scheduler.load().accepting)
                for name in names:
                    await client.create_prefix(name, PROMPT)
                assert {info.name for info in second.scheduler.list_prefixes()} == set(names)
                pieces += [piece async for piece in stream]
                assert sum(len(piece.token_ids) for piece in pieces) == 500, "what ran there has finished"
                await stopping
                gate.set()
                await late.ready()
                async with asyncio.timeout(20):
                    while not late._backend.scheduler.list_prefixes():  # its names come home
                        await asyncio.gather(*(client.create_prefix(name, PROMPT) for name in names))
    finally:
        gate.set()
        await late.stop(0.0)


def test_affinity_says_when_grpc_is_told_not_to_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(channel._RING_HASH_SWITCH, "false")
    for kind in (Client, AsyncClient):
        with pytest.raises(errors.InvalidArgument, match="unset it, or set it to true") as caught:
            kind("127.0.0.1:1", affinity=True)
        assert caught.value.field == "affinity"
        kind("127.0.0.1:1")
    monkeypatch.delenv(channel._RING_HASH_SWITCH)
    Client("127.0.0.1:1", affinity=True).close()


async def test_a_full_server_is_waited_for() -> None:
    engine = FakeEngine(step_s=0.001)
    async with serving(engine, scheduler=SchedulerSettings(max_queue=4)) as served, served.client(timeout=60) as client:
        results = await asyncio.gather(
            *(client.complete((1, i), max_tokens=20, ignore_eos=True) for i in range(1, 120)), return_exceptions=True
        )
        done = [result for result in results if not isinstance(result, BaseException)]
        assert all(isinstance(r, errors.QueueFull) for r in results if isinstance(r, BaseException))
        assert len(done) > 64


def test_credentials(tmp_path: Any) -> None:
    assert channel.credentials(None) is None and channel.credentials(False) is None
    given = grpc.ssl_channel_credentials()
    assert channel.credentials(given) is given
    assert isinstance(channel.credentials(True), grpc.ChannelCredentials)
    roots = tmp_path / "ca.pem"
    roots.write_bytes(b"-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n")
    assert isinstance(channel.credentials(roots), grpc.ChannelCredentials)
    with pytest.raises(OSError):
        channel.credentials(tmp_path / "missing.pem")


async def test_replica_names_default_to_the_host(served: Served) -> None:
    app = App(Settings(server=replace(SERVER, replica=None)), lambda: LoadedModel(FakeEngine(), None, CONFIG))
    await app.start()
    await app.ready()
    async with AsyncClient(app.address) as client:
        assert (await client.model()).replica
    await app.stop(0.0)
