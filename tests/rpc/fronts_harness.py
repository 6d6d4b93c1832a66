"""What tests of fronts ask of processes and connections."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rpc_harness import SERVER, Served, ids
from server_process import NO_RETRIES

from tinyloop_service.pb import generation_pb2 as g
from tinyloop_service.pb import model_pb2

FRONTS = replace(SERVER, grpc_processes=2)
OWN_CONNECTION = (*NO_RETRIES, ("grpc.use_local_subchannel_pool", 1))  # else channels to one address share one


def request(*tokens: int, max_tokens: int = 20) -> g.GenerateRequest:
    return g.GenerateRequest(input=ids(*tokens), max_tokens=max_tokens, ignore_eos=True)


def children(pid: int) -> set[int]:
    """Processes that a process has started and that live."""
    text = "".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return {int(word) for word in text.split() if Path(f"/proc/{word}/cmdline").read_bytes()}


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def resident(pid: int) -> list[str]:
    """The line of /proc that says how much memory it has, in KiB."""
    return [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]


def living(pids: set[int]) -> set[int]:
    return {pid for pid in pids if Path(f"/proc/{pid}").exists()}


def fronts_of(served: Served) -> list[Any]:
    return list(served.app._server._fronts.values())  # type: ignore[attr-defined]


def pid_of(front: Any) -> int:
    return int(front._process.pid)


async def in_front(served: Served, front: Any) -> grpc.aio.Channel:
    """A connection that the kernel gave to that front; it decides, so that some are tried."""
    for _ in range(64):
        channel = grpc.aio.insecure_channel(served.address, OWN_CONNECTION)
        before = len(front._calls._running)
        await health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()).read()  # runs on
        if len(front._calls._running) > before:
            return channel
        await channel.close()
    raise AssertionError("no connection of 64 came to it")


async def served_model(channel: grpc.aio.Channel) -> model_pb2.Model:
    stub = channel.unary_unary(
        "/tinyloop.v1.ModelService/GetModel",
        request_serializer=model_pb2.GetModelRequest.SerializeToString,
        response_deserializer=model_pb2.Model.FromString,
    )
    return await stub(model_pb2.GetModelRequest(), timeout=10)  # type: ignore[no-any-return]
