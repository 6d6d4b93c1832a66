"""`tinyloop top`: what a running server is doing, live."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import click
from rich.console import Console
from rich.live import Live

from tinyloop_service.cli import output
from tinyloop_service.cli.connection import Connection, client_options
from tinyloop_service.cli.top_view import BAR, ORDERS, Frame, Sample, render
from tinyloop_service.client import Client
from tinyloop_service.client.results import ModelInfo
from tinyloop_service.errors import DeadlineExceeded, Unavailable

_ASK_S = 5.0  # for one answer, where no --timeout is given
_AROUND = 14  # lines that are no prefixes
_KEYS = "q quit   s sort"
WIDTH = 110  # columns, where no terminal says how many there are


@click.command()
@click.option(
    "--interval", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Seconds from frame to frame."
)
@click.option("--sort", type=click.Choice(ORDERS), default=ORDERS[0], show_default=True, help="Order of prefixes.")
@click.option("--once", is_flag=True, help="One frame as text, of two samples an interval apart.")
@client_options
def top(interval: float, sort: str, once: bool, server: Connection) -> None:
    """Show what a server is doing: rows, queue, memory, tokens a second, prefixes by size and use.

    Keys: q ends it, s changes the order of prefixes.  When the server goes away it waits for it to come back.

    \b
    Examples:
      tinyloop top
      tinyloop top --target 10.1.2.3:50051 --sort use
      tinyloop top --once | head -3
    """
    if not (once or output.out.is_terminal):
        raise click.UsageError("standard output is no terminal; give --once for one frame as text")
    with server.client(default_timeout=_ASK_S) as client:
        watch = _Watch(client, server.target, sort)
        if not once:
            _run(watch, interval)
            return
        watch.ask()
        time.sleep(interval)
        watch.ask()
        width = None if output.out.is_terminal else WIDTH
        Console(highlight=False, width=width).print(render(watch.frame()))


def _run(watch: _Watch, interval: float) -> None:
    """Frame after frame until somebody types q."""
    with _keyboard() as wait_key, Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        while True:
            watch.ask_patiently()
            due_s = time.monotonic() + interval
            while (left_s := due_s - time.monotonic()) > 0:
                live.update(render(watch.frame(live.console.height - _AROUND, keys=_KEYS)), refresh=True)
                key = wait_key(left_s)
                if key == "q":
                    return
                if key == "s":
                    watch.turn_order()


@contextmanager
def _keyboard() -> Iterator[Callable[[float], str]]:
    """Keys as they are typed, without Enter and not shown.  Yields what waits for one so many seconds; "" for none."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield _wait_key
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _wait_key(wait_s: float) -> str:
    ready, _, _ = select.select([sys.stdin], [], [], wait_s)
    return os.read(sys.stdin.fileno(), 1).decode("ascii", "ignore").lower() if ready else ""


def _no_key(wait_s: float) -> str:
    time.sleep(wait_s)
    return ""


@dataclass
class _Watch:
    """The last two samples of one server."""

    client: Client
    target: str
    order: str
    model: ModelInfo | None = None
    now: Sample | None = None
    before: Sample | None = None
    history: deque[float] = field(default_factory=lambda: deque(maxlen=BAR))
    trouble: str = ""

    def ask(self) -> None:
        """A new sample.  Raises what the client raises."""
        if self.model is None or self.trouble:  # another server may be there now
            self.model = self.client.model()
        load, prefixes = self.client.load(), self.client.list_prefixes()
        self.before, self.now = self.now, Sample(time.monotonic(), load, prefixes)
        if (rate := self.frame().rate("generated_tokens")) is not None:
            self.history.append(rate)

    def ask_patiently(self) -> None:
        """As `ask`; a server that is not there is waited for, and may come back as another one."""
        try:
            self.ask()
            self.trouble = ""
        except (Unavailable, DeadlineExceeded) as error:
            self.trouble = f"no answer, trying again: {error}"

    def turn_order(self) -> None:
        self.order = ORDERS[(ORDERS.index(self.order) + 1) % len(ORDERS)]

    def frame(self, rows: int | None = None, *, keys: str = "") -> Frame:
        """What to show, with at most `rows` prefixes."""
        room = None if rows is None else max(1, rows)
        seen = (self.target, self.model, self.now, self.before, tuple(self.history))
        return Frame(*seen, self.trouble, self.order, room, keys)
