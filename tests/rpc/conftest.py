"""Fixtures of the service's tests; what they are made of is in rpc_harness.py."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog
from rpc_harness import SERVER, Served, byte_tokenizer, serving

from tinyloop_service.engine.fake import FakeEngine

BOTH_WAYS = ("test_generation", "test_cancel", "test_edges")


@pytest.fixture(autouse=True)
def quiet_logs() -> Any:
    with structlog.testing.capture_logs() as logs:
        yield logs


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """In some modules a server behind a front is asked for the same as one without."""
    if "served" in metafunc.fixturenames and metafunc.module.__name__.rpartition(".")[2] in BOTH_WAYS:
        metafunc.parametrize("served", [0, 1], ids=["alone", "behind a front"], indirect=True)


@pytest.fixture
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    """The plain server: text is taken."""
    fronts = getattr(request, "param", SERVER.grpc_processes)
    async with serving(tokenizer=byte_tokenizer(), grpc_processes=fronts) as running:
        yield running


@pytest.fixture
async def gated() -> AsyncIterator[tuple[Served, threading.Event]]:
    """A server whose engine stands still until the event is set."""
    gate = threading.Event()
    async with serving(FakeEngine(gate=gate), tokenizer=byte_tokenizer()) as running:
        yield running, gate
