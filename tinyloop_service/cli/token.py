"""`tinyloop token`: make tokens, and look at files of them.  No server is needed."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from tinyloop_service.cli import output
from tinyloop_service.cli.commands import Commands
from tinyloop_service.cli.connection import read_token
from tinyloop_service.cli.options import json_option
from tinyloop_service.rpc.caller import Right
from tinyloop_service.rpc.tokens import Tokens, hash_token, new_token, parse_tokens
from tinyloop_service.types import Quota

LEAST_LENGTH = 32  # of a token that was made elsewhere: a hash hides only what nobody can guess


@click.group(cls=Commands)
def token() -> None:
    """Make the tokens by which a server knows its callers, and check the file that lists them.

    A token says which tenant calls and what he may do.  The file, of `tinyloop serve --tokens-file`, has hashes only; a
    server reads it again when it changes.

    \b
    Examples:
      tinyloop token new acme --add-to tokens.toml > acme.token
      tinyloop token check tokens.toml
      tinyloop prefix list --token-file acme.token
    """


@token.command("new")
@click.argument("tenant")
@click.option(
    "--right",
    "rights",
    multiple=True,
    type=click.Choice([right.value for right in Right]),
    default=[Right.GENERATE.value, Right.BUILD.value],
    show_default=True,
    help="What it allows; may be repeated.",
)
@click.option("--add-to", type=click.Path(path_type=Path, dir_okay=False), help="Tokens file to add it to, or to make.")
@json_option
def new(tenant: str, rights: tuple[str, ...], add_to: Path | None, as_json: bool) -> None:
    """Make a token for TENANT and print it: this once, for it is kept nowhere.

    What belongs into the tokens file goes to standard error, or into the file itself with --add-to.  To replace a
    token: add a new one, hand it out, then take the old one out of the file.

    \b
    Examples:
      tinyloop token new acme --add-to tokens.toml > acme.token
      tinyloop token new acme --right generate               # may use prefixes, not make them
      tinyloop token new operators --right admin --json
    """
    made = new_token()
    table = _table_of(tenant, hash_token(made), tuple(dict.fromkeys(rights)))
    parse_tokens(table.encode())
    if add_to is not None:
        _add(table, add_to)
    if as_json:
        output.print_json({"token": made, "tenant": tenant, "sha256": hash_token(made), "table": table})
        return
    click.echo(made)
    output.err.print(Text(f"added to {add_to}" if add_to else f"for the tokens file:\n\n{table}"))


@token.command("hash")
def hash_command() -> None:
    """Print the sha256 of a token that was made elsewhere, read from standard input.

    \b
    Example:
      tinyloop token hash < acme.token
    """
    given = click.prompt("token", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.read()
    given = given.strip()
    if len(given) < LEAST_LENGTH:
        raise click.ClickException(
            f"a token of {len(given)} characters, {LEAST_LENGTH} or more expected, random ones, for short ones are "
            "guessed from their hash; `tinyloop token new` makes one"
        )
    click.echo(hash_token(given))


@token.command()
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--token-file", type=click.Path(path_type=Path), help="Say whom the token in this file stands for.")
@json_option
def check(path: Path, token_file: Path | None, as_json: bool) -> None:
    """Check a tokens file, and show its tenants, their rights and their quotas.

    With --token-file: whom that token stands for; the status is 1 if it is none of the file's.

    \b
    Examples:
      tinyloop token check tokens.toml
      tinyloop token check tokens.toml --token-file acme.token --json
    """
    tokens = parse_tokens(path.read_bytes())
    callers = tokens.callers
    if token_file is not None:
        caller = tokens.caller(read_token(token_file))
        if caller is None:
            raise click.ClickException(f"the token in {token_file} is none of those in {path}")
        callers = (caller,)
    if as_json:
        output.print_json(
            [
                {
                    "tenant": caller.tenant,
                    "token": caller.token_id,
                    "rights": sorted(caller.rights),
                    "quota": output.plain(tokens.quotas.get(caller.tenant, Quota())),
                }
                for caller in callers
            ]
        )
    else:
        output.print_table(_shown(tokens, callers))


def _shown(tokens: Tokens, callers: tuple[object, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("TENANT", "TOKEN", "RIGHTS", "QUOTA"):
        table.add_column(column)
    for caller in tokens.callers:
        if caller in callers:
            quota = output.plain(tokens.quotas.get(caller.tenant, Quota()))
            bounds = ", ".join(f"{name} {value}" for name, value in quota.items() if value is not None)
            table.add_row(caller.tenant, caller.token_id, " ".join(sorted(caller.rights)), bounds or "none")
    return table


def _table_of(tenant: str, sha256: str, rights: tuple[str, ...]) -> str:
    listed = ", ".join(f'"{right}"' for right in rights)
    quoted = tenant.replace("\\", "\\\\").replace('"', '\\"')
    return f'[[token]]\ntenant = "{quoted}"\nsha256 = "{sha256}"\nrights = [{listed}]\n'


def _add(table: str, path: Path) -> None:
    """In front, since a quotas table may end the file; in one step, since a server may be reading."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    content = f"{table}\n{before}" if before else table
    parse_tokens(content.encode())
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
        if before:
            Path(name).chmod(path.stat().st_mode & 0o777)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
