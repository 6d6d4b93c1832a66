"""`tinyloop demo`: what `make demo` runs, from nothing to the table."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from command_harness import eventually, start, tinyloop

from tinyloop_service.demo import SUFFIXES


def test_the_demo_shows_streams_and_a_table() -> None:
    done = tinyloop("demo", "--requests", "2", "--max-tokens", "8")
    for suffix in SUFFIXES[:2]:
        assert suffix.strip() in done.out
    for word in ("NO_CACHE", "SHARED", "speed-up", "predicted", "time to first token", "the same in 2 of 2 requests"):
        assert word in done.out
    assert "\x1b" not in done.out, "plain where there is no terminal"


def test_the_demo_for_scripts() -> None:
    report = tinyloop("demo", "--requests", "1", "--max-tokens", "4", "--json").json
    assert report["requests"] == 1
    assert f"a prefix of {report['prefix_tokens']} tokens" in tinyloop("demo", "--help").out
    assert report["same_tokens"] is True
    assert report["speedup"] > 0


def test_the_demo_has_a_server_of_its_own_whatever_is_set_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYLOOP_METRICS_LISTEN", "127.0.0.1:0")
    tinyloop("demo", "--requests", "1", "--max-tokens", "2", "--json")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("serves", [False, True])
def test_a_signal_that_ends_the_demo_ends_its_server(number: signal.Signals, serves: bool) -> None:
    process = start("demo", "--requests", "50", "--max-tokens", "256")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    eventually(lambda: any(b"serve" in Path(f"/proc/{n}/cmdline").read_bytes() for n in children.read_text().split()))
    [server] = children.read_text().split()
    if serves:
        assert process.stdout is not None and process.stdout.readline()
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert err.splitlines()[-1].startswith(f"error: ended by {number.name}") and "Traceback" not in err
    assert not Path(f"/proc/{server}").exists()
