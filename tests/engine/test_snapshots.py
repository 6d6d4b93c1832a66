"""State that was saved is reused to the bit, and never where it is of something else (T17, T24)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import Kind, engine_of, fitted, make_engine, weights_of
from test_small_cases import PLAIN

from tinyloop_service.completion import CompletionBuilder
from tinyloop_service.engine.api import Engine, Pending, Plan
from tinyloop_service.engine.spec import SIZES, Quant
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.settings import NamesSettings, SchedulerSettings
from tinyloop_service.snapshots import start_snapshots
from tinyloop_service.types import CacheMode, GenerationRequest, PrefixDefinition, Sampling, TokenIds

SPEC = replace(
    SIZES["tiny"], vocab_size=300, d_model=128, head_dim=32, d_ff=256, pre_blocks=1, default_loops=2, max_seq_len=512,
    quant=Quant(4, 64),
)  # fmt: skip
MOTHER, CHILD = tuple(i % 96 for i in range(1, 131)), tuple(i % 96 for i in range(250, 180, -1))
Answers = dict[str, tuple[object, int]]  # (ids and logprobs, cached tokens) by prefix


class WatchedEngine:
    """An engine, and how many prompt tokens it was given to compute."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.num_prompt_tokens = 0

    def submit(self, plan: Plan) -> Pending:
        self.num_prompt_tokens += plan.num_prompt_tokens
        return self._engine.submit(plan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def cpu_engine(mode: CacheMode = CacheMode.FP16, *, seed: int = 0, accuracy_level: int = 4) -> Engine:
    return engine_of(fitted(SPEC, "cpu", mode), mode, seed=seed, accuracy_level=accuracy_level)


def cuda_engine(kind: Kind, mode: CacheMode) -> Engine:
    options: dict[str, Any] = {"cache_mode": mode, "row_counts": (1,), "max_chunk": 256}
    return make_engine(kind, weights_of(PLAIN), kv_memory=2 << 20, **options)


@asynccontextmanager
async def scheduling(folder: Path, engine: Engine) -> AsyncIterator[tuple[Scheduler, WatchedEngine]]:
    watched = WatchedEngine(engine)
    scheduler = Scheduler(watched, SchedulerSettings())
    await scheduler.start()
    snapshots = await start_snapshots(scheduler, NamesSettings(snapshot_dir=str(folder)))
    assert snapshots is not None
    try:
        yield scheduler, watched
    finally:
        await scheduler.close()
        await snapshots.close()


async def answer(scheduler: Scheduler, prefix: str, suffix: TokenIds) -> tuple[object, int]:
    sampling = Sampling(temperature=1.0, seed=3, logprobs=3)
    builder = CompletionBuilder(1)
    async with scheduler.generate(GenerationRequest(suffix, 9, prefix=prefix, sampling=sampling)) as stream:
        async for outputs in stream:
            builder.add(outputs)
    completion = builder.completion()
    choice = completion.choices[0]
    return (choice.token_ids, choice.logprobs), completion.usage.cached_tokens


async def life(scheduler: Scheduler) -> Answers:
    """Prefixes made, of which one slides and expires, and used on their kept logits and with tokens behind."""
    await scheduler.create_prefix(PrefixDefinition(MOTHER, 3), name="mother")
    await scheduler.create_prefix(PrefixDefinition(CHILD, parent="mother"), name="child")
    ends = scheduler.now_ns() + 10**15
    await scheduler.create_prefix(PrefixDefinition(MOTHER, 2, 40), name="slides", expire_time_ns=ends)
    suffixes: dict[str, tuple[str, TokenIds]] = {
        "m": ("mother", (5, 6)), "m0": ("mother", ()), "c": ("child", (5,)), "c0": ("child", ()),
        "s": ("slides", (5,)),
    }  # fmt: skip
    return {key: await answer(scheduler, name, suffix) for key, (name, suffix) in suffixes.items()}


SUFFIXES = 2 + 1 + 1  # tokens that are computed in any life
WHOLE = 2 * len(MOTHER) + len(CHILD) + SUFFIXES


def files(folder: Path) -> int:
    return len(list(folder.glob("*.safetensors")))


ENGINES = [
    *(pytest.param("cpu", mode, id=f"cpu-{mode.value}") for mode in (CacheMode.FP16, CacheMode.H_INT4)),
    *(pytest.param("emulated", mode, id=f"emulated-{mode.value}") for mode in CacheMode),
    *(pytest.param("cuda", mode, id=f"cuda-{mode.value}", marks=pytest.mark.gpu) for mode in CacheMode),
]


@pytest.mark.parametrize(("kind", "mode"), ENGINES)
async def test_the_same_bits_come_from_saved_state(tmp_path: Path, kind: Kind, mode: CacheMode) -> None:
    def start() -> Engine:
        return cpu_engine(mode) if kind == "cpu" else cuda_engine(kind, mode)

    async with scheduling(tmp_path, start()) as (scheduler, engine):
        first = await life(scheduler)
        assert engine.num_prompt_tokens == WHOLE
    assert files(tmp_path) == 3
    async with scheduling(tmp_path, start()) as (scheduler, engine):
        assert await life(scheduler) == first
        assert engine.num_prompt_tokens == SUFFIXES
        for name in ("child", "mother", "slides"):
            scheduler.delete_prefix(name)
    assert files(tmp_path) == 0, "state goes with the names"


async def test_state_of_something_else_is_not_used(tmp_path: Path) -> None:
    """Of another model, another rounding, another mode: each is prefilled, and its own state kept instead."""
    for change in ({}, {"seed": 1}, {"accuracy_level": 0}, {"mode": CacheMode.INT8}):
        async with scheduling(tmp_path, cpu_engine(**change)) as (scheduler, engine):  # type: ignore[arg-type]
            await life(scheduler)
            assert engine.num_prompt_tokens == WHOLE, change


async def test_state_that_fits_nothing_here_is_dropped_and_the_prefix_built(tmp_path: Path) -> None:
    """A file whose checksums are right but whose pages are not those of the prefix: no crash, no wrong answer."""
    async with scheduling(tmp_path, cpu_engine()) as (scheduler, _):
        first = await life(scheduler)
        states = scheduler.snapshots._states
        mother, child = (scheduler.get_prefix(name).content_sha256 for name in ("mother", "child"))
        states[mother], states[child] = states[child], states[mother]
        core = scheduler._core
        for name in ("child", "mother"):
            prefix = core._prefixes.peek("", name)
            assert prefix is not None
            core._prefixes.evict(prefix)
        with pytest.raises(RuntimeError):
            await answer(scheduler, "mother", (5, 6))
        assert await answer(scheduler, "mother", (5, 6)) == (first["m"][0], 0)
