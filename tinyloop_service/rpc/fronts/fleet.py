"""The fronts of a server: as many processes as asked for, one started anew where one has ended.

In: what a gRPC server is given, services and interceptors and an address.  Out: answered calls.  To whoever wires it
it is a gRPC server, with the methods of `grpc.aio.Server` that are needed.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import structlog

from tinyloop_service.errors import InvalidArgument
from tinyloop_service.rpc.addresses import places
from tinyloop_service.rpc.fronts.answering import CallDetails, Calls
from tinyloop_service.rpc.fronts.pipe import Down, Event, Pipe, Up
from tinyloop_service.settings import ServerSettings

_MODULE = "tinyloop_service.front"
_START_S = 30.0  # for a process to start and listen
_END_S = 5.0  # for one to end, beyond the grace it was given
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0  # before one that ended is started anew; twice as long each time
_log = structlog.get_logger("tinyloop.fronts")


class Fronts:
    """Interceptors and handlers run in this process, on the event loop that it was started on."""

    def __init__(self, settings: ServerSettings, interceptors: Sequence[Any] = ()) -> None:
        self._settings = settings
        self._address = ""
        self._services: list[Any] = []
        self._find: Callable[[Any], Awaitable[Any]] = self._handler
        for interceptor in reversed(interceptors):
            self._find = partial(interceptor.intercept_service, self._find)
        self._claimed: socket.socket | None = None
        self._keepers: list[asyncio.Task[None]] = []
        self._fronts: dict[int, _Front] = {}

    # ---- as a gRPC server is set up

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[Any]) -> None:
        self._services += generic_rpc_handlers

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Generated code says the same twice."""

    def add_insecure_port(self, address: str) -> int:
        """Raises OSError where it cannot be had."""
        self._claimed = _claim(address)
        port = int(self._claimed.getsockname()[1])
        self._address = f"{address.rpartition(':')[0]}:{port}"
        return port

    def add_secure_port(self, address: str, server_credentials: object) -> int:
        """As without TLS; fronts read the files of certificates themselves."""
        return self.add_insecure_port(address)

    async def start(self) -> None:
        """Returns when all fronts listen.  Raises InvalidArgument when one cannot."""
        assert self._claimed is not None, "a port comes first"
        try:
            await asyncio.gather(*(self._start(nth) for nth in range(self._settings.grpc_processes or 0)))
        except InvalidArgument:
            await self.stop(None)
            raise
        self._keepers = [asyncio.create_task(self._keep(nth)) for nth in self._fronts]

    async def stop(self, grace: float | None) -> None:
        """Take no more calls; those that run have so long to end."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*(front.stop(grace) for front in self._fronts.values()))
        if self._claimed is not None:
            self._claimed.close()

    # ---- helpers

    async def _handler(self, details: CallDetails) -> Any:
        found = (service.service(details) for service in self._services)
        return next((handler for handler in found if handler is not None), None)

    async def _start(self, nth: int) -> None:
        self._fronts[nth] = front = _Front(self._find)
        await front.start(self._address, self._settings)

    async def _keep(self, nth: int) -> None:
        """See to it that there is an nth front, for as long as the server runs."""
        pause_s = _FIRST_PAUSE_S
        while True:
            began_s = time.monotonic()
            status = await self._fronts[nth].ended()
            if time.monotonic() - began_s > _LONGEST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            _log.error("a process that speaks gRPC has ended; starting another", status=status, pause_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            try:
                await self._start(nth)
            except InvalidArgument as error:
                _log.error("it does not start", error=str(error))


class _Front:
    """One process and its calls."""

    def __init__(self, find: Callable[[Any], Awaitable[Any]]) -> None:
        self._process: Process | None = None
        self._started: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # what is wrong, or ""
        self._pipe = Pipe(self._receive, self._lost)
        self._calls = Calls(self._pipe, find)

    async def start(self, address: str, settings: ServerSettings) -> None:
        """Returns when it listens.  Raises InvalidArgument when it cannot, and then it has ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            await self._pipe.open(ours)  # if anything is cancelled from here on, it closes, and a process ends with it
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", _MODULE, str(theirs.fileno()),
                stdin=DEVNULL, stdout=DEVNULL, pass_fds=[theirs.fileno()],
            )  # fmt: skip
        self._pipe.send(Down.LISTEN, address, pickle.dumps(settings))
        try:
            error = await asyncio.wait_for(self._started, _START_S)
        except TimeoutError:
            error = f"a process that speaks gRPC did not start within {_START_S:.0f} s"
        if error:
            await self.stop(None)
            raise InvalidArgument("grpc_processes", error)

    async def ended(self) -> int:
        """Wait until the process is gone; its status."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, grace_s: float | None) -> None:
        if self._process is None:
            return
        self._pipe.send(Down.STOP, grace_s)
        try:
            await asyncio.wait_for(self._process.wait(), (grace_s or 0.0) + _END_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._pipe.close()

    def _receive(self, event: Event) -> None:
        if event[0] == Up.LISTENING:
            self._settle("")
        elif event[0] == Up.REFUSED:
            self._settle(event[1])
        else:
            self._calls.take(event)

    def _lost(self) -> None:
        self._settle("a process that speaks gRPC ended before it listened; its last words are above")
        self._calls.cancel()

    def _settle(self, error: str) -> None:
        if not self._started.done():
            self._started.set_result(error)


def _claim(address: str) -> socket.socket:
    """A socket that keeps a port for fronts to share, and does not listen.  Raises OSError."""
    family, place = places(address)[0]
    claimed = socket.socket(family)
    try:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            claimed.setsockopt(socket.SOL_SOCKET, option, 1)
        claimed.bind(place)
    except OSError:
        claimed.close()
        raise
    return claimed
