"""How the clients reach a server: channel options, credentials, headers, and errors back to exceptions.

Retries are gRPC's own, by service config: only UNAVAILABLE, only until the first message has arrived, after the delay
that the server asks for (`grpc-retry-pushback-ms`), and only for methods that may safely run twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc

from tinyloop_service import errors
from tinyloop_service.errors import InvalidArgument, TinyLoopError
from tinyloop_service.rpc.status import to_exception

PREFIX_KEY = "x-tinyloop-prefix"
Tls = bool | str | Path | grpc.ChannelCredentials | None
Options = list[tuple[str, Any]]

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
    "retryableStatusCodes": ["UNAVAILABLE"],
}
_RING_HASH_SWITCH = "GRPC_EXPERIMENTAL_RING_HASH_SET_REQUEST_HASH_KEY"


def channel_options(*, affinity: bool) -> Options:
    """`affinity`: among several addresses, requests of one prefix go to one of them; else they take turns."""
    if affinity:
        os.environ.setdefault(_RING_HASH_SWITCH, "true")  # gRPC core reads it when the policy is made
    return [
        ("grpc.service_config", service_config(affinity=affinity)),
        ("grpc.enable_retries", 1),
        ("grpc.per_rpc_retry_buffer_size", 16 * 2**20),  # a long prompt may be sent again too
        ("grpc.max_receive_message_length", 64 * 2**20),
        ("grpc.keepalive_time_ms", 30_000),  # a dead server is noticed under a silent stream
        ("grpc.keepalive_timeout_ms", 10_000),
    ]


def service_config(*, affinity: bool) -> str:
    """Load balancing and retries, as gRPC's JSON."""
    policy: dict[str, Any] = {"round_robin": {}}
    if affinity:
        policy = {"ring_hash_experimental": {"requestHashHeader": PREFIX_KEY}}
    names = [
        {"service": f"tinyloop.v1.{service}", "method": method}
        for service, methods in _RETRIED.items()
        for method in methods
    ]
    return json.dumps(
        {"loadBalancingConfig": [policy], "methodConfig": [{"name": names, "retryPolicy": _RETRY_POLICY}]}
    )


def credentials(tls: Tls) -> grpc.ChannelCredentials | None:
    """None: plaintext; True: the system's roots; a path: the PEM file of roots to trust; or credentials as given."""
    if tls is None or tls is False:
        return None
    if isinstance(tls, grpc.ChannelCredentials):
        return tls
    return grpc.ssl_channel_credentials(None if tls is True else Path(tls).read_bytes())


def metadata(token: str | None, prefix: str | None) -> list[tuple[str, str]]:
    """Headers of a call: who asks, and by which prefix a proxy may route it."""
    headers = [("authorization", f"Bearer {token}")] if token else []
    return [*headers, (PREFIX_KEY, prefix)] if prefix else headers


def exception_of(error: Any, content_field: str, *, closed: bool) -> TinyLoopError:
    """The exception for a failed call; `content_field`: what the Python caller calls the request's input."""
    code, message = error.code(), error.details() or ""
    if closed and code is grpc.StatusCode.CANCELLED:
        return closed_error()
    trailers: Iterable[Any] = error.trailing_metadata() or ()
    meant = to_exception(code, message, [(key, value) for key, value in trailers])
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
