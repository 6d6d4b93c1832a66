"""A real redis-server on a free port, which keeps what it was told on disk and can be killed and started again.

Where it is missing a test is skipped, but never in CI.  `make ops-tools` installs it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_START_S = 20.0


def redis_binary() -> str:
    """Skips the test that asks where there is none; fails it in CI."""
    found = shutil.which("redis-server")
    if found is None:
        assert os.environ.get("CI", "").lower() not in ("1", "true"), "redis-server is missing; run `make ops-tools`"
        pytest.skip("redis-server is missing; `make ops-tools` installs it (as root, on Debian or Ubuntu)")
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class RedisServer:
    """One server process, started by `start`.  Data and port stay the same from one process to the next."""

    def __init__(self, folder: Path, binary: str) -> None:
        self._folder = folder
        self._binary = binary
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"redis://127.0.0.1:{self._port}/0"

    def start(self, folder: Path | None = None) -> None:
        """`folder`: of older data, to go on from."""
        self._folder = folder or self._folder
        options = {"port": self._port, "bind": "127.0.0.1", "dir": self._folder, "save": "", "daemonize": "no"}
        durable = {"appendonly": "yes", "appendfsync": "always"}
        words = [word for name, value in (options | durable).items() for word in (f"--{name}", str(value))]
        self._process = subprocess.Popen([self._binary, *words], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_S
        while not self._answers():
            assert self._process.poll() is None, "redis-server ended at once"
            assert time.monotonic() < deadline, "redis-server does not answer"
            time.sleep(0.01)

    def copy_data(self) -> Path:
        """What is on disk now, in a folder of its own."""
        return Path(shutil.copytree(self._folder, f"{self._folder}-older"))

    def kill(self) -> None:
        """As kill -9 does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False


@contextmanager
def running_redis(folder: Path, binary: str | None = None) -> Iterator[RedisServer]:
    server = RedisServer(folder, binary or redis_binary())
    server.start()
    try:
        yield server
    finally:
        server.kill()
