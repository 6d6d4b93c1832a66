"""From the setting `registry` to a registry."""

from __future__ import annotations

from pathlib import Path

from tinyloop_service.registry.api import Realm, Registry
from tinyloop_service.registry.memory import MemoryRegistry
from tinyloop_service.registry.sqlite import SqliteRegistry

_SQLITE = "sqlite:///"


async def open_registry(url: str, realm: Realm) -> Registry:
    """The registry at `url`, as `settings.RegistrySettings` allows it.

    Raises InvalidArgument when it cannot be had that way at all, RegistryUnavailable when it may be had later.
    """
    if url == "memory":
        return MemoryRegistry()
    if url.startswith(_SQLITE):
        return await SqliteRegistry.open(Path(url.removeprefix(_SQLITE)), realm)
    from tinyloop_service.registry.redis import RedisRegistry  # an extra: loads only where it is asked for

    return await RedisRegistry.open(url, realm)
