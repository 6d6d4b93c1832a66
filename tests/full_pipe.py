"""A pipe whose reader has stopped."""

from __future__ import annotations

import os
from contextlib import suppress


def fill(descriptor: int) -> int:
    """Until it takes no byte more; how many it took.  Whoever else writes to it blocks from then on."""
    os.set_blocking(descriptor, False)
    count = 0
    for size in (4096, 1):
        with suppress(BlockingIOError):
            while True:
                count += os.write(descriptor, b"." * size)
    os.set_blocking(descriptor, True)
    return count
