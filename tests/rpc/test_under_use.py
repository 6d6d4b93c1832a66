"""T5 against a server process: a name ends, or the server does, while 32 streams use the prefix."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from rpc_harness import collect, expected_tokens, ids, reason_of, refusal
from server_process import NO_RETRIES, SERVING, ServerProcess, health, server_process

from tinyloop_service.pb import generation_pb2 as g
from tinyloop_service.pb import generation_pb2_grpc, model_pb2, model_pb2_grpc, prefix_pb2_grpc
from tinyloop_service.pb import prefix_pb2 as p

NUM_STREAMS, NUM_TOKENS = 32, 100  # two seconds, for all of them to begin
PROMPT, OTHER = tuple(range(1, 151)), tuple(range(300, 100, -1))
NAME = "prefixes/p"


@dataclass(frozen=True)
class Used:
    """A server, and streams that decode from the prefix p."""

    server: ServerProcess
    prefixes: Any
    generation: Any
    model: Any
    streams: list[asyncio.Task[list[Any]]]

    def generate(self, token: int, max_tokens: int = NUM_TOKENS) -> Any:
        return self.generation.Generate(
            g.GenerateRequest(prefix=NAME, input=ids(token), max_tokens=max_tokens, ignore_eos=True)
        )

    async def load(self) -> Any:
        return await self.model.GetLoad(model_pb2.GetLoadRequest())

    async def finish(self) -> None:
        """Every stream ends as if nothing had happened, and what the prefix held comes back."""
        for i, messages in enumerate(await asyncio.gather(*self.streams), 1):
            assert tokens_of(messages) == expected_tokens((*PROMPT, i), NUM_TOKENS)

    async def until_held(self, pages: int) -> None:
        async with asyncio.timeout(20):
            while (load := await self.load()).pages_free != load.pages_total - pages:
                pass


def tokens_of(messages: list[Any]) -> tuple[int, ...]:
    return tuple(token for message in messages for token in message.delta.token_ids)


@asynccontextmanager
async def in_use(max_tokens: int = NUM_TOKENS, **settings: object) -> AsyncIterator[Used]:
    async with (
        server_process(step_s=0.02, steps_per_plan=1, **settings) as server,
        grpc.aio.insecure_channel(server.address, NO_RETRIES) as channel,
    ):
        stubs = (
            prefix_pb2_grpc.PrefixServiceStub(channel),
            generation_pb2_grpc.GenerationServiceStub(channel),
            model_pb2_grpc.ModelServiceStub(channel),
        )
        used = Used(server, *stubs, [])
        await used.prefixes.CreatePrefix(p.CreatePrefixRequest(prefix_id="p", input=ids(*PROMPT)))
        calls = [used.generate(i, max_tokens) for i in range(1, NUM_STREAMS + 1)]
        used.streams.extend(asyncio.create_task(collect(call)) for call in calls)
        async with asyncio.timeout(60):
            while (await used.load()).rows_running < NUM_STREAMS:
                pass
        yield used


async def test_a_name_that_is_deleted_under_use_is_free_at_once_and_streams_finish() -> None:
    async with in_use() as used:
        await used.prefixes.DeletePrefix(p.DeletePrefixRequest(name=NAME))
        for call in (used.prefixes.GetPrefix(p.GetPrefixRequest(name=NAME)), used.generate(1)):
            assert reason_of(await refusal(call)) == ("NOT_FOUND", "PREFIX_NOT_FOUND")
        made = await used.prefixes.CreatePrefix(p.CreatePrefixRequest(prefix_id="p", input=ids(*OTHER)))
        assert tokens_of(await collect(used.generate(7))) == expected_tokens((*OTHER, 7), NUM_TOKENS)
        await used.finish()
        await used.until_held(made.size_bytes // (await used.load()).page_bytes)


async def test_a_name_that_expires_under_use_says_so_and_streams_finish() -> None:
    async with in_use() as used:
        update = p.UpdatePrefixRequest(prefix=p.Prefix(name=NAME), update_mask=FieldMask(paths=["ttl"]))
        update.prefix.ttl.FromMilliseconds(50)
        assert not (await used.prefixes.UpdatePrefix(update)).pinned
        with pytest.raises(grpc.aio.AioRpcError):
            while True:
                await used.prefixes.GetPrefix(p.GetPrefixRequest(name=NAME))
        for call in (used.prefixes.GetPrefix(p.GetPrefixRequest(name=NAME)), used.generate(1)):
            assert reason_of(await refusal(call)) == ("NOT_FOUND", "PREFIX_EXPIRED")
        await used.finish()
        await used.until_held(0)


@pytest.mark.parametrize("num_signals", [1, 2], ids=["its grace runs out", "a second signal"])
async def test_a_server_that_ends_under_use_tells_every_stream(num_signals: int) -> None:
    async with in_use(1000, drain_grace_s=0.1 if num_signals == 1 else 3600) as used:
        used.server.process.send_signal(signal.SIGTERM)
        if num_signals == 2:
            while await health(used.server.health_address) == SERVING:
                pass
            used.server.process.send_signal(signal.SIGTERM)
        for ended in await asyncio.gather(*used.streams, return_exceptions=True):
            assert isinstance(ended, grpc.aio.AioRpcError) and ended.code() is grpc.StatusCode.UNAVAILABLE
            if num_signals == 1:
                assert reason_of(ended) == ("UNAVAILABLE", "MODEL_CLOSED")
        async with asyncio.timeout(30):
            await used.server.process.communicate()
        assert used.server.process.returncode == num_signals - 1
