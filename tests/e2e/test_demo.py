"""`tinyloop demo`: what `make demo` runs, from nothing to the table."""

from __future__ import annotations

from command_harness import tinyloop

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
