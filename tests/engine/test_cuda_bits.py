"""What the CUDA engine promises of numbers, small: equal to the reference, and to itself in any company and any cut.

In emulation.  `test_bits.py` has the same and more on a GPU, at the sizes that are served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from driver import GREEDY, Driver, Held
from emulated import HOT, PAGE, TOKENS, engine_of, shared_engine
from engines import weights_of
from test_small_cases import PLAIN, SWITCHED

from tinyloop_service.completion import CompletionBuilder
from tinyloop_service.engine.api import Engine
from tinyloop_service.engine.reference import Reference
from tinyloop_service.engine.spec import ModelSpec
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.types import CacheMode, GenerationRequest, PrefixDefinition

CHUNK = 50


@pytest.fixture
def driver() -> Driver:
    return Driver(shared_engine(PLAIN))


@pytest.fixture(params=["plain", "switched"])
def any_driver(request: pytest.FixtureRequest) -> Driver:
    return Driver(shared_engine(SPECS[request.param]))


# ---- equal to the reference

SPECS = {
    "plain": PLAIN,
    "switched": SWITCHED,
    "two loop blocks": replace(PLAIN, loop_blocks=2, post_blocks=1, pre_blocks=0, inject="add", loop_norm=True),
    "sandwich": replace(PLAIN, norm_placement="sandwich", norm_eps=1e-3, tie_embeddings=True),
}


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("name", SPECS)
def test_logits_are_the_reference_s(name: str, window: int) -> None:
    """A prefix and a child of it, in chunks, against fp32 sums over the same stored K and V.

    The engine rounds what goes into a product to fp16: some five roundings a block, each 2^-12 of a value, over up to
    five blocks, independent: 2^-12 · √25 ≈ 1.2e-3 of the stream's rms at the most, and about as much of the logits'.
    A wrong switch, position or mask gives 100 percent.
    """
    got = prompt_logits(Driver(shared_engine(SPECS[name])), window)
    error = difference(got, reference_logits(SPECS[name], window, CacheMode.FP16))
    assert error < 3e-3, f"{name}: not the same model, {error}"


def prompt_logits(driver: Driver, window: int) -> np.ndarray:
    """After 90 tokens in chunks, and after 50 more of a child."""
    parent = driver.prefix(TOKENS[:90], window=window, chunk=CHUNK)
    child = driver.prefix(TOKENS[90:140], parent, window=window)
    got = np.stack([driver.engine.read_logits(held.id) for held in (parent, child)])
    driver.close(child, parent)
    return got


def reference_logits(spec: ModelSpec, window: int, state: CacheMode | Literal["exact"]) -> np.ndarray:
    """The same by the reference."""
    reference = Reference(weights_of(spec), np.float32, cache_mode=state)
    return reference.forward(TOKENS[:140], reference.new_cache(2, window))[[89, 139]]


def difference(got: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square of the difference, relative to that of what is expected."""
    return float(np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2)))


@pytest.mark.parametrize("name", ["plain", "switched"])
def test_greedy_tokens_are_the_reference_s(name: str) -> None:
    """Decoding over the end of a page; where the reference's two best lie within 1 % of a logit, either may win."""
    spec = SPECS[name]
    driver = Driver(shared_engine(spec))
    drawn = [token for token, _ in driver.alone(None, TOKENS[:60], 9)]
    reference = Reference(weights_of(spec), np.float32, cache_mode=CacheMode.FP16)
    logits = reference.forward([*TOKENS[:60], *drawn[:-1]], reference.new_cache(2))[59:]
    assert (logits.max(axis=1) - logits[np.arange(10), drawn] < 0.01).all()


# ---- equal to itself


@pytest.mark.parametrize("window", [0, PAGE + 1])
@pytest.mark.parametrize("length", [1, PAGE, PAGE + 1, 150])
def test_cold_equals_warm(driver: Driver, length: int, window: int) -> None:
    """T1, for suffixes of 0, 1 and a page."""
    prefix = driver.prefix(TOKENS[:length], chunk=CHUNK, window=window)
    for more in (0, 1, PAGE):
        tokens = TOKENS[length : length + more]
        warm = driver.alone(prefix, tokens, 2, window=window)
        cold = driver.alone(None, TOKENS[: length + more], 2, window=window, chunk=CHUNK)
        assert warm == cold, f"suffix {more}: reading the prefix gives other bits than computing it"
    driver.close(prefix)


@pytest.mark.parametrize("chunk", [19, 77])
def test_chunks_leave_the_same_pages(any_driver: Driver, chunk: int) -> None:
    """T3: every cache layer, and the logits of the last token."""
    driver = any_driver
    whole, parts = driver.prefix(TOKENS[:150]), driver.prefix(TOKENS[:150], chunk=chunk)
    pages = [driver.engine.read_kv(held.id) for held in (whole, parts)]
    assert pages[0].shape[3] == 150 and np.array_equal(*pages)
    assert np.array_equal(*(driver.engine.read_logits(held.id) for held in (whole, parts)))
    driver.close(whole, parts)


@pytest.mark.parametrize("rows", [2, 7, 9])
def test_company_changes_nothing(driver: Driver, rows: int) -> None:
    """T2 and T19: alone, in a batch or two, joining late, after others left; seeds of others do not matter."""
    prefix = driver.prefix(TOKENS[:100])
    suffixes = [TOKENS[200 + i : 200 + i + i % 5] for i in range(rows)]
    seeds = [replace(HOT, seed=i) for i in range(rows)]
    late, steps = rows // 2, 12
    alone = driver.alone(prefix, suffixes[late], steps, sampling=seeds[late])
    batch = [driver.request(prefix, suffixes[i], sampling=seeds[i]) for i in range(rows) if i != late]
    driver.decode(batch, 2)
    joined = driver.request(prefix, suffixes[late], sampling=seeds[late])
    driver.decode([*batch[: rows // 3], joined, *batch[rows // 3 :]], 6, at_once=3)
    leaving, staying = batch[::2], batch[1::2]
    driver.close(*leaving)
    driver.decode([*staying, joined], steps - 6, at_once=4)
    assert driver.drawn[joined.id] == alone
    driver.close(joined, *staying, prefix)


@pytest.mark.parametrize("at_once", [2, 8])
def test_steps_in_one_plan(driver: Driver, at_once: int) -> None:
    """Over the end of a page, with a window that loses one."""
    prefix = driver.prefix(TOKENS[:120], window=59)
    alone = driver.alone(prefix, TOKENS[120:124], 16, sampling=HOT, window=59)
    row = driver.request(prefix, TOKENS[120:124], sampling=HOT, window=59)
    driver.decode([row], 16, at_once=at_once)
    assert driver.drawn[row.id] == alone
    driver.close(row, prefix)


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("more", [0, 3, PAGE])
def test_a_row_begins_and_goes_on_in_one_plan(any_driver: Driver, more: int, window: int) -> None:
    """Beside one that decodes, off a partly filled page, by kept logits or tokens of its own, over the end of a page;
    also to its very end."""
    prefix, own = any_driver.prefix(TOKENS[:125], window=window), TOKENS[150 : 150 + more]
    other = any_driver.request(prefix, TOKENS[5:6], window=window)
    alone = any_driver.alone(prefix, own, 6, sampling=HOT, window=window)
    for most in (1, 3, 20):
        held = any_driver.open(prefix, sampling=HOT, prompt=own, window=window, max_tokens=most)
        begins: dict[str, Any] = {"prefill": (any_driver.chunk(held, more),)} if more else {"first": (held.id,)}
        for row in (other, held):
            row.length = row.length + 3 if row.end is None else min(row.length + 3, row.end)
            any_driver.room(row, row.length)
        result = any_driver.step(**begins, decode=(other.id, held.id), num_steps=3)
        assert sorted(output.seq for output in result.rows) == [other.id, held.id]
        any_driver.decode([held], 3)
        assert any_driver.drawn.pop(held.id) == alone[:most]
        any_driver.close(held)
    any_driver.close(other, prefix)


def test_any_mix_in_one_plan(driver: Driver) -> None:
    """Prefixes, depths and windows side by side, first tokens, a build, and decoding."""
    shapes = [(100, 2, 0), (64, 1, 0), (65, 3, 30), (100, 1, 70)]
    prefixes = [driver.prefix(TOKENS[:n], loops=loops, window=w) for n, loops, w in shapes]
    asked: list[dict[str, Any]] = [{"parent": p, "loops": p.loops, "window": p.window} for p in prefixes]
    asked += [{"parent": None, "loops": 3, "tokens": TOKENS[:5]}, {"parent": prefixes[0], "tokens": TOKENS[9:40]}]
    alone = [driver.alone(steps=5, **{"tokens": (), **each}) for each in asked]
    rows = [driver.request(**{"tokens": (), **each}) for each in asked[2:]]
    begun = [driver.open(sampling=GREEDY, **{k: v for k, v in each.items() if k != "tokens"}) for each in asked[:2]]
    build = driver.open(prompt=TOKENS[:80], loops=1)
    for size, first in ((33, [held.id for held in begun]), (47, [])):
        chunk = driver.chunk(build, size)
        for held in rows:
            driver.room(held, held.length + 2)
            held.length += 2
        driver.step(first=tuple(first), prefill=(chunk,), decode=tuple(held.id for held in rows), num_steps=2)
    driver.decode(rows, 1)
    driver.decode(begun, 5)
    assert [driver.drawn[held.id] for held in (*begun, *rows)] == alone
    expected = driver.prefix(TOKENS[:80], loops=1)
    assert np.array_equal(driver.engine.read_kv(build.id), driver.engine.read_kv(expected.id))
    driver.close(*rows, *begun, build, expected, *prefixes)


def test_many_prompts_in_one_plan(driver: Driver) -> None:
    """Suffixes off one prefix share tiles; in two chunks each, so that the second ones begin at different places."""
    prefix, other = driver.prefix(TOKENS[:90]), driver.prefix(TOKENS[:70], window=30)
    asked = [(prefix, TOKENS[100 + i : 102 + 9 * i], 0) for i in range(5)] + [(other, TOKENS[60:65], 30)]
    alone = [driver.alone(parent, suffix, 1, sampling=HOT, window=window) for parent, suffix, window in asked]
    rows = [driver.open(parent, sampling=HOT, prompt=suffix, window=window) for parent, suffix, window in asked]
    sizes = [max(1, len(suffix) // 2) for _, suffix, _ in asked]
    driver.step(prefill=tuple(driver.chunk(held, size) for held, size in zip(rows, sizes, strict=True)))
    rest = [held for held in rows if held.length < len(held.tokens)]
    driver.step(prefill=tuple(driver.chunk(held, len(held.tokens) - held.length) for held in rest))
    driver.decode(rows, 1)
    assert [driver.drawn[held.id] for held in rows] == alone
    driver.close(*rows, prefix, other)


@pytest.mark.parametrize("lengths", [(70, 10, 5), (64, 64, 1), (1, 1, 1)])
@pytest.mark.parametrize("window", [0, 65])
def test_chains_of_parents(driver: Driver, lengths: tuple[int, ...], window: int) -> None:
    """A child of a child: the same draws as one prompt."""
    chain: list[Held] = []
    for n in lengths:
        done = chain[-1].length if chain else 0
        chain.append(driver.prefix(TOKENS[done : done + n], chain[-1] if chain else None, window=window, chunk=CHUNK))
    total = sum(lengths)
    cold = driver.alone(None, TOKENS[: total + 3], 5, window=window)
    assert driver.alone(chain[-1], TOKENS[total : total + 3], 5, window=window) == cold
    driver.close(*reversed(chain))


def test_decodes_never_change_a_prefix(driver: Driver) -> None:
    """T4, and T18: given-back pages are NaN, so a stray read would show in the draws."""
    prefix = driver.prefix(TOKENS[:100])
    before, logits = driver.engine.read_kv(prefix.id), driver.engine.read_logits(prefix.id)
    first = driver.alone(prefix, TOKENS[100:103], 4, sampling=HOT)
    for i in range(8):
        driver.alone(prefix, TOKENS[100 : 103 + i % 3], 1, sampling=replace(HOT, seed=i))
    assert driver.alone(prefix, TOKENS[100:103], 4, sampling=HOT) == first
    assert np.array_equal(driver.engine.read_kv(prefix.id), before)
    assert np.array_equal(driver.engine.read_logits(prefix.id), logits)
    driver.close(prefix)


def test_choices_differ_and_repeat(driver: Driver) -> None:
    """T19: n choices of one seed; each is what it is alone."""
    prefix = driver.prefix(TOKENS[:64])
    samplings = [replace(HOT, temperature=3.0, top_k=0, top_p=1.0, choice=i) for i in range(4)]
    rows = [driver.request(prefix, sampling=sampling) for sampling in samplings]
    driver.decode(rows, 6, at_once=3)
    drawn = [driver.drawn[held.id] for held in rows]
    assert len({str(d) for d in drawn}) == 4
    assert drawn == [driver.alone(prefix, (), 6, sampling=sampling) for sampling in samplings]
    driver.close(*rows, prefix)


def test_repetition_penalty_counts_the_prefix(driver: Driver) -> None:
    """T14; and a slot's next owner does not inherit what its last one saw."""
    sampling = replace(GREEDY, repetition_penalty=1.7, logit_bias=((3, 1.5), (5, -2.0)))
    prefix = driver.prefix(TOKENS[:80])
    warm = driver.alone(prefix, TOKENS[80:90], 8, sampling=sampling)
    plain = driver.alone(prefix, TOKENS[80:90], 8)
    assert warm == driver.alone(None, TOKENS[:90], 8, sampling=sampling)
    assert [token for token, _ in warm] != [token for token, _ in plain]
    driver.close(prefix)


async def complete(scheduler: Scheduler, request: GenerationRequest) -> list[object]:
    """Ids and logprobs of every choice."""
    builder = CompletionBuilder(request.n)
    async with scheduler.generate(request) as stream:
        async for outputs in stream:
            builder.add(outputs)
    return [(choice.token_ids, choice.logprobs) for choice in builder.completion().choices]


async def complete_all(engine: Engine, requests: list[GenerationRequest], *, at_once: bool) -> list[list[object]]:
    scheduler = Scheduler(engine, SchedulerSettings(max_prefixes=2 if at_once else 9))
    await scheduler.start()
    for name, (length, loops, window) in {"a": (63, None, 0), "b": (130, 3, 0), "c": (65, 1, 30)}.items():
        await scheduler.create_prefix(PrefixDefinition(TOKENS[:length], loops, window), name=name)
    if at_once:
        results = await asyncio.gather(*(complete(scheduler, request) for request in requests))
    else:
        results = [await complete(scheduler, request) for request in requests]
    scheduler._core.check()
    await scheduler.close()
    return results


async def test_the_scheduler_s_requests_are_what_they_are_alone() -> None:
    await check_the_scheduler_s_requests(lambda num_pages: engine_of(PLAIN, kv_memory=num_pages * 2 * PAGE * 64 * 2))


async def check_the_scheduler_s_requests(engine_with: Callable[[int], Engine]) -> None:
    """Two plans in flight, and memory for two of three prefixes: they are evicted and built again (T2, T5)."""
    requests = [
        GenerationRequest(
            TOKENS[100 : 100 + i % 4] or (() if i % 4 < 3 else (1,)),
            4 + i % 7,
            prefix="abc"[i % 4] if i % 4 < 3 else None,
            sampling=replace(HOT, seed=i),
            n=1 + i % 2,
        )
        for i in range(12)
    ]
    alone = await complete_all(engine_with(400), requests, at_once=False)
    assert await complete_all(engine_with(45), requests, at_once=True) == alone
