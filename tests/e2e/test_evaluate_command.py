"""`tinyloop evaluate`: table, JSON, plot, and one error for each mistake, before any work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_harness import TIMEOUT_S, Done, clean_environment, tinyloop

from tinyloop_service import plotting
from tinyloop_service.cli import evaluate as command
from tinyloop_service.errors import install
from tinyloop_service.evaluate.rounding import ModelForward

TEXT = "And God said, Let there be light: and there was light. — “Good.”\n" * 3


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def second(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `tiny`, with other weights."""
    folder = tmp_path_factory.mktemp("second")
    path = folder / "other.tinyloop"
    tinyloop("init", "--size", "tiny", path, "--seed", "1", "--tokenizer", tiny.parent / "tokenizer.json")
    return path


QUICK = ("--depths", "1,4", "--window-tokens", "50")


def test_the_table_names_models_depths_and_circumstances(tiny: Path, second: Path, book: Path) -> None:
    done = tinyloop("evaluate", tiny, second, "--text", book, *QUICK)
    for words in ("tiny.tinyloop (reference)", "other.tinyloop, int8 activations", "fp16 cache", "L = 1", "cores"):
        assert words in done.out


def test_json_holds_figures_circumstances_and_what_was_read(tiny: Path, second: Path, book: Path) -> None:
    done = tinyloop("evaluate", tiny, second, "--text", book, *QUICK, "--json")
    found = done.json
    assert found["machine"] and found["seconds"] >= 0 and found["versions"].keys() >= {"python", "numpy", "tokenizers"}
    assert found["texts"][0]["bytes"] == len(TEXT.encode())
    assert [row["model"] for row in found["rows"] if row["scored"] == "all"] == [
        *("tiny.tinyloop", "tiny.tinyloop", "other.tinyloop", "other.tinyloop")
    ]


def test_files_are_written_beside_the_table(tiny: Path, book: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures, picture = tmp_path / "q.json", tmp_path / "q.svg"
    done = tinyloop("evaluate", tiny, "--text", book, *QUICK, "--save", figures, "--plot", picture)
    assert "tiny.tinyloop" in done.out
    assert json.loads(figures.read_text())["reference"] == "tiny.tinyloop"
    assert picture.read_text().startswith("<?xml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["book.txt", "q.json", "q.svg"]


def test_the_reference_comes_first_wherever_it_is_named(tiny: Path, second: Path, book: Path) -> None:
    fast = (*QUICK, "--no-int8-activations", "--cache-modes", "none", "--json")
    for models in ((second, tiny), (tiny,)):
        found = tinyloop("evaluate", *models, "--reference", second, "--text", book, *fast).json
        assert [row["model"] for row in found["rows"]] == ["other.tinyloop", "tiny.tinyloop"]


def test_two_files_of_one_name_are_told_apart(tiny: Path, book: Path, tmp_path: Path) -> None:
    copy = tmp_path / tiny.name
    copy.write_bytes(tiny.read_bytes())
    found = tinyloop("evaluate", tiny, copy, "--text", book, *QUICK, "--json").json
    assert [model["name"] for model in found["models"]] == [str(tiny), str(copy)]


def test_a_quick_look_cuts_no_character_in_two(tiny: Path, book: Path) -> None:
    inside = len(TEXT.encode()[: TEXT.encode().index("—".encode())]) + 1
    found = tinyloop("evaluate", tiny, "--text", book, *QUICK, "--max-bytes", str(inside), "--json").json
    assert found["texts"][0]["bytes"] == inside - 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--depths", "1,two"], "'1,two' is no list of depths"),
        (["--cache-modes", "fp17"], "'fp17' is none of fp16, int8"),
        (["--save", "figures.tinyloop"], "--save figures.tinyloop: expected a path that ends in .json"),
        (["--save", "/nonexistent/q.json"], "/nonexistent is no directory"),
        (["--plot", "q.gif"], "--plot q.gif: expected a path that ends in .svg or .png or .pdf"),
        (["--reference", "/nonexistent"], "'/nonexistent' does not exist"),
        (["--window-tokens", "1"], "1 is not in the range x>=2"),
    ],
)
def test_wrong_usage_is_named(tiny: Path, book: Path, arguments: list[str], words: str) -> None:
    done = tinyloop("evaluate", tiny, "--text", book, *arguments, status=2)
    assert words in " ".join(done.err.split())
    assert done.out == ""


def test_a_model_given_twice_a_missing_text_and_bytes_that_are_no_text(tiny: Path, book: Path, tmp_path: Path) -> None:
    assert "is given twice" in tinyloop("evaluate", tiny, tiny, "--text", book, status=2).err
    assert "Missing option '--text'" in tinyloop("evaluate", tiny, status=2).err
    book.write_bytes(b"fine \xff not")
    refused = tinyloop("evaluate", tiny, "--text", book, "--save", tmp_path / "q.json", status=2)
    assert "book.txt is not UTF-8 text: invalid start byte at byte 5" in " ".join(refused.err.split())
    assert not (tmp_path / "q.json").exists()


def one_error(done: Done) -> str:
    assert done.out == ""
    [line] = done.err.strip().splitlines()
    assert line.startswith("error: ")
    return line


def test_what_the_models_cannot_do_is_one_error(tiny: Path, book: Path, tmp_path: Path) -> None:
    mute = tmp_path / "mute.tinyloop"
    tinyloop("init", "--size", "tiny", mute)
    assert "mute.tinyloop has no tokenizer" in one_error(tinyloop("evaluate", mute, "--text", book, status=1))
    deep = tinyloop("evaluate", tiny, "--text", book, "--depths", "17", status=1)
    assert "--depths: hold 17, expected 1 to 16" in one_error(deep)
    book.write_text("")
    assert "book.txt has 0 tokens to predict" in one_error(tinyloop("evaluate", tiny, "--text", book, status=1))
    mute.write_bytes(b"GGUF" + bytes(100))
    assert "mute.tinyloop" in one_error(tinyloop("evaluate", mute, "--text", book, status=1))


def test_a_plot_without_matplotlib_is_refused_before_any_work(
    tiny: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plotting, "can_plot", lambda: False)
    monkeypatch.setattr(command, "_read_models", lambda paths: pytest.fail("models were read"))
    done = tinyloop("evaluate", tiny, "--text", book, "--plot", tmp_path / "q.svg", status=2)
    assert f"--plot needs matplotlib: {install('plot')}" in done.err


TALKATIVE = "from tinyloop_service.cli import main, output; output.QUIET_S = 0.01; main()"


@contextmanager
def evaluating(*arguments: str | Path, stderr: int = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    """A process that tells its progress as soon as there is any."""
    started = [sys.executable, "-c", TALKATIVE, "evaluate", *map(str, arguments)]
    with subprocess.Popen(
        started, stdout=subprocess.PIPE, stderr=stderr, text=True, env=clean_environment()
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_results_come_out_though_nobody_reads_the_progress(tiny: Path, book: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with evaluating(tiny, "--text", book, *QUICK, "--cache-modes", "none", "--json", stderr=writer) as process:
        os.close(writer)
        out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert json.loads(out)["reference"] == "tiny.tinyloop"


@pytest.mark.parametrize(
    ("number", "words", "status"),
    [
        (signal.SIGINT, "error: ended by SIGINT before there was a result", 128 + signal.SIGINT),
        (signal.SIGTERM, "error: ended by SIGTERM before there was a result", 128 + signal.SIGTERM),
        (signal.SIGHUP, "error: ended by SIGHUP before there was a result", 128 + signal.SIGHUP),
        (signal.SIGBUS, "Fatal Python error: Bus error", -signal.SIGBUS),
    ],
)
def test_no_signal_ends_it_silently(tiny: Path, book: Path, number: signal.Signals, words: str, status: int) -> None:
    book.write_text(TEXT * 3000, encoding="utf-8")  # minutes of work
    with evaluating(tiny, "--text", book, *QUICK) as process:
        assert process.stderr is not None
        assert any(line.startswith("scoring windows: 0 %") for line in process.stderr)
        process.send_signal(number)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out) == (status, "")
    assert words in err


def test_not_enough_memory_is_one_line(tiny: Path, book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*given: object) -> None:
        raise MemoryError("Unable to allocate 40.0 GiB for an array")

    monkeypatch.setattr(ModelForward, "run", exhausted)
    done = tinyloop("evaluate", tiny, "--text", book, *QUICK, status=1)
    assert done.err.startswith("Error: Unable to allocate 40.0 GiB for an array; take fewer --threads")
    assert len(done.err.splitlines()) == 1
