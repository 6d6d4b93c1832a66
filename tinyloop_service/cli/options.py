"""Options that several commands share, and how each is read."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from tinyloop_service.arguments import MAX_TTL_NS
from tinyloop_service.errors import InvalidArgument
from tinyloop_service.settings import Settings
from tinyloop_service.types import TokenIds

F = TypeVar("F", bound=Callable[..., Any])

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}


def parse_duration(value: str | timedelta) -> timedelta:
    """ "90", "90s", "15m", "1.5h", "7d" → timedelta."""
    if isinstance(value, timedelta):
        return value
    found = _DURATION.fullmatch(value.strip())
    if not found:
        raise click.BadParameter(f"{value!r} is no duration; examples: 90s, 15m, 1.5h, 7d")
    seconds = float(found[1]) * _SECONDS[found[2]]
    if seconds * 1e9 > MAX_TTL_NS:
        raise click.BadParameter(f"{value!r} is longer than ten years")
    return timedelta(seconds=seconds)


def parse_token_ids(value: str | TokenIds) -> TokenIds:
    """ "464, 3290 318" → (464, 3290, 318)."""
    if isinstance(value, tuple):
        return value
    try:
        return tuple(int(item) for item in value.replace(",", " ").split())
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of token ids; example: 464,3290,318") from None


# Flags of the settings that a command line is likely to give; all of them can be TINYLOOP_ variables as well.
SETTING_FLAGS = {
    "model": "A .tinyloop file.  [default: the demo model]",
    "engine": "What computes: cuda, cpu, or auto, which takes a GPU if there is one.  [default: auto]",
    "kv_memory": "Memory for prefixes and requests.  [default: a quarter of RAM, at most 2GiB; what a GPU has free]",
    "cache_mode": "How state is stored: fp16, int8, h-fp16, h-int8 or h-int4, from large to small.  [default: fp16]",
    "threads": "Threads of the CPU engine.  [default: one per core, one for a small model]",
    "accuracy_level": "How the CPU multiplies INT4 weights: 4 with int8 activations, 0 with float32.  [default: 4]",
    "registry": "Where names are kept: memory, sqlite:////DIR/FILE, or redis://HOST:PORT/DB.  [default: memory]",
    "prefixes": "A TOML or JSON file of prefixes that are built and pinned before the server is ready.",
    "snapshot_dir": "Keep the state of named prefixes in this directory, so that a restart needs no prefill.",
    "listen": "Where to serve; port 0 takes a free one.  [default: 127.0.0.1:50051]",
    "grpc_processes": "Processes that speak gRPC, so that this one need not.  [default: 4 beside a GPU with 8 cores]",
    "health_listen": "Where to answer health checks; none for nowhere.  [default: 127.0.0.1:50052]",
    "tokens_file": "Who may call: bearer tokens, tenants, quotas; `tinyloop token` makes it.  [default: everybody may]",
    "tls_cert": "PEM file of the server's certificate.  [default: plaintext]",
    "tls_key": "PEM file of its key.",
    "tls_client_ca": "PEM file of who signs clients' certificates; clients then have to show one.",
    "max_queue": "Requests that may wait; beyond it they are refused.  [default: 1024]",
    "max_prefixes": "Prefixes kept in memory; beyond it the least recently used are evicted.  [default: 2048]",
    "drain_grace_s": "Seconds that running requests get to finish after SIGTERM.  [default: 30]",
    "log_level": "debug, info, warning or error.  [default: info]",
    "metrics_listen": "Where Prometheus reads metrics by HTTP; none for nowhere.  [default: none]",
    "otlp_endpoint": "Where traces go: http://HOST:PORT of an OTLP/gRPC receiver; none for nowhere.  [default: none]",
    "slow_request_s": "Log calls that take longer than this, in seconds, as warnings; none: never.  [default: 30]",
    "log_format": "console for people, json for machines.  [default: console]",
}
SETTING_SWITCHES = {
    "reflection": "Let clients list the methods (grpcurl).",
    "insecure_any_address": "Listen beyond loopback although nobody is authenticated.",
}


_INPUT = ("tokens", "file")
_FLAGS_OF_INPUTS = {  # arguments of the APIs that a command line has other names for
    "prompt": _INPUT,
    "suffix": _INPUT,
    "tokens_or_text": _INPUT,
    "stop_sequences": ("stop_tokens", "stop"),
    "text": ("texts",),
}


def settings_options(*names: str) -> Callable[[F], F]:
    """One flag per setting, in order; the command takes them as keyword arguments, None where not given."""

    def decorate(command: F) -> F:
        command = named_as_given(command)
        for name in reversed(names):
            flag = "--" + name.removesuffix("_s").replace("_", "-")
            if name in SETTING_SWITCHES:
                command = click.option(flag, name, is_flag=True, default=None, help=SETTING_SWITCHES[name])(command)
            else:
                command = click.option(flag, name, metavar="VALUE", help=SETTING_FLAGS[name])(command)
        return command

    return decorate


def read_settings(given: Mapping[str, object]) -> Settings:
    """Defaults, then the environment, then the flags; a usage error names what cannot be read."""
    flags = {_variable(name): str(value) for name, value in given.items() if value is not None}
    try:
        return Settings.from_environment({**os.environ, **flags})
    except InvalidArgument as error:
        raise click.UsageError(str(as_given(error))) from None


def named_as_given(command: F) -> F:
    """The command, whose errors name what is wrong as it was given: by a flag, or by a variable."""

    @functools.wraps(command)
    def call(**given: Any) -> Any:
        try:
            return command(**given)
        except InvalidArgument as error:
            raise as_given(error) from None
        except OSError as error:
            raise _file_as_given(error) from None

    return call  # type: ignore[return-value]


def as_given(error: InvalidArgument) -> InvalidArgument:
    """`error` under the flag of the running command, or the variable, that its field was given by; of a default, under
    the flag.  A field that has neither keeps its name.  Further fields that it names are named so too; those that were
    not given, as the first one is."""
    context = click.get_current_context()
    name = error.field.removeprefix("TINYLOOP_").lower().replace(".", "_")
    flags = _flags(context)
    if name not in flags:  # a part of an input, which has several flags, or has a shorter one
        of_input = _FLAGS_OF_INPUTS.get(name.partition("[")[0], ())
        given = [flag for flag in of_input if flag in flags and context.params.get(flag)]
        name = given[0] if len(given) == 1 else name
    named, description = _given_by(name) or flags.get(name, error.field), error.description
    for other in error.others:
        alike = _variable(other) if named == _variable(name) else flags.get(other, _variable(other))
        description = description.replace(other, _given_by(other) or alike)
    return InvalidArgument(named, description)


def _given_by(name: str) -> str | None:
    """The flag of the running command, or the variable, that `name` was given by."""
    context = click.get_current_context()
    if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
        return _flags(context).get(name)
    return _variable(name) if os.environ.get(_variable(name)) else None


def _variable(name: str) -> str:
    return f"TINYLOOP_{name.upper()}"


def _file_as_given(error: OSError) -> OSError | InvalidArgument:
    """`error` under the flag, or the variable, that names its file; itself where none does."""
    if error.filename is None or error.strerror is None:
        return error
    context, path = click.get_current_context(), str(error.filename)
    flags = _flags(context)
    given = (name for name, value in context.params.items() if name in flags and str(value) == path)
    by_variable = (name for name in flags if os.environ.get(_variable(name)) == path)
    name = next(chain(given, by_variable), None)
    return error if name is None else as_given(InvalidArgument(name, f"{path}: {error.strerror}; check the path"))


def _flags(context: click.Context) -> dict[str, str]:
    """By the name of what they give."""
    return {option.name: option.opts[0] for option in context.command.params if isinstance(option, click.Option)}


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


def input_options(command: F) -> F:
    """--file and --tokens, beside a TEXT argument; `read_input` makes one value of the three."""
    command = click.option(
        "--tokens", type=parse_token_ids, metavar="IDS", help="Token ids in place of text, taken as they are."
    )(command)
    return click.option(
        "--file",
        "-f",
        type=click.Path(path_type=Path, allow_dash=True, dir_okay=False),
        help="Read the text from a file; - is standard input.",
    )(command)


def read_input(text: str | None, file: Path | None, tokens: TokenIds | None) -> str | TokenIds | None:
    """The one input that was given; None when there is none.  Two are a usage error."""
    given = [value for value in (text, file, tokens) if value is not None]
    if len(given) > 1:
        raise click.UsageError("give one of TEXT, --file and --tokens, not several")
    if file is None:
        return text if tokens is None else tokens
    try:
        return (sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()).decode()
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise click.UsageError(f"{file}: {what}") from None
