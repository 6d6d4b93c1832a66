"""What every gRPC server of this package listens with: options, and an address."""

from __future__ import annotations

import resource
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import grpc

from tinyloop_service.errors import InvalidArgument
from tinyloop_service.settings import ServerSettings

_OWN_FILES = 64  # some 20 while nobody calls, and the connections of the metrics port
_FEWEST_CONNECTIONS = 4
_ANY_HOST = ("[::]", "0.0.0.0")  # gRPC takes either for both, and one if it cannot have the other

_OPTIONS = (
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),  # keepalives during a long, silent prefill
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
    # calls that the event loop has not got to: from 1000 on gRPC ends some as CANCELLED; the scheduler refuses better
    ("grpc.server.max_pending_requests", 2**16),
    ("grpc.server.max_pending_requests_hard_limit", 2**16),
)

Options = list[tuple[str, int]]


class Server(Protocol):
    """What of `grpc.aio.Server` is used, which fronts have as well."""

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[Any]) -> None: ...

    def add_insecure_port(self, address: str) -> int: ...

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int: ...

    async def start(self) -> None: ...

    async def stop(self, grace: float | None) -> None: ...


def serving_options(settings: ServerSettings, *, shared_port: bool = False) -> Options:
    """Of a server that answers callers.  shared_port: others may listen there too, and each gets some connections."""
    options = [
        *_OPTIONS,
        ("grpc.so_reuseport", int(shared_port)),
        ("grpc.max_receive_message_length", settings.max_request_bytes),
        _most_connections(3 / 4),
    ]
    if settings.max_connection_age_s is not None:  # with no grace: streams live on, new calls find new replicas
        options.append(("grpc.max_connection_age_ms", round(settings.max_connection_age_s * 1000)))
    return options


def health_options() -> Options:
    """Of a server that answers for health alone."""
    return [*_OPTIONS, ("grpc.so_reuseport", 0), _most_connections(1 / 8)]


def _most_connections(share: float) -> tuple[str, int]:
    """A share of the files that this process may open, but for its own: metrics, names, snapshots, whoever connects and
    stays."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2**20 if files == resource.RLIM_INFINITY else max(_FEWEST_CONNECTIONS, int((files - _OWN_FILES) * share))
    return "grpc.max_allowed_incoming_connections", most


def listen(server: Server, address: str, field: str, credentials: grpc.ServerCredentials | None = None) -> str:
    """Bind; returns the address with its real port.  Raises InvalidArgument naming the setting."""
    is_unix = address.startswith("unix:")
    try:
        if not is_unix:
            _try_bind(address)
        port = bind(server, address, credentials)
    except OSError as error:
        raise InvalidArgument(
            field, f"cannot listen on {address}: {error.strerror}; choose another port, or 0"
        ) from None
    except RuntimeError:
        raise InvalidArgument(field, f"cannot listen on {address}, for the reason that gRPC gave") from None
    return address if is_unix else f"{address.rpartition(':')[0]}:{port}"


def bind(server: Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """The port; 1 of a Unix socket.  Raises RuntimeError where gRPC cannot, which says why on standard error."""
    return server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)


def _try_bind(address: str) -> None:
    """As gRPC will, which says why it cannot on standard error only, in a form of its own.

    Raises OSError where not one of the places that the address stands for can be had.
    """
    *others, last = places(address)
    for family, place in others:
        with suppress(OSError):
            return _bind(family, place)
    _bind(*last)


def places(address: str) -> list[tuple[int, Any]]:
    """Families of sockets, and what they are bound to.  Raises OSError for a host that nobody knows."""
    host, _, port = address.rpartition(":")
    names = _ANY_HOST if host in _ANY_HOST else (host,)
    return [
        (family, place)
        for name in names
        for family, _, _, _, place in socket.getaddrinfo(name.strip("[]"), int(port), type=socket.SOCK_STREAM)
    ]


def _bind(family: int, place: Any) -> None:
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does: ended connections may linger
        trial.bind(place)
