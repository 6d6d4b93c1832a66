"""The CPU engine in every cache mode: the promise, the active form that comes and goes, and what memory holds.

The promise is that of `test_bits.py`, which has the full set; here is a small one, for every mode.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import test_bits
from driver import Driver, Held
from engines import engine_of, weights_of
from test_bits import PAGE, TOKENS, driver_of

from tinyloop_service.completion import CompletionBuilder
from tinyloop_service.engine.api import Plan
from tinyloop_service.engine.cache_modes import H_MODES, page_bytes
from tinyloop_service.engine.cpu import CpuEngine
from tinyloop_service.engine.spec import SIZES
from tinyloop_service.errors import EngineFault, InvalidArgument
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.types import CacheMode, GenerationRequest, PrefixDefinition

NARROW = replace(SIZES["tiny"], n_kv_heads=2)  # K and V are as wide as half of h


@pytest.fixture(scope="module", params=[(mode, "small") for mode in CacheMode] + [(CacheMode.INT8, "everything")])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    mode, name = request.param
    yield from driver_of(("cpu", name, mode))


def tracks(driver: Driver, held: Held) -> list[np.ndarray]:
    """The active form: K and V of every layer, [splits, G, 64, D]."""
    track = driver.engine._table[held.id].track  # type: ignore[attr-defined]
    return [*track.kv[0], *track.kv[1]]


@pytest.mark.parametrize("window", [0, PAGE + 1])
@pytest.mark.parametrize("length", [1, PAGE, 2 * PAGE + 2])
def test_cold_equals_warm(driver: Driver, length: int, window: int) -> None:
    test_bits.test_cold_equals_warm(driver, length, window)


@pytest.mark.parametrize("chunk", [7, 77])
def test_chunks_leave_the_same_pages(driver: Driver, chunk: int) -> None:
    test_bits.test_chunks_leave_the_same_pages(driver, chunk)


def test_company_and_seeds_of_others_change_nothing(driver: Driver) -> None:
    test_bits.test_company_changes_nothing(driver, 7)


def test_decoding_leaves_the_pages_of_a_prefill(driver: Driver) -> None:
    """Tokens drawn one by one, over the ends of a half page and of pages, and the same tokens as a prompt."""
    request = driver.request(None, TOKENS[:20])
    driver.decode([request], 80)
    drawn = tuple(token for token, _ in driver.drawn[request.id])
    prefix = driver.prefix((*TOKENS[:20], *drawn[:-1]))
    assert np.array_equal(driver.engine.read_kv(request.id), driver.engine.read_kv(prefix.id))
    driver.close(request, prefix)


@pytest.mark.parametrize("window", [0, 100])
def test_a_dropped_active_form_is_made_again_bit_for_bit(driver: Driver, window: int) -> None:
    """Of a prefix and its child, which begins inside a page; decodes on them leave both as they are (T4)."""
    parent = driver.prefix(TOKENS[:150], window=window)
    child = driver.prefix(TOKENS[150:180], parent, window=window)
    built = [array.copy() for held in (parent, child) for array in tracks(driver, held)]
    before = driver.alone(child, TOKENS[180:185], 20, window=window)
    driver.step(deactivate=(child.id, parent.id))
    driver.step(activate=(parent.id, child.id))
    for was, now in zip(built, tracks(driver, parent) + tracks(driver, child), strict=True):
        np.testing.assert_array_equal(now, was)
    assert driver.alone(child, TOKENS[180:185], 20, window=window) == before
    driver.close(child, parent)


def test_decodes_never_change_a_prefix(driver: Driver) -> None:
    prefix = driver.prefix(TOKENS[:100])
    pool = driver.engine._table.pool  # type: ignore[attr-defined]
    pages = [page for block in prefix.blocks.values() for page in block]
    before = [field.tobytes() for page in pages for field in pool.page(page).values()]
    rows = [driver.request(prefix, TOKENS[100 : 100 + i], sampling=test_bits.hot(i)) for i in range(9)]
    driver.decode(rows, 40)
    assert [field.tobytes() for page in pages for field in pool.page(page).values()] == before
    driver.close(*rows, prefix)


def test_a_clone_is_the_first_tokens_of_a_page(driver: Driver) -> None:
    parent = driver.prefix(TOKENS[:70])
    child = driver.prefix(TOKENS[70:71], parent)
    pool = driver.engine._table.pool  # type: ignore[attr-defined]
    for a, b in zip(parent.blocks[1], child.blocks[1], strict=True):
        for source, copy in zip(pool.page(a).values(), pool.page(b).values(), strict=True):
            np.testing.assert_array_equal(copy[..., :6, :], source[..., :6, :])
            assert copy[..., 6, :].any() and not copy[..., 7:, :].any()
    driver.close(child, parent)


@pytest.mark.parametrize("mode", CacheMode)
def test_a_stray_read_of_a_page_given_back_shows(mode: CacheMode) -> None:
    """T18: a prefix is made active from pages that were (wrongly) released."""
    driver = Driver(engine_of(test_bits.SMALL, mode))
    prefix = driver.prefix(TOKENS[:70])
    released = prefix.blocks[0] + prefix.blocks[1]
    driver.engine.step(Plan(800, released=released, deactivate=(prefix.id,), activate=(prefix.id,)))
    with pytest.raises(EngineFault, match=r"step \d+ failed"):
        driver.request(prefix, TOKENS[70:72])


# ---- what memory holds

SPEC = replace(SIZES["tiny"], pre_blocks=1, default_loops=2)
LAYERS = SPEC.cache_layers(2)
ACTIVE_BYTES = LAYERS * PAGE * 2 * SPEC.kv_dim * 2  # of 64 tokens
MEMORY = 2 << 20


@asynccontextmanager
async def scheduling(mode: CacheMode, kv_memory: int = MEMORY) -> AsyncIterator[Scheduler]:
    engine = CpuEngine(weights_of(SPEC), kv_memory=kv_memory, cache_mode=mode, threads=2, debug=True)
    scheduler = Scheduler(engine, SchedulerSettings())
    await scheduler.start()
    try:
        yield scheduler
    finally:
        await scheduler.close()


async def create(scheduler: Scheduler, number: int) -> int:
    """A prefix of 64 tokens; its bytes."""
    tokens = tuple((7 * i + number) % SPEC.vocab_size for i in range(PAGE))
    return (await scheduler.create_prefix(PrefixDefinition(tokens), name=f"p{number:03}")).size_bytes


async def answer(scheduler: Scheduler, name: str) -> tuple[int, ...]:
    builder = CompletionBuilder(1)
    async with scheduler.generate(GenerationRequest((5,), 1, prefix=name)) as stream:
        async for outputs in stream:
            builder.add(outputs)
    completion = builder.completion()
    assert completion.usage.cached_tokens == PAGE
    return completion.choices[0].token_ids


@pytest.mark.parametrize(("mode", "most"), [*zip(CacheMode, [9, 18, 19, 36, 68], strict=True)])
async def test_memory_holds_as_many_prefixes_as_their_bytes_promise(mode: CacheMode, most: int) -> None:
    """All of them stored and each answering in turn, as its active form comes and goes; then up to the last page."""
    stored, active = LAYERS * page_bytes(mode, SPEC), -(-ACTIVE_BYTES // page_bytes(mode, SPEC))
    pages = MEMORY // page_bytes(mode, SPEC)
    assert most == (pages - active) // LAYERS, "beside the active form of the one that is built"
    answering = (pages - 2 * active - LAYERS) // LAYERS  # one is read, and a request has a block, both in both forms
    async with scheduling(mode) as scheduler:
        assert [await create(scheduler, i) for i in range(answering)] == [stored] * answering
        names = [info.name or "" for info in scheduler.list_prefixes()]
        answers = [await answer(scheduler, name) for name in names]
        assert [await answer(scheduler, name) for name in names[:5]] == answers[:5]
        load = scheduler.load()
        assert (load.prefixes_ready, load.prefixes_evicted) == (answering, 0)
        assert load.pages_prefixes * load.page_bytes == answering * stored
        for i in range(answering, most + 1):
            await create(scheduler, i)
        load = scheduler.load()
        assert (load.prefixes_ready, load.prefixes_evicted) == (most, 1), "one more than there is room for"


@pytest.mark.parametrize("mode", CacheMode)
async def test_pages_that_slide_out_of_a_window_are_free(mode: CacheMode) -> None:
    async with scheduling(mode, kv_memory=8 << 20) as scheduler:
        tokens = tuple(i % SPEC.vocab_size for i in range(400))
        info = await scheduler.create_prefix(PrefixDefinition(tokens, cache_window=65), name="w")
        pages = 2 * LAYERS  # of positions 336 … 399, in blocks 5 and 6
        assert info.size_bytes == pages * page_bytes(mode, SPEC)
        load = scheduler.load()
        assert load.pages_prefixes == pages and load.pages_requests == 0
        assert load.pages_free == load.pages_total - pages - load.pages_active
        scheduler.delete_prefix("w")
        assert scheduler.load().pages_free == load.pages_total


# ---- what is refused


@pytest.mark.parametrize("mode", sorted(H_MODES))
def test_an_h_mode_that_saves_nothing_is_refused_at_start(mode: CacheMode) -> None:
    with pytest.raises(
        InvalidArgument, match=rf"cache_mode: {mode.value} given, .* = 256, so nothing is saved; use int8"
    ):
        CpuEngine(weights_of(NARROW), kv_memory=64 << 20, cache_mode=mode)


@pytest.mark.parametrize("mode", CacheMode)
def test_memory_for_less_than_a_page_is_refused_with_what_it_takes(mode: CacheMode) -> None:
    need = LAYERS * page_bytes(mode, SPEC) + ACTIVE_BYTES
    pages = -(-need // page_bytes(mode, SPEC))
    with pytest.raises(InvalidArgument, match=f"64 tokens alone take {pages * page_bytes(mode, SPEC)}"):
        CpuEngine(weights_of(SPEC), kv_memory=pages * page_bytes(mode, SPEC) - 1, cache_mode=mode)
    limits = CpuEngine(weights_of(SPEC), kv_memory=pages * page_bytes(mode, SPEC), cache_mode=mode).limits
    assert limits.num_pages == pages == LAYERS + limits.active_pages(0, PAGE, 2)
    assert (limits.page_bytes, limits.active_page_bytes) == (page_bytes(mode, SPEC), ACTIVE_BYTES // LAYERS)
