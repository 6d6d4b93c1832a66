"""The observer that a server has: one door, behind it metrics, logs and traces.

In: what scheduler and RPCs tell it.  Out: the same to whoever is switched on; a metrics port.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version

from tinyloop_service.observe.exposition import MetricsServer, Snapshot
from tinyloop_service.observe.logs import log_call
from tinyloop_service.observe.metrics import Metrics
from tinyloop_service.observer import UNWATCHED, BuildRecord, CallRecord, Observer, RequestRecord
from tinyloop_service.settings import ServerSettings
from tinyloop_service.types import Load


class Observation:
    """An `Observer`.  Logs calls from the start; counts if there is a metrics port."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._slow_ns = float("inf") if settings.slow_request_s is None else settings.slow_request_s * 1e9
        self._metrics = Metrics()
        self._counting: Observer = self._metrics if settings.metrics_listen is not None else UNWATCHED
        self._server: MetricsServer | None = None
        self._load: Callable[[], Load] | None = None
        self._facts: Mapping[str, str] = {}
        self._is_draining = False

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
        """The model is loaded.  `facts`: the labels of tinyloop_build_info besides the version."""
        self._load, self._facts = load, {"version": version("tinyloop-service"), **facts}

    def drain(self) -> None:
        """From now on the server is not ready."""
        self._is_draining = True

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()

    def snapshot(self) -> Snapshot:
        """All metrics of this moment."""
        load = self._load() if self._load is not None else None
        is_ready = load is not None and load.accepting and not self._is_draining
        return Snapshot(self._metrics.copy(), load, is_ready, self._facts)

    # ---- what an observer hears

    def admitted(self, record: RequestRecord) -> None:
        self._counting.admitted(record)

    def first_token(self, record: RequestRecord) -> None:
        self._counting.first_token(record)

    def generated(self, tenant: str, num_tokens: int, num_gaps: int, gap_ns: float) -> None:
        self._counting.generated(tenant, num_tokens, num_gaps, gap_ns)

    def request_ended(self, record: RequestRecord) -> None:
        self._counting.request_ended(record)

    def build_ended(self, record: BuildRecord) -> None:
        self._counting.build_ended(record)

    def step(self, num_rows: int, num_steps: int, num_prefilled: int, duration_ns: int) -> None:
        self._counting.step(num_rows, num_steps, num_prefilled, duration_ns)

    def call_ended(self, call: CallRecord) -> None:
        self._counting.call_ended(call)
        log_call(call, self._slow_ns, None)
