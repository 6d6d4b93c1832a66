"""Keeps a port for the fronts of one server, from before they listen until it ends: nobody else gets it meanwhile."""

from __future__ import annotations

import socket
from typing import Any

from tinyloop_service.rpc.addresses import places


def claim(address: str) -> list[socket.socket]:
    """Sockets that keep a port for fronts to share, and do not listen: one for each place that the address stands for,
    but for those that cannot be had.  Raises OSError where none can."""
    claimed: list[socket.socket] = []
    failure = OSError("no place")
    for family, place in places(address):
        port = claimed[0].getsockname()[1] if claimed else place[1]
        try:
            claimed.append(_claim_place(family, (place[0], port, *place[2:])))
        except OSError as error:
            failure = error
    if not claimed:
        raise failure
    return claimed


def _claim_place(family: int, place: Any) -> socket.socket:
    """Linux lets sockets that may reuse an address have one that nobody listens at: this one may until it has it, for
    ended connections may linger, and then shares it with those alone that share theirs.  Of two who ask at once for a
    port by its number one gets it, the one that listens first, for a moment."""
    claimed = socket.socket(family)
    try:
        claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        claimed.bind(place)
        is_named = place[1] != 0
        if is_named:
            claimed.listen(1)
        claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if is_named:
            claimed.shutdown(socket.SHUT_RDWR)
    except OSError:
        claimed.close()
        raise
    return claimed


def written(claimed: socket.socket) -> str:
    """The place of a socket, as gRPC takes it."""
    host, port = claimed.getsockname()[:2]
    return f"[{host}]:{port}" if claimed.family == socket.AF_INET6 else f"{host}:{port}"
