"""A server as it is watched: the line it prints, its metrics port, its logs, `tinyloop top`."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from command_harness import TIMEOUT_S, Server, eventually, start, tinyloop
from full_pipe import fill
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis_server import free_port

from tinyloop_service.observe.lines import MOST_LINES
from tinyloop_service.rpc.health import READY_SERVICE

MARKER = "xyzzy"  # in everything that a caller writes, but for names
IDS = "101,102,103,104,105,106"


@dataclass(frozen=True)
class Watched(Server):
    metrics: str
    log: Path

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture(scope="module")
def watched(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A server that calls everything slow and says all it can, in JSON."""
    log = tmp_path_factory.mktemp("watched") / "log"
    ports = ("--listen", "127.0.0.1:0", "--health-listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
    told = ("--log-level", "debug", "--log-format", "json", "--slow-request", "0.000001")
    with log.open("w") as sink:
        process = start("serve", "--model", tiny, *ports, *told, stderr=sink)
        assert process.stdout is not None
        words = process.stdout.readline().split()
        assert words[::2] == ["serving", "health", "metrics"], log.read_text()
        yield Watched(process, words[1], words[3], words[5], log)
        process.terminate()
        assert process.wait(TIMEOUT_S) == 0
        process.communicate()


def test_no_word_of_a_prompt_is_in_the_log(watched: Watched) -> None:
    watched.run("prefix", "create", "words", f"say {MARKER} and again {MARKER}")
    watched.run("generate", "--prefix", "words", f" {MARKER}", "--max-tokens", "4", "--stop", f"{MARKER}{MARKER}")
    watched.run("generate", "--tokens", IDS, "--max-tokens", "4", "--ids")
    watched.run("generate", f"{MARKER}", "--temperature", "nan", status=1)
    watched.run("prefix", "create", "words", f"not {MARKER}", status=1)
    eventually(lambda: watched.log.read_text().count('"method": ') >= 4)  # a line leaves after its call's answer
    text = watched.log.read_text()
    for line in watched.lines():
        assert {"event", "level", "timestamp"} <= line.keys()
    calls = [line for line in watched.lines() if "method" in line]
    assert [line["prefix"] for line in calls if line["event"] == "slow request" and "prefix" in line][-1] == "words"
    assert len(calls) >= 4 and all(line["request_id"] for line in calls)
    assert MARKER not in text
    assert "101, 102" not in text and "101,102" not in text and '"101"' not in text


def test_the_metrics_port_counts_what_was_asked(watched: Watched) -> None:
    def value(name: str) -> float:
        with urllib.request.urlopen(f"http://{watched.metrics}/", timeout=TIMEOUT_S) as response:
            lines = response.read().decode().splitlines()
        return float(next(line.split()[-1] for line in lines if line.startswith(name)))

    before = value("tinyloop_prompt_tokens_total")
    watched.run("generate", "--tokens", IDS, "--max-tokens", "4", "--ignore-eos")
    assert value("tinyloop_prompt_tokens_total") == before + 6
    assert value('tinyloop_calls_total{code="OK",method="Generate"}') >= 1
    assert value("tinyloop_build_info{") == 1
    assert value("process_resident_memory_bytes") > 2**20


def test_top_shows_a_frame_as_text(watched: Watched) -> None:
    watched.run("prefix", "create", "shown", "--tokens", IDS)
    shown = watched.run("top", "--once", "--interval", "0.1").out
    assert watched.address in shown and "0 running, 0 waiting" in shown
    assert any(line.startswith("shown") and " ready " in line for line in shown.splitlines())
    watched.run("prefix", "delete", "shown")


def test_top_needs_a_terminal_or_once(watched: Watched) -> None:
    assert "--once" in watched.run("top", status=2).err


def test_top_is_live_until_q(watched: Watched) -> None:
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    process = start("top", "--target", watched.address, stdin=inner, stdout=inner, stderr=inner)
    os.close(inner)
    seen, deadline = b"", time.monotonic() + TIMEOUT_S
    while b"q quit" not in seen and time.monotonic() < deadline:
        seen += os.read(outer, 65536)
    assert b"by size" in seen or b"no names" in seen
    assert watched.address.encode() in seen
    os.write(outer, b"q")
    assert process.wait(TIMEOUT_S) == 0
    os.close(outer)


def test_a_server_does_not_wait_for_who_reads_what_it_says(tiny: Path) -> None:
    """Both streams are one pipe that is full before the start; it is read once, then left to fill again."""
    reading, writing = os.pipe()
    fill(writing)
    address = f"127.0.0.1:{free_port()}"
    command = ("serve", "--model", tiny, "--listen", address, "--health-listen", "none")
    server = start(*command, stdout=writing, stderr=writing)
    try:
        eventually(lambda: is_serving(address))
        asked = ("generate", "--tokens", "1,2,3", "--max-tokens", "2", "--ids", "--target", address)
        tokens = {tinyloop(*asked).out for _ in range(5)}
        assert len(tokens) == 1 and is_serving(address)
        said = b""
        while b"serving " not in said or said.count(b"answered") < 5:
            said += os.read(reading, 65536)
        assert f"serving {address}\n".encode() in said
        fill(writing)
        tinyloop(*asked)
        server.send_signal(signal.SIGTERM)
        assert server.wait(TIMEOUT_S) == 0
    finally:
        server.kill()
        server.wait()
        os.close(reading)
        os.close(writing)


def test_a_server_that_fails_does_not_wait_for_who_reads_why(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    fill(writing)
    addresses = ("--listen", "127.0.0.1:0", "--health-listen", "none")
    server = start("serve", "--model", tmp_path / "none", *addresses, stderr=writing)
    try:
        assert server.wait(TIMEOUT_S) == 1
    finally:
        server.kill()
        server.communicate()
        os.close(reading)
        os.close(writing)


def test_last_words_of_all_kinds_leave() -> None:
    """What was to happen last of all was registered before the log was there."""
    code = (
        "import atexit, subprocess, sys; atexit.register(print, 'last of all', file=sys.stderr)\n"
        "atexit.register(lambda: print('later', file=sys.stderr))\n"
        "from tinyloop_service.observe.logs import configure_logging\n"
        "from tinyloop_service.settings import ServerSettings\n"
        "configure_logging(ServerSettings())\n"
        "print('printed', file=sys.stderr)\n"
        "sys.stderr.write('no end')\n"
        "raise SystemExit('why')"
    )
    done = subprocess.run((sys.executable, "-c", code), stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1
    assert done.stderr == "printed\nno endwhy\nlater\nlast of all\n"


def test_what_grpc_says_of_an_answer_whose_caller_has_left_is_no_line_of_ours() -> None:
    code = (
        "import logging; from tinyloop_service.observe.logs import configure_logging\n"
        "from tinyloop_service.settings import ServerSettings\n"
        "configure_logging(ServerSettings())\n"
        "log = logging.getLogger('grpc._cython.cygrpc')\n"
        "log.error('ExecuteBatchError raised in core by servicer method [/x.Y/Z]')\n"
        "log.error('Unexpected [Bug] raised by servicer method [/x.Y/Z]')"
    )
    done = subprocess.run((sys.executable, "-c", code), stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
    assert "ExecuteBatchError" not in done.stderr and "Unexpected [Bug]" in done.stderr


def test_lines_that_were_dropped_are_counted_and_the_next_one_has_their_number() -> None:
    code = (
        "import structlog; from tinyloop_service.observe.logs import configure_logging, dropped_lines\n"
        "from tinyloop_service.settings import LogFormat, ServerSettings\n"
        "configure_logging(ServerSettings(log_format=LogFormat.JSON))\n"
        "log = structlog.get_logger()\n"
        "for number in range(5000): log.info('line', number=number)\n"
        "print(dropped_lines(), flush=True); input(); log.info('after'); print(dropped_lines())"
    )
    reading, writing = os.pipe()
    filler = fill(writing)
    command = (sys.executable, "-c", code)
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=writing, text=True)
    os.close(writing)
    assert child.stdin is not None and child.stdout is not None
    with child, os.fdopen(reading, "rb") as log:
        dropped = int(child.stdout.readline())
        assert 5000 - MOST_LINES - 1 <= dropped <= 5000 - MOST_LINES
        log.read(filler)
        lines = [json.loads(log.readline()) for _ in range(100)]
        child.stdin.write("\n")
        child.stdin.close()
        lines += map(json.loads, log)
        assert int(child.stdout.read()) == dropped
    assert [line["number"] for line in lines[:-1]] == [*range(5000 - dropped)]
    assert (lines[-1]["event"], lines[-1]["dropped_lines"]) == ("after", dropped)


def is_serving(address: str) -> bool:
    """One that stands still never says so."""
    with grpc.insecure_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        try:
            state = check(health_pb2.HealthCheckRequest(service=READY_SERVICE), timeout=20)
        except grpc.RpcError:
            return False
    return bool(state.status == health_pb2.HealthCheckResponse.SERVING)


def test_what_libraries_say_has_the_form_of_the_log() -> None:
    code = (
        "import logging; from tinyloop_service.observe.logs import configure_logging\n"
        "from tinyloop_service.settings import LogFormat, ServerSettings\n"
        "configure_logging(ServerSettings(log_format=LogFormat.JSON))\n"
        "logging.getLogger('some.library').warning('it is %s', 'late')\n"
        "logging.getLogger('some.library').info('chatter')\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: logging.getLogger('some.library').exception('it broke')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    late, broke = map(json.loads, done.stderr.splitlines())
    assert (late["event"], late["level"]) == ("it is late", "warning")
    assert (broke["event"], broke["level"]) == ("it broke", "error") and "ZeroDivisionError" in broke["exception"]
