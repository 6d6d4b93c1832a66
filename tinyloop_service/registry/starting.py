"""The names of a server that starts: its registry reached, what happens in it followed, its file's prefixes built."""

from __future__ import annotations

import asyncio

import structlog

from tinyloop_service.errors import RegistryUnavailable
from tinyloop_service.registry.api import Realm
from tinyloop_service.registry.names import Names
from tinyloop_service.registry.opening import open_registry
from tinyloop_service.registry.prefix_file import FilePrefix, build_prefixes
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.settings import NamesSettings

_WAIT_S = 1.0  # between two attempts to reach the registry
_log = structlog.get_logger("tinyloop.registry")


async def start_names(scheduler: Scheduler, settings: NamesSettings, prefixes: tuple[FilePrefix, ...]) -> Names:
    """Waits for a registry that does not answer yet: without it a server would deny names that there are.

    Raises InvalidArgument for a registry that cannot be had, and for a prefix that cannot be built.
    """
    realm = Realm(scheduler.limits.model_id, scheduler.limits.cache_mode.value)
    while True:
        try:
            names = Names(scheduler, await open_registry(settings.registry, realm))
            try:
                await names.start()
                await build_prefixes(prefixes, names, scheduler.tokenizer)
            except BaseException:
                await names.close()
                raise
            return names
        except RegistryUnavailable as error:
            _log.warning("not ready: the registry does not answer", error=str(error))
            await asyncio.sleep(_WAIT_S)
