"""A server of one's own: another process on loopback, ready when the block is entered, gone when it is left.

A signal that ends this process leaves the block, and so ends that one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tinyloop_service.cli import output
from tinyloop_service.errors import TinyLoopError
from tinyloop_service.rpc.health import READY_SERVICE

START_S = 120.0
STOP_S = 20.0
_ENDING = (signal.SIGTERM, signal.SIGHUP)  # Ctrl-C is asyncio's, which does the same
_NOT_INHERITED = (
    "TINYLOOP_TOKENS_FILE",
    "TINYLOOP_TLS_CERT",
    "TINYLOOP_TLS_KEY",
    "TINYLOOP_TLS_CLIENT_CA",
    "TINYLOOP_METRICS_LISTEN",
)
_ADDRESSES = ("--listen", "127.0.0.1:0", "--health-listen", "127.0.0.1:0", "--log-level", "warning")


@asynccontextmanager
async def local_server(model: Path, variables: Mapping[str, str] | None = None) -> AsyncIterator[str]:
    """Serve `model` on a free port; yields the address.  TinyLoopError if it does not come up.

    variables: TINYLOOP_ settings, beside those of this process but for who may call and look: it is for us alone.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    command = (sys.executable, "-m", "tinyloop_service.cli", "serve", "--model", str(model), *_ADDRESSES)
    whole = {**inherited, **(variables or {})}
    # asyncio's own way may wait for ever once a start is cancelled (Python 3.11)
    with _ended_by_signals(), Popen(command, stdout=PIPE, env=whole) as process:  # noqa: ASYNC220
        try:
            address, health = await _addresses(process)
            await _check_health(health)
            yield address
        finally:
            await _stop(process)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the event loop, which cancels its tasks, so that what they began is left in order."""

    def end(number: signal.Signals) -> None:
        output.print_error(f"ended by {number.name} before there was a result; start it again")
        raise SystemExit(128 + number)

    loop = asyncio.get_running_loop()
    for number in _ENDING:
        loop.add_signal_handler(number, end, number)
    try:
        yield
    finally:
        for number in _ENDING:
            loop.remove_signal_handler(number)


async def _addresses(process: Popen[bytes]) -> tuple[str, str]:
    """From the line that `tinyloop serve` prints once it serves: serving ADDRESS health ADDRESS."""
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), START_S)
    except TimeoutError:
        raise TinyLoopError(f"the server did not start within {START_S:.0f} s; try `tinyloop serve`") from None
    words = line.decode().split()
    if len(words) != 4:
        raise TinyLoopError("the server ended before it was ready; what it said is above")
    return words[1], words[3]


async def _check_health(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=READY_SERVICE)
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=STOP_S)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise TinyLoopError("the server says that it is not ready; try `tinyloop serve`")


async def _stop(process: Popen[bytes]) -> None:
    """SIGTERM and wait; SIGKILL if that is not enough."""
    process.terminate()
    try:
        await asyncio.to_thread(process.wait, STOP_S)
    except TimeoutExpired:
        process.kill()
        await asyncio.to_thread(process.wait)
