"""The grpc.aio servers: options, services, addresses.

Two servers on one event loop: the one that serves, and a small one for health alone (health.py says why).
"""

from __future__ import annotations

import resource
import socket
from contextlib import suppress
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection

from tinyloop_service.errors import InvalidArgument
from tinyloop_service.pb import (
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    prefix_pb2,
    prefix_pb2_grpc,
)
from tinyloop_service.rpc.auth import Authenticate
from tinyloop_service.rpc.backend import Backend
from tinyloop_service.rpc.boundary import Methods
from tinyloop_service.rpc.creation import PrefixCreator
from tinyloop_service.rpc.generation_service import GenerationService
from tinyloop_service.rpc.health import READY_SERVICE, Health
from tinyloop_service.rpc.model_service import ModelService
from tinyloop_service.rpc.prefix_service import PrefixService
from tinyloop_service.rpc.tokens import TokensFile
from tinyloop_service.settings import ServerSettings

_OWN_FILES = 64  # some 20 while nobody calls, and the connections of the metrics port
_FEWEST_CONNECTIONS = 4
_ANY_HOST = ("[::]", "0.0.0.0")  # gRPC takes either for both, and one if it cannot have the other

SERVICES = (
    READY_SERVICE,
    prefix_pb2.DESCRIPTOR.services_by_name["PrefixService"].full_name,
    model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name,
)
assert generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name == READY_SERVICE

_OPTIONS = (
    ("grpc.so_reuseport", 0),  # else a second server takes the same port and half of the connections
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),  # keepalives during a long, silent prefill
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
    # calls that the event loop has not got to: from 1000 on gRPC ends some as CANCELLED; the scheduler refuses better
    ("grpc.server.max_pending_requests", 2**16),
    ("grpc.server.max_pending_requests_hard_limit", 2**16),
)


def make_server(
    settings: ServerSettings, backend: Backend, tokens: TokensFile | None, health: Health
) -> grpc.aio.Server:
    """The serving server with every service, not yet listening.  `tokens`: who may call; None: everybody."""
    options = [
        *_OPTIONS,
        _most_connections(3 / 4),
        ("grpc.max_receive_message_length", settings.max_request_bytes),
    ]
    if settings.max_connection_age_s is not None:  # with no grace: streams live on, new calls find new replicas
        options.append(("grpc.max_connection_age_ms", round(settings.max_connection_age_s * 1000)))
    interceptors = [Authenticate(tokens, backend.observer)] if tokens is not None else []
    server = grpc.aio.server(interceptors=interceptors, options=options)
    creator, methods = PrefixCreator(backend), Methods(backend.observer)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationService(backend, creator), methods)
    prefix_pb2_grpc.add_PrefixServiceServicer_to_server(PrefixService(backend, creator), methods)
    model_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(backend), methods)
    server.add_generic_rpc_handlers((methods,))
    health.add_to(server)
    if settings.reflection:
        reflection.enable_server_reflection((*SERVICES, reflection.SERVICE_NAME), server)
    return server


def make_health_server(health: Health) -> grpc.aio.Server:
    """For health alone, not yet listening."""
    server = grpc.aio.server(options=[*_OPTIONS, _most_connections(1 / 8)])
    health.add_to(server)
    return server


def _most_connections(share: float) -> tuple[str, int]:
    """A share of the files that this process may open, but for its own: metrics, names, snapshots, whoever connects and
    stays."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2**20 if files == resource.RLIM_INFINITY else max(_FEWEST_CONNECTIONS, int((files - _OWN_FILES) * share))
    return "grpc.max_allowed_incoming_connections", most


def listen(server: grpc.aio.Server, address: str, field: str, credentials: grpc.ServerCredentials | None = None) -> str:
    """Bind; returns the address with its real port.  Raises InvalidArgument naming the setting."""
    is_unix = address.startswith("unix:")
    try:
        if not is_unix:
            _try_bind(address)
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except OSError as error:
        raise InvalidArgument(
            field, f"cannot listen on {address}: {error.strerror}; choose another port, or 0"
        ) from None
    except RuntimeError:
        raise InvalidArgument(field, f"cannot listen on {address}, for the reason that gRPC gave") from None
    return address if is_unix else f"{address.rpartition(':')[0]}:{port}"


def _try_bind(address: str) -> None:
    """As gRPC will, which says why it cannot on standard error only, in a form of its own.

    Raises OSError where not one of the places that the address stands for can be had.
    """
    host, _, port = address.rpartition(":")
    names = _ANY_HOST if host in _ANY_HOST else (host,)
    *others, last = [
        (family, place)
        for name in names
        for family, _, _, _, place in socket.getaddrinfo(name.strip("[]"), int(port), type=socket.SOCK_STREAM)
    ]
    for family, place in others:
        with suppress(OSError):
            return _bind(family, place)
    _bind(*last)


def _bind(family: int, place: Any) -> None:
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does: ended connections may linger
        trial.bind(place)
