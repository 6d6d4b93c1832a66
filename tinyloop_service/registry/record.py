"""Records as text: one JSON object of a fixed version, for the registries that leave the process."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import structlog

from tinyloop_service.errors import PrefixDamaged
from tinyloop_service.types import Ancestor, PrefixRecord

VERSION = 1
_log = structlog.get_logger("tinyloop.registry")


def encode(record: PrefixRecord) -> str:
    return json.dumps({"version": VERSION, **asdict(record)}, separators=(",", ":"))


def decode(text: str | bytes) -> PrefixRecord:
    """The inverse of `encode`.  PrefixDamaged for anything else."""
    try:
        fields: dict[str, Any] = json.loads(text)
        if (version := fields.pop("version")) != VERSION:
            raise ValueError(f"version {version}, {VERSION} expected")
        fields["tokens"] = tuple(fields["tokens"])
        fields["ancestors"] = tuple(Ancestor(**ancestor) for ancestor in fields["ancestors"])
        return _checked(PrefixRecord(**fields))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _log.error("a record cannot be read", error=type(error).__name__, size=len(text))  # it may have a prompt
        raise PrefixDamaged("what the registry holds of this prefix cannot be read; use another id") from error


def _checked(record: PrefixRecord) -> PrefixRecord:
    """The same.  TypeError unless every value is of its field's type."""
    texts, numbers = [record.tenant, record.name, record.uid, record.content_sha256], [record.revision, record.loops]
    numbers += [*record.tokens, record.cache_window, record.create_time_ns]
    if record.expire_time_ns is not None:
        numbers.append(record.expire_time_ns)
    for ancestor in record.ancestors:
        texts += [ancestor.uid, ancestor.name]
        numbers.append(ancestor.end)
    if {*map(type, texts)} != {str} or {*map(type, numbers)} != {int} or type(record.pinned) is not bool:
        raise TypeError("a value is of another type than its field")
    return record


def decode_all(texts: Iterable[str | bytes]) -> list[PrefixRecord]:
    """Those that can be read."""
    found = []
    for text in texts:
        with suppress(PrefixDamaged):
            found.append(decode(text))
    return found
