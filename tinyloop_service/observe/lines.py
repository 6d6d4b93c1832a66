"""Lines on their way out of the process: who says something never waits for who reads it.

    event loop, any thread ──admit, write──► at most MOST_LINES, in order ──a thread of their own──► a descriptor
            print, tracebacks ──Stream────────┘

Somebody who reads a pipe may stop, a terminal may be told to (Ctrl-S), a disk may stand still; a server that wrote by
itself would stand still with them, health checks included.  Here lines wait, and what finds no room is dropped and
counted; the next one that finds room says how many were.  At the end of the process the rest has FLUSH_S to leave.
A process that is forked from it has no such thread, and writes by itself.

In: lines.  Out: their bytes.  It refuses to know what they say.  They go to the descriptor itself, since Python's
streams have locks: a thread that holds one for ever would abort the interpreter at its end.
"""

from __future__ import annotations

import atexit
import io
import os
import select
import threading
import time
from collections.abc import MutableMapping
from queue import SimpleQueue
from typing import Any

import structlog

MOST_LINES = 4096  # some 1.5 MB
FLUSH_S = 1.0
_MOMENT_S = 0.002  # lines of one moment wake the thread once: a wake costs as much as two lines


class Lines:
    """What structlog takes for a file."""

    def __init__(self, descriptor: int, most: int = MOST_LINES) -> None:
        """The descriptor is duplicated: what its number stands for later is none of ours."""
        self.dropped = 0  # since the start; read from anywhere
        self._told = 0  # of them, those that a line has told of
        self._counting = threading.Lock()
        self._descriptor = _own(descriptor)
        self._most = most
        self._waiting: SimpleQueue[str | threading.Event] = SimpleQueue()
        self._is_forked = False
        os.register_at_fork(after_in_child=self._forked)
        threading.Thread(target=self._run, name="tinyloop-lines", daemon=True).start()
        atexit.register(self.settle)

    def admit(self, logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """The first of structlog's processors: what has no room costs nothing more."""
        if self._waiting.qsize() >= self._most:
            self._drop()
            raise structlog.DropEvent
        if self._told != self.dropped:
            with self._counting:
                event["dropped_lines"], self._told = self.dropped - self._told, self.dropped
        return event

    def write(self, text: str) -> None:
        """Returns at once."""
        if self._is_forked:
            self._send(text)
        else:
            self._waiting.put(text)

    def write_if_room(self, text: str) -> None:
        """The same, of what was not admitted."""
        if self._waiting.qsize() < self._most:
            self.write(text)
        else:
            self._drop()

    def flush(self) -> None:
        """Nothing is kept back."""

    def fileno(self) -> int:
        return self._descriptor

    def settle(self, limit_s: float = FLUSH_S) -> bool:
        """Wait for what was written until now to leave; whether it did."""
        if self._is_forked:
            return True
        left = threading.Event()
        self._waiting.put(left)
        return left.wait(limit_s)

    def _run(self) -> None:
        while True:
            item = self._waiting.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            self._send(item)
            if self._waiting.empty():
                time.sleep(_MOMENT_S)

    def _send(self, text: str) -> None:
        data = text.encode(errors="backslashreplace")
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # somebody we share it with wants it so
                waiting = select.poll()
                waiting.register(self._descriptor, select.POLLOUT)
                waiting.poll()
            except OSError:  # the reader is gone, the disk is full
                self._drop()
                return

    def _forked(self) -> None:
        """In the child: what waits is the parent's, and a lock may be held by a thread that is not there."""
        self._is_forked, self._waiting, self._counting = True, SimpleQueue(), threading.Lock()

    def _drop(self) -> None:
        with self._counting:
            self.dropped += 1


class Stream(io.TextIOBase):
    """What print, tracebacks and rich take for a file: whole lines of theirs wait among the others."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._begun = threading.local()  # a thread's line without an end

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._lines.fileno()

    def isatty(self) -> bool:
        return os.isatty(self.fileno())

    def write(self, text: str) -> int:
        whole, end, begun = (getattr(self._begun, "text", "") + text).rpartition("\n")
        self._begun.text = begun
        if end:
            self._lines.write_if_room(whole + end)
        return len(text)

    def flush(self) -> None:
        """Of this thread, a line that has no end yet too."""
        begun, self._begun.text = getattr(self._begun, "text", ""), ""
        if begun:
            self._lines.write_if_room(begun)


def _own(descriptor: int) -> int:
    """A duplicate; of one that is closed (`2>&-`) nothing, which also keeps its number from what is opened next."""
    try:
        return os.dup(descriptor)
    except OSError:
        nothing = os.open(os.devnull, os.O_WRONLY)
        return nothing if nothing == descriptor else os.dup2(nothing, descriptor)
