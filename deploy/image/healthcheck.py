"""Status 0 if a server is ready: the one in this container, or the one whose health service is at HOST:PORT.

For engines that ask the container itself (Docker, Podman), and for `helm test`.  Kubelets ask by gRPC themselves.
"""

from __future__ import annotations

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE = "tinyloop.v1.GenerationService"
DEFAULT_LISTEN = "127.0.0.1:50052"
TIMEOUT_S = 4.0


def is_ready(target: str) -> bool:
    with grpc.insecure_channel(target) as channel:
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def own_target() -> str:
    listen = os.environ.get("TINYLOOP_HEALTH_LISTEN") or DEFAULT_LISTEN
    return f"localhost:{listen.rpartition(':')[2]}"


if __name__ == "__main__":
    sys.exit(not is_ready(sys.argv[1] if len(sys.argv) > 1 else own_target()))
