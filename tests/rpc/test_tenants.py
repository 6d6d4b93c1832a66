"""T12, real server: another tenant's prefix is answered as one that was never made, in words, work and time."""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import grpc
import pytest
import redis
from google.protobuf.field_mask_pb2 import FieldMask
from rpc_harness import Served, ids, reason_of, refusal, serving
from server_process import server_process
from tenants_harness import ADMIN, A, B, bearer, write_tokens

import tinyloop_service
from tinyloop_service.pb import generation_pb2 as g
from tinyloop_service.pb import generation_pb2_grpc, model_pb2, prefix_pb2_grpc
from tinyloop_service.pb import prefix_pb2 as p
from tinyloop_service.rpc import tokens
from tinyloop_service.settings import NamesSettings
from tinyloop_service.types import PrefixState

PROMPT = tuple(range(1, 150))
THEIRS, NOBODYS = "prefixes/theirs", "prefixes/nobody"  # as long as each other
PACKAGE = str(Path(tinyloop_service.__file__).parent)


@pytest.fixture
async def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    """A server where tenant a has the prefix `theirs`, and an expired one."""
    monkeypatch.setattr(tokens, "LOOK_EVERY_S", 3600)  # nothing else runs while lines are counted
    async with serving_tenants(tmp_path, "memory") as served:
        yield served


@pytest.fixture(params=["memory", "sqlite", "redis"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Each place where names are remembered, empty."""
    if request.param != "redis":
        return {"memory": "memory", "sqlite": f"sqlite:///{tmp_path}/names"}[request.param]
    url: str = request.getfixturevalue("redis_server").url
    with redis.Redis.from_url(url) as database:
        database.flushdb()
    return url


@pytest.fixture
async def remembered(registry: str, tmp_path: Path) -> AsyncIterator[Served]:
    """The same, wherever names are remembered."""
    async with serving_tenants(tmp_path, registry) as served:
        yield served


@asynccontextmanager
async def serving_tenants(folder: Path, registry: str) -> AsyncIterator[Served]:
    path = write_tokens(folder / "tokens.toml")
    async with serving(tokens_file=str(path), names=NamesSettings(registry=registry)) as served:
        async with served.client(token=A) as client:
            await client.create_prefix("theirs", PROMPT)
        served.scheduler._core._prefixes.expire_name("a", "expired")  # as when its time has come
        yield served


def create(prefix_id: str, **fields: Any) -> p.CreatePrefixRequest:
    return p.CreatePrefixRequest(prefix_id=prefix_id, **{"input": ids(*PROMPT), **fields})


def generate(name: str) -> g.GenerateRequest:
    return g.GenerateRequest(prefix=name, input=ids(5), max_tokens=3)


class Stubs(NamedTuple):
    """What calls go through; a `Served` has them too."""

    prefixes: Any
    generation: Any


# By method: a call on a name, as tenant b.
CALLS: dict[str, Callable[[Served | Stubs, str], Any]] = {
    "get": lambda served, name: served.prefixes.GetPrefix(p.GetPrefixRequest(name=name), metadata=bearer(B)),
    "update": lambda served, name: served.prefixes.UpdatePrefix(
        p.UpdatePrefixRequest(prefix=p.Prefix(name=name, pinned=True), update_mask=FieldMask(paths=["pinned"])),
        metadata=bearer(B),
    ),
    "delete": lambda served, name: served.prefixes.DeletePrefix(p.DeletePrefixRequest(name=name), metadata=bearer(B)),
    "watch": lambda served, name: served.prefixes.WatchPrefix(p.WatchPrefixRequest(name=name), metadata=bearer(B)),
    "create below it": lambda served, name: served.prefixes.CreatePrefix(
        create("child", parent=name), metadata=bearer(B)
    ),
    "generate": lambda served, name: served.generation.Generate(generate(name), metadata=bearer(B)),
    "generate unary": lambda served, name: served.generation.GenerateUnary(
        g.GenerateUnaryRequest(generation=generate(name)), metadata=bearer(B)
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_another_tenants_name_is_answered_as_an_unknown_one(
    remembered: Served, call: Callable[[Served, str], Any]
) -> None:
    for name in (THEIRS, "prefixes/expired"):
        known, unknown = await refusal(call(remembered, name)), await refusal(call(remembered, NOBODYS))
        assert reason_of(known) == reason_of(unknown) == ("NOT_FOUND", "PREFIX_NOT_FOUND")
        bare = [(error.details() or "").replace(n[9:], "NAME") for error, n in ((known, name), (unknown, NOBODYS))]
        assert bare[0] == bare[1] and "NAME" in bare[0]
        keys = [[key for key, _ in error.trailing_metadata() or ()] for error in (known, unknown)]
        assert keys[0] == keys[1]
    async with remembered.client(token=A) as client:
        theirs = await client.get_prefix("theirs")
        assert theirs.state is PrefixState.READY and not theirs.pinned and theirs.use_count == 0


@contextmanager
def lines_run() -> Iterator[list[tuple[str, int]]]:
    """Every line of ours that runs in this thread, which is also the server's, in order."""
    lines: list[tuple[str, int]] = []

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            lines.append((frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_lineno))
        return trace

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)
        gc.enable()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_it_takes_the_same_work_line_by_line(shared: Served, call: Callable[[Served, str], Any]) -> None:
    """What a clock could tell apart only with luck is told apart here for certain."""
    await refusal(call(shared, NOBODYS))  # what happens once has happened
    runs = []
    for name in (THEIRS, NOBODYS):
        with lines_run() as lines:
            await refusal(call(shared, name))
        runs.append(lines)
    assert len(runs[0]) > 30 and any("/scheduler/" in file for file, _ in runs[0])
    assert runs[0] == runs[1]


def rank_sum(one: list[float], other: list[float]) -> float:
    """How many standard deviations the rank sum of `one` lies from what equal distributions give (Mann, Whitney)."""
    ranks = {value: rank for rank, value in enumerate(sorted([*one, *other]), 1)}
    n, m = len(one), len(other)
    excess = sum(ranks[value] for value in one) - n * (n + m + 1) / 2
    return float(excess / (n * m * (n + m + 1) / 12) ** 0.5)


async def test_it_takes_the_same_time(registry: str, tmp_path: Path) -> None:
    """In a server process, wherever names are remembered.  Names take turns in random order, so whatever the machine
    does meanwhile befalls both alike: beyond five standard deviations by chance is one in a million runs.  That a
    difference would be seen is seen with one that is added."""
    tokens_file = write_tokens(tmp_path / "tokens.toml")
    async with (
        server_process(registry=registry, tokens_file=tokens_file, log_level="error") as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stubs = Stubs(prefix_pb2_grpc.PrefixServiceStub(channel), generation_pb2_grpc.GenerationServiceStub(channel))
        await stubs.prefixes.CreatePrefix(create("theirs"), metadata=bearer(A))
        for method in ("get", "generate"):
            took: dict[str, list[float]] = {THEIRS: [], NOBODYS: []}
            order = [THEIRS, NOBODYS] * 200
            random.Random(time.time_ns()).shuffle(order)
            for name in order:
                begin = time.perf_counter()
                await refusal(CALLS[method](stubs, name))
                took[name].append(time.perf_counter() - begin)
            assert abs(rank_sum(took[THEIRS], took[NOBODYS])) < 5, method
            tenths = statistics.quantiles(took[NOBODYS], n=10)
            assert rank_sum([value + tenths[-1] - tenths[0] for value in took[THEIRS]], took[NOBODYS]) > 5


async def test_tenants_have_their_own_names_lists_and_contents(remembered: Served) -> None:
    async with (
        remembered.client(token=A) as a,
        remembered.client(token=B) as b,
        remembered.client(token=ADMIN) as admin,
    ):
        mine = await b.create_prefix("theirs", (1, 2, 3))
        assert mine.uid != (await a.get_prefix("theirs")).uid
        built = remembered.engine.tokens_prefilled
        same = await b.create_prefix("same", PROMPT)  # equal tokens, nothing shared: it would show in the time
        assert remembered.engine.tokens_prefilled == built + len(PROMPT) and same.shared_bytes == 0
        assert [prefix.id for prefix in await a.list_prefixes()] == ["theirs"]
        assert [prefix.id for prefix in await b.list_prefixes()] == ["same", "theirs"]
        assert await admin.list_prefixes() == [], "no right reaches what is another tenant's"
        await b.delete_prefix("theirs")
        assert [prefix.id for prefix in await a.list_prefixes()] == ["theirs"]
        completion = await a.complete(prefix="theirs", suffix=(5,), max_tokens=2, ignore_eos=True)
        assert completion.usage.cached_tokens == len(PROMPT)


async def test_page_tokens_and_request_ids_of_one_tenant_mean_nothing_to_another(shared: Served) -> None:
    async with shared.client(token=A) as client:
        await client.create_prefix("x", (1,))
    page = await shared.prefixes.ListPrefixes(p.ListPrefixesRequest(page_size=1), metadata=bearer(A))
    further = p.ListPrefixesRequest(page_token=page.next_page_token)
    assert page.next_page_token and not (await shared.prefixes.ListPrefixes(further, metadata=bearer(B))).prefixes
    key = str(uuid.uuid4())
    made = [
        await shared.prefixes.CreatePrefix(create("", input=ids(*prompt), request_id=key), metadata=bearer(token))
        for token, prompt in ((A, (1, 2)), (B, (3, 4, 5)), (A, (1, 2)))
    ]
    assert made[0].uid == made[2].uid != made[1].uid and made[0].name != made[1].name


async def test_the_load_is_the_callers_own_but_for_admins(shared: Served) -> None:
    whole, own, none = [
        await shared.model.GetLoad(model_pb2.GetLoadRequest(), metadata=bearer(token)) for token in (ADMIN, A, B)
    ]
    assert whole.prefixes_ready == own.prefixes_ready == 1 and none.prefixes_ready == 0
    assert whole.pages_prefixes == own.pages_prefixes > 0 == none.pages_prefixes
    assert none.pages_free == none.pages_total == whole.pages_total and none.accepting
