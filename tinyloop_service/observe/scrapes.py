"""The HTTP port where Prometheus reads the metrics.

In: a way to take a snapshot, called on the event loop for each scrape.  Out: the text format.  It refuses to know what
the metrics are; `exposition` does.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tinyloop_service.errors import InvalidArgument
from tinyloop_service.observe.exposition import Snapshot, families

MOST_CONNECTIONS = 32  # at once
_LONGEST_S = 30.0  # that anybody stays connected, however often he says a little
_SCRAPE_S = 5.0  # for the event loop to give its numbers; a scrape that gets none fails


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, as long as there are few: whoever reaches the port may connect, and say nothing."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        self._free = threading.Semaphore(MOST_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        end = threading.Timer(_LONGEST_S, _cut_off, (request,))
        end.daemon = True
        end.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever asked is gone, or did not ask in time: nothing to log, least of all a traceback each."""


def _cut_off(connection: socket.socket) -> None:
    with suppress(OSError):  # it is closed already
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(WSGIRequestHandler):
    timeout = 10.0  # for the other side to ask, and to take what it asked for

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is no event."""


class MetricsServer:
    """One HTTP port; every path of it answers with all metrics and those of the process."""

    def __init__(self, address: str, take: Callable[[], Snapshot]) -> None:
        """take: called on the running event loop.  Raises InvalidArgument if the address cannot be had."""
        host, _, port = address.rpartition(":")
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(_LoopCollector(asyncio.get_running_loop(), take))
        try:
            self._server = make_server(host.strip("[]"), int(port), make_wsgi_app(registry), _Server, _Handler)
        except OSError as error:
            raise InvalidArgument(
                "metrics_listen", f"cannot listen on {address}: {error.strerror}; choose another port, or 0"
            ) from None
        self.address = f"{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="tinyloop-metrics", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _LoopCollector(Collector):
    """Runs on the HTTP server's threads, and asks the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[], Snapshot]) -> None:
        self._loop = loop
        self._take = take

    def collect(self) -> Iterator[Metric]:
        future: Future[Snapshot] = Future()

        def answer() -> None:
            try:
                future.set_result(self._take())
            except BaseException as error:
                future.set_exception(error)

        self._loop.call_soon_threadsafe(answer)
        yield from families(future.result(_SCRAPE_S))
