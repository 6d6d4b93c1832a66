"""The wiring: engine → scheduler → gRPC server, from the first byte read to the last page given back.

    start   listen at once, health says "alive, not ready"; the model loads in a thread, callers hear WARMING_UP
    ready   the engine is made and has checked itself: health says "ready"
    stop    1 health says "not ready"            load balancers stop sending
            2 a pause                            until they have noticed
            3 new requests hear DRAINING         running ones have the grace time to finish
            4 scheduler and engine close         what still runs hears MODEL_CLOSED, what comes DRAINING
            5 the server closes                  when no call has come for a moment, and the last messages have left

`App.run` does all of it around SIGTERM and SIGINT: the first signal drains, a second one skips what is left of the
grace time, and more change nothing.  A lost device drains too, with exit status 1.  `run_process` is for who has a
process to end: a load or a step that cannot be interrupted does not keep it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import structlog

from tinyloop_service.engine.cgroup import usable_cores
from tinyloop_service.loading import LoadedModel
from tinyloop_service.observe.hub import Observation
from tinyloop_service.observe.logs import settle_log
from tinyloop_service.registry.names import Names
from tinyloop_service.registry.prefix_file import FilePrefix, read_prefixes
from tinyloop_service.registry.starting import start_names
from tinyloop_service.rpc.addresses import Server, listen
from tinyloop_service.rpc.backend import Backend
from tinyloop_service.rpc.fronts.fleet import Fronts
from tinyloop_service.rpc.health import Health
from tinyloop_service.rpc.server import make_health_server, make_server
from tinyloop_service.rpc.tls import server_credentials
from tinyloop_service.rpc.tokens import TokensFile
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.settings import EngineKind, ServerSettings, Settings
from tinyloop_service.signals import ignore_signals, signals_caught
from tinyloop_service.snapshots import Snapshots, start_snapshots

_CLOSE_S = 60.0  # for the step in flight; an engine that takes longer is left behind
_LAST_CALLS_S = 1.0  # for calls that came before the refusal was heard
_LISTEN_S = 1.0  # for a start to get so far that it can be stopped
_LOADER_S = 1.0  # for the thread of a load that has failed to end, which it is about to
_FLUSH_S = 2.0  # for the last messages of finished requests to leave
_GPU_DRIVER = Path("/dev/nvidiactl")
_FRONTS, _CORES_FOR_FRONTS = 4, 8
_log = structlog.get_logger("tinyloop.app")


class App:
    """One server of one model.  `load` runs in a thread of its own."""

    def __init__(self, settings: Settings, load: Callable[[], LoadedModel]) -> None:
        self._has_fronts_by_default = settings.server.grpc_processes is None
        self._settings = settings = replace(settings, server=_with_fronts(settings))
        self._load = load
        replica = settings.server.replica or socket.gethostname()
        self._observation = Observation(settings.server, replica)
        self._backend = Backend(replica, self._observation)
        self._scheduler: Scheduler | None = None
        self._names: Names | None = None
        self._snapshots: Snapshots | None = None
        self._prefixes: tuple[FilePrefix, ...] = ()
        self._health = Health()
        self._server: Server | None = None
        self._health_server: Server | None = None
        self._tokens: TokensFile | None = None
        self._following: asyncio.Task[None] | None = None
        self._warming: asyncio.Task[None] | None = None
        self._loader: threading.Thread | None = None
        self._listening = asyncio.Event()
        self._is_ready, self._is_reachable = False, True
        self._hurry = asyncio.Event()
        self.address = ""  # where it listens, once started
        self.health_address = ""

    async def start(self) -> None:
        """Listen.  Raises InvalidArgument when an address cannot be had, or a file not be understood; then `stop` is
        still to be called."""
        server = self._settings.server
        if server.tokens_file:
            self._tokens = TokensFile(server.tokens_file)
        if self._settings.names.prefixes:
            self._prefixes = read_prefixes(self._settings.names.prefixes)
        serving = make_server(server, self._backend, self._tokens, self._health, self._set_reachable)
        self.address = listen(serving, server.listen, "listen", server_credentials(server))
        self._server = serving
        if server.health_listen:
            self._health_server = make_health_server(self._health)
            self.health_address = listen(self._health_server, server.health_listen, "health_listen")
            await self._health_server.start()
        self._observation.start()
        self._warming = asyncio.create_task(self._warm_up(), name="tinyloop-warm-up")
        await self._server.start()
        self._listening.set()
        _log.info(
            "listening",
            address=self.address,
            health=self.health_address or None,
            metrics=self.metrics_address or None,
            grpc_processes=server.grpc_processes or None,
        )
        if self._tokens is not None:
            self._following = asyncio.create_task(self._follow(self._tokens), name="tinyloop-tokens")

    @property
    def metrics_address(self) -> str:
        """Empty without a metrics port, and before `start`."""
        return self._observation.address

    async def ready(self) -> None:
        """Wait until requests are served.  Raises what loading the model raised."""
        assert self._warming is not None, "start comes first"
        await asyncio.shield(self._warming)

    async def stop(self, grace_s: float | None = None) -> None:
        """Drain and close, in the order that the module's docstring gives.  Default grace: the settings'."""
        settings = self._settings.server
        grace_s = settings.drain_grace_s if grace_s is None else grace_s
        self._set_ready(False)
        await self._unless_hurried(asyncio.sleep(settings.drain_pause_s))
        if self._warming is not None and not self._warming.done():
            self._warming.cancel()
            await asyncio.wait([self._warming], timeout=_FLUSH_S)
        if self._scheduler is not None:
            await self._unless_hurried(self._scheduler.drain(grace_s))
        self._backend.close()
        if self._scheduler is not None:
            await self._unless_hurried(_close(self._scheduler))
        self._health.end_watches()
        await self._unless_hurried(self._backend.quiet(_LAST_CALLS_S))  # those in gRPC's hands would end as CANCELLED
        if self._server is not None:
            await self._server.stop(None if self._hurry.is_set() else _FLUSH_S)
        if self._names is not None:
            await self._names.close()
        if self._snapshots is not None:
            await self._unless_hurried(self._snapshots.close())
        if self._health_server is not None:
            await self._health_server.stop(None)
        if self._following is not None:
            self._following.cancel()
        await self._observation.stop()
        _log.info("stopped")

    def hurry(self) -> None:
        """Skip what is left of the pause and the grace time."""
        self._hurry.set()

    async def run(self, on_ready: Callable[[App], None] = lambda app: None) -> int:
        """Serve until SIGTERM, SIGINT or a lost device; the exit status.  `on_ready` is called once it serves.

        Both signals stay caught when it returns, and do nothing any more."""
        stopping = asyncio.Event()

        def caught(name: str) -> None:
            _log.info("signal", signal=name, draining=stopping.is_set())
            self.hurry() if stopping.is_set() else stopping.set()

        with signals_caught(caught):
            return await self._run(stopping, on_ready)

    async def _run(self, stopping: asyncio.Event, on_ready: Callable[[App], None]) -> int:
        stopped = asyncio.create_task(stopping.wait())
        fault = asyncio.create_task(self._serve_until_fault(on_ready))
        try:
            await asyncio.wait({stopped, fault}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            failed = fault.done()
            if not failed:  # gRPC's server cannot be left half started
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._listening.wait(), _LISTEN_S)
            for task in (stopped, fault):
                task.cancel()
            await asyncio.wait({fault})
            if failed and self._scheduler is None:  # nobody has been told to call
                self.hurry()
            if self.address:
                await self.stop()
        if failed:
            if self._loader is not None:
                await asyncio.to_thread(self._loader.join, _LOADER_S)
            fault.result()  # raises what starting or loading raised
        return 1 if failed or self._hurry.is_set() else 0

    @property
    def still_computes(self) -> bool:
        """After `stop`: a load, a step or a write was left behind, in a thread that nothing can interrupt."""
        loads = self._loader is not None and self._loader.is_alive()
        writes = self._snapshots is not None and not self._snapshots.is_closed
        return loads or writes or (self._scheduler is not None and not self._scheduler.is_stopped)

    async def _serve_until_fault(self, on_ready: Callable[[App], None]) -> None:
        """Returns when the device is lost."""
        await self.start()
        await self.ready()
        on_ready(self)
        assert self._scheduler is not None
        await self._scheduler.wait_fault()
        _log.error("device lost", fault=str(self._scheduler.fault))

    async def _warm_up(self) -> None:
        self._loader, loading = _start_thread(self._load)
        loaded = await loading
        scheduler = Scheduler(
            loaded.engine, self._settings.scheduler, tokenizer=loaded.tokenizer, observer=self._observation
        )
        await scheduler.start()
        limits = scheduler.limits
        self._scheduler = scheduler
        await self._check_fronts(scheduler.engine_name)
        if self._tokens is not None:
            scheduler.set_quotas(self._tokens.tokens.quotas)
        facts = {"model_id": limits.model_id, "engine": scheduler.engine_name, "cache_mode": limits.cache_mode.value}
        self._observation.open(scheduler.load, **facts)
        self._snapshots = await start_snapshots(scheduler, self._settings.names)
        self._names = await start_names(scheduler, self._settings.names, self._prefixes)
        self._backend.open(scheduler, self._names, loaded.config)
        await self._listening.wait()
        self._set_ready(True)
        _log.info("ready", engine=scheduler.engine_name, model_id=limits.model_id)

    async def _check_fronts(self, engine: str) -> None:
        """They start beside the load, before it is known what computes; by default they are for a GPU alone."""
        if self._has_fronts_by_default and engine != EngineKind.CUDA and self._settings.server.grpc_processes:
            await self._listening.wait()
            assert isinstance(self._server, Fronts)
            await self._server.take_over()
            _log.info("processes that speak gRPC end, which by default are for a GPU alone", engine=engine)

    def _set_ready(self, ready: bool) -> None:
        self._is_ready = ready
        self._tell_readiness()

    def _set_reachable(self, reachable: bool) -> None:
        self._is_reachable = reachable
        self._tell_readiness()

    def _tell_readiness(self) -> None:
        ready = self._is_ready and self._is_reachable
        self._health.set_ready(ready)
        self._observation.set_ready(ready)

    async def _follow(self, file: TokensFile) -> None:
        """Quotas are the scheduler's to keep; who calls is looked up in the file's tokens anyway."""
        async for tokens in file.changes():
            if self._scheduler is not None:
                self._scheduler.set_quotas(tokens.quotas)

    async def _unless_hurried(self, work: Any) -> None:
        """Await `work`, but no longer than until `hurry`."""
        working, hurried = asyncio.ensure_future(work), asyncio.create_task(self._hurry.wait())
        await asyncio.wait({working, hurried}, return_when=asyncio.FIRST_COMPLETED)
        for task in (working, hurried):
            task.cancel()
        if working.done() and not working.cancelled():
            working.result()


async def _close(scheduler: Scheduler) -> None:
    try:
        await asyncio.wait_for(scheduler.close(), _CLOSE_S)
    except TimeoutError:
        _log.error("the engine did not stop", waited_s=_CLOSE_S)
    except Exception:  # callers have their last messages to come, and whoever waits for this process its status
        _log.exception("the engine failed to close")


def _with_fronts(settings: Settings) -> ServerSettings:
    """Of the server, with a number of processes that speak gRPC: where none was given, some beside what may be a GPU
    that has the cores for them, for nothing else is so fast that callers wait for gRPC."""
    server = settings.server
    if server.grpc_processes is None:
        beside_gpu = settings.engine.engine != EngineKind.CPU and _GPU_DRIVER.exists()
        pays = beside_gpu and usable_cores() >= _CORES_FOR_FRONTS and not server.listen.startswith("unix:")
        server = replace(server, grpc_processes=_FRONTS if pays else 0)
    return server


def run_process(app: App, on_ready: Callable[[App], None]) -> NoReturn:
    """`App.run`, and then the end of this process with its status."""

    def ready(app: App) -> None:
        gc.collect()
        gc.freeze()  # of what is there now all stays: looking through it held every stream up for 40 ms and more
        on_ready(app)

    try:
        status = asyncio.run(app.run(ready))
    except Exception as error:
        if not app.still_computes:
            raise
        _log.error("the server ends", error=str(error))
        status = 1
    finally:
        ignore_signals()  # the interpreter's own end would give them their old meaning
    if app.still_computes:  # the interpreter would wait for the thread, or abort under its feet
        settle_log()
        os._exit(status)
    raise SystemExit(status)


def _start_thread(work: Callable[[], LoadedModel]) -> tuple[threading.Thread, asyncio.Future[LoadedModel]]:
    """A daemon thread that does `work`, and its result."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[LoadedModel] = loop.create_future()

    def finish(result: LoadedModel | None, error: BaseException | None) -> None:
        if future.cancelled():
            if result is not None:
                result.engine.close()
        elif error is not None:
            future.set_exception(error)
        elif result is not None:
            future.set_result(result)

    def run() -> None:
        try:
            outcome: tuple[LoadedModel | None, BaseException | None] = (work(), None)
        except BaseException as error:
            outcome = (None, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, *outcome)

    thread = threading.Thread(target=run, name="tinyloop-load", daemon=True)
    thread.start()
    return thread, future
