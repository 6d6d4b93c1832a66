"""The fronts of a server: as many processes as asked for, one started anew where one has ended, or answers no more.

In: what a gRPC server is given, services and interceptors and an address.  Out: answered calls.  To whoever wires it
it is a gRPC server, with the methods of `grpc.aio.Server` that are needed.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
import structlog

from tinyloop_service.errors import InvalidArgument
from tinyloop_service.observer import UNWATCHED, Observer
from tinyloop_service.rpc.addresses import bind, serving_options
from tinyloop_service.rpc.fronts.answering import CallDetails, Calls
from tinyloop_service.rpc.fronts.claim import claim, written
from tinyloop_service.rpc.fronts.pipe import Down, Event, Pipe, Up
from tinyloop_service.rpc.tls import Certificates, Pems, server_credentials
from tinyloop_service.rpc.tokens import TokensFile
from tinyloop_service.settings import ServerSettings
from tinyloop_service.signals import ENDING

_MODULE = "tinyloop_service.front"
_START_S = 30.0  # for a process to start and listen
_END_S = 5.0  # for one to end, beyond the grace it was given
_HURRIED_S = 1.0  # for one to end without any
_TAKE_OVER_S = 1.0  # for calls of a server that is not ready yet
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0  # before one that ended is started anew; twice as long each time
_LOOK_EVERY_S = 5.0  # how they are, and whether the tokens have changed
_MOST_UNANSWERED = 3  # looks, after which one is taken for hung
_log = structlog.get_logger("tinyloop.fronts")

Given = tuple[ServerSettings, Pems | None]  # None: plaintext


class Fronts:
    """Interceptors and handlers run in this process, on the event loop that it was started on."""

    def __init__(
        self,
        settings: ServerSettings,
        interceptors: Sequence[Any] = (),
        tokens: TokensFile | None = None,
        reachable: Callable[[bool], None] = lambda reachable: None,
        observer: Observer = UNWATCHED,
    ) -> None:
        """reachable: hears whether any of them listens.  tokens: who of the callers is worth being read."""
        self._settings = settings
        self._tokens = tokens
        self._reachable = reachable
        self._observer = observer
        self._interceptors = interceptors
        self._services: list[Any] = []
        self._find: Callable[[Any], Awaitable[Any]] = self._handler
        for interceptor in reversed(interceptors):
            self._find = partial(interceptor.intercept_service, self._find)
        self._claimed: list[socket.socket] = []
        self._certificates: Certificates | None = None
        self._keepers: list[asyncio.Task[None]] = []
        self._fronts: dict[int, _Front] = {}  # that listen
        self._own: grpc.aio.Server | None = None  # that has taken over from them
        self._leaving: asyncio.Future[Any] | None = None

    # ---- as a gRPC server is set up

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[Any]) -> None:
        self._services += generic_rpc_handlers

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Generated code says the same twice."""

    def add_insecure_port(self, address: str) -> int:
        """Raises OSError where it cannot be had."""
        self._claimed = claim(address)
        return int(self._claimed[0].getsockname()[1])

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        """As without TLS; whoever listens reads the files of certificates himself, and is given what these last held
        that fitted together.  Raises InvalidArgument for files that cannot be used."""
        self._certificates = Certificates(self._settings)
        return self.add_insecure_port(address)

    async def start(self) -> None:
        """Returns when all fronts listen.  Raises InvalidArgument when one cannot; `stop` is still to be called."""
        assert self._claimed, "a port comes first"
        numbers = range(self._settings.grpc_processes or 0)
        self._reachable(False)
        for outcome in await asyncio.gather(*map(self._start, numbers), return_exceptions=True):  # of all, if cancelled
            if outcome is not None:
                raise outcome
        self._keepers = [asyncio.create_task(self._keep(nth)) for nth in numbers]
        if self._certificates is not None:
            self._keepers.append(asyncio.create_task(self._follow(self._certificates)))

    async def take_over(self) -> None:
        """This process listens itself from now on, where they do, and they end.  Their connections are told to go, and
        come back here; calls that run there have a moment."""
        self._own = grpc.aio.server(
            interceptors=self._interceptors, options=serving_options(self._settings, shared_port=True)
        )
        self._own.add_generic_rpc_handlers(tuple(self._services))
        last = None if self._certificates is None else self._certificates.last
        credentials = server_credentials(self._settings, last)
        for claimed in self._claimed:
            bind(self._own, written(claimed), credentials)
        await self._own.start()
        await self._leave_alone()
        self._reachable(True)
        fronts = self._fronts.values()  # which the kernel gives connections for as long as they live, hung ones too
        self._leaving = asyncio.gather(*(front.stop(_TAKE_OVER_S, _HURRIED_S) for front in fronts))
        for front in fronts:
            self._observer.front_ended(front.pid)
        self._fronts = {}

    async def stop(self, grace: float | None) -> None:
        """Take no more calls; those that run have so long to end."""
        await self._leave_alone()
        end_s = _HURRIED_S if grace is None else _END_S
        await asyncio.gather(*(front.stop(grace, end_s) for front in self._fronts.values()))
        if self._own is not None:
            await self._own.stop(grace)
        if self._leaving is not None:
            await self._leaving
        for claimed in self._claimed:
            claimed.close()

    # ---- helpers

    async def _leave_alone(self) -> None:
        """Fronts that end are not started anew any more."""
        for keeper in self._keepers:
            keeper.cancel()
        if self._keepers:
            await asyncio.wait(self._keepers)

    async def _handler(self, details: CallDetails) -> Any:
        found = (service.service(details) for service in self._services)
        return next((handler for handler in found if handler is not None), None)

    def _callers(self) -> frozenset[bytes] | None:
        return None if self._tokens is None else self._tokens.tokens.digests

    async def _start(self, nth: int) -> None:
        """Raises InvalidArgument; then nothing of it is left."""
        front = _Front(self._find)
        pems = None
        if self._certificates is not None:
            await asyncio.to_thread(self._certificates.look)
            pems = self._certificates.last
        try:
            await front.start(list(map(written, self._claimed)), (self._settings, pems), self._callers())
        except BaseException:
            await front.stop(None, _HURRIED_S)
            raise
        self._fronts[nth] = front
        self._observer.front_listens(front.pid)
        self._reachable(True)

    async def _follow(self, certificates: Certificates) -> None:
        """So that a front that starts while they do not fit together has the last that did."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await asyncio.to_thread(certificates.look)

    async def _keep(self, nth: int) -> None:
        """See to it that there is an nth front, for as long as the server runs."""
        pause_s, began_s = _FIRST_PAUSE_S, time.monotonic()
        while True:
            reason = "not_started"
            if (front := self._fronts.get(nth)) is not None:
                status = await self._end_of(front)
                reason = "hung" if front.has_hung else "killed" if status < 0 else "exited"
                del self._fronts[nth]
                self._observer.front_ended(front.pid)
                self._reachable(bool(self._fronts))
                if time.monotonic() - began_s > 2 * _LONGEST_PAUSE_S:
                    pause_s = _FIRST_PAUSE_S
                _log.error(
                    "a process that speaks gRPC has ended; starting another",
                    process=front.pid,
                    status=status,
                    left=len(self._fronts),
                    pause_s=pause_s,
                )
            await asyncio.sleep(pause_s)
            pause_s, began_s = min(2 * pause_s, _LONGEST_PAUSE_S), time.monotonic()
            self._observer.front_restarted(reason)
            try:
                await self._start(nth)
            except InvalidArgument as error:
                _log.error("a process that speaks gRPC does not start", error=str(error), pause_s=pause_s)
            else:
                _log.info("another process speaks gRPC", process=self._fronts[nth].pid)

    async def _end_of(self, front: _Front) -> int:
        """Look after a front until it ends; its status."""
        ended = asyncio.create_task(front.ended())
        try:
            while not (await asyncio.wait({ended}, timeout=_LOOK_EVERY_S))[0]:
                front.look(self._callers())
        finally:
            ended.cancel()
        return ended.result()


class _Front:
    """One process and its calls."""

    def __init__(self, find: Callable[[Any], Awaitable[Any]]) -> None:
        self._process: Process | None = None
        self._started: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()  # what is wrong
        self._pipe = Pipe(self._receive, self._lost)
        self._calls = Calls(self._pipe, find)
        self._told: frozenset[bytes] | None = None
        self._num_unanswered = 0
        self.has_hung = False  # and was ended

    async def start(self, addresses: list[str], settings: Given, callers: frozenset[bytes] | None) -> None:
        """Returns when it listens.  Raises InvalidArgument when it cannot; `stop` is still to be called."""
        try:
            await self._spawn(addresses)
        except OSError as error:
            what = f"a process that speaks gRPC cannot be started: {error.strerror}; allow more of them, or give 0"
            raise InvalidArgument("grpc_processes", what) from None
        self._tell(callers)
        self._pipe.send(Down.LISTEN, addresses, pickle.dumps(settings))
        try:
            field, wrong = await asyncio.wait_for(asyncio.shield(self._started), _START_S)
        except TimeoutError:
            field, wrong = "grpc_processes", f"a process that speaks gRPC did not start within {_START_S:.0f} s"
        if wrong:
            raise InvalidArgument(field, wrong)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def ended(self) -> int:
        """Wait until the process is gone; its status."""
        assert self._process is not None
        return await self._process.wait()

    def look(self, callers: frozenset[bytes] | None) -> None:
        """Tell it of changed tokens, and kill it if it has answered nobody for too long."""
        assert self._process is not None
        if callers != self._told:
            self._tell(callers)
        if self._num_unanswered == _MOST_UNANSWERED:
            _log.error("a process that speaks gRPC does not answer; ending it", process=self.pid)
            self.has_hung = True
            with suppress(ProcessLookupError):
                self._process.kill()
        self._num_unanswered += 1
        self._pipe.send(Down.ASK)

    async def stop(self, grace_s: float | None, end_s: float) -> None:
        """Calls have the grace to end, the process `end_s` more; then it is killed."""
        if self._process is not None:
            self._pipe.send(Down.STOP, grace_s)
            try:
                await asyncio.wait_for(self._process.wait(), (grace_s or 0.0) + end_s)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._pipe.close()

    async def _spawn(self, addresses: list[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            await self._pipe.open(ours)  # if anything is cancelled from here on, it closes, and a process ends with it
            known = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
            signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # which it inherits, until it ignores them
            try:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-P", "-m", _MODULE, "--listen", *addresses, "--fd", str(theirs.fileno()),
                    stdin=DEVNULL, stdout=DEVNULL, pass_fds=[theirs.fileno()], env=known,
                )  # fmt: skip
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)

    def _tell(self, callers: frozenset[bytes] | None) -> None:
        self._told = callers
        self._pipe.send(Down.CALLERS, callers)

    def _receive(self, event: Event) -> None:
        match event[0]:
            case Up.LISTENING:
                self._settle("", "")
            case Up.REFUSED:
                self._settle(*event[1:])
            case Up.WELL:
                self._num_unanswered = 0
            case _:
                self._calls.take(event)

    def _lost(self) -> None:
        self._settle("grpc_processes", "a process that speaks gRPC ended before it listened; its last words are above")
        self._calls.cancel()

    def _settle(self, field: str, wrong: str) -> None:
        if not self._started.done():
            self._started.set_result((field, wrong))
