"""Processes that speak gRPC in front of the engine's: what is theirs alone.  That they answer as a server without them
does is asked in other modules, where `served` is either (conftest.py)."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority
from fronts_harness import (
    FRONTS,
    children,
    command_line,
    fronts_of,
    in_front,
    living,
    pid_of,
    request,
    resident,
    served_model,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from rpc_harness import CONFIG, SERVER, collect, expected_tokens, reason_of, refusal, serving, until
from scraping import scrape
from server_process import NO_RETRIES, NOT_SERVING, SERVING, server_process, start_server

from tinyloop_service import app as app_module
from tinyloop_service.app import App
from tinyloop_service.engine.fake import FakeEngine
from tinyloop_service.errors import InvalidArgument
from tinyloop_service.loading import LoadedModel
from tinyloop_service.pb import generation_pb2_grpc
from tinyloop_service.rpc.addresses import _try_bind
from tinyloop_service.rpc.fronts import fleet
from tinyloop_service.rpc.fronts.claim import claim
from tinyloop_service.rpc.fronts.pipe import Down, Up
from tinyloop_service.rpc.health import READY_SERVICE
from tinyloop_service.rpc.tokens import hash_token
from tinyloop_service.settings import EngineSettings, ServerSettings, Settings


async def test_every_front_answers() -> None:
    async with serving(grpc_processes=2) as served:
        for front in fronts_of(served):
            channel = await in_front(served, front)
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            messages = await collect(stub.Generate(request(5, 6)))
            assert tuple(t for m in messages for t in m.delta.token_ids) == expected_tokens((5, 6), 20)
            await channel.close()


async def test_a_list_of_processes_says_what_a_front_is_and_where_it_listens() -> None:
    async with serving(grpc_processes=1) as served:
        (front,) = fronts_of(served)
        assert command_line(pid_of(front))[1:6] == ["-P", "-m", "tinyloop_service.front", "--listen", served.address]


async def test_a_front_that_is_killed_takes_its_calls_along_and_no_other_and_is_started_anew(
    quiet_logs: list[dict[str, Any]],
) -> None:
    gate = threading.Event()
    async with serving(FakeEngine(gate=gate), grpc_processes=2) as served:
        doomed, other = fronts_of(served)
        channels = [await in_front(served, front) for front in (doomed, other)]
        lost, kept = [generation_pb2_grpc.GenerationServiceStub(c).Generate(request(9)) for c in channels]
        await until(lambda: served.num_open() == 2)
        os.kill(pid_of(doomed), signal.SIGKILL)
        assert (await refusal(lost)).code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: served.num_open() == 1)
        gate.set()
        assert tuple(t for m in await collect(kept) for t in m.delta.token_ids) == expected_tokens((9,), 20)
        await until(lambda: doomed not in fronts_of(served) and len(fronts_of(served)) == 2)
        again = await in_front(served, fronts_of(served)[1])  # it is the last to have started
        await served.settled()
        for channel in (*channels, again):
            await channel.close()
    ended = [line for line in quiet_logs if "speaks gRPC has ended" in line["event"]]
    assert len(ended) == 1 and ended[0]["status"] == -signal.SIGKILL


async def test_a_front_that_cannot_be_started_is_tried_again_and_meanwhile_nobody_is_told_to_call(
    quiet_logs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, tries = asyncio.create_subprocess_exec, 0

    async def scarce(*command: str, **options: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return await real(*command, **options)

    async with serving(grpc_processes=1) as served:
        states, told = served.app._health._states, []
        monkeypatch.setattr(served.app._observation, "set_ready", told.append)
        assert states[READY_SERVICE] == SERVING
        monkeypatch.setattr(fleet.asyncio, "create_subprocess_exec", scarce)
        os.kill(pid_of(fronts_of(served)[0]), signal.SIGKILL)
        await until(lambda: states[READY_SERVICE] == NOT_SERVING)
        await until(lambda: tries == 3 and states[READY_SERVICE] == SERVING)
        assert told == [False, True]
        assert (await served_model(served.channel)).replica == "replica-0"
    failed = [line for line in quiet_logs if "does not start" in line["event"]]
    assert len(failed) == 2 and "Resource temporarily unavailable" in failed[0]["error"]


async def test_a_front_that_answers_nobody_is_ended_and_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_LOOK_EVERY_S", 0.1)
    async with serving(grpc_processes=1) as served:
        (hung,) = fronts_of(served)
        await asyncio.sleep(1.0)
        assert fronts_of(served) == [hung]  # one that is well stays
        os.kill(pid_of(hung), signal.SIGSTOP)
        await until(lambda: fronts_of(served) not in ([hung], []))  # another one
        assert (await served_model(served.channel)).replica == "replica-0"


async def test_metrics_say_how_many_there_are_and_why_others_were_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_LOOK_EVERY_S", 0.5)
    monkeypatch.setattr(fleet, "_FIRST_PAUSE_S", 0.01)
    real, failing = asyncio.create_subprocess_exec, iter([True, True])

    async def scarce(*command: str, **options: Any) -> Any:
        if next(failing, False):
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return await real(*command, **options)

    async with serving(grpc_processes=2, metrics_listen="127.0.0.1:0") as served:
        before = await scrape(served.app.metrics_address)
        assert before("grpc_processes") == 2 and before.by("grpc_process_restarts_total", "reason") == {}
        own = sum(int(line.split()[1]) for pid in map(pid_of, fronts_of(served)) for line in resident(pid)) * 1024
        assert before("grpc_processes_resident_memory_bytes") == pytest.approx(own, rel=0.1)

        async def end_one(number: signal.Signals) -> None:
            doomed = fronts_of(served)[0]
            os.kill(pid_of(doomed), number)
            await until(lambda: doomed not in fronts_of(served))
            await until(lambda: len(fronts_of(served)) == 2)

        await end_one(signal.SIGSTOP)
        monkeypatch.setattr(fleet.asyncio, "create_subprocess_exec", scarce)
        await end_one(signal.SIGKILL)
        fronts_of(served)[0]._pipe.close()  # it leaves by itself
        await until(lambda: served.app._observation.snapshot().metrics.front_restarts["exited"] == 1)
        await until(lambda: len(fronts_of(served)) == 2)
        after = await scrape(served.app.metrics_address)
    assert after("grpc_processes") == 2 and after("grpc_processes_resident_memory_bytes") > 0
    assert after.by("grpc_process_restarts_total", "reason") == {"hung": 1, "killed": 1, "not_started": 2, "exited": 1}


async def test_fronts_end_with_an_engine_process_that_is_killed() -> None:
    async with server_process(grpc_processes=2) as server:
        pid = server.process.pid
        fronts = children(pid)
        assert len(fronts) == 2
        os.kill(pid, signal.SIGKILL)
        await server.process.wait()
        await until(lambda: not living(fronts))


async def test_a_signal_to_all_processes_drains_once_and_finishes_what_runs() -> None:
    async with server_process(step_s=0.02, grpc_processes=2, drain_grace_s=60) as server:
        everybody = {server.process.pid, *children(server.process.pid)}
        assert len(everybody) == 3
        async with grpc.aio.insecure_channel(server.address, NO_RETRIES) as channel:
            stream = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request(3, max_tokens=40))
            messages: list[Any] = []
            async for message in stream:
                if not messages:
                    for pid in everybody:
                        os.kill(pid, signal.SIGTERM)
                messages.append(message)
            assert tuple(t for m in messages for t in m.delta.token_ids) == expected_tokens((3,), 40)
        async with asyncio.timeout(30):
            _, log = await server.process.communicate()
        assert server.process.returncode == 0
        events = [json.loads(line)["event"] for line in log.decode().splitlines()]
        assert events[-1] == "stopped" and not [event for event in events if "has ended" in event]
        assert not living(everybody)


async def test_ctrl_c_while_fronts_start_ends_a_server_as_it_should() -> None:
    server = await start_server(load_s=0.01, grpc_processes=2)  # signals are heard, fronts are on their way
    for pid in (server.process.pid, *children(server.process.pid)):
        os.kill(pid, signal.SIGINT)
    async with asyncio.timeout(30):
        _, log = await server.process.communicate()
    assert server.process.returncode == 0 and b"Traceback" not in log
    assert json.loads(log.splitlines()[-1])["event"] == "stopped"


def test_a_port_is_claimed_before_anybody_listens_there() -> None:
    (claimed,) = claim("127.0.0.1:0")
    with claimed:
        named = f"127.0.0.1:{claimed.getsockname()[1]}"
        for take in (_try_bind, claim):
            with pytest.raises(OSError, match="in use"):
                take(named)
    (again,) = claim(named)
    with again, pytest.raises(OSError, match="in use"):
        _try_bind(named)


def test_of_many_who_claim_a_port_at_once_one_gets_it() -> None:
    for _ in range(20):
        (free,) = claim("127.0.0.1:0")
        named = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        barrier, got = threading.Barrier(4), list[socket.socket]()

        def take(named: str = named, barrier: threading.Barrier = barrier, got: list[socket.socket] = got) -> None:
            barrier.wait()
            with suppress(OSError):
                got.extend(claim(named))

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for claimed in got:
            claimed.close()
        assert len(got) == 1


async def test_a_name_of_two_places_is_listened_at_in_both(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [(socket.AF_INET6, ("::1", 0, 0, 0)), (socket.AF_INET, ("127.0.0.1", 0))]
    monkeypatch.setattr("tinyloop_service.rpc.fronts.claim.places", lambda address: both)
    async with serving(grpc_processes=1, listen="localhost:0") as served:
        port = served.address.rpartition(":")[2]
        for host in ("[::1]", "127.0.0.1"):
            async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
                assert (await served_model(channel)).replica == "replica-0"


def test_a_machine_without_ipv6_can_have_fronts(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket

    def without_ipv6(family: int = -1, *rest: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(family, *rest)

    monkeypatch.setattr(socket, "socket", without_ipv6)
    for claimed in claim("0.0.0.0:0"):
        claimed.close()


async def test_a_caller_who_only_writes_is_held_back() -> None:
    large = reflection_pb2.ServerReflectionRequest(file_containing_symbol="x" * 500_000).SerializeToString()
    async with serving(grpc_processes=1, reflection=True) as served:
        channel: Any = served.channel
        for method in ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/no.such.Service/Method"):
            call, written = channel.stream_stream(method)(), 0
            with suppress(TimeoutError, asyncio.InvalidStateError, grpc.aio.AioRpcError):
                for written in range(400):  # noqa: B007
                    await asyncio.wait_for(call.write(large), 1)
            assert written < 100
            call.cancel()


async def test_of_a_caller_without_a_token_no_request_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(f'[[token]]\ntenant = "a"\nsha256 = "{hash_token("tl_x")}"\nrights = ["generate"]\n')
    async with serving(grpc_processes=1, tokens_file=str(path), reflection=True) as served:
        (front,) = fronts_of(served)
        seen: list[Any] = []
        take = front._calls.take
        front._calls.take = lambda event: (seen.append(event), take(event))
        stub = generation_pb2_grpc.GenerationServiceStub(served.channel)
        for headers in ((), (("authorization", "Bearer tl_y"),), (("authorization", "tl_x"),)):
            assert reason_of(await refusal(stub.Generate(request(1), metadata=headers))) == (
                "UNAUTHENTICATED", "UNAUTHENTICATED",
            )  # fmt: skip
        assert [event[-1] for event in seen if event[0] == Up.CALL] == [None] * 3
        assert not [event for event in seen if event[0] == Up.REQUEST]
        mine = (("authorization", "Bearer tl_x"),)
        messages = await collect(stub.Generate(request(5), metadata=mine))
        assert tuple(t for m in messages for t in m.delta.token_ids) == expected_tokens((5,), 20)
        assert not [event for event in seen if event[0] == Up.REQUEST]  # it came with the call
        front._pipe.send(Down.CALLERS, frozenset())  # a token that the front has not heard of yet
        messages = await collect(stub.Generate(request(5), metadata=mine))
        assert tuple(t for m in messages for t in m.delta.token_ids) == expected_tokens((5,), 20)
        assert len([event for event in seen if event[0] == Up.REQUEST]) == 1
        check = health_pb2_grpc.HealthStub(served.channel).Check
        assert (await check(health_pb2.HealthCheckRequest(service=READY_SERVICE))).status == SERVING


async def test_a_port_that_others_share_is_refused() -> None:
    async with serving(grpc_processes=1) as served:
        for fronts in (0, 1):
            second = replace(FRONTS, listen=served.address, grpc_processes=fronts)
            app = App(Settings(server=second), lambda: LoadedModel(FakeEngine(), None, CONFIG))
            with pytest.raises(InvalidArgument, match=r"listen: cannot listen on .*Address already in use"):
                await app.start()


async def test_a_front_that_cannot_start_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinyloop_service.rpc.fronts.fleet._MODULE", "tinyloop_service.no_such_module")
    app = App(Settings(server=FRONTS), lambda: LoadedModel(FakeEngine(), None, CONFIG))
    with pytest.raises(InvalidArgument, match="grpc_processes: a process that speaks gRPC ended before it listened"):
        await app.start()
    await app.stop(0.0)


def test_a_unix_socket_cannot_be_shared() -> None:
    with pytest.raises(InvalidArgument, match="grpc_processes: 2 given, which cannot share unix:/tmp/x"):
        ServerSettings(listen="unix:/tmp/x", grpc_processes=2)
    assert not ServerSettings(listen="unix:/tmp/x").grpc_processes


async def test_health_is_watched_and_methods_are_listed_through_a_front() -> None:
    async with serving(grpc_processes=1, reflection=True) as served:
        watch = health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest(service=READY_SERVICE))
        assert (await watch.read()).status == SERVING
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")] * 2)
        listing = reflection_pb2_grpc.ServerReflectionStub(served.channel).ServerReflectionInfo(asked)
        answers = await collect(listing)
        assert len(answers) == 2
        assert READY_SERVICE in [service.name for service in answers[0].list_services_response.service]
        served.app._health.set_ready(False)
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()


async def test_tls_is_spoken_by_the_front(tmp_path: Path) -> None:
    ca = Authority.make("ours")
    cert, key = ca.issue("server").write(tmp_path, "server")
    async with serving(grpc_processes=1, tls_cert=str(cert), tls_key=str(key)) as served:
        credentials = grpc.ssl_channel_credentials(ca.pem)
        async with grpc.aio.secure_channel(served.address, credentials) as channel:
            assert (await served_model(channel)).replica == "replica-0"
        assert (await refusal(served.generation.Generate(request(1), timeout=2))).code() in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.DEADLINE_EXCEEDED,
        )


async def test_a_method_that_there_is_not_is_said_to_be_none() -> None:
    async with serving(grpc_processes=1) as served:
        channel: Any = served.channel
        for call in (
            channel.unary_unary("/tinyloop.v1.ModelService/Nope")(b"x"),
            channel.unary_stream("/no.such.Service/Method")(b"x"),
        ):
            assert (await refusal(call)).code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_handler_that_fails_unforeseen_says_so_and_nothing_of_itself() -> None:
    async with serving(grpc_processes=1) as served:
        served.app._backend._scheduler = None  # whatever it is that nobody foresaw
        served.app._backend._refusal = ValueError("a secret")  # type: ignore[assignment]
        assert reason_of(await refusal(served.generation.Generate(request(1)))) == ("INTERNAL", "INTERNAL")
        served.app._health._states = None  # type: ignore[assignment]
        error = await refusal(health_pb2_grpc.HealthStub(served.channel).Check(health_pb2.HealthCheckRequest()))
        assert error.code() is grpc.StatusCode.UNKNOWN and "secret" not in (error.details() or "")
        served.app._health._states = {}


@pytest.mark.parametrize(
    ("engine", "driver", "cores", "given", "expected"),
    [
        ("auto", True, 8, None, 4),
        ("cuda", True, 64, None, 4),
        ("cpu", True, 64, None, 0),
        ("auto", True, 7, None, 0),
        ("auto", False, 64, None, 0),
        ("auto", True, 64, 0, 0),
        ("cpu", False, 1, 3, 3),
    ],
)
def test_how_many_there_are(
    engine: str, driver: bool, cores: int, given: int | None, expected: int, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(app_module, "_GPU_DRIVER", tmp_path if driver else tmp_path / "none")
    monkeypatch.setattr(app_module, "usable_cores", lambda: cores)
    settings = Settings(engine=EngineSettings(engine=engine), server=replace(SERVER, grpc_processes=given))
    assert app_module._with_fronts(settings).grpc_processes == expected
