"""A real server on a free port, with the fake engine behind it, in the test's own event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import grpc
import pytest
import tokenizers
from google.rpc import error_details_pb2, status_pb2
from tokenizers import decoders, models, pre_tokenizers

from tinyloop_service.app import App
from tinyloop_service.client import AsyncClient
from tinyloop_service.engine.fake import FAKE_LIMITS, FakeEngine
from tinyloop_service.engine.fake import expected_tokens as expected_of_segments
from tinyloop_service.loading import LoadedModel
from tinyloop_service.pb import generation_pb2_grpc, input_pb2, model_pb2_grpc, prefix_pb2_grpc
from tinyloop_service.rpc.status import DETAILS_KEY
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.settings import NamesSettings, SchedulerSettings, ServerSettings, Settings
from tinyloop_service.text import Tokenizer
from tinyloop_service.types import Sampling, TokenIds

BOS = 257
CONFIG: dict[str, Any] = {
    "vocab_size": FAKE_LIMITS.vocab_size,
    "d_model": 256,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 64,
    "d_ff": 768,
    "pre_blocks": 1,
    "loop_blocks": 1,
    "post_blocks": 0,
    "default_loops": 2,
    "max_loops": 16,
    "max_seq_len": FAKE_LIMITS.max_seq_len,
    "rope_theta": 10000.0,
    "rope_pairing": "half",
    "norm_eps": 1e-5,
    "norm_placement": "pre",
    "loop_norm": False,
    "inject": "none",
    "tie_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_ids": [0],
    "quant": {"bits": 4, "group_size": 128},
}
SERVER = ServerSettings(
    listen="127.0.0.1:0",
    health_listen=None,
    replica="replica-0",
    drain_grace_s=5.0,
    grpc_processes=int(os.environ.get("TINYLOOP_GRPC_PROCESSES", "0")),  # so that all tests can be run either way
)


@cache
def byte_tokenizer() -> Tokenizer:
    """Token 1 + i is one byte, 0 ends a text, 257 begins it; the fake engine's other ids are padding words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": 0, **{symbol: 1 + i for i, symbol in enumerate(alphabet)}, "<bos>": BOS}
    vocab |= {f"<{i}>": i for i in range(len(vocab), FAKE_LIMITS.vocab_size)}
    library = tokenizers.Tokenizer(models.BPE(vocab, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return Tokenizer(library.to_str().encode(), BOS)


@dataclass(frozen=True)
class Served:
    """A running server and ways to talk to it."""

    app: App
    engine: FakeEngine
    channel: grpc.aio.Channel

    @property
    def address(self) -> str:
        return self.app.address

    @property
    def scheduler(self) -> Scheduler:
        assert self.app._scheduler is not None
        return self.app._scheduler

    @property
    def prefixes(self) -> Any:
        return prefix_pb2_grpc.PrefixServiceStub(self.channel)

    @property
    def generation(self) -> Any:
        return generation_pb2_grpc.GenerationServiceStub(self.channel)

    @property
    def model(self) -> Any:
        return model_pb2_grpc.ModelServiceStub(self.channel)

    def client(self, **options: Any) -> AsyncClient:
        return AsyncClient(self.address, **options)

    def num_open(self) -> int:
        """Requests that run or wait."""
        load = self.scheduler.load()
        return load.rows_running + load.requests_waiting

    async def settled(self) -> None:
        """Wait until nothing runs and every page is free or a prefix's."""
        await until(lambda: self.is_idle())

    def is_idle(self) -> bool:
        load = self.scheduler.load()
        return not (load.rows_running or load.requests_waiting or load.pages_requests or load.prefixes_building)


async def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Poll; only a failing test waits for the limit."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110, any condition, none of ours to signal
            await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(
    engine: FakeEngine | None = None,
    *,
    scheduler: SchedulerSettings | None = None,
    tokenizer: Tokenizer | None = None,
    names: NamesSettings | None = None,
    **server: Any,
) -> AsyncIterator[Served]:
    engine = engine or FakeEngine()
    settings = Settings(
        scheduler=scheduler or SchedulerSettings(),
        server=replace(SERVER, **server),
        names=names or NamesSettings(),
    )
    app = App(settings, lambda: LoadedModel(engine, tokenizer, CONFIG))
    await app.start()
    try:
        await app.ready()
        async with grpc.aio.insecure_channel(app.address) as channel:
            yield Served(app, engine, channel)
    finally:
        if engine._gate is not None:
            engine._gate.set()
        await app.stop(grace_s=0.0)


def expected_tokens(prompt: TokenIds, max_tokens: int, loops: int = FAKE_LIMITS.default_loops) -> TokenIds:
    """What the fake engine generates greedily after `prompt`, by its oracle without pages."""
    return expected_of_segments([(prompt, 0)], max_tokens, Sampling(), loops, FAKE_LIMITS)


def ids(*tokens: int) -> input_pb2.Input:
    return input_pb2.Input(tokens=input_pb2.Tokens(ids=tokens))


async def collect(call: Any) -> list[Any]:
    """All messages of a stream."""
    return [message async for message in call]


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    """The status that a call, unary or a stream, ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (collect(call) if hasattr(call, "__aiter__") else call)
    return caught.value


def reason_of(error: grpc.aio.AioRpcError) -> tuple[str, str]:
    """(code, reason) of a refusal; asserts that it carries ErrorInfo of our domain and the request id."""
    trailers = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailers[DETAILS_KEY])
    assert status.code == error.code().value[0] and status.message == error.details()
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info), "the first detail is ErrorInfo"
    assert info.domain == "tinyloop" and info.metadata["request_id"] == trailers["x-request-id"]
    return error.code().name, info.reason


def field_of(error: grpc.aio.AioRpcError) -> str:
    """The field that a refusal names."""
    status = status_pb2.Status.FromString(dict(error.trailing_metadata() or ())[DETAILS_KEY])
    bad = error_details_pb2.BadRequest()
    assert any(detail.Unpack(bad) for detail in status.details), f"no field violation in {error.details()!r}"
    return bad.field_violations[0].field
