"""The promise: a request's ids and logprobs are the same bits, whatever its company and its past.

Cold or from a prefix, alone or in any batch, joining early or late, built in one chunk or many; on every engine, on a
GPU also at the sizes that are served.  A failure here means that some sum over k, over positions or over splits is
taken in another order for some number of rows or some cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from driver import GREEDY, Drawn, Driver, Held
from engines import Case, cases, fitted, make_engine, weights_of
from switches import switches

from tinyloop_service.engine.spec import SIZES, Quant
from tinyloop_service.types import CacheMode, Sampling

PAGE = 64
CHUNK = 130  # not a multiple of a page, so that chunks begin and end inside of pages
LONGEST, MOST = -1, -2  # as long as a sequence of this engine may be; as many rows
SMALL = replace(
    SIZES["tiny"], vocab_size=300, d_model=128, head_dim=32, d_ff=256, pre_blocks=1, max_seq_len=512, quant=Quant(4, 64)
)
SPECS = {
    "small": SMALL,
    "everything": replace(switches(SMALL)["everything"], n_kv_heads=2),
    "fp16 weights": replace(SMALL, quant=None, d_ff=100),
}
TOKENS = tuple(np.random.default_rng(11).integers(0, SMALL.vocab_size, SIZES["407m"].max_seq_len).tolist())


def driver_of(case: Case) -> Iterator[Driver]:
    """For `SPECS`, two loops and little memory; served models as they are served."""
    kind, name, mode = case
    if name in SPECS:
        driver = Driver(make_engine(kind, weights_of(fitted(SPECS[name], kind, mode)), cache_mode=mode))
    else:
        weights = weights_of(name)
        engine = make_engine(kind, weights, kv_memory=8 << 30, cache_mode=mode)
        driver = Driver(engine, loops=weights.spec.default_loops)
    yield driver
    driver.engine.close()


CASES = cases(["small"], only_cuda=["407m", "demo"], on_cuda=[("small", CacheMode.INT8), ("small", CacheMode.H_INT8)])


@pytest.fixture(scope="module", params=CASES)
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    yield from driver_of(request.param)


ANY_CASES = cases(
    ["everything", "fp16 weights"],
    only_cuda=["407m"],
    on_cpu=[("everything", CacheMode.H_INT8)],
    on_cuda=[
        ("everything", CacheMode.INT8),
        ("everything", CacheMode.H_INT4),
        ("407m", CacheMode.INT8),
        ("407m", CacheMode.H_INT8),
    ],
)


@pytest.fixture(scope="module", params=ANY_CASES)
def any_driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    yield from driver_of(request.param)


def longest(driver: Driver) -> int:
    """Room is left for the longest suffix and the tokens drawn."""
    return driver.engine.limits.max_seq_len - PAGE - 4


def hot(seed: int, **changes: object) -> Sampling:
    return replace(Sampling(temperature=0.9, top_k=40, top_p=0.95, logprobs=2, seed=seed), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [0, 1, PAGE, PAGE + 1])
@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, LONGEST])
def test_cold_equals_warm(driver: Driver, length: int, window: int) -> None:
    """T1, for suffixes of 0, 1 and a page; the prefix in small chunks, the whole prompt in large ones."""
    length = longest(driver) if length == LONGEST else length
    prefix = driver.prefix(TOKENS[:length], chunk=CHUNK, window=window)
    for more in (0, 1, PAGE):
        tokens = TOKENS[length : length + more]
        warm = driver.alone(prefix, tokens, 3, window=window)
        cold = driver.alone(None, TOKENS[: length + more], 3, window=window)
        assert warm == cold, f"suffix {more}: reading the prefix gives other bits than computing it"
    driver.close(prefix)


@pytest.mark.parametrize("chunk", [1, 7, PAGE, 77])
def test_chunks_leave_the_same_pages(any_driver: Driver, chunk: int) -> None:
    """T3: every cache layer, and the logits of the last token."""
    whole = any_driver.prefix(TOKENS[:150])
    parts = any_driver.prefix(TOKENS[:150], chunk=chunk)
    pages = [any_driver.engine.read_kv(held.id) for held in (whole, parts)]
    assert pages[0].shape[3] == 150 and np.array_equal(*pages)
    assert np.array_equal(*(any_driver.engine.read_logits(held.id) for held in (whole, parts)))
    any_driver.close(whole, parts)


@pytest.mark.parametrize("chunk", [CHUNK, 8 * PAGE])
def test_long_chunks_leave_the_same_pages(driver: Driver, chunk: int) -> None:
    """T3, for products of as many rows as a plan may have."""
    length = min(longest(driver), driver.engine.limits.max_chunk + 76)
    whole, parts = driver.prefix(TOKENS[:length]), driver.prefix(TOKENS[:length], chunk=chunk)
    assert np.array_equal(*(driver.engine.read_kv(held.id) for held in (whole, parts)))
    assert np.array_equal(*(driver.engine.read_logits(held.id) for held in (whole, parts)))
    driver.close(whole, parts)


@pytest.mark.parametrize("rows", [2, 7, 8, 9, 32, MOST])
def test_company_changes_nothing(driver: Driver, rows: int) -> None:
    """T2 and T19: alone, in a batch, joining late, after others left; seeds of others do not matter."""
    length, steps = 100, 30
    rows = driver.engine.limits.max_rows if rows == MOST else rows
    prefix = driver.prefix(TOKENS[:length])
    suffixes = [TOKENS[200 + i : 200 + i + i % 5] for i in range(rows)]
    seeds = [hot(seed=i * 1000 + rows) for i in range(rows)]
    late = rows // 2
    alone = driver.alone(prefix, suffixes[late], steps, sampling=seeds[late])
    batch = [driver.request(prefix, suffixes[i], sampling=seeds[i]) for i in range(rows) if i != late]
    driver.decode(batch, 5)
    joined = driver.request(prefix, suffixes[late], sampling=seeds[late])
    driver.decode([*batch[: rows // 3], joined, *batch[rows // 3 :]], 15)
    leaving, staying = batch[::2], batch[1::2]
    driver.close(*leaving)
    driver.decode([*staying, joined], steps - 15, at_once=5)
    assert driver.drawn[joined.id] == alone
    driver.close(joined, *staying, prefix)


def test_a_row_may_pause(driver: Driver) -> None:
    """A row that is left out of some steps, over the end of a page, goes on as if it had not been."""
    prefix = driver.prefix(TOKENS[:50])
    alone = driver.alone(prefix, TOKENS[50:53], 30)
    paused, other = driver.request(prefix, TOKENS[50:53]), driver.request(prefix, TOKENS[60:75])
    for _ in range(10):
        driver.decode([paused, other], 2)
        driver.decode([other], 1)
        driver.decode([paused], 1)
    assert driver.drawn[paused.id] == alone
    driver.close(paused, other, prefix)


@pytest.mark.parametrize("window", [0, 100])
def test_own_splits_of_many_rows(driver: Driver, window: int) -> None:
    check_own_splits(driver, window)


def check_own_splits(driver: Driver, window: int) -> None:
    """Rows off one parent with 0 to 4 own whole splits, some of them behind the window, some put away by the engine.

    They join one after the other, pause in turn, fill splits at different times, and leave when they are done.
    """
    prefix = driver.prefix(TOKENS[:100], window=window)
    suffixes = [TOKENS[100 : 100 + n] for n in (0, 28, 60, 92, 160, 250)]
    steps, at_once = 70, 5
    alone = [driver.alone(prefix, suffix, steps, window=window) for suffix in suffixes]
    rows = [driver.request(prefix, suffix, window=window) for suffix in suffixes]
    missing = dict.fromkeys(range(len(rows)), steps)
    for turn in range(2 * steps):
        now = [i for i in missing if turn >= i and (turn + i) % 3]
        driver.decode([rows[i] for i in now], at_once)
        for i in now:
            missing[i] -= at_once
            if not missing[i]:
                del missing[i]
                assert driver.drawn[rows[i].id] == alone[i], f"{len(suffixes[i])} tokens"
                driver.close(rows[i])
    assert not missing
    driver.close(prefix)


def test_any_mix_in_one_plan(any_driver: Driver) -> None:
    """Several prefixes, depths, windows and no prefix at all, with a prompt being built in the same pass."""
    driver = any_driver
    shapes = [(100, 4, 0), (128, 2, 0), (65, 7, 30), (100, 1, 70)]
    prefixes = [driver.prefix(TOKENS[:n], loops=loops, window=w) for n, loops, w in shapes]
    parents = [(p, p.loops, p.window) for p in prefixes for _ in range(3)] + [(None, 3, 0), (None, 4, 20)]

    def options(i: int) -> dict[str, int]:
        return {"loops": parents[i][1], "window": parents[i][2]}

    suffixes = [TOKENS[150 + 9 * i : 150 + 9 * i + 1 + 17 * (i % 5)] for i in range(len(parents))]
    alone = [driver.alone(p, suffixes[i], 12, **options(i)) for i, (p, *_) in enumerate(parents)]
    rows = [driver.request(p, suffixes[i], **options(i)) for i, (p, *_) in enumerate(parents)]
    expected = driver.prefix(TOKENS[:200], loops=5)
    build = driver.open(prompt=TOKENS[:200], loops=5)
    for size in (1, 63, 70, 66):
        chunk = driver.chunk(build, size)
        for held in rows:
            driver.room(held, held.length + 3)
            held.length += 3
        driver.step(prefill=(chunk,), decode=tuple(held.id for held in rows), num_steps=3)
    for i, held in enumerate(rows):
        assert driver.drawn[held.id] == alone[i], f"row {i}, prefix {parents[i]}"
    assert np.array_equal(driver.engine.read_kv(build.id), driver.engine.read_kv(expected.id))
    driver.close(*rows, build, expected, *prefixes)


@pytest.mark.parametrize("window", [0, 65])
def test_many_prompts_in_one_plan(driver: Driver, window: int) -> None:
    """In two chunks each, so that the second ones begin with different numbers of own splits."""
    prefix = driver.prefix(TOKENS[:90], window=window)
    suffixes = [TOKENS[100 + i : 102 + 20 * i] for i in range(9)]
    alone = [driver.alone(prefix, suffix, 2, sampling=hot(i), window=window) for i, suffix in enumerate(suffixes)]
    rows = [driver.open(prefix, sampling=hot(i), prompt=suffix, window=window) for i, suffix in enumerate(suffixes)]
    driver.step(
        prefill=tuple(driver.chunk(held, len(suffix) // 2) for held, suffix in zip(rows, suffixes, strict=True))
    )
    driver.step(prefill=tuple(driver.chunk(held, len(held.tokens) - held.length) for held in rows))
    driver.decode(rows, 2)
    assert [driver.drawn[held.id] for held in rows] == alone
    driver.close(*rows, prefix)


@pytest.mark.parametrize("lengths", [(70, 10, 5), (64, 64, 1), (1, 1, 1), (30, 50, 60)])
@pytest.mark.parametrize("window", [0, 65])
def test_chains_of_parents(any_driver: Driver, lengths: tuple[int, ...], window: int) -> None:
    """A child of a child: same pages, same draws as one prompt."""
    driver, total = any_driver, sum(lengths)
    chain: list[Held] = []
    for n in lengths:
        done = chain[-1].length if chain else 0
        chain.append(driver.prefix(TOKENS[done : done + n], chain[-1] if chain else None, window=window, chunk=50))
    cold = driver.alone(None, TOKENS[: total + 3], 40, window=window)
    assert driver.alone(chain[-1], TOKENS[total : total + 3], 40, window=window) == cold
    driver.close(*chain)


def test_decodes_never_change_a_prefix(driver: Driver) -> None:
    """T4, and T18: given-back pages are NaN, so a stray read would show in the draws."""
    prefix = driver.prefix(TOKENS[:100])
    before, logits = driver.engine.read_kv(prefix.id), driver.engine.read_logits(prefix.id)
    first = driver.alone(prefix, TOKENS[100:103], 8, sampling=hot(0))
    for i in range(100):
        driver.alone(prefix, TOKENS[100 : 103 + i % 3], 2, sampling=hot(i))
    assert driver.alone(prefix, TOKENS[100:103], 8, sampling=hot(0)) == first
    assert np.array_equal(driver.engine.read_kv(prefix.id), before)
    assert np.array_equal(driver.engine.read_logits(prefix.id), logits)
    driver.close(prefix)


def test_choices_differ_and_repeat(driver: Driver) -> None:
    """T19: n choices of one seed; each is what it is alone."""
    prefix = driver.prefix(TOKENS[:64])
    samplings = [hot(5, temperature=3.0, top_k=0, top_p=1.0, choice=i) for i in range(4)]
    rows = [driver.request(prefix, sampling=sampling) for sampling in samplings]
    driver.decode(rows, 10, at_once=5)
    drawn = [driver.drawn[held.id] for held in rows]
    assert len({str(d) for d in drawn}) == 4
    assert drawn == [driver.alone(prefix, (), 10, sampling=sampling) for sampling in samplings]
    driver.close(*rows, prefix)


def test_repetition_penalty_counts_the_prefix(driver: Driver) -> None:
    """T14.  A penalty of 1000 leaves a token that was seen no chance beside one with a logit above 0."""
    sampling = replace(GREEDY, repetition_penalty=1000.0)
    prefix = driver.prefix(TOKENS[:80])
    warm = driver.alone(prefix, TOKENS[80:90], 20, sampling=sampling)
    assert warm == driver.alone(None, TOKENS[:90], 20, sampling=sampling)
    seen_or_drawn = [*set(TOKENS[:90]), *tokens_of(warm)]
    assert len(set(seen_or_drawn)) == len(seen_or_drawn), "a token was drawn that stands in the prompt, or twice"
    driver.close(prefix)


def tokens_of(drawn: Drawn) -> list[int]:
    return [token for token, _ in drawn]
