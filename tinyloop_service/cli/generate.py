"""`tinyloop generate`: one request to a running server, streamed."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from tinyloop_service.cli import output
from tinyloop_service.cli.connection import Connection, client_options
from tinyloop_service.cli.options import input_options, json_option, parse_token_ids, read_input
from tinyloop_service.client import Client
from tinyloop_service.completion import Completion, Delta
from tinyloop_service.errors import ModelClosed, TinyLoopError, Unavailable
from tinyloop_service.types import TokenIds


@click.command()
@click.argument("text", required=False)
@input_options
@click.option("--prefix", metavar="NAME", help="Start from this prefix; TEXT is the suffix, and may be left out.")
@click.option(
    "--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="At most this many new tokens."
)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 always takes the likeliest token.")
@click.option(
    "--top-k", type=click.IntRange(0), default=50, show_default=True, help="Sample among the k likeliest; 0: all."
)
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Sample among the likeliest of this mass.")
@click.option(
    "--min-p", type=float, default=0.0, show_default=True, help="Drop what is less likely than this share of the best."
)
@click.option("--repetition-penalty", type=float, default=1.0, show_default=True, help="Above 1 discourages repeats.")
@click.option("--seed", type=int, help="The same seed gives the same tokens.  [default: random]")
@click.option(
    "-n", "n", type=click.IntRange(1), default=1, show_default=True, help="How many continuations to generate."
)
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated.")
@click.option(
    "--stop-tokens", type=parse_token_ids, multiple=True, metavar="IDS", help="End before this sequence of ids."
)
@click.option("--ignore-eos", is_flag=True, help="Go on where the model would end.")
@click.option(
    "--loops",
    type=click.IntRange(1),
    help="Depth, in loops; with a prefix it must be the prefix's.  [default: the model's]",
)
@click.option("--cache-window", type=click.IntRange(0), help="Sliding-window attention; narrows a prefix's window.")
@click.option(
    "--logprobs", type=click.IntRange(0), default=0, help="With --json: log-probabilities of the k likeliest."
)
@click.option("--ids", is_flag=True, help="Print token ids in place of text.")
@client_options
@json_option
def generate(
    text: str | None,
    file: Path | None,
    tokens: TokenIds | None,
    prefix: str | None,
    stop: tuple[str, ...],
    stop_tokens: tuple[TokenIds, ...],
    ids: bool,
    server: Connection,
    as_json: bool,
    **parameters: Any,
) -> None:
    """Generate from a prompt, or from a named prefix and a suffix; the text appears as it is made.

    \b
    Examples:
      tinyloop generate "In the beginning"
      tinyloop generate --prefix rag " What is a page?" --max-tokens 100
      tinyloop generate --prefix rag --file question.txt --temperature 0.8 --seed 7 -n 3
      tinyloop generate --tokens 17,4,256 --ids
      tinyloop generate "In the beginning" --logprobs 3 --json
    """
    content = read_input(text, file, tokens)
    if content is None and prefix is None:
        raise click.UsageError("nothing to start from; give TEXT, --file or --tokens, or a --prefix")
    if ids and as_json:
        raise click.UsageError("--json has the ids already; leave --ids out")
    if parameters["logprobs"] and not as_json:
        raise click.UsageError("log-probabilities are printed with --json only; add it")
    parameters["stop_sequences"] = (*stop, *stop_tokens)
    start = {"prompt": content} if prefix is None else {"prefix": prefix, "suffix": () if content is None else content}
    with server.client() as client:
        if as_json:
            with output.waiting("generating"):
                completion = client.complete(**start, **parameters)
            output.print_json(_as_json(completion))
        elif parameters["n"] > 1:
            with output.waiting("generating"):
                completion = client.complete(**start, **parameters)
            _print_choices(completion, ids)
        else:
            _print_stream(client, {**start, **parameters}, ids)


def _print_stream(client: Client, request: dict[str, Any], ids: bool) -> None:
    """Text as it comes; ids where that was asked, or where the model has no tokenizer."""
    began = time.monotonic()
    shown_text = False
    kept: list[int] = []
    last: Delta | None = None
    stream = client.stream(**request)
    with output.waiting("reading the prompt"):
        first = list(itertools.islice(stream, 1))
    try:
        for last in itertools.chain(first, stream):
            kept.extend(last.token_ids)
            if not ids and last.text:
                shown_text = True
                click.echo(last.text, nl=False)
    except TinyLoopError as error:
        if kept:
            click.echo("" if shown_text else " ".join(map(str, kept)))
        raise _cut_short(error, len(kept), last.seed if last and request["temperature"] else None) from None
    click.echo("" if shown_text else " ".join(map(str, kept)))
    if last is not None and output.err.is_terminal:
        output.err.print(Text(_summary(last, time.monotonic() - began), style="dim"))


def _cut_short(error: TinyLoopError, num_tokens: int, seed: int | None) -> TinyLoopError:
    """What to say of a stream that broke off; `seed`: of tokens that were drawn."""
    again = "" if seed is None else f", with --seed {seed} for the same tokens"
    way_out = {Unavailable: f"; run it again once the server is back{again}", ModelClosed: again}.get(type(error), "")
    return TinyLoopError(f"after {num_tokens} {'token' if num_tokens == 1 else 'tokens'} {error}{way_out}")


def _summary(last: Delta, elapsed_s: float) -> str:
    """How it went, in one line."""
    if last.finish_reason is None or last.usage is None or last.timings is None:
        return ""
    usage = last.usage
    return (
        f"{usage.completion_tokens} tokens, ended by {last.finish_reason.value} · "
        f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens from the prefix · "
        f"first token after {last.timings.ttft_ns / 1e6:.0f} ms · "
        f"{usage.completion_tokens / elapsed_s:.0f} tokens/s · seed {last.seed}"
    )


def _print_choices(completion: Completion, ids: bool) -> None:
    for index, choice in enumerate(completion.choices):
        shown = choice.text if choice.text and not ids else " ".join(map(str, choice.token_ids))
        output.out.print(Text.assemble((f"[{index}] ", "dim"), shown))


def _as_json(completion: Completion) -> dict[str, Any]:
    """The completion; every choice with its ids, text, finish reason, logprobs and timings."""
    shown: dict[str, Any] = output.plain(completion)
    return shown
