"""`tinyloop load` against a real server, through several processes, and in process."""

from __future__ import annotations

import os
import re
import shlex
import signal
import time
from pathlib import Path

import pytest
from command_harness import ROOT, Done, Server, eventually, start, tinyloop
from kept_signals import kept_signals

from tinyloop_service import Client
from tinyloop_service.cli import load as command
from tinyloop_service.errors import TinyLoopError, install
from tinyloop_service.load.definitions import DEFINITIONS
from tinyloop_service.load.driver import Job
from tinyloop_service.load.fleet import Endpoint, Processes
from tinyloop_service.load.prompts import Vocabulary
from tinyloop_service.load.results import Driving, Result, Way
from tinyloop_service.load.workload import parse_workload, shipped

PAGE = (ROOT / "docs/load-tests.md").read_text(encoding="utf-8")
PRINTED_COMMANDS = [
    line.removeprefix("$ tinyloop ").split("  #")[0] for line in PAGE.splitlines() if line.startswith("$ tinyloop load")
]
# The smallest that still does everything, for a model of random weights.
SMALL = ("--duration", "0.5s", "--warmup", "0s", "--set", "prefix_len=80", "--set", "suffix_len=[1,6]")
SMALL = (*SMALL, "--set", "output_len=[2,6]")


def result_of(done: Done, text: str | None = None) -> Result:
    """On a busy machine the harness may have been too slow, which it says; nothing else may have been wrong."""
    result = Result.from_json(done.out if text is None else text)
    too_slow = any(phase.lag.bottleneck for phase in result.phases)
    assert done.status == int(too_slow), f"{done.status} for {result.metadata.command}: {done.err}"
    return result


def printed(option: str) -> list[str]:
    """The page's one command that has this option."""
    [command] = [command for command in PRINTED_COMMANDS if option in command]
    return shlex.split(command)


def test_callers_both_ways_with_every_answer_verified(server: Server) -> None:
    result = result_of(server.run(*printed("--verify"), *SMALL, "--slo", "ttft=5m", "--json", "-", status=None))
    assert [phase.way for phase in result.phases] == [*Way]
    for phase in result.phases:
        assert phase.counts.completed > 0 and phase.errors == ()
        assert (phase.driving, phase.load) == (Driving.CLOSED, 32.0)
        assert phase.pages_after == phase.pages_before == 0
        assert phase.throughput.goodput_share == (None if phase.lag.bottleneck else 1.0)
    assert result.phases[0].cached_token_rate is not None and result.phases[0].cached_token_rate > 0.9
    assert result.phases[1].cached_token_rate == 0.0
    assert result.verification is not None
    assert result.verification.alike == result.verification.asked == 16
    [comparison] = result.comparisons
    assert comparison.load == 32.0 and comparison.tokens_per_s is not None
    assert result.economy is not None and result.economy.prefix_tokens == 80
    metadata = result.metadata
    assert metadata.server["engine"] == "cpu" and len(metadata.server["model_id"]) == 64
    assert metadata.workload["name"] == "rag" and metadata.workload["prefix_len"] == 80
    assert {"python", "grpcio", "hdrhistogram"} <= metadata.versions.keys()
    assert server.run("prefix", "list", "--json").json == [], "what was made is deleted"


def test_an_open_loop_through_processes_as_file_page_and_table(server: Server, tmp_path: Path) -> None:
    words = [str(tmp_path / word) if word in ("run.json", "curves") else word for word in printed("--report")]
    done = server.run(*words, *SMALL, "--processes", "2", status=None)
    result = result_of(done, (tmp_path / "run.json").read_text(encoding="utf-8"))
    assert (tmp_path / "curves" / "report.html").exists()
    for phase in result.phases:
        assert phase.driving is Driving.OPEN and phase.counts.offered > 0
        assert phase.counts.completed == phase.counts.offered
        assert f"{phase.load:g}/s, shared" in done.out
    assert result.metadata.processes == 2
    for word in ("TTFT", "ITL", "TPOT", "goodput", "cached", "break-even"):
        assert re.search(f"^{word} +{re.escape(DEFINITIONS[word])}$", done.out, re.MULTILINE), f"{word} is not defined"


def test_errors_that_the_workload_does_not_name_are_told_first_and_end_it_with_1(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with a queue of one, and 32 callers at once: some get an answer, the others QUEUE_FULL."""
    monkeypatch.setenv("TINYLOOP_MAX_QUEUE", "1")
    done = tinyloop("load", "--in-process", tiny, "-c", "32", *SMALL, "--json", "-", status=1)
    [phase] = Result.from_json(done.out).phases
    assert phase.counts.completed > 0 and phase.counts.failed > 0
    assert [(error.code, error.reason, error.expected) for error in phase.errors] == [
        ("UNAVAILABLE", "QUEUE_FULL", False)
    ]
    assert f"{phase.errors[0].count} errors UNAVAILABLE QUEUE_FULL: " in done.err


async def test_a_process_that_is_gone_is_said_so(server: Server) -> None:
    workload = parse_workload("x", {"about": "x", "prefixes": 1, "prefix_len": 8, "suffix_len": 1, "output_len": 1})
    job = Job(Way.SHARED, time.monotonic_ns(), 0.0, 0.1, 1.0, None, callers=1)
    async with Processes(1, Endpoint(server.address), workload, 0, Vocabulary(512, ())) as fleet:
        [process] = fleet._processes
        process.kill()
        process.join()
        with pytest.raises(TinyLoopError, match="ended by itself"):
            await fleet.drive(job, lambda counted: None)


def test_ctrl_c_while_its_processes_start_ends_them_quietly(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    workload = parse_workload("x", {"about": "x", "prefixes": 1, "prefix_len": 8, "suffix_len": 1, "output_len": 1})
    with kept_signals():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # processes would inherit that it is ignored
        fleet = Processes(2, Endpoint(server.address), workload, 0, Vocabulary(512, ()))
    for process in fleet._processes:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
    for process in fleet._processes:
        process.join(30)
    assert [process.exitcode for process in fleet._processes] == [0, 0] and capfd.readouterr().err == ""
    fleet._stop()


def test_sigterm_ends_its_processes_quietly(server: Server) -> None:
    process = start("load", *SMALL, "--duration", "60s", "--processes", "2", "-c", "8", "--target", server.address)
    with Client(server.address) as client:
        eventually(lambda: client.load().rows_running > 0)
        process.terminate()
        _, err = process.communicate(timeout=30)  # ends when the last of them does
        assert process.returncode == -signal.SIGTERM and "Traceback" not in err and "never retrieved" not in err
        eventually(lambda: client.load().rows_running == 0)
        for prefix in client.list_prefixes():
            client.delete_prefix(prefix.id)


def test_text_and_a_sweep_in_process(tiny: Path) -> None:
    words = [str(tiny) if word.endswith(".tinyloop") else word for word in printed("--in-process")]
    asked = ("--workload", "few-shot", "--sweep", "--phases", "2", "--json", "-")
    result = result_of(tinyloop(*words, *asked, *SMALL))
    assert result.metadata.target == f"in process: {tiny}"
    assert result.metadata.workload["content"] == "text" and result.metadata.workload["prefixes"] == 2
    assert [phase.load for phase in result.phases] == [1.0, 2.0]
    [sweep] = result.sweeps
    assert sweep.way is Way.SHARED


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rate", "1", "--concurrency", "2"],
        ["--rate", "0"],
        ["--rate", "fast"],
        ["-c", "1.5"],
        ["-c", "1,2", "--sweep"],
        ["--slo", "ttft"],
        ["--slo", "ttft=soon"],
        ["--set", "prefixes"],
        ["--set", "content=ids"],
        ["--slo", "ttft=0s"],
        ["--slo", "itl=1s,itl=2s"],
        ["--duration", "0s"],
        ["--duration", "99999999999d"],
        ["--rate", "1e6", "--duration", "1d"],
        ["-c", "1e6"],
        ["--json", "/"],
        ["--compare", "--no-share"],
        ["--in-process", "x.tinyloop", "--processes", "2"],
        ["--in-process", "x.tinyloop", "--target", "127.0.0.1:1"],
        ["--json", "/nonexistent/run.json"],
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_2(arguments: list[str]) -> None:
    assert "Usage: tinyloop load" in tinyloop("load", *arguments, status=2).err


def test_the_help_says_that_the_two_loops_exclude_each_other() -> None:
    told = " ".join(tinyloop("load", "--help").out.split())
    assert "Excludes --concurrency." in told and "Excludes --rate." in told


def test_without_the_extra_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert f"load tests need hdrhistogram: {install('load')}" in tinyloop("load", status=2).err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-w", "nonsense"], f"workload: 'nonsense' is neither a file nor one of {', '.join(shipped())}"),
        (["-w", "missing.toml"], "workload: 'missing.toml' is neither a file nor one of"),
        (["--set", "prefixes=0"], "prefixes: is 0, expected an integer of at least 1 (workload rag)"),
        (["--set", "colour='red'"], "colour: is no key of a workload"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_workload_that_is_none_is_wrong_usage(arguments: list[str], said: str) -> None:
    done = tinyloop("load", *arguments, status=2)
    assert "Usage: tinyloop load" in done.err and said in done.err


def test_a_server_that_is_not_there_is_one_line() -> None:
    done = tinyloop("load", "--target", "127.0.0.1:1", status=1)
    [line] = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert "tinyloop serve" in line
