"""How the clients reach a server: channel options, credentials, headers, and errors back to exceptions.

Retries are gRPC's own, by service config: only UNAVAILABLE, and CANCELLED, as which gRPC ends calls that a server which
closes has not taken; only until the first message has arrived, after the delay that the server asks for
(`grpc-retry-pushback-ms`), and only for methods that may safely run twice.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from tinyloop_service import errors
from tinyloop_service.errors import InvalidArgument, TinyLoopError
from tinyloop_service.rpc.health import READY_SERVICE
from tinyloop_service.rpc.status import to_exception

PREFIX_KEY = "x-tinyloop-prefix"
_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")  # RFC 6750
Options = list[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class Tls:
    """How a client knows the server, and shows who it is itself; all are paths of PEM files.

    ca     whose certificates to trust; None: the system's roots
    cert   the client's own certificate, for servers that ask for one, with its
    key
    """

    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise InvalidArgument("tls", "has one of cert and key; give both, or neither")


TlsChoice = bool | str | Path | Tls | grpc.ChannelCredentials | None

_RETRIED = {
    "PrefixService": ("CreatePrefix", "GetPrefix", "ListPrefixes", "WatchPrefix"),
    "GenerationService": ("Generate", "GenerateUnary"),
    "ModelService": ("GetModel", "GetLoad", "Tokenize", "Detokenize"),
}
_RETRY_POLICY = {
    "maxAttempts": 5,
    "initialBackoff": "0.2s",
    "maxBackoff": "3s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
}
_RING_HASH_SWITCH = "GRPC_EXPERIMENTAL_RING_HASH_SET_REQUEST_HASH_KEY"


def channel_options(*, affinity: bool, retries: bool = True) -> Options:
    """`affinity`: among several addresses, requests of one prefix go to one of them; else they take turns.

    Raises InvalidArgument where gRPC is told by its own variable not to hash by a header.
    """
    if affinity:
        _switch_on_ring_hash()
    return [
        ("grpc.service_config", service_config(affinity=affinity)),
        ("grpc.enable_retries", int(retries)),
        ("grpc.per_rpc_retry_buffer_size", 16 * 2**20),  # a long prompt may be sent again too
        ("grpc.max_receive_message_length", 64 * 2**20),
        ("grpc.keepalive_time_ms", 30_000),  # a dead server is noticed under a silent stream
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.max_reconnect_backoff_ms", 5_000),  # who was away for long gets its requests back soon
    ]


def _switch_on_ring_hash() -> None:
    """Never too late: gRPC looks when it reads a channel's service config.  Without it every call would fail."""
    if os.environ.setdefault(_RING_HASH_SWITCH, "true").lower() not in ("1", "t", "true", "y", "yes"):
        given = os.environ[_RING_HASH_SWITCH]
        raise InvalidArgument("affinity", f"is at odds with {_RING_HASH_SWITCH}={given}; unset it, or set it to true")


def service_config(*, affinity: bool) -> str:
    """Load balancing and retries, as gRPC's JSON.

    With affinity every address's health is watched: a replica that warms up or drains gets no calls, its neighbours on
    the ring do.  Without, there may be no other address, and what the server says of itself is worth more.
    """
    config: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}]}
    if affinity:
        config["loadBalancingConfig"] = [{"ring_hash_experimental": {"requestHashHeader": PREFIX_KEY}}]
        config["healthCheckConfig"] = {"serviceName": READY_SERVICE}
    names = [
        {"service": f"tinyloop.v1.{service}", "method": method}
        for service, methods in _RETRIED.items()
        for method in methods
    ]
    return json.dumps({**config, "methodConfig": [{"name": names, "retryPolicy": _RETRY_POLICY}]})


def credentials(tls: TlsChoice) -> grpc.ChannelCredentials | None:
    """None: plaintext; True: the system's roots; a path: the PEM file of roots to trust; or credentials as given.

    Raises InvalidArgument when the file of roots holds none, of which gRPC would say nothing before a call fails.
    """
    if tls is None or tls is False:
        return None
    if isinstance(tls, grpc.ChannelCredentials):
        return tls
    field = "tls.ca" if isinstance(tls, Tls) else "tls"
    if not isinstance(tls, Tls):
        tls = Tls(ca=None if tls is True else tls)
    ca, cert, key = (None if path is None else Path(path).read_bytes() for path in (tls.ca, tls.cert, tls.key))
    if ca is not None and b"-----BEGIN CERTIFICATE-----" not in ca:
        raise InvalidArgument(field, f"{tls.ca} holds no certificate in PEM; give the file of who signed the server's")
    return grpc.ssl_channel_credentials(ca, key, cert)


def check_token(token: str | None) -> str | None:
    """Raises InvalidArgument for what no header can carry; the token is no part of the message."""
    if token is not None and not (isinstance(token, str) and _TOKEN.fullmatch(token)):
        raise InvalidArgument(
            "token", "is no bearer token: expected letters, digits and -._~+/= only, nothing around them"
        )
    return token


def metadata(token: str | None, prefix: str | None) -> list[tuple[str, str]]:
    """Headers of a call: who asks, and by which prefix a proxy may route it."""
    headers = [("authorization", f"Bearer {token}")] if token else []
    return [*headers, (PREFIX_KEY, prefix)] if prefix else headers


def exception_of(error: Any, content_field: str, *, closed: bool, has_begun: bool = False) -> TinyLoopError:
    """The exception for a failed call; `content_field`: what the Python caller calls the request's input; `has_begun`:
    some of the answer has come."""
    code, message = error.code(), error.details() or ""
    if closed and code is grpc.StatusCode.CANCELLED:
        return closed_error()
    trailers: Iterable[Any] = error.trailing_metadata() or ()
    meant = to_exception(code, message, [(key, value) for key, value in trailers], has_begun=has_begun)
    if isinstance(meant, InvalidArgument):
        return InvalidArgument(_python_field(meant.field, content_field), meant.description)
    return meant


def closed_error() -> errors.ModelClosed:
    return errors.ModelClosed("client was closed; construct a new one")


def _python_field(path: str, content_field: str) -> str:
    """`generation.sampling.top_p` is `top_p` to a caller in Python, `input.tokens.ids[3]` is `prompt[3]`."""
    for message in ("generation.", "sampling."):
        path = path.removeprefix(message)
    for wire in ("input.tokens.ids", "input.tokens", "input.text", "input", "tokens.ids", "tokens", "text"):
        if path == wire or path.startswith(f"{wire}["):
            return content_field + path.removeprefix(wire)
    return path
