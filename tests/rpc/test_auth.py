"""Who may call, against a real server: tokens, rights, reloads, quotas on the wire."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from rpc_harness import CONFIG, SERVER, Served, byte_tokenizer, collect, ids, reason_of, serving, until
from tenants_harness import ADMIN, KNOWN, READER, STRANGER, A, B, bearer, write_tokens

from tinyloop_service import errors
from tinyloop_service.app import App
from tinyloop_service.engine.fake import FakeEngine
from tinyloop_service.loading import LoadedModel
from tinyloop_service.pb import generation_pb2 as g
from tinyloop_service.pb import model_pb2, model_pb2_grpc
from tinyloop_service.pb import prefix_pb2 as p
from tinyloop_service.rpc import tokens
from tinyloop_service.rpc.auth import RIGHTS
from tinyloop_service.rpc.health import READY_SERVICE
from tinyloop_service.rpc.status import DETAILS_KEY
from tinyloop_service.settings import Settings

SERVICES = [
    *p.DESCRIPTOR.services_by_name.values(),
    *g.DESCRIPTOR.services_by_name.values(),
    *model_pb2.DESCRIPTOR.services_by_name.values(),
    *reflection_pb2.DESCRIPTOR.services_by_name.values(),
]
METHODS = [f"/{service.full_name}/{method.name}" for service in SERVICES for method in service.methods]


@pytest.fixture
def quick_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "LOOK_EVERY_S", 0.01)


@pytest.fixture
async def guarded(tmp_path: Path, quick_reload: None) -> AsyncIterator[Served]:
    path = write_tokens(tmp_path / "tokens.toml")
    async with serving(tokenizer=byte_tokenizer(), tokens_file=str(path), reflection=True) as served:
        yield served


def generation(**fields: Any) -> g.GenerateRequest:
    return g.GenerateRequest(**{"input": ids(1, 2), "max_tokens": 3, "ignore_eos": True, **fields})


async def refused(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (collect(call) if hasattr(call, "__aiter__") else call)
    return reason_of(caught.value)


def test_every_method_has_its_right() -> None:
    assert set(RIGHTS) == set(METHODS)


@pytest.mark.parametrize("method", [*METHODS, "/tinyloop.v1.PrefixService/NoSuchMethod", "/no.such.Service/Method"])
async def test_nobody_is_let_in_without_a_token(guarded: Served, method: str) -> None:
    """Whatever the method, and whatever is in the request: it is not even read."""
    call = guarded.channel.unary_unary(method, request_serializer=lambda raw: raw)
    for metadata in (
        (),
        bearer(STRANGER),
        bearer(""),
        (("authorization", A),),
        (("authorization", f"Basic {A}"),),
        (*bearer(A), *bearer(STRANGER)),
        (("x-authorization", f"Bearer {A}"),),
    ):
        assert await refused(call(b"\xff no message", metadata=metadata)) == ("UNAUTHENTICATED", "UNAUTHENTICATED")


async def test_a_token_is_taken_however_its_scheme_is_spelled(guarded: Served) -> None:
    for value in (f"Bearer {A}", f"bearer {A}", f"BEARER  {A} "):
        await guarded.model.GetModel(model_pb2.GetModelRequest(), metadata=(("authorization", value),))


async def test_a_known_caller_hears_of_methods_that_are_not_there(guarded: Served) -> None:
    call = guarded.channel.unary_unary("/no.such.Service/Method", Empty.SerializeToString)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(Empty(), metadata=bearer(READER))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_rights_are_needed_and_are_enough(guarded: Served) -> None:
    denied = ("PERMISSION_DENIED", "PERMISSION_DENIED")
    create = p.CreatePrefixRequest(prefix_id="p", input=ids(1, 2, 3))
    reflect = reflection_pb2_grpc.ServerReflectionStub(guarded.channel).ServerReflectionInfo
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    for token in (READER, ADMIN):
        assert await refused(guarded.prefixes.CreatePrefix(create, metadata=bearer(token))) == denied
        for method in ("UpdatePrefix", "DeletePrefix"):
            request = getattr(p, f"{method}Request")()
            assert await refused(getattr(guarded.prefixes, method)(request, metadata=bearer(token))) == denied
    missing = generation(prefix="prefixes/p", create_if_missing=p.CreatePrefixRequest(input=ids(1)))
    assert await refused(guarded.generation.Generate(missing, metadata=bearer(READER))) == denied
    assert await refused(guarded.generation.Generate(generation(), metadata=bearer(ADMIN))) == denied
    unary = g.GenerateUnaryRequest(generation=generation())
    assert await refused(guarded.generation.GenerateUnary(unary, metadata=bearer(ADMIN))) == denied
    assert await refused(reflect(iter([asked]), metadata=bearer(A))) == denied

    assert await collect(guarded.generation.Generate(missing, metadata=bearer(A)))
    assert await collect(guarded.generation.Generate(generation(prefix="prefixes/p"), metadata=bearer(READER)))
    listed = await guarded.prefixes.ListPrefixes(p.ListPrefixesRequest(), metadata=bearer(READER))
    assert [prefix.name for prefix in listed.prefixes] == ["prefixes/p"], "one tenant, whichever of its tokens"
    assert await collect(reflect(iter([asked]), metadata=bearer(ADMIN)))


async def test_clients_raise_what_the_server_says(guarded: Served) -> None:
    for token, error in ((None, errors.Unauthenticated), (STRANGER, errors.Unauthenticated)):
        async with guarded.client(token=token) as client:
            with pytest.raises(error) as caught:
                await client.model()
            assert isinstance(caught.value, PermissionError) and STRANGER not in str(caught.value)
    async with guarded.client(token=READER) as client:
        with pytest.raises(errors.PermissionDenied, match="'build'"):
            await client.build_prefix_cache((1, 2))
        assert (await client.complete((1, 2), max_tokens=3)).token_ids


async def test_a_server_that_warms_up_asks_for_tokens_too_and_its_health_does_not(tmp_path: Path) -> None:
    gate = threading.Event()

    def load() -> LoadedModel:
        gate.wait()
        return LoadedModel(FakeEngine(), None, CONFIG)

    path = write_tokens(tmp_path / "tokens.toml")
    app = App(Settings(server=replace(SERVER, tokens_file=str(path), health_listen="127.0.0.1:0")), load)
    await app.start()
    try:
        for address in (app.health_address, app.address):
            async with grpc.aio.insecure_channel(address) as channel:
                check = health_pb2_grpc.HealthStub(channel).Check
                assert (await check(health_pb2.HealthCheckRequest(service=""))).status == 1
                assert (await check(health_pb2.HealthCheckRequest(service=READY_SERVICE))).status == 2
        async with grpc.aio.insecure_channel(app.address, (("grpc.enable_retries", 0),)) as channel:
            get = model_pb2_grpc.ModelServiceStub(channel).GetModel
            assert (await refused(get(model_pb2.GetModelRequest())))[1] == "UNAUTHENTICATED"
            assert (await refused(get(model_pb2.GetModelRequest(), metadata=bearer(A))))[1] == "WARMING_UP"
    finally:
        gate.set()
        await app.stop(0.0)


async def answers(served: Served, token: str) -> bool:
    """Whether the token is known."""
    try:
        await served.model.GetModel(model_pb2.GetModelRequest(), metadata=bearer(token))
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        return False
    return True


async def eventually(served: Served, token: str, known: bool) -> None:
    async with asyncio.timeout(20):
        while await answers(served, token) is not known:
            pass


async def test_tokens_are_replaced_without_a_restart_and_running_streams_go_on(
    tmp_path: Path, quick_reload: None
) -> None:
    gate = threading.Event()
    path = write_tokens(tmp_path / "tokens.toml", {A: ("a", "generate")})
    async with serving(FakeEngine(gate=gate), tokens_file=str(path)) as served:
        running = asyncio.create_task(collect(served.generation.Generate(generation(), metadata=bearer(A))))
        await until(lambda: served.num_open() == 1)
        write_tokens(path, {B: ("a", "generate")})
        await eventually(served, B, True)
        assert not await answers(served, A)
        gate.set()
        assert (await running)[-1].WhichOneof("output") == "completed"


async def test_a_file_that_cannot_be_understood_changes_nothing_and_is_logged_once(
    tmp_path: Path, quick_reload: None, quiet_logs: list[dict[str, Any]]
) -> None:
    path = write_tokens(tmp_path / "tokens.toml", {A: ("a", "generate")})

    def complaints() -> list[str]:
        return [line["error"] for line in quiet_logs if line["event"] == "the old tokens stay"]

    async with serving(tokens_file=str(path)) as served:
        path.write_text("[[token]]\ntenant = 3\n")
        await until(lambda: len(complaints()) == 1)
        assert await answers(served, A) and "token 1: tenant" in complaints()[0]
        path.unlink()
        await until(lambda: len(complaints()) == 2)
        assert await answers(served, A) and "No such file" in complaints()[1]
        path.write_text("token = " + "[" * 10_000)
        await until(lambda: len(complaints()) == 3)
        assert await answers(served, A) and "is no TOML" in complaints()[2]
        write_tokens(path, {B: ("a", "generate")})
        await eventually(served, B, True)
        assert len(complaints()) == 3 and not await answers(served, A)


async def test_a_file_that_is_wrong_from_the_start_ends_the_start(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text("token = []")
    with pytest.raises(errors.InvalidArgument, match="tokens_file"):
        async with serving(tokens_file=str(path)):
            pass


async def test_quotas_reach_the_caller_and_change_with_the_file(tmp_path: Path, quick_reload: None) -> None:
    path = write_tokens(tmp_path / "tokens.toml", quotas="[quotas.a]\nprefix_bytes = 1\ntokens_per_s = 1")
    async with serving(tokens_file=str(path)) as served, served.client(token=A) as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            request = p.CreatePrefixRequest(prefix_id="p", input=ids(1, 2, 3))
            await served.prefixes.CreatePrefix(request, metadata=bearer(A))
        assert reason_of(caught.value) == ("RESOURCE_EXHAUSTED", "TENANT_QUOTA")
        failure = error_details_pb2.QuotaFailure()
        status = status_pb2.Status.FromString(dict(caught.value.trailing_metadata() or ())[DETAILS_KEY])
        assert any(detail.Unpack(failure) for detail in status.details)
        assert failure.violations[0].subject == "prefix_bytes"
        with pytest.raises(errors.TenantQuotaExceeded, match="delete a prefix") as refusal:
            await client.create_prefix("p", (1, 2, 3))
        assert (refusal.value.subject, refusal.value.retry_after_s) == ("prefix_bytes", None)
        await client.complete((1, 2), max_tokens=30, ignore_eos=True)  # a debt of 22 s
        with pytest.raises(errors.TenantQuotaExceeded) as refusal:
            await client.complete((1, 2), max_tokens=30)
        assert refusal.value.subject == "tokens_per_s" and 10 < (refusal.value.retry_after_s or 0) < 23
        async with served.client(token=B) as other:
            await other.create_prefix("p", (1, 2, 3))
        write_tokens(path)
        await until(lambda: served.scheduler._core._quotas.balance("a", 0) == float("inf"))
        await client.create_prefix("p", (1, 2, 3))
        await client.complete((1, 2), max_tokens=30)


async def test_requests_beyond_a_quota_wait_and_give_the_same_tokens(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "tokens.toml", quotas="[quotas.a]\nconcurrent_requests = 2\nqueued_requests = 8")
    async with serving(tokens_file=str(path)) as served, served.client(token=A) as client:
        await client.create_prefix("p", tuple(range(1, 100)))
        batch = await client.complete_batch("p", [(i,) for i in range(1, 11)], max_tokens=5, ignore_eos=True)
        async with served.client(token=B) as other:
            alone = [await other.complete((*range(1, 100), i), max_tokens=5, ignore_eos=True) for i in range(1, 11)]
        assert [one.token_ids for one in batch] == [one.token_ids for one in alone]


async def test_the_log_names_tenants_and_no_tokens(guarded: Served, quiet_logs: list[dict[str, Any]]) -> None:
    await guarded.model.GetModel(model_pb2.GetModelRequest(), metadata=bearer(A))
    await refused(guarded.generation.Generate(generation(), metadata=bearer(ADMIN)))
    await refused(guarded.channel.unary_unary("/words.of/Strangers", Empty.SerializeToString)(Empty()))
    lines = [line for line in quiet_logs if "method" in line]
    assert [(line["event"], line["method"], line.get("tenant")) for line in lines] == [
        ("answered", "GetModel", "a"),
        ("refused", "Generate", "operators"),
        ("refused", "Unknown", None),
    ]
    assert "words" not in str(lines)
    await refused(guarded.model.GetModel(model_pb2.GetModelRequest(), metadata=bearer(STRANGER)))
    assert not any(secret in str(quiet_logs) for secret in (*KNOWN, STRANGER))


async def test_without_a_tokens_file_everybody_may_do_everything(served: Served) -> None:
    async with served.client(token=STRANGER) as client:
        await client.create_prefix("p", (1, 2))
        assert (await client.load()).prefixes_ready == 1
    assert [info.tenant for info in served.scheduler.list_prefixes()] == [""]
