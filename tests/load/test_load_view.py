"""What people see of a result: troubles first, then figures, then what they mean; nothing is computed on the way."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from types import SimpleNamespace

import pytest
from command_harness import eventually
from load_example import example, slowed
from rich.console import Console

from tinyloop_service.cli import load_view, output
from tinyloop_service.cli.load import _status
from tinyloop_service.load.definitions import DEFINITIONS
from tinyloop_service.load.results import ErrorCount, Result, Verification
from tinyloop_service.load.run import Status


def shown(result: Result, capsys: pytest.CaptureFixture[str]) -> list[str]:
    load_view.print_result(result)
    return capsys.readouterr().out.splitlines()


def quiet() -> Result:
    """One phase without any trouble."""
    return replace(example(), phases=example().phases[:1], sweeps=(), verification=Verification(16, 16, ()))


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_time_of_a_phase_does_not_pass_its_length(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    text = StringIO()
    monkeypatch.setattr(output, "err", Console(file=text, width=120, force_terminal=is_terminal, color_system=None))
    monkeypatch.setattr(output, "QUIET_S", 0.01)
    with load_view.watching("rag") as tell:
        for elapsed_s, said in ((2, "2 of 4 s"), (5, "4 of 4 s, waiting for the last answers")):
            monkeypatch.setattr(load_view, "time", SimpleNamespace(monotonic_ns=lambda now_s=elapsed_s: now_s * 10**9))
            tell(Status("8 callers, shared", started_ns=0, length_s=4.0))
            eventually(lambda said=said: said in text.getvalue())
    assert "5 of 4" not in text.getvalue()


def test_errors_come_first_by_code_and_reason(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(example(), capsys)
    count = sum(error.count for _, error in example().errors())
    assert lines[0] == f"{count} errors UNAVAILABLE QUEUE_FULL: the queue is full (64 requests)"
    troubles = lines[: lines.index("")]
    assert any("requests had not ended" in line for line in troubles)
    assert troubles[-1] == "differs: request 7, shared: token 3 is 41, alone 40"


def test_errors_that_nobody_expects_come_before_those_that_belong_to_the_workload(
    capsys: pytest.CaptureFixture[str],
) -> None:
    [first] = quiet().phases
    gone = ErrorCount("NOT_FOUND", "PREFIX_EXPIRED", 40, True, "it has expired")
    full, fault = ErrorCount("UNAVAILABLE", "QUEUE_FULL", 2, False, "full"), ErrorCount("INTERNAL", "", 3, False, "bug")
    phases = (replace(first, errors=(gone, fault)), replace(first, load=2.0, errors=(gone, full, fault)))
    result = replace(quiet(), phases=phases)
    told = ["6 errors INTERNAL: bug", "2 errors UNAVAILABLE QUEUE_FULL: full"]
    told.append("80 errors NOT_FOUND PREFIX_EXPIRED, expected: it has expired")
    assert shown(result, capsys)[:3] == told
    load_view.print_troubles(result)
    assert capsys.readouterr() == ("", "\n".join(told) + "\n")


def test_a_run_without_trouble_begins_with_its_facts(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in shown(quiet(), capsys) if line]
    assert lines[0].startswith("target ")
    assert "asked again alone: 16 of 16 alike, bit for bit" in lines
    assert any(line.startswith("break-even     N = build / (cold − warm)") for line in lines)


def test_every_phase_has_a_line_and_a_single_one_its_percentiles(capsys: pytest.CaptureFixture[str]) -> None:
    whole = shown(example(), capsys)
    for phase in example().phases:
        assert sum(line.startswith(f"{phase.name} ") for line in whole) == 1, phase.name
    single = shown(quiet(), capsys)
    assert {line.split()[0] for line in single if line[:4] in ("TTFT", "ITL ", "TPOT", "E2E ", "queu")} == {
        "TTFT", "ITL", "TPOT", "E2E", "queue",
    }  # fmt: skip


@pytest.mark.parametrize("width", [80, 100, 200])
def test_nothing_is_cut_off_on_a_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    text = StringIO()
    monkeypatch.setattr(output, "out", Console(file=text, width=width, force_terminal=True, color_system=None))
    result = example()
    load_view.print_result(result)
    lines = text.getvalue().splitlines()
    assert "…" not in text.getvalue() and max(map(len, lines)) <= width
    for phase in result.phases:  # in two tables where there is no room for one
        assert sum(line.startswith(f"{phase.name} ") for line in lines) == (1 if width == 200 else 2), phase.name
    words = " ".join(text.getvalue().split())
    assert all(f"{term} {meaning}" in words for term, meaning in DEFINITIONS.items())


def test_latencies_of_a_bottleneck_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    [phase] = quiet().phases
    result = replace(quiet(), phases=(slowed(phase, "it sent requests 90 ms late"),))
    lines = shown(result, capsys)
    told = "1/s, shared: no latencies and no goodput, the harness was the bottleneck: it sent requests 90 ms late"
    assert lines[0] == told
    [line] = [line for line in lines if line.startswith("1/s, shared  ")]
    offered, rate, tokens, *latencies, cached, goodput = line.split()[2:]
    assert (offered, rate, tokens, cached) == (str(phase.counts.offered), "1.00", "32", "93.0%"), "it is still reported"
    assert {*latencies, goodput} == {"–"}
    assert _status(result) == 1


def test_a_sweep_says_of_which_loads_it_knows_the_goodput(capsys: pytest.CaptureFixture[str]) -> None:
    phases = example().phases
    for keep, said in (
        (len(phases), "most goodput 4.92/s, at 6"),
        (len(phases) - 2, "most goodput 4.92/s, at 6, of those that the harness kept up with"),
        (0, "goodput unknown: the harness kept up with no load"),
    ):
        slow = tuple(slowed(phase, "late") for phase in phases[keep:])
        lines = shown(replace(example(), phases=(*phases[:keep], *slow)), capsys)
        assert f"shared: knee at 6; {said}" in lines


def test_the_exit_status_tells_what_must_not_be_relied_on() -> None:
    assert _status(quiet()) == 0
    assert _status(replace(quiet(), verification=Verification(16, 15, ("…",)))) == 1
    [phase] = quiet().phases
    nothing = replace(phase, counts=replace(phase.counts, completed=0))
    assert _status(replace(quiet(), phases=(nothing,))) == 1
    hanging = replace(phase, counts=replace(phase.counts, unfinished=1))
    assert _status(replace(quiet(), phases=(hanging,))) == 1
    error = ErrorCount("NOT_FOUND", "PREFIX_EXPIRED", 1, True, "it has expired")
    assert _status(replace(quiet(), phases=(replace(phase, errors=(error,)),))) == 0, "the workload provokes it"
    assert _status(replace(quiet(), phases=(replace(phase, errors=(replace(error, expected=False),)),))) == 1


def test_pages_that_did_not_come_back_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    [phase] = quiet().phases
    error = ErrorCount("INTERNAL", "", 3, False, "bug")
    kept = replace(quiet(), phases=(replace(phase, pages_after=12),))
    lines = shown(replace(kept, phases=(replace(kept.phases[0], errors=(error,)),)), capsys)
    assert lines[0].startswith("1/s, shared: requests hold 12 pages afterwards, 0 before")
    assert lines[1] == "3 errors INTERNAL: bug" and _status(kept) == 1
    fewer = replace(quiet(), phases=(replace(phase, pages_before=12),))
    assert _status(fewer) == 0, "somebody else's came back"
    too_far = replace(kept, phases=(replace(kept.phases[0], counts=replace(phase.counts, unfinished=1)),))
    assert _status(replace(too_far, sweeps=example().sweeps)) == 0, "what still runs holds them"


def test_a_server_that_did_not_say_is_not_said_to_hold_pages(capsys: pytest.CaptureFixture[str]) -> None:
    [phase] = quiet().phases
    lines = shown(replace(quiet(), phases=(replace(phase, pages_after=-1),)), capsys)
    assert lines[0] == "1/s, shared: the server did not say what requests hold afterwards"
    assert not any("-1" in line for line in lines)
