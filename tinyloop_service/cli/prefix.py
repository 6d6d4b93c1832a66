"""`tinyloop prefix`: named prefixes of a running server."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from tinyloop_service.cli import output
from tinyloop_service.cli.commands import Commands
from tinyloop_service.cli.connection import Connection, client_options
from tinyloop_service.cli.options import input_options, json_option, parse_duration, read_input
from tinyloop_service.client import AsyncClient, Prefix
from tinyloop_service.errors import PrefixNotFound, TinyLoopError
from tinyloop_service.types import PrefixState, TokenIds

POLL_S = 0.5
STATE_STYLES = {"ready": "green", "building": "yellow", "evicted": "dim", "failed": "red"}


@click.group(cls=Commands)
def prefix() -> None:
    """Create, look at, change and delete the named prefixes of a server.

    A prefix is a prompt whose state the server keeps under a name.  It is built once; every request that names it
    starts where it ends.

    \b
    Examples:
      tinyloop prefix create rag --file system_prompt.txt --ttl 1h
      tinyloop prefix list
      tinyloop generate --prefix rag " What is a page?"
      tinyloop prefix delete rag
    """


@prefix.command()
@click.argument("name")
@click.argument("text", required=False)
@input_options
@click.option("--loops", type=click.IntRange(1), help="Depth, in loops.  [default: the model's, or the parent's]")
@click.option("--cache-window", type=click.IntRange(0), help="Sliding-window attention over this many tokens; 0: all.")
@click.option(
    "--ttl", type=parse_duration, metavar="DURATION", help="Expires after this long, for example 15m.  [default: never]"
)
@click.option("--pin", is_flag=True, help="Keep it in memory whatever else needs room.")
@click.option("--parent", metavar="NAME", help="A prefix that this one continues; TEXT is what comes after it.")
@click.option("--no-wait", is_flag=True, help="Return at once; follow it with `tinyloop prefix watch`.")
@client_options
@json_option
def create(
    name: str,
    text: str | None,
    file: Path | None,
    tokens: TokenIds | None,
    loops: int | None,
    cache_window: int | None,
    ttl: timedelta | None,
    pin: bool,
    parent: str | None,
    no_wait: bool,
    server: Connection,
    as_json: bool,
) -> None:
    """Build a prefix from TEXT, a file or token ids, and keep it under NAME.

    The same name with the same content is no work, and said to be there already; with other content it is refused.  A
    suffix is tokenised separately from its prefix: end the prefix where a token ends, before a space for most
    tokenizers.

    \b
    Examples:
      tinyloop prefix create genesis "In the beginning God created the heaven and the earth."
      tinyloop prefix create rag --file system_prompt.txt --ttl 1h --pin
      cat chapter.txt | tinyloop prefix create chapter --file -
      tinyloop prefix create ids --tokens 17,4,256 --loops 4
    """
    content = read_input(text, file, tokens)
    if content is None:
        raise click.UsageError("nothing to build from; give TEXT, --file or --tokens")

    async def run() -> tuple[Prefix | None, Prefix]:
        async with server.async_client() as client:
            before = await _look_up(client, name)
            building = asyncio.create_task(
                client.create_prefix(
                    name,
                    content,
                    loops=loops,
                    cache_window=cache_window,
                    ttl=ttl,
                    pinned=pin,
                    parent=parent,
                    wait=not no_wait,
                )
            )
            await _show_progress(client, name, building)
            return before, await building

    before, made = asyncio.run(run())
    if before is not None and before.uid == made.uid:
        since = output.human_time(made.create_time)
        output.err.print(f"{name} was there already, since {since}; its expiry and pin are as asked now")
    _show(made, as_json)


async def _look_up(client: AsyncClient, name: str) -> Prefix | None:
    try:
        return await client.get_prefix(name)
    except PrefixNotFound:
        return None


async def _show_progress(client: AsyncClient, name: str, building: asyncio.Task[Prefix]) -> None:
    with output.waiting(f"building {name}") as say:
        while not (await asyncio.wait({building}, timeout=POLL_S))[0]:
            try:
                now = await client.get_prefix(name)
            except TinyLoopError:  # not there yet, or out of reach: what counts is how the build ends
                continue
            say(f"building {name}: {now.tokens_built} of {now.token_count} tokens")


@prefix.command()
@click.argument("name")
@client_options
@json_option
def get(name: str, server: Connection, as_json: bool) -> None:
    """Show one prefix.

    \b
    Example:
      tinyloop prefix get rag --json
    """
    with server.client() as client:
        _show(client.get_prefix(name), as_json)


@prefix.command("list")
@client_options
@json_option
def list_prefixes(server: Connection, as_json: bool) -> None:
    """List the prefixes, by name.

    \b
    Examples:
      tinyloop prefix list
      tinyloop prefix list --json | python3 -c 'import json,sys; print([p["id"] for p in json.load(sys.stdin)])'
    """
    with server.client() as client:
        prefixes = client.list_prefixes()
    if as_json:
        output.print_json([output.plain(item) for item in prefixes])
    elif prefixes:
        output.out.print(_table(prefixes))
    else:
        output.err.print("no prefixes; make one with: tinyloop prefix create NAME TEXT")


@prefix.command()
@click.argument("name")
@click.option("--ttl", type=parse_duration, metavar="DURATION", help="Expires this long from now.")
@click.option("--no-expiry", is_flag=True, help="Never expires.")
@click.option("--pin/--unpin", default=None, help="Keep it in memory whatever else needs room, or no longer.")
@client_options
@json_option
def update(
    name: str,
    ttl: timedelta | None,
    no_expiry: bool,
    pin: bool | None,
    server: Connection,
    as_json: bool,
) -> None:
    """Change when a prefix expires, or whether it is pinned.  Its content never changes.

    \b
    Examples:
      tinyloop prefix update rag --ttl 2h
      tinyloop prefix update rag --pin --no-expiry
    """
    if ttl is not None and no_expiry:
        raise click.UsageError("give one of --ttl and --no-expiry, not both")
    changes: dict[str, Any] = {}
    if ttl is not None or no_expiry:
        changes["ttl"] = ttl
    if pin is not None:
        changes["pinned"] = pin
    if not changes:
        raise click.UsageError("nothing to change; give --ttl, --no-expiry, --pin or --unpin")
    with server.client() as client:
        _show(client.update_prefix(name, **changes), as_json)


@prefix.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@client_options
def delete(names: tuple[str, ...], server: Connection) -> None:
    """Delete prefixes.  The names end at once; requests that run finish.

    \b
    Example:
      tinyloop prefix delete rag genesis
    """
    with server.client() as client:
        for name in names:
            client.delete_prefix(name)
            output.err.print(f"deleted {name}")


@prefix.command()
@click.argument("name")
@client_options
@json_option
def watch(name: str, server: Connection, as_json: bool) -> None:
    """Follow a build until it is ready or failed: exit status 0 or 1.

    \b
    Example:
      tinyloop prefix create rag --file big.txt --no-wait && tinyloop prefix watch rag
    """
    last: Prefix | None = None
    with server.client() as client:
        for last in client.watch_prefix(name):
            if as_json:
                output.print_json(output.plain(last))
            else:
                progress = (
                    "" if last.state == PrefixState.READY else f"  {last.tokens_built} of {last.token_count} tokens"
                )
                output.out.print(Text.assemble(f"{last.id}  ", _styled(last.state), progress))
    if last is not None and last.state == PrefixState.FAILED:
        raise click.ClickException(f"the build of {name} failed: {last.error}")


def _show(shown: Prefix, as_json: bool) -> None:
    if as_json:
        output.print_json(output.plain(shown))
        return
    facts = {
        "name": shown.id,
        "state": shown.state.value,
        "error": shown.error,
        "tokens": shown.token_count,
        "loops": shown.loops,
        "cache window": shown.cache_window or "",
        "size": f"{output.human_bytes(shown.size_bytes)}, {shown.cache_mode.value}",
        "shared": output.human_bytes(shown.shared_bytes) if shown.shared_bytes else "",
        "parent": shown.parent,
        "pinned": "yes" if shown.pinned else "",
        "expires": output.human_time(shown.expire_time),
        "used": f"{shown.use_count} time{'s' * (shown.use_count != 1)}",
        "built in": f"{shown.build_duration.total_seconds() * 1e3:.0f} ms",
        "uid": shown.uid,
    }
    output.print_facts(facts)


def _table(prefixes: list[Prefix]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("NAME", "STATE"):
        table.add_column(column)
    for column in ("TOKENS", "LOOPS", "SIZE", "USED"):
        table.add_column(column, justify="right")
    for column in ("PINNED", "EXPIRES"):
        table.add_column(column)
    for item in prefixes:
        table.add_row(
            item.id,
            _styled(item.state),
            str(item.token_count),
            str(item.loops),
            output.human_bytes(item.size_bytes),
            str(item.use_count),
            "yes" if item.pinned else "",
            output.human_time(item.expire_time),
        )
    return table


def _styled(state: PrefixState) -> Text:
    return Text(state.value, style=STATE_STYLES[state.value])
