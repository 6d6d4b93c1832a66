"""Health, as gRPC defines it: on the serving port, beside the services, and on a small port of its own.

"" is alive as long as it answers; `tinyloop.v1.GenerationService` is SERVING when the server takes requests,
NOT_SERVING while it warms up or drains, while no front of it listens, and after a lost device, never because it is
busy.

Kubelets ask on the port of its own, for they neither speak TLS nor send tokens.  Proxies and the channels of clients
that hash by themselves watch the port that they call; no token is asked for there either.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tinyloop_service.rpc.addresses import Server

MOST_WATCHES = 10_000  # at a time, some 20 KB each, by whoever reaches the port
READY_SERVICE = "tinyloop.v1.GenerationService"
_States = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # generated, without types
    """One state for everybody who asks or watches."""

    def __init__(self) -> None:
        self._states = {"": _States.SERVING, READY_SERVICE: _States.NOT_SERVING}
        self._changed = asyncio.Event()  # another one after each change
        self._is_ending = False
        self._num_watches = 0

    def add_to(self, server: Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    def set_ready(self, ready: bool) -> None:
        self._states[READY_SERVICE] = _States.SERVING if ready else _States.NOT_SERVING
        self._tell()

    def end_watches(self) -> None:
        """A server that stops waits for its calls, and these end by nothing else."""
        self._is_ending = True
        self._tell()

    async def Check(self, request: Any, context: Any) -> Any:
        if request.service not in self._states:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service; ask for '' or " + READY_SERVICE)
        return _States(status=self._states[request.service])

    async def Watch(self, request: Any, context: Any) -> None:
        if self._num_watches >= MOST_WATCHES:  # channels call on without it; to another status they call nobody
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{MOST_WATCHES} watch already; ask by Check")
        self._num_watches += 1
        try:
            await self._watch(request.service, context)
        finally:
            self._num_watches -= 1

    async def _watch(self, service: str, context: Any) -> None:
        told = None
        while not self._is_ending:
            changed = self._changed
            status = self._states.get(service, _States.SERVICE_UNKNOWN)
            if status != told:
                await context.write(_States(status=status))
            told = status
            await changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
