"""The prefixes file: names that are built and pinned before the server is ready.

    [[prefix]]
    id = "assistant"                     # as in `prefixes/{id}`
    text = "You are ..."                 # or file = "assistant.txt", beside this file; or tokens = [464, 3290, 318]
    loops = 8                            # left out: the parent's, else the model's default
    cache_window = 0                     # left out: the parent's, else 0, all
    parent = "base"                      # an id above, or one in the registry; the content then goes on from it
    tenant = "acme"                      # whose it is; left out: "", who calls a server without tokens

The same as JSON, {"prefix": [{"id": ..., "text": ...}, ...]}, in a file whose name ends in .json.

The file decides: a name that stands for other content is replaced.  What it does not name any more stays until it is
deleted.  In: a path, and later the scheduler's tokenizer and the names.  Out: everything built, or one error that says
which entry is wrong and why.
"""

from __future__ import annotations

import asyncio
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from tinyloop_service import arguments
from tinyloop_service.errors import InvalidArgument, RegistryUnavailable, TinyLoopError
from tinyloop_service.files import read_file
from tinyloop_service.registry.names import Names
from tinyloop_service.text import Tokenizer
from tinyloop_service.types import PrefixDefinition, TokenIds

_FIELD = "prefixes"
_CONTENTS = ("text", "file", "tokens")
_KEYS = ("id", *_CONTENTS, "loops", "cache_window", "parent", "tenant")
_log = structlog.get_logger("tinyloop.registry")


@dataclass(frozen=True, slots=True)
class FilePrefix:
    """One entry."""

    tenant: str
    id: str
    content: str | TokenIds
    loops: int | None
    cache_window: int | None
    parent: str | None


def read_prefixes(path: str | Path) -> tuple[FilePrefix, ...]:
    """The entries in their order.  Raises InvalidArgument for what is wrong, OSError for a file that is not there."""
    path = Path(path)
    document = _parse(path)
    if not isinstance(document, dict) or not isinstance(entries := document.get("prefix"), list):
        raise _wrong(path, 'has no list "prefix": [[prefix]] tables expected, in JSON {"prefix": [...]}')
    if unknown := document.keys() - {"prefix"}:
        raise _wrong(path, f"has {sorted(unknown)[0]!r} at the top; only prefix is expected there")
    found: dict[tuple[str, str], FilePrefix] = {}
    for number, entry in enumerate(entries, 1):
        prefix = _read_entry(path, number, entry)
        if (prefix.tenant, prefix.id) in found:
            raise _wrong(path, f"names {prefix.id!r} twice")
        found[prefix.tenant, prefix.id] = prefix
    return tuple(found.values())


async def build_prefixes(prefixes: tuple[FilePrefix, ...], names: Names, tokenizer: Tokenizer | None) -> None:
    """All of them READY and pinned.  Raises InvalidArgument for the first that cannot be, RegistryUnavailable."""
    for prefix in prefixes:
        try:
            tokens = await _encode(prefix, tokenizer)
            info = await names.create(
                PrefixDefinition(tokens, prefix.loops, prefix.cache_window, prefix.parent),
                tenant=prefix.tenant,
                name=prefix.id,
                pinned=True,
                replaces_other=True,
            )
        except RegistryUnavailable:
            raise
        except TinyLoopError as error:
            raise InvalidArgument(_FIELD, f"prefix {prefix.id!r} cannot be built: {error}") from None
        _log.info("prefix of the file is ready", prefix=prefix.id, tokens=len(info.tokens), uid=info.uid)


async def _encode(prefix: FilePrefix, tokenizer: Tokenizer | None) -> TokenIds:
    if not isinstance(prefix.content, str):
        return prefix.content
    if tokenizer is None:
        raise InvalidArgument("text", "the model file has no tokenizer; give tokens")
    return await asyncio.to_thread(tokenizer.encode, prefix.content, bos=prefix.parent is None)


def _parse(path: Path) -> Any:
    content = read_file(path)
    try:
        return json.loads(content) if path.suffix == ".json" else tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # not all that the two raise is an error of theirs
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise _wrong(path, f"is no {kind}: {error}") from None


def _read_entry(path: Path, number: int, entry: Any) -> FilePrefix:
    which = f"entry {number}"
    if not isinstance(entry, dict):
        raise _wrong(path, f"{which} is no table")
    if isinstance(entry.get("id"), str):
        which = f"prefix {entry['id'][:80]!r}"
    if unknown := entry.keys() - set(_KEYS):
        raise _wrong(path, f"{which} has {sorted(unknown)[0]!r}; expected are {', '.join(_KEYS)}")
    if len(given := [key for key in _CONTENTS if key in entry]) != 1:
        raise _wrong(
            path, f"{which} has {' and '.join(given) or 'no content'}; expected is one of text, file and tokens"
        )
    try:
        return FilePrefix(
            tenant=_tenant(entry.get("tenant", "")),
            id=arguments.prefix_id(entry.get("id"), "id"),
            content=_content(path, given[0], entry[given[0]]),
            loops=arguments.loops(entry.get("loops")),
            cache_window=arguments.cache_window(entry.get("cache_window")),
            parent=arguments.prefix_id(entry["parent"], "parent") if "parent" in entry else None,
        )
    except InvalidArgument as error:
        raise _wrong(path, f"{which}: {error}") from None


def _tenant(value: object) -> str:
    tenant = arguments.text(value, "tenant")
    if not tenant.isprintable():
        raise InvalidArgument("tenant", "holds control characters; expected is a name as in the tokens file")
    return tenant


def _content(path: Path, key: str, value: object) -> str | TokenIds:
    if key == "tokens":
        content: str | TokenIds = arguments.token_ids(value, key)
    elif key == "text":
        content = arguments.text(value, key)
    else:
        try:
            content = read_file(path.parent / arguments.text(value, key)).decode()
        except UnicodeDecodeError:
            raise InvalidArgument(key, f"{value} is not UTF-8 text") from None
        except OSError as error:
            raise InvalidArgument(key, f"{value} cannot be read: {error.strerror}") from None
    if not content:
        raise InvalidArgument(key, "is empty, expected at least one token")
    return content


def _wrong(path: Path, message: str) -> InvalidArgument:
    return InvalidArgument(_FIELD, f"{path}: {message}")
