"""Files that an operator names: opened without ever waiting for anybody.

A FIFO makes who opens it wait until somebody writes to it, a device may never end; and some of these files are read
again and again while the server runs, where waiting would mean that a withdrawn token stays good.  So what is no
regular file is refused.  Links are followed: that is how Kubernetes mounts a Secret.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_file(path: Path) -> BinaryIO:
    """For reading, as bytes.  Raises OSError, also for what is no regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        what = os.strerror(number) if stat.S_ISDIR(mode) else "is no regular file"
        raise OSError(number, what, str(path))
    return os.fdopen(descriptor, "rb")


def read_file(path: Path) -> bytes:
    """The whole of it.  Raises OSError as `open_file` does."""
    with open_file(path) as file:
        return file.read()
