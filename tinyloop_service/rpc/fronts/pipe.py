"""What the engine's process and a front say to each other, over a socket pair that nobody else holds.

In and out: events, tuples of plain values that begin with a kind of `Up` or `Down`.  What one side has to say in
one turn of its event loop leaves as one frame, but for large messages: 8 bytes of length, then the events as `marshal`
writes them, which is for two processes of one interpreter and takes the least time.  It refuses to know what an event
means.
"""

from __future__ import annotations

import asyncio
import marshal
import socket
from collections.abc import Callable
from typing import Any, Final, cast

Event = tuple[Any, ...]
_LENGTH: Final = 8
_LARGE: Final = 2**16  # bytes of a message that has a frame to itself, so that others need not wait for all of it


class Up:
    """From a front; CALL to CANCELLED begin with the call's number, which the front chooses."""

    LISTENING: Final = 0
    CALL: Final = 1  # number, method, metadata, request; None: requests are read when they are asked for
    REQUEST: Final = 2  # number, request; None: no more will come
    WRITTEN: Final = 3  # number: one more message of the answer has left
    CANCELLED: Final = 4  # number: the caller is gone; what still comes for the call is dropped
    REFUSED: Final = 5  # why the front cannot listen: setting, description
    WELL: Final = 6  # in answer to ASK


class Down:
    """To a front; what belongs to a call begins with its number."""

    LISTEN: Final = 0  # addresses, (ServerSettings, Pems or None) pickled
    MESSAGE: Final = 1  # number, message of the answer
    ENDED: Final = 2  # number, status code, its words, trailing metadata
    NEXT: Final = 3  # number: one more request is wanted
    STOP: Final = 4  # grace in seconds, or None
    ASK: Final = 5  # how are you
    CALLERS: Final = 6  # SHA-256 of all tokens; None: nobody needs one


class Pipe(asyncio.Protocol):
    """One side of a socket pair, on the running event loop."""

    def __init__(self, receive: Callable[[Event], None], lost: Callable[[], None]) -> None:
        """receive: is called with each event; lost: once, when the other side is gone or the pipe is closed."""
        self._receive = receive
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[Event] = []
        self._unread = bytearray()
        self._writable = asyncio.Event()
        self._writable.set()

    async def open(self, end: socket.socket) -> None:
        await self._loop.connect_accepted_socket(lambda: self, end)

    def send(self, *event: Any) -> None:
        """Leaves with whatever else is said in this turn of the event loop; to nobody if the pipe is closed."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(event)

    async def room_for(self, message: bytes) -> None:
        """Wait, for a large one, until those before it have left: each is there twice while it waits."""
        while len(message) > _LARGE and not self._writable.is_set():
            await self._writable.wait()

    def close(self) -> None:
        """What was said leaves first."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    # ---- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._unread += data
        begin = 0
        while len(self._unread) >= begin + _LENGTH:
            at = begin + _LENGTH
            end = at + int.from_bytes(self._unread[begin:at], "little")
            if len(self._unread) < end:
                break
            with memoryview(self._unread) as unread:
                events = marshal.loads(unread[at:end])
            begin = end
            for event in events:
                self._receive(event)
        del self._unread[:begin]

    def connection_lost(self, error: Exception | None) -> None:
        self._lost()

    def _flush(self) -> None:
        events, self._unsent = self._unsent, []
        if self._transport is None or self._transport.is_closing():
            return
        first = 0
        for at, event in enumerate(events):
            if isinstance(event[-1], bytes) and len(event[-1]) > _LARGE:
                self._write(events[first:at])
                self._write([event])
                first = at + 1
        self._write(events[first:])

    def _write(self, events: list[Event]) -> None:
        if events and self._transport is not None:
            data = marshal.dumps(events)
            self._transport.writelines((len(data).to_bytes(_LENGTH, "little"), data))
