"""Fixtures of the service's tests; what they are made of is in rpc_harness.py."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog
from rpc_harness import Served, byte_tokenizer, serving

from tinyloop_service.engine.fake import FakeEngine


@pytest.fixture(autouse=True)
def quiet_logs() -> Any:
    with structlog.testing.capture_logs() as logs:
        yield logs


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """The plain server: text is taken."""
    async with serving(tokenizer=byte_tokenizer()) as running:
        yield running


@pytest.fixture
async def gated() -> AsyncIterator[tuple[Served, threading.Event]]:
    """A server whose engine stands still until the event is set."""
    gate = threading.Event()
    async with serving(FakeEngine(gate=gate), tokenizer=byte_tokenizer()) as running:
        yield running, gate
