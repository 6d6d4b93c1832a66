"""How commands speak: results on standard output, progress and errors on standard error.

In: values and text.  Out: lines for people, or JSON for scripts.  Colour and motion only where a terminal is.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, Protocol

from rich.console import Console, Group
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

UNBROKEN = 240  # columns, where no terminal says how many there are
QUIET_S = 2.0  # a wait longer than this shows what it waits for


class _Messages(Console):
    """Standard error.  Where nobody reads it any more, results still go to whoever reads standard output."""

    def on_broken_pipe(self) -> None:
        self.quiet = True  # and no more: rich would also turn standard output away, and end the thread that printed


out = Console(highlight=False, soft_wrap=True)
err = _Messages(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: object) -> None:
    """One JSON document, in one line when standard output is no terminal."""
    print(json.dumps(value, indent=2 if out.is_terminal else None, ensure_ascii=False))


def plain(value: object) -> Any:
    """A value as JSON has it: dataclasses become objects, times ISO 8601, durations seconds."""
    match value:
        case Enum():
            return value.value
        case datetime():
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case timedelta():
            return value.total_seconds()
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return value


def print_sentence(sentence: str | Text) -> None:
    """Broken between words on a terminal; where there is none it stays one line, for grep."""
    out.print(sentence, soft_wrap=not out.is_terminal)


def print_facts(facts: Mapping[str, object]) -> None:
    """A two-column list, empty values left out."""
    shown = {name.replace("_", " "): str(value) for name, value in facts.items() if value not in (None, "")}
    width = max(map(len, shown))
    for name, value in shown.items():
        cells = Text(name.ljust(width), style="dim"), Text(value)
        if out.is_terminal:
            line = Table.grid(padding=(0, 2))
            line.add_row(*cells)
            out.print(line)
        else:
            out.print(Text("  ").join(cells))


def print_table(table: Table | Group) -> None:
    """As wide as the terminal; where there is none, a row stays one line, for grep."""
    console = out if out.is_terminal else Console(width=UNBROKEN, highlight=False)
    console.print(table)


def print_error(message: str) -> None:
    err.print(Text.assemble(("error: ", "bold red"), " ".join(message.split())))


def human_bytes(count: int) -> str:
    """Bytes with a binary unit, for example "80.0 MiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def human_time(moment: datetime | None) -> str:
    """ISO 8601 in UTC to the second; "never" for None."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ") if moment else "never"


@contextmanager
def waiting(doing: str) -> Iterator[Callable[[str], None]]:
    """Says what is being waited for, on standard error: a spinner on a terminal, else lines at least two seconds apart.

    Yields a function that changes the words.
    """
    if err.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=err, transient=True) as progress:
            task = progress.add_task(doing, total=None)
            yield lambda words: progress.update(task, description=words)
        return
    lines = _SparseLines(doing)
    lines.start()
    try:
        yield lines.say
    finally:
        lines.stop()


class _SparseLines(threading.Thread):
    """Prints the newest words, when they changed, every two seconds; so a wait shorter than that is silent."""

    def __init__(self, words: str) -> None:
        super().__init__(daemon=True)
        self._words = words
        self._ended = threading.Event()

    def say(self, words: str) -> None:
        self._words = words

    def stop(self) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        printed = ""
        while not self._ended.wait(QUIET_S):
            if self._words != printed:
                printed = self._words
                err.print(Text(f"{printed} ..."))


@contextmanager
def counting(doing: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error; yields a function that takes how much is done."""
    if not err.is_terminal:
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(doing, total=total)
        yield lambda done: progress.update(task, completed=done)


class Progressing(Protocol):
    """Takes how much is done, of how much, and what is being done now, where that changes."""

    def __call__(self, done: int, total: int, stage: str = ...) -> None: ...


@contextmanager
def progressing(doing: str) -> Iterator[Progressing]:
    """For minutes of work: a bar with the time that is left, elsewhere a line a tenth, at least two seconds apart.

    A signal that ends it is told of.
    """
    if not err.is_terminal:
        with _telling_signals(), waiting(doing) as say:
            yield lambda done, total, stage=doing: say(f"{stage}: {10 * (10 * done // total)} %")
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with _telling_signals(), Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(doing, total=None)
        yield lambda done, total, stage=doing: progress.update(task, completed=done, total=total, description=stage)


@contextmanager
def _telling_signals() -> Iterator[None]:
    """Signals of which a process dies without a word: one error at once, then SystemExit of 128 + number."""

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one waits for nothing
        print_error(f"ended by {signal.Signals(number).name} before there was a result; start it again")
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # where Python allows no handlers
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    deadly = {number: old for number, old in handlers.items() if old in (signal.SIG_DFL, signal.default_int_handler)}
    for number in deadly:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, old in deadly.items():
            signal.signal(number, old)
