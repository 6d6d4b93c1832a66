"""SIGTERM and SIGINT, which end a process: caught for a while, or ignored.  Standard library only; main thread only."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ENDING = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def signals_caught(caught: Callable[[str], None]) -> Iterator[None]:
    """`caught` hears the name of each, on the running event loop; afterwards they do nothing.

    Not by the loop, which when it closes leaves them to end the process as if nobody had caught them.  A signal that
    comes when the loop is about to sleep is seen when it wakes: so each leaves a byte in a socket.
    """

    def handle(number: int, frame: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(caught, signal.Signals(number).name)

    loop = asyncio.get_running_loop()
    woken, waking = socket.socketpair()
    with woken, waking:
        for end in (woken, waking):
            end.setblocking(False)
        loop.add_reader(woken, woken.recv, 64)
        signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
        for number in ENDING:
            signal.signal(number, handle)
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)
            loop.remove_reader(woken)


def ignore_signals() -> None:
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
