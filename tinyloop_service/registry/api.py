"""The seam: what every registry does.  Values in and out; RegistryUnavailable when it does not answer.

A registry is opened for one realm and sees no other's names.  It refuses to know the time: expired records are kept,
and returned like others, until `purge`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tinyloop_service.types import PrefixRecord

Key = tuple[str, str]  # tenant, name


@dataclass(frozen=True, slots=True)
class Realm:
    """Whose names: prefixes of another model, or stored in another form, are other prefixes."""

    model_id: str
    cache_mode: str

    def __str__(self) -> str:
        return f"{self.model_id}/{self.cache_mode}"


@dataclass(frozen=True, slots=True)
class Changes:
    """What happened after a position."""

    position: int  # to ask from next time
    etags: Mapping[Key, str | None] | None  # now, of each name that changed, None: it is gone; no map: too many to tell


class Registry(Protocol):
    """Names to records.  Every change compares and sets: it is made only if the record is the expected one."""

    @property
    def is_shared(self) -> bool:
        """Other processes may change it meanwhile."""
        ...

    async def read(self, tenant: str, name: str) -> PrefixRecord | None: ...

    async def write(self, record: PrefixRecord, *, replaces: str | None) -> bool:
        """Durable when it returns.  `replaces`: the etag that the name has now, None: it has no record.
        False, and nothing done, where that is not so."""
        ...

    async def remove(self, tenant: str, name: str, *, etag: str) -> bool:
        """As `write`: False if the name has another etag, or no record."""
        ...

    async def page(self, tenant: str, *, after: str, limit: int) -> list[PrefixRecord]:
        """A tenant's records by name, the first `limit` of those beyond `after`."""
        ...

    async def changes(self, since: int | None) -> Changes:
        """What changed after a position; None: nothing, but where that is now."""
        ...

    async def wait(self, limit_s: float) -> None:
        """Return when something may have changed, at the latest after `limit_s`.  Never raises RegistryUnavailable."""
        ...

    async def purge(self, before_ns: int) -> None:
        """Drop records whose time ran out before then."""
        ...

    async def close(self) -> None: ...
