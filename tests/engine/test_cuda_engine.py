"""The CUDA engine on the emulated device: its kernels are those of the GPU, compiled for this processor.

What the engine promises of numbers, small: equal to the reference, and equal to itself in any company and any cut.  And
what it is as an object: its refusals, what a failed plan leaves behind, two plans in flight, its check of itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from driver import GREEDY, Drawn, Driver, Held
from emulation.device import EmulatedDevice
from engines import weights_of
from test_small_cases import PLAIN, SWITCHED

from tinyloop_service.engine.api import Extend, Open, Plan, Prefill, StepResult
from tinyloop_service.engine.cuda import CudaEngine
from tinyloop_service.engine.cuda.probe import DeviceUnavailable, check_spec
from tinyloop_service.engine.cuda.prompt import FIXED_ROWS
from tinyloop_service.engine.cuda.selfcheck import check_rows
from tinyloop_service.engine.reference import Reference
from tinyloop_service.engine.spec import ModelSpec, Quant
from tinyloop_service.errors import EngineFault, InvalidArgument
from tinyloop_service.types import CacheMode, Sampling

PAGE, CHUNK = 64, 50
ROW_COUNTS = (1, 8)
TOKENS = tuple(np.random.default_rng(7).integers(0, 96, 250).tolist())
HOT = Sampling(temperature=0.9, top_k=40, top_p=0.95, logprobs=2, seed=3)


def engine_of(spec: ModelSpec, device: Any = None, **options: Any) -> CudaEngine:
    settings = {"kv_memory": 8 << 20, "debug": True, "row_counts": ROW_COUNTS, "max_chunk": 256, **options}
    return CudaEngine(weights_of(spec), device=device or EmulatedDevice(), **settings)


@cache
def shared_engine(spec: ModelSpec) -> CudaEngine:
    return engine_of(spec)


@pytest.fixture
def driver() -> Iterator[Driver]:
    """Pages of what a test left open are given to the next one's sequences, so each closes what it opens."""
    yield Driver(shared_engine(PLAIN))


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
    spec = SPECS[name]
    driver = Driver(shared_engine(spec))
    parent = driver.prefix(TOKENS[:90], window=window, chunk=CHUNK)
    child = driver.prefix(TOKENS[90:140], parent, window=window)
    got = np.stack([driver.engine.read_logits(held.id) for held in (parent, child)])
    driver.close(child, parent)
    reference = Reference(weights_of(spec), np.float32, kv="fp16")
    expected = reference.forward(TOKENS[:140], reference.new_cache(2, window))[[89, 139]]
    error = np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2))
    assert error < 3e-3, f"{name}: not the same model, {error}"


@pytest.mark.parametrize("name", ["plain", "switched"])
def test_greedy_tokens_are_the_reference_s(name: str) -> None:
    """Decoding over the end of a page; where the reference's two best lie within 1 % of a logit, either may win."""
    spec = SPECS[name]
    driver = Driver(shared_engine(spec))
    drawn = [token for token, _ in driver.alone(None, TOKENS[:60], 9)]
    reference = Reference(weights_of(spec), np.float32, kv="fp16")
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


@pytest.mark.parametrize("name", ["plain", "switched"])
@pytest.mark.parametrize("chunk", [19, 77])
def test_chunks_leave_the_same_pages(name: str, chunk: int) -> None:
    """T3: every cache layer, and the logits of the last token."""
    driver = Driver(shared_engine(SPECS[name]))
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


# ---- the engine as an object


def test_limits_say_what_memory_holds() -> None:
    limits = shared_engine(PLAIN).limits
    assert limits.page_bytes == 2 * 64 * 64 * 2  # K and V, tokens, dim, fp16
    assert limits.num_pages == (8 << 20) // limits.page_bytes
    assert (limits.model_id, limits.cache_mode) == (weights_of(PLAIN).model_id, CacheMode.FP16)
    assert limits.active_pages(0, 1000, 2) == 0


class SmallDevice(EmulatedDevice):
    def __init__(self, free: int) -> None:
        super().__init__()
        self.free = free
        self._taken = 0

    def empty(self, shape: Any, dtype: Any) -> Any:
        self._taken += int(np.prod(shape)) * np.dtype(dtype).itemsize
        return super().empty(shape, dtype)

    def memory(self) -> tuple[int, int]:
        return max(0, self.free - self._taken), self.free


def test_memory_that_does_not_suffice_is_refused_with_ways_out() -> None:
    with pytest.raises(InvalidArgument, match=r"kv_memory: 1000 bytes given; 64 tokens alone take \d+"):
        engine_of(PLAIN, kv_memory=1000)
    with pytest.raises(InvalidArgument, match=r"kv_memory: 1048576 MiB needed, \d+ MiB .*free.*give less kv_memory"):
        engine_of(PLAIN, kv_memory=1 << 40)
    with pytest.raises(InvalidArgument, match=r"engine: the model's weights need \d.* free; .*engine cpu"):
        engine_of(PLAIN, SmallDevice(1 << 16))
    with pytest.raises(InvalidArgument, match=r"kv_memory: 0 bytes are left beside weights"):
        engine_of(PLAIN, SmallDevice(1 << 20), kv_memory=None)
    with pytest.raises(InvalidArgument, match="cache_mode: int8 given"):
        engine_of(PLAIN, cache_mode=CacheMode.INT8)


def test_all_free_memory_is_taken_where_none_is_asked_for() -> None:
    limits = engine_of(PLAIN, SmallDevice(64 << 20), kv_memory=None).limits
    assert 0.5 * (64 << 20) < limits.num_pages * limits.page_bytes < 0.9 * (64 << 20)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"head_dim": 32}, "head_dim is 32; the CUDA kernels have 64 and 128"),
        ({"d_model": 96}, "d_model is 96; the CUDA kernels need a multiple of 64"),
        ({"d_ff": 192, "quant": Quant(4, 128)}, "d_model is 64; the CUDA kernels need a multiple of 128"),
        ({"n_heads": 17, "n_kv_heads": 1}, "17 heads of the model share"),
    ],
)
def test_models_that_the_kernels_cannot_run(changes: dict[str, Any], says: str) -> None:
    check_spec(PLAIN)
    with pytest.raises(DeviceUnavailable, match=says):
        check_spec(replace(PLAIN, **changes))


def test_progress_says_what_takes_time() -> None:
    said: list[str] = []
    engine_of(PLAIN, progress=said.append)
    assert said == ["repacking weights", "capturing graphs", "checking that no row depends on its company"]


def test_a_failed_plan_costs_only_its_own_sequences(driver: Driver) -> None:
    prefix = driver.prefix(TOKENS[:70])
    alone = driver.alone(prefix, TOKENS[70:72], 6)
    survivor = driver.request(prefix, TOKENS[70:72])
    driver.decode([survivor], 3)
    engine, lost = driver.engine, 999
    bad = Plan(900, open=(Open(lost, None, 0, 2, 0, GREEDY),), prefill=(Prefill(lost, 0, (1, 2), last=True),))
    with pytest.raises(EngineFault, match=r"step 900 failed: .*sequence 999 has pages for 0 tokens, 2 are written"):
        engine.submit(bad)
    engine.step(Plan(901, close=(lost, 998)))
    driver.decode([survivor], 3)
    assert driver.drawn[survivor.id] == alone
    driver.close(survivor, prefix)


def test_a_stray_read_of_a_page_given_back_is_a_fault_of_the_result(driver: Driver) -> None:
    """T18: a prefix's pages were (wrongly) released.  The plan fails when it is waited for, those behind it do not."""
    prefix, other = driver.prefix(TOKENS[:70]), driver.prefix(TOKENS[:70])
    expected = driver.alone(other, (), 3)
    driver.engine.step(Plan(800, released=prefix.blocks[0]))
    row = driver.open(prefix, sampling=GREEDY, prompt=TOKENS[70:72])
    pending = driver.engine.submit(Plan(801, open=tuple(driver._open), **_prefilled(driver, row)))
    driver._open, driver._extend, driver._clone = [], [], []
    behind = driver.engine.submit(Plan(802))
    for _ in range(2):
        with pytest.raises(EngineFault, match=rf"logits of sequence {row.id} are not finite"):
            pending.result()
    assert behind.result() == StepResult(())
    assert driver.alone(other, (), 3) == expected
    driver.close(row, prefix, other)


def _prefilled(driver: Driver, row: Held) -> dict[str, Any]:
    """The fields of a plan that feeds a row its suffix."""
    chunk = driver.chunk(row, len(row.tokens) - row.length)
    return {"extend": tuple(driver._extend), "clone": tuple(driver._clone), "prefill": (chunk,)}


def test_pages_given_back_are_poisoned_and_pages_taken_are_zero(driver: Driver) -> None:
    held = driver.prefix(TOKENS[:64])
    pages = held.blocks[0]
    driver.close(held)
    driver.step()
    engine = shared_engine(PLAIN)
    pool = engine._arena.pool
    assert np.isnan(pool[list(pages)]).all()
    engine.step(Plan(700, open=(Open(500, None, 0, 2, 0, None),), extend=(Extend(500, (pages,)),)))
    assert not pool[list(pages)].any()
    engine.step(Plan(701, close=(500,)))


def test_two_plans_in_flight_share_no_memory() -> None:
    """On a device that runs nothing before somebody waits, so that memory reused too early shows."""
    driver = Driver(shared_engine(PLAIN))
    prefix = driver.prefix(TOKENS[:70])
    suffixes = [TOKENS[80 : 80 + n] for n in (3, 1, 4)]
    alone = [driver.alone(prefix, suffix, 6, sampling=HOT) for suffix in suffixes]
    driver.close(prefix)

    late = Driver(LateEngine(engine_of(PLAIN, EmulatedDevice(deferred=True))))
    prefix = late.prefix(TOKENS[:70])
    rows = [late.request(prefix, suffix, sampling=HOT) for suffix in suffixes]
    late.decode(rows, 6, at_once=2)
    late.close(prefix)
    late.engine.settle()
    for held, expected in zip(rows, alone, strict=True):
        assert late.drawn[held.id] == expected


class LateEngine:
    """Waits for a plan's result only when the next one was submitted; what it returns is the one before's."""

    def __init__(self, engine: CudaEngine) -> None:
        self._engine, self.limits = engine, engine.limits
        self._pending: Any = None

    def step(self, plan: Plan) -> StepResult:
        before, self._pending = self._pending, self._engine.submit(plan)
        return before.result() if before is not None else StepResult(())

    def settle(self) -> None:
        self._pending.result()


# ---- its check of itself


class PickyDevice(EmulatedDevice):  # type: ignore[misc]
    """Products of other than `size` rows have other bits in their first row."""

    size = FIXED_ROWS

    def gemm(self, x: Any, weight: Any, out: Any, *, accumulate: bool = False) -> None:
        super().gemm(x, weight, out, accumulate=accumulate)
        if len(x) != self.size:
            self.enqueue(lambda: out.__setitem__(0, out[0] * out.dtype.type(1 + len(x) / 512)))


def test_products_whose_bits_depend_on_their_rows_get_a_fixed_number_of_rows() -> None:
    """Then the engine is the one whose products do not."""
    driver, picky = Driver(shared_engine(PLAIN)), Driver(engine_of(PLAIN, PickyDevice()))
    assert drawn_by(picky) == drawn_by(driver)


def drawn_by(driver: Driver) -> Drawn:
    prefix = driver.prefix(TOKENS[:70])
    drawn = driver.alone(prefix, TOKENS[70:90], 3)
    driver.close(prefix)
    return drawn


def test_products_that_depend_on_their_place_are_a_fault() -> None:
    device = PickyDevice()
    device.size = -1
    with pytest.raises(EngineFault, match="self-check: a row of a matrix product depends"):
        engine_of(PLAIN, device)


def test_rows_that_depend_on_company_are_a_fault() -> None:
    engine = shared_engine(PLAIN)

    class Sloppy:
        limits = engine.limits

        def step(self, plan: Plan) -> StepResult:
            result = engine.step(plan)
            if len(plan.decode) != 8:
                return result
            return StepResult(tuple(replace(row, tokens=row.tokens[:-1]) for row in result.rows))

    with pytest.raises(EngineFault, match=r"self-check: .* a row of a batch of 8 gets other bits"):
        check_rows(Sloppy(), ROW_COUNTS)
    engine.step(Plan(0, close=(-1,)))
