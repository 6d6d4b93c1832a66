"""What signals mean to the test process, kept: a server that ends leaves them caught, as its process ends with it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_signals() -> Iterator[None]:
    """Around what would have a process of its own; whatever it starts later would inherit what it ignores."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, meaning in before.items():
            if signal.getsignal(number) is not meaning:
                signal.signal(number, meaning)
