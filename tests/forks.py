"""A fork of the test process, for what must not be used in one."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable

WAIT_S = 10.0


def forked(child: Callable[[], int]) -> int:
    """The exit status of `child` in a fork of this process; fails if it does not end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
        process = os.fork()
    if process == 0:
        try:
            os._exit(child())
        finally:
            os._exit(99)
    deadline = time.monotonic() + WAIT_S
    while (ended := os.waitpid(process, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(ended[1])
