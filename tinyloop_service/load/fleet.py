"""Who drives: this process's event loop, or several processes that share a schedule.

    Here         one driver beside the watch                        Processes    spawned, each with a channel of its own

A process is told of the workload once, then gets a `Job` for each phase and answers with what it has counted, now and
then, and at last with its `Driven`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Protocol, Self

from tinyloop_service.bench import Service
from tinyloop_service.client import Tls
from tinyloop_service.errors import TinyLoopError
from tinyloop_service.load.driver import Counted, Driven, Driver, Job
from tinyloop_service.load.prompts import Prompts, Vocabulary
from tinyloop_service.load.remote import Remote
from tinyloop_service.load.workload import Workload

TELL_S = 0.25
LEAVE_S = 5.0  # for all processes to end by themselves
_INTERRUPT = {signal.SIGINT}
_ENDED = "a process of the load test ended by itself; what it said is above"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server, and how to reach it."""

    target: str
    token: str | None = field(default=None, repr=False)
    tls: Tls | bool = False
    timeout: float | None = None
    affinity: bool = False

    def connect(self) -> Remote:
        return Remote(self.target, token=self.token, tls=self.tls, timeout=self.timeout, affinity=self.affinity)


class Fleet(Protocol):
    """Entered once, drives phases one after the other."""

    lead_ns: int  # from a job's being handed over to its start

    async def drive(self, job: Job, show: Callable[[Counted], None]) -> tuple[Driven, ...]: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...


class Here:
    """One driver on the running event loop."""

    lead_ns = 50_000_000

    def __init__(self, service: Service, prompts: Prompts) -> None:
        self._service = service
        self._prompts = prompts

    async def drive(self, job: Job, show: Callable[[Counted], None]) -> tuple[Driven, ...]:
        driver = Driver(self._service, self._prompts, job)
        telling = asyncio.create_task(_tell(driver, show))
        try:
            return (await driver.run(),)
        finally:
            telling.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        return None


class Processes:
    """`count` processes; entered when all of them have reached the server."""

    lead_ns = 500_000_000

    def __init__(self, count: int, endpoint: Endpoint, workload: Workload, seed: int, vocabulary: Vocabulary) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._threads = ThreadPoolExecutor(count, "tinyloop-load")
        self._ends: list[Connection] = []
        self._processes = []
        resource_tracker.ensure_running()  # its start lets signals through
        signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPT)  # which they inherit, until they can answer one
        try:
            for _ in range(count):
                mine, theirs = spawn.Pipe()
                arguments = (theirs, endpoint, workload, seed, vocabulary)
                self._processes.append(spawn.Process(target=_main, args=arguments, daemon=True))
                self._processes[-1].start()
                theirs.close()
                self._ends.append(mine)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPT)

    async def drive(self, job: Job, show: Callable[[Counted], None]) -> tuple[Driven, ...]:
        counted = [Counted() for _ in self._ends]

        async def one(share: int, end: Connection) -> Driven:
            try:
                end.send(replace(job, share=share, shares=len(self._ends)))
            except OSError:
                raise TinyLoopError(_ENDED) from None
            while not isinstance(heard := await self._hear(end), Driven):
                assert isinstance(heard, Counted)
                counted[share] = heard
                show(sum(counted, Counted()))
            return heard

        return tuple(await asyncio.gather(*(one(share, end) for share, end in enumerate(self._ends))))

    async def _hear(self, end: Connection) -> object:
        """Raises TinyLoopError for what went wrong there."""
        try:
            heard = await asyncio.get_running_loop().run_in_executor(self._threads, end.recv)
        except (EOFError, ConnectionResetError):
            raise TinyLoopError(_ENDED) from None
        if isinstance(heard, TinyLoopError):
            raise heard
        return heard

    async def __aenter__(self) -> Self:
        try:
            for end in self._ends:
                await self._hear(end)
        except BaseException:
            self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        """A process ends when nobody is at the other end; one that does not is killed."""
        for end in self._ends:
            with suppress(OSError):
                end.send(None)
        patience_end = time.monotonic() + LEAVE_S
        for process in self._processes:
            process.join(max(0.0, patience_end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for end in self._ends:
            end.close()
        self._threads.shutdown()


async def _tell(driver: Driver, show: Callable[[Counted], None]) -> None:
    while True:
        show(replace(driver.counted))
        await asyncio.sleep(TELL_S)


def _main(end: Connection, endpoint: Endpoint, workload: Workload, seed: int, vocabulary: Vocabulary) -> None:
    """Of a spawned process."""
    with suppress(KeyboardInterrupt):  # the first process says what happened
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPT)
        asyncio.run(_work(end, endpoint, Prompts(workload, seed, vocabulary)))


async def _work(end: Connection, endpoint: Endpoint, prompts: Prompts) -> None:
    def send(what: object) -> None:
        with _ended_with_the_first():
            end.send(what)

    def receive() -> Job | None:
        with _ended_with_the_first():
            job: Job | None = end.recv()
        return job

    async with endpoint.connect() as remote:
        try:
            await remote.load()
        except TinyLoopError as error:
            send(error)
            return
        send(None)
        here = Here(remote, prompts)
        while (job := await asyncio.to_thread(receive)) is not None:
            for driven in await here.drive(job, send):
                send(driven)


@contextmanager
def _ended_with_the_first() -> Iterator[None]:
    """Where the first process is gone, killed by a signal for example, this one has nobody to work for."""
    try:
        yield
    except (EOFError, OSError):
        os._exit(1)
