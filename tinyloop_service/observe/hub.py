"""The observer that a server has: one door, behind it metrics, logs and traces.

In: what scheduler and RPCs tell it.  Out: the same to whoever is switched on; a metrics port.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from tinyloop_service.errors import InvalidArgument, install
from tinyloop_service.observe.exposition import Snapshot
from tinyloop_service.observe.logs import dropped_lines, log_build, log_call
from tinyloop_service.observe.metrics import Metrics
from tinyloop_service.observe.scrapes import MetricsServer
from tinyloop_service.observer import UNWATCHED, BuildRecord, CallRecord, Observer
from tinyloop_service.settings import ServerSettings
from tinyloop_service.types import Load

if TYPE_CHECKING:
    from tinyloop_service.observe.traces import Traces

_VERSION = version("tinyloop-service")


class Observation:
    """An `Observer`.  Logs calls from the start; counts if there is a metrics port."""

    def __init__(self, settings: ServerSettings, replica: str) -> None:
        """Raises InvalidArgument where traces are asked for and OpenTelemetry is not installed."""
        self._settings = settings
        self._replica = replica
        self._traces = _traces(settings, replica) if settings.otlp_endpoint is not None else None
        self._slow_ns = float("inf") if settings.slow_request_s is None else settings.slow_request_s * 1e9
        self._metrics = Metrics()
        counting: Observer = self._metrics if settings.metrics_listen is not None else UNWATCHED
        self._counting = counting
        # told for every row of a plan: there is nobody between the scheduler and who counts
        self.admitted, self.first_token, self.generated = counting.admitted, counting.first_token, counting.generated
        self.request_ended, self.step = counting.request_ended, counting.step
        self.front_listens, self.front_ended = counting.front_listens, counting.front_ended
        self.front_restarted = counting.front_restarted
        self._server: MetricsServer | None = None
        self._load: Callable[[], Load] | None = None
        self._facts: Mapping[str, str] = {}
        self._is_ready = False

    # ---- lifetime

    @property
    def address(self) -> str:
        """Of the metrics port; empty without one."""
        return self._server.address if self._server is not None else ""

    def start(self) -> None:
        """Open the metrics port, on the running event loop.  Raises InvalidArgument when it cannot be had."""
        if self._settings.metrics_listen is not None:
            self._server = MetricsServer(self._settings.metrics_listen, self.snapshot)

    def open(self, load: Callable[[], Load], **facts: str) -> None:
        """There is a scheduler.  `facts`: the labels of tinyloop_build_info besides version and replica."""
        self._load, self._facts = load, {"version": _VERSION, "replica": self._replica, **facts}

    def set_ready(self, ready: bool) -> None:
        """As health has it."""
        self._is_ready = ready

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)

    def snapshot(self) -> Snapshot:
        """All metrics of this moment."""
        load = self._load() if self._load is not None else None
        is_ready = self._is_ready and load is not None and load.accepting
        front_bytes = sum(map(_resident_bytes, self._metrics.fronts))
        return Snapshot(self._metrics.copy(), load, is_ready, self._facts, dropped_lines(), front_bytes)

    # ---- what an observer hears

    def build_ended(self, record: BuildRecord) -> None:
        self._counting.build_ended(record)
        log_build(record)

    def call_ended(self, call: CallRecord) -> None:
        self._counting.call_ended(call)
        trace_id = self._traces.call_ended(call) if self._traces is not None else None
        log_call(call, self._slow_ns, trace_id)


def _resident_bytes(process: int) -> int:
    """0 of one that has just ended."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def _traces(settings: ServerSettings, replica: str) -> Traces:
    try:
        from tinyloop_service.observe import traces  # its library is an extra
    except ImportError as error:
        raise InvalidArgument("otlp_endpoint", f"given, but {error.name} is not installed: {install('otel')}") from None
    exporter = traces.otlp_exporter(settings.otlp_endpoint or "")
    return traces.Traces(exporter, share=settings.trace_share, replica=replica, version=_VERSION)
