"""Handles of prefixes without a name: they keep what they stand for, are renewed, and take it along."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest
from clients_harness import PROMPT, in_thread
from rpc_harness import Served, until

from tinyloop_service import errors
from tinyloop_service.client import Client, keepers
from tinyloop_service.client.calls import HANDLE_TTL_NS


async def test_a_handle_keeps_its_prefix_and_takes_it_along(served: Served) -> None:
    async with served.client() as client:
        kept = await client.build_prefix_cache(PROMPT)
        dropped = await client.build_prefix_cache(PROMPT[:50])
        both = await client.list_prefixes()
        assert {prefix.id for prefix in both} == {kept.id, dropped.id}
        assert all(prefix.expire_time is not None for prefix in both)
        del dropped
        gc.collect()
        await until(lambda: len(served.scheduler.list_prefixes()) == 1)
        assert await client.generate_from_prefix_cache(kept, 3, ignore_eos=True)
    assert served.scheduler.list_prefixes() == []

    def work(client: Client) -> Any:
        kept, dropped = client.build_prefix_cache(PROMPT), client.build_prefix_cache(PROMPT)
        assert kept.id != dropped.id
        del dropped
        gc.collect()
        while len(client.list_prefixes()) > 1:
            pass
        return kept

    kept = await in_thread(served, work)
    assert served.scheduler.list_prefixes() == [] and tuple(kept.prompt) == PROMPT


async def test_a_handle_is_renewed_at_a_third_of_its_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pytest.approx(HANDLE_TTL_NS / 3e9) == keepers._RENEW_S
    monkeypatch.setattr(keepers, "_RENEW_S", 0.02)

    async def grows(expiry: Callable[[], int | None]) -> None:
        first = expiry()
        await until(lambda: (expiry() or 0) > (first or 0))

    def expiry() -> int | None:
        return served.scheduler.list_prefixes()[0].expire_time_ns

    async with served.client() as client:
        handle = await client.build_prefix_cache(PROMPT)
        await grows(expiry)
        await client.delete_prefix(handle.id)  # by someone else: renewing stops, and its use says so
        with pytest.raises(errors.PrefixNotFound):
            await client.complete(prefix=handle)
    with Client(served.address) as blocking:
        handle = await asyncio.to_thread(blocking.build_prefix_cache, PROMPT)
        await grows(expiry)
        await asyncio.to_thread(blocking.close)
    assert served.scheduler.list_prefixes() == []
