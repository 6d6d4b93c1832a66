"""What tests of the clients share: one prompt, and a synchronous client beside a server in the same event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rpc_harness import Served

from tinyloop_service.client import Client

PROMPT = tuple(range(1, 100))
GREEDY: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}


async def in_thread(served: Served, work: Callable[[Client], Any], **options: Any) -> Any:
    """Run `work` with a synchronous client, in a thread: the server needs this one."""

    def run() -> Any:
        with Client(served.address, **options) as client:
            return work(client)

    return await asyncio.to_thread(run)
