"""Runs the command: servers as real processes on loopback, short commands in this process, output captured."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from unittest import mock

import pytest
from kept_signals import kept_signals

from tinyloop_service.cli import main

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 60


def clean_environment() -> dict[str, str]:
    """Without settings that happen to be set, those that this process gave itself among them, and with plain output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TINYLOOP_", "GRPC_VERBOSITY"))}
    return {**kept, "COLUMNS": "120", "NO_COLOR": "1"}


def start(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tinyloop_service.cli", *map(str, arguments)]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, text=True, env=clean_environment(), **piped)


@dataclass(frozen=True, slots=True)
class Done:
    status: object
    out: str
    err: str

    @classmethod
    def checked(cls, arguments: object, status: object, expected: int | None, out: str, err: str) -> Self:
        assert expected is None or status == expected, f"{arguments} ended with {status}\n{out}\n{err}"
        return cls(status, out, err)

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def tinyloop(*arguments: str | Path, stdin: str = "", status: int | None = 0) -> Done:
    """Run a command to its end, in this process: much faster.  Fails unless it ends with `status`; None: any.

    The log stays as it is: a process configures it once, and loggers in use would keep what they were given first.
    """
    out, err = io.StringIO(), io.StringIO()
    typed = io.TextIOWrapper(io.BytesIO(stdin.encode()))
    captured = (contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch("sys.stdin", typed))
    kept_log = mock.patch("tinyloop_service.observe.logs.configure_logging")
    with captured[0], captured[1], captured[2], kept_log, kept_signals(), pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    return Done.checked(arguments, ended.value.code, status, out.getvalue(), err.getvalue())


def tinyloop_process(*arguments: str | Path, stdin: str = "", status: int = 0) -> Done:
    """The same as a process of its own."""
    process = start(*arguments, stdin=subprocess.PIPE)
    out, err = process.communicate(stdin, timeout=TIMEOUT_S)
    return Done.checked(arguments, process.returncode, status, out, err)


@dataclass(frozen=True, slots=True)
class Server:
    process: subprocess.Popen[str]
    address: str
    health: str
    metrics: str = ""

    def run(self, *arguments: str | Path, stdin: str = "", status: int | None = 0) -> Done:
        """A command against this server."""
        return tinyloop(*arguments, "--target", self.address, stdin=stdin, status=status)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it and wait; the exit status."""
        self.process.send_signal(number)
        return self.process.wait(TIMEOUT_S)


@contextlib.contextmanager
def serving(*arguments: str | Path) -> Iterator[Server]:
    """`tinyloop serve` on free ports, ready; gone afterwards, whatever happened."""
    addresses = ("--listen", "127.0.0.1:0", "--health-listen", "127.0.0.1:0", "--log-level", "warning")
    process = start("serve", *addresses, *arguments)
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        if words[:1] != ["serving"]:
            process.kill()
            pytest.fail(f"the server did not come up: {process.communicate()[1]}")
        yield Server(process, *words[1::2])
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TIMEOUT_S)
        if process.poll() is None:
            process.kill()
        process.communicate()


def eventually(condition: Any) -> None:
    """Wait for what another process does; fails after a minute."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
