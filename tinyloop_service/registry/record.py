"""Records as text: one JSON object of a fixed version, for the registries that leave the process."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from tinyloop_service.errors import RegistryUnavailable
from tinyloop_service.types import Ancestor, PrefixRecord

VERSION = 1
_UNREADABLE = "the registry holds a record that this version of the server cannot read; its log names it"


def encode(record: PrefixRecord) -> str:
    return json.dumps({"version": VERSION, **asdict(record)}, separators=(",", ":"))


def decode(text: str | bytes) -> PrefixRecord:
    """The inverse of `encode`.  RegistryUnavailable for anything else."""
    try:
        fields: dict[str, Any] = json.loads(text)
        if fields.pop("version") != VERSION:
            raise ValueError("another version")
        fields["tokens"] = tuple(fields["tokens"])
        fields["ancestors"] = tuple(Ancestor(**ancestor) for ancestor in fields["ancestors"])
        return PrefixRecord(**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RegistryUnavailable(_UNREADABLE) from error
