"""What `tinyloop demo` shows: the streams side by side as they grow, then the table of what was measured.

On a terminal the streams move; elsewhere each is printed once, when all have ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tinyloop_service.bench import Outcome, Run, describe_machine
from tinyloop_service.bench.rounds import ShowPiece
from tinyloop_service.cli import output

REFRESH_HZ = 12


def introduce(address: str, prefix: str, prefix_tokens: int, requests: int) -> None:
    """What is about to happen."""
    first, last = prefix.strip().split("\n", 1)[0], prefix.strip()[-70:].replace("\n", " ").split(" ", 1)[-1]
    output.out.print()
    output.out.print(Text.assemble(("TinyLoop", "bold"), f" serves its demo model on {address}"))
    output.out.print(
        Text(f"One prefix of {prefix_tokens} tokens, built once; {requests} requests go on from it at once:")
    )
    output.out.print()
    output.out.print(Text(f"    {first[:100]}", style="dim italic"))
    output.out.print(Text(f"    … {last}", style="dim italic"))
    output.out.print()


@contextmanager
def streams(suffixes: Sequence[str], *, quiet: bool) -> Iterator[ShowPiece]:
    """Yields a function that takes each new piece of text of each request."""
    texts = [""] * len(suffixes)

    def add(request: int, piece: str) -> None:
        texts[request] += piece

    if quiet:
        yield add
    elif output.out.is_terminal:
        with Live(console=output.out, refresh_per_second=REFRESH_HZ, get_renderable=lambda: _columns(suffixes, texts)):
            yield add
    else:
        yield add
        output.out.print(_columns(suffixes, texts))


def _columns(suffixes: Sequence[str], texts: Sequence[str]) -> Table:
    """Request number, and its suffix with what has come of it."""
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", style="dim")
    table.add_column(overflow="fold")
    for number, (suffix, text) in enumerate(zip(suffixes, texts, strict=True), start=1):
        table.add_row(str(number), Text.assemble((_one_line(suffix).strip(), "bold cyan"), _one_line(text)))
    return table


def _one_line(text: str) -> str:
    return text.replace("\n", " ")


def print_outcome(outcome: Outcome, max_tokens: int) -> None:
    """The table, and how to read it."""
    requests = len(outcome.shared.answers)
    table = Table(title_justify="left", header_style="bold", pad_edge=False, box=None)
    table.add_column("")
    for name in ("NO_CACHE", "SHARED"):
        table.add_column(name, justify="right", min_width=12)
    for label, no_cache, shared in _lines(outcome):
        table.add_row(label, no_cache, shared)
    alike = f"the same in {outcome.num_alike} of {requests} requests"
    output.out.print()
    output.out.print(
        Group(
            Text(f"Measured in this run on {describe_machine()}:", style="bold"),
            Text(),
            table,
            Text(),
            Text.assemble(
                ("Tokens of both ways: ", "dim"), (alike, "green" if outcome.num_alike == requests else "red")
            ),
        )
    )
    output.print_facts(_how_to_read(outcome, max_tokens))
    output.out.print()


def _how_to_read(outcome: Outcome, max_tokens: int) -> dict[str, str]:
    requests = len(outcome.shared.answers)
    return {
        "NO_CACHE": f"each request prefills its whole prompt, one after the other; up to {max_tokens} new tokens each",
        "SHARED": f"one prefill ({outcome.shared.build_ms:.0f} ms, included in the total), then all requests at once",
        "predicted": f"(P + D) / (P/{requests} + D) with P = the prefill, D = a lone request after its first token: "
        "what the saved prefills are worth alone; decoding together is what exceeds it",
    }


def _lines(outcome: Outcome) -> Iterator[tuple[str, str, str]]:
    runs: tuple[Run, Run] = (outcome.no_cache, outcome.shared)
    yield ("time to first token, median", *(f"{run.ttft_ms:.0f} ms" for run in runs))  # type: ignore[misc]
    yield (f"all {len(runs[0].answers)} requests done", *(f"{run.total_ms:.0f} ms" for run in runs))  # type: ignore[misc]
    yield ("new tokens per second", *(f"{run.tokens_per_s:.0f}" for run in runs))  # type: ignore[misc]
    yield "speed-up", "1.00×", f"{outcome.speedup:.2f}×"
    yield "predicted", "", f"{outcome.predicted:.2f}×"
