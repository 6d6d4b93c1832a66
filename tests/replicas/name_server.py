"""A name server for tests: A records over UDP, as a cluster's DNS has them for a headless Service.

Serves from a thread of its own.  It knows one kind of question; of everything else, AAAA included, it has no records.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_HEADER = struct.Struct(">HHHHHH")  # id, flags, questions, answers, authorities, additional
_RECORD = struct.Struct(">HHHIH4s")  # pointer to the name, type, class, ttl, length, address
_ANSWER, _NO_SUCH_NAME = 0x8580, 0x8583  # authoritative, recursion granted
_TYPE_A, _CLASS_IN, _TTL_S = 1, 1, 1
_NAME_OF_QUESTION = 0xC000 | _HEADER.size


@contextmanager
def name_server(records: Mapping[str, tuple[str, ...]]) -> Iterator[int]:
    """`records`: IPv4 addresses by name, which may change while it runs.  Yields the port, on 127.0.0.1."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        thread = threading.Thread(target=_serve, args=(listener, records), name="name-server", daemon=True)
        thread.start()
        try:
            yield port
        finally:
            listener.sendto(b"", ("127.0.0.1", port))  # its last datagram
            thread.join()


def _serve(listener: socket.socket, records: Mapping[str, tuple[str, ...]]) -> None:
    while True:
        asked, asker = listener.recvfrom(512)
        if not asked:
            return
        listener.sendto(_answer(asked, records), asker)


def _answer(asked: bytes, records: Mapping[str, tuple[str, ...]]) -> bytes:
    number = _HEADER.unpack_from(asked)[0]
    labels, at = [], _HEADER.size
    while length := asked[at]:
        labels.append(asked[at + 1 : at + 1 + length].decode("ascii"))
        at += 1 + length
    question = asked[_HEADER.size : at + 5]
    kind = int.from_bytes(asked[at + 1 : at + 3], "big")
    addresses = records.get(".".join(labels).lower())
    found = addresses if addresses is not None and kind == _TYPE_A else ()
    flags = _NO_SUCH_NAME if addresses is None else _ANSWER
    answers = (
        _RECORD.pack(_NAME_OF_QUESTION, _TYPE_A, _CLASS_IN, _TTL_S, 4, socket.inet_aton(address)) for address in found
    )
    return _HEADER.pack(number, flags, 1, len(found), 0, 0) + question + b"".join(answers)
