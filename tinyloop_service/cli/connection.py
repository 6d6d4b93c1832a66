"""Which server a command calls, as whom, and over what: options that all such commands share.

The token itself is no option: command lines are seen by others on the machine and kept in histories.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import click

from tinyloop_service.cli.options import as_given, named_as_given
from tinyloop_service.client import AsyncClient, Client, Tls
from tinyloop_service.errors import InvalidArgument
from tinyloop_service.settings import ClientSettings

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_TARGET = "127.0.0.1:50051"
_FLAGS = {  # of ClientSettings
    "token_file": "File that holds the token to call with; or the token itself in TINYLOOP_TOKEN.",
    "tls_ca": "Speak TLS, and trust the authorities in this PEM file.",
    "client_cert": "PEM file of a certificate to show, where the server asks for one.",
    "client_key": "PEM file of its key.",
}
_SWITCHES = {
    "affinity": "Ask the replica that holds the prefix, of several behind the target (dns:///NAME:PORT).",
    "tls": "Speak TLS, and trust the system's roots.",
}


@dataclass(frozen=True, slots=True)
class Connection:
    """A server, and how to call it."""

    target: str
    timeout: float | None
    tls: Tls | bool = False
    token: str | None = field(default=None, repr=False)
    affinity: bool = False

    def client(self, *, default_timeout: float | None = None) -> Client:
        """default_timeout: seconds for each call where no --timeout was given."""
        return Client(self.target, timeout=self.timeout or default_timeout, **self._options)

    def async_client(self) -> AsyncClient:
        return AsyncClient(self.target, timeout=self.timeout, **self._options)

    @property
    def _options(self) -> dict[str, Any]:
        return {"token": self.token, "tls": self.tls, "affinity": self.affinity}


def client_options(command: F) -> F:
    """--target, --timeout and what TLS and tokens need; the command takes one argument `server`, a Connection."""

    @named_as_given
    @functools.wraps(command)
    def call(*, target: str, timeout: float | None, **given: Any) -> Any:
        own = {name: given.pop(name) for name in (*_FLAGS, *_SWITCHES)}
        return command(server=_connection(target, timeout, own), **given)

    wrapped: Any = call
    for name, words in reversed(_FLAGS.items()):
        wrapped = click.option("--" + name.replace("_", "-"), name, metavar="PATH", help=words)(wrapped)
    for name, words in reversed(_SWITCHES.items()):
        wrapped = click.option("--" + name, is_flag=True, default=None, help=words)(wrapped)
    wrapped = click.option(
        "--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Give up after this long."
    )(wrapped)
    wrapped = click.option(
        "--target", "-t", metavar="HOST:PORT", default=DEFAULT_TARGET, show_default=True, help="The server to call."
    )(wrapped)
    return wrapped  # type: ignore[no-any-return]


def _connection(target: str, timeout: float | None, given: dict[str, Any]) -> Connection:
    flags = {f"TINYLOOP_{name.upper()}": str(value) for name, value in given.items() if value is not None}
    environment = {**os.environ, **flags}
    if given["token_file"] is not None:
        environment.pop("TINYLOOP_TOKEN", None)
    try:
        settings = ClientSettings.from_environment(environment)
    except InvalidArgument as error:
        raise click.UsageError(str(as_given(error))) from None
    return Connection(target, timeout, _tls(settings), _token(settings), settings.affinity)


def _tls(settings: ClientSettings) -> Tls | bool:
    if settings.tls_ca or settings.client_cert:
        return Tls(settings.tls_ca, settings.client_cert, settings.client_key)
    return settings.tls


def _token(settings: ClientSettings) -> str | None:
    return settings.token if settings.token_file is None else read_token(Path(settings.token_file))


def read_token(path: Path) -> str:
    """The one token in a file, with or without a line end.  Raises InvalidArgument for anything else."""
    token = path.read_text(encoding="ascii", errors="replace").strip()
    if not token or token.split() != [token]:
        raise InvalidArgument("token_file", f"{path} holds {len(token.split())} words, one token expected")
    return token
