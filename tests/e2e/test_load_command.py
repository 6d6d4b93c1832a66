"""`tinyloop load` against a real server, through several processes, and in process."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from command_harness import ROOT, Done, Server, tinyloop

from tinyloop_service.load.results import Driving, Result, Way

SECTION = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Load tests\n", 1)[1].split("\n## ", 1)[0]
README_COMMANDS = [
    line.removeprefix("$ tinyloop ").split("  #")[0]
    for line in SECTION.splitlines()
    if line.startswith("$ tinyloop load")
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


def test_callers_both_ways_with_every_answer_verified(server: Server) -> None:
    asked = ("load", "--workload", "rag", "-c", "6", "--compare", "--verify", "--slo", "ttft=1m,itl=1m", "--json", "-")
    result = result_of(server.run(*asked, *SMALL, status=None))
    assert [phase.way for phase in result.phases] == [*Way]
    for phase in result.phases:
        assert phase.counts.completed > 0 and phase.errors == ()
        assert (phase.driving, phase.load) == (Driving.CLOSED, 6.0)
        assert phase.pages_after == phase.pages_before == 0
        assert phase.throughput.goodput_share == 1.0
    assert result.phases[0].cached_token_rate is not None and result.phases[0].cached_token_rate > 0.9
    assert result.phases[1].cached_token_rate == 0.0
    assert result.verification is not None
    assert result.verification.alike == result.verification.asked == 16
    [comparison] = result.comparisons
    assert comparison.load == 6.0 and comparison.tokens_per_s is not None
    assert result.economy is not None and result.economy.prefix_tokens == 80
    metadata = result.metadata
    assert metadata.server["engine"] == "cpu" and len(metadata.server["model_id"]) == 64
    assert metadata.workload["name"] == "rag" and metadata.workload["prefix_len"] == 80
    assert {"python", "grpcio", "hdrhistogram"} <= metadata.versions.keys()
    assert server.run("prefix", "list", "--json").json == [], "what was made is deleted"


def test_an_open_loop_through_processes_to_a_file(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    done = server.run(
        "load", "-w", "chat-template", "--rate", "30", "--processes", "2", "--json", path, *SMALL, status=None
    )
    result = result_of(done, path.read_text(encoding="utf-8"))
    [phase] = result.phases
    assert phase.driving is Driving.OPEN and phase.counts.offered > 4
    assert phase.counts.completed == phase.counts.offered
    assert result.metadata.processes == 2
    assert "30/s, shared" in done.out
    for word in ("TTFT", "ITL", "TPOT", "goodput", "cached", "break-even N = build / (cold − warm)"):
        assert re.search(f"^{re.escape(word)}.*", done.out, re.MULTILINE), f"{word} is defined under the numbers"


def test_text_in_process_and_a_sweep(tiny: Path) -> None:
    asked = ("load", "-w", "few-shot", "--in-process", tiny, "--sweep", "--phases", "2", "--json", "-")
    result = result_of(tinyloop(*asked, *SMALL))
    assert result.metadata.target == f"in process: {tiny}"
    assert [phase.load for phase in result.phases] == [1.0, 2.0]
    [sweep] = result.sweeps
    assert sweep.way is Way.SHARED


@pytest.mark.parametrize("command", README_COMMANDS)
def test_the_commands_in_readme_run(command: str, server: Server, tiny: Path, tmp_path: Path) -> None:
    words = [str(tmp_path / word) if word in ("run.json", "curves") else word for word in shlex.split(command)]
    if "--in-process" in words:
        tinyloop(*(str(tiny) if word.endswith(".tinyloop") else word for word in words), *SMALL)
    else:
        done = server.run(*words, *SMALL, status=None)
        assert done.status == int("the harness was the bottleneck" in done.out), done.out + done.err
        assert (tmp_path / "curves" / "report.html").exists() is ("--report" in words)


def test_there_are_commands_in_readme() -> None:
    assert len(README_COMMANDS) >= 3


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
        ["--duration", "0s"],
        ["--compare", "--no-share"],
        ["--in-process", "x.tinyloop", "--processes", "2"],
        ["--in-process", "x.tinyloop", "--target", "127.0.0.1:1"],
        ["--json", "/nonexistent/run.json"],
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_2(arguments: list[str]) -> None:
    assert "Usage: tinyloop load" in tinyloop("load", *arguments, status=2).err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-w", "nonsense"], "neither a file nor one of"),
        (["--set", "prefixes=0"], "prefixes: is 0, expected an integer of at least 1 (workload rag)"),
        (["--set", "colour='red'"], "colour: is no key of a workload"),
        (["--target", "127.0.0.1:1"], "tinyloop serve"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_run_is_one_line(arguments: list[str], said: str) -> None:
    done = tinyloop("load", *arguments, status=1)
    [line] = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert said in line


def test_the_json_is_one_document(server: Server) -> None:
    done = server.run("load", "-c", "1", "--json", "-", *SMALL, status=None)
    assert json.loads(done.out)["version"] == 1
