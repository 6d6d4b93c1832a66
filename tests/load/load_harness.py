"""Load tests of the fake engine in the test's own event loop: fast, and every answer can be foretold."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tinyloop_service.bench import Service
from tinyloop_service.engine.fake import FAKE_LIMITS, FakeEngine
from tinyloop_service.load.driver import Driven, Driver, Job
from tinyloop_service.load.local import Local
from tinyloop_service.load.prompts import Prompts, Vocabulary
from tinyloop_service.load.results import Driving, Way
from tinyloop_service.load.run import Plan
from tinyloop_service.load.workload import parse_workload
from tinyloop_service.loading import LoadedModel
from tinyloop_service.settings import SchedulerSettings, Settings

VOCABULARY = Vocabulary(FAKE_LIMITS.vocab_size, FAKE_LIMITS.eos_token_ids)
BASE: dict[str, Any] = {"about": "x", "prefixes": 2, "prefix_len": 70, "suffix_len": [1, 5], "output_len": [2, 9]}


def prompts_of(seed: int = 0, **changes: Any) -> Prompts:
    return Prompts(parse_workload("test", {**BASE, **changes}), seed, VOCABULARY)


@asynccontextmanager
async def fake(engine: FakeEngine | None = None, **scheduler: Any) -> AsyncIterator[Local]:
    """A target with nothing in it."""
    config = {"vocab_size": FAKE_LIMITS.vocab_size, "bos_token_id": None}
    settings = Settings(scheduler=SchedulerSettings(**scheduler))
    async with Local(LoadedModel(engine or FakeEngine(), None, config), settings) as target:
        yield target


async def with_prefixes(target: Local, prompts: Prompts) -> None:
    for number in range(prompts.workload.prefixes):
        await target.create_prefix(*prompts.prefix(number))


def job_of(**changes: Any) -> Job:
    """Starts now and takes 0.3 s."""
    usual: dict[str, Any] = {
        "way": Way.SHARED,
        "start_ns": time.monotonic_ns(),
        "warmup_s": 0.0,
        "measured_s": 0.3,
        "patience_s": 30.0,
        "arrivals_ns": None,
        "keep_ids": True,
    }
    return Job(**{**usual, **changes})


class Around:
    """A service that does what another one does."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def __getattr__(self, name: str) -> Any:
        return getattr(self.service, name)


async def drive(target: Any, prompts: Prompts, **changes: Any) -> Driven:
    return await Driver(target, prompts, job_of(**changes)).run()


def plan_of(prompts: Prompts, *, loads: Sequence[float] = (4.0,), **changes: Any) -> Plan:
    usual: dict[str, Any] = {
        "workload": prompts.workload,
        "vocabulary": VOCABULARY,
        "seed": 0,
        "driving": Driving.CLOSED,
        "loads": tuple(loads),
        "search_phases": 0,
        "ways": (Way.SHARED,),
        "warmup_s": 0.0,
        "measured_s": 0.3,
        "slo": None,
        "verify": 0,
        "own_loop": False,
    }
    return Plan(**{**usual, **changes})
