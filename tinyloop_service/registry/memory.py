"""The registry of one process: its names end with it."""

from __future__ import annotations

from tinyloop_service.registry.api import Changes, Key
from tinyloop_service.types import PrefixRecord


class MemoryRegistry:
    """A dictionary.  No call of it suspends, so a server with this one behaves as if it had none."""

    is_shared = False

    def __init__(self) -> None:
        self._records: dict[Key, PrefixRecord] = {}

    async def read(self, tenant: str, name: str) -> PrefixRecord | None:
        return self._records.get((tenant, name))

    async def write(self, record: PrefixRecord, *, replaces: str | None) -> bool:
        key = (record.tenant, record.name)
        if self._etag(key) != replaces:
            return False
        self._records[key] = record
        return True

    async def remove(self, tenant: str, name: str, *, etag: str) -> bool:
        if self._etag((tenant, name)) != etag:
            return False
        del self._records[tenant, name]
        return True

    async def page(self, tenant: str, *, after: str, limit: int) -> list[PrefixRecord]:
        keys = sorted(key for key in self._records if key[0] == tenant and key[1] > after)
        return [self._records[key] for key in keys[:limit]]

    async def changes(self, since: int | None) -> Changes:
        return Changes(0, {})

    async def wait(self, limit_s: float) -> None:
        raise AssertionError("nobody else changes it: there is nothing to wait for")

    async def purge(self, before_ns: int) -> None:
        self._records = {key: record for key, record in self._records.items() if not record.is_expired(before_ns)}

    async def close(self) -> None:
        pass

    def _etag(self, key: Key) -> str | None:
        record = self._records.get(key)
        return record.etag if record is not None else None
