"""A server in a process of its own, with the fake engine: what signals, kills and clocks are tried on."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rpc_harness import SERVER

from tinyloop_service.rpc.health import READY_SERVICE

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
NO_RETRIES = (("grpc.enable_retries", 0),)
_SCRIPT = Path(__file__).with_name("fake_server.py")
_START_S = 60.0
_SETTINGS = {
    "listen": "127.0.0.1:0",
    "health_listen": "127.0.0.1:0",
    "log_format": "json",
    "grpc_processes": SERVER.grpc_processes,
}


@dataclass(frozen=True)
class ServerProcess:
    """Its addresses are empty while it loads."""

    process: Process
    address: str
    health_address: str


async def start_server(
    step_s: float = 0.0, load_s: float = 0.0, *, log: int = PIPE, **settings: object
) -> ServerProcess:
    """`settings`: fields of the server's; `log`: where its log goes.  It is ready, or with `load_s` about to load."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TINYLOOP_")}
    given = {f"TINYLOOP_{name.upper()}": str(value) for name, value in {**_SETTINGS, **settings}.items()}
    command = (sys.executable, str(_SCRIPT), str(step_s), str(load_s))
    started = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=log, env=kept | given)
    assert started.stdout is not None
    try:
        async with asyncio.timeout(_START_S):
            assert await started.stdout.readline() == b"listening\n", "the server did not come up"
            words = ["", "", "", ""] if load_s else (await started.stdout.readline()).decode().split()
        return ServerProcess(started, words[1], words[3])
    except BaseException:
        started.kill()
        raise


@asynccontextmanager
async def server_process(step_s: float = 0.0, load_s: float = 0.0, **settings: object) -> AsyncIterator[ServerProcess]:
    """As `start_server`; gone afterwards, whatever happened."""
    running = await start_server(step_s, load_s, **settings)
    try:
        yield running
    finally:
        if running.process.returncode is None:
            running.process.kill()
        await running.process.communicate()


async def health(address: str, service: str = READY_SERVICE) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        return (await check(health_pb2.HealthCheckRequest(service=service), timeout=5)).status  # type: ignore[no-any-return]
