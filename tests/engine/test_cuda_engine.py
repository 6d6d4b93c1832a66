"""The CUDA engine as an object, in emulation: refusals, what a failed plan leaves, plans in flight, its self-check."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from driver import GREEDY, Drawn, Driver, Held
from emulated import HOT, ROW_COUNTS, TOKENS, engine_of, shared_engine
from emulation.device import EmulatedDevice
from engines import weights_of
from test_small_cases import PLAIN

from tinyloop_service.engine.api import Extend, Open, Plan, Prefill, StepResult
from tinyloop_service.engine.cache_modes import H_MODES, page_bytes
from tinyloop_service.engine.cuda import CudaEngine
from tinyloop_service.engine.cuda.engine import affordable
from tinyloop_service.engine.cuda.probe import DeviceUnavailable, check_spec
from tinyloop_service.engine.cuda.products import FIXED_ROWS, Products, least_rows
from tinyloop_service.engine.cuda.selfcheck import check_rows
from tinyloop_service.engine.spec import Quant
from tinyloop_service.errors import EngineFault, InvalidArgument
from tinyloop_service.settings import MOST_PREFIXES
from tinyloop_service.types import CacheMode, Sampling


@pytest.fixture
def driver() -> Driver:
    return Driver(shared_engine(PLAIN))


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


@pytest.mark.parametrize("mode", sorted(H_MODES))
def test_an_h_mode_that_saves_nothing_is_refused_at_start(mode: CacheMode) -> None:
    with pytest.raises(
        InvalidArgument, match=rf"cache_mode: {mode.value} given, .* = 128, so nothing is saved; use int8"
    ):
        engine_of(replace(PLAIN, d_model=128), cache_mode=mode)


def test_all_free_memory_is_taken_where_none_is_asked_for() -> None:
    limits = engine_of(PLAIN, SmallDevice(64 << 20), kv_memory=None).limits
    assert 0.5 * (64 << 20) < limits.num_pages * limits.page_bytes < 0.9 * (64 << 20)


def test_prefixes_that_hold_no_pages_do_not_use_up_an_engine_s_tables() -> None:
    """Of 64 tokens in a window of one, all pages have slid out: memory for a few blocks has room for as many of them
    as a scheduler keeps, and for its requests."""
    engine = engine_of(
        PLAIN, SmallDevice(16 << 20), kv_memory=8 * PLAIN.cache_layers(2) * page_bytes(CacheMode.FP16, PLAIN)
    )
    most = MOST_PREFIXES + engine.limits.max_rows * 3 // 2  # pairs of rows have a prompt of their own in common
    engine.step(Plan(900, open=tuple(Open(seq, None, 0, 2, 1, None) for seq in range(most))))
    engine.step(Plan(901, close=tuple(range(most))))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"head_dim": 32}, "head_dim is 32; the CUDA kernels have 64 and 128"),
        ({"d_model": 96}, "d_model is 96; the CUDA kernels need a multiple of 64"),
        ({"d_ff": 192, "quant": Quant(4, 128)}, "d_model is 64; the CUDA kernels need a multiple of 128"),
        ({"n_heads": 17, "n_kv_heads": 1}, "17 heads of the model share"),
        ({"vocab_size": 2**19}, "the model has 524288 tokens; the CUDA kernels need fewer than 524288"),
    ],
)
def test_models_that_the_kernels_cannot_run(changes: dict[str, Any], says: str) -> None:
    check_spec(PLAIN)
    with pytest.raises(DeviceUnavailable, match=says):
        check_spec(replace(PLAIN, **changes))


def test_progress_says_what_takes_time() -> None:
    said: list[str] = []
    engine_of(PLAIN, progress=said.append)
    assert said == [
        "repacking weights",
        "trying matrix products",
        "capturing graphs",
        "capturing graphs of prompts: 4 of 4",
        "checking that no row depends on its company",
    ]


def test_a_failed_plan_costs_only_its_own_sequences(driver: Driver) -> None:
    prefix = driver.prefix(TOKENS[:70])
    alone = driver.alone(prefix, TOKENS[70:72], 6)
    survivor = driver.request(prefix, TOKENS[70:72])
    driver.decode([survivor], 3)
    engine, lost = driver.engine, 999
    bad = Plan(900, open=(Open(lost, None, 0, 2, 0, GREEDY),), prefill=(Prefill(lost, 0, (1, 2)),))
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


def test_a_small_vocabulary_has_no_more_logprobs_than_tokens() -> None:
    driver = Driver(engine_of(replace(PLAIN, vocab_size=17)))
    for _, logprob in driver.alone(None, (1, 2, 3), 2, sampling=Sampling(logprobs=20)):
        assert logprob is not None and sorted(token for token, _ in logprob.top) == list(range(17))
        assert abs(sum(np.exp(value) for _, value in logprob.top) - 1) < 1e-5  # 17 terms, each good to 1e-6


def test_pages_given_back_are_poisoned_and_pages_taken_are_zero(driver: Driver) -> None:
    held = driver.prefix(TOKENS[:64])
    pages = held.blocks[0]
    driver.close(held)
    driver.step()
    engine = shared_engine(PLAIN)
    assert engine._machine is not None
    pool = engine._machine.arena.pool
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


def test_a_prompt_of_a_shape_that_comes_again_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where graphs are many, the least used one makes room for one that is used more."""
    monkeypatch.setattr("tinyloop_service.engine.cuda.graphs._MOST_GRAPHS", 1)
    captures: list[object] = []

    class Counting(EmulatedDevice):
        def capture(self, work: Any) -> Any:
            captures.append(work)
            return super().capture(work)

    driver = Driver(engine_of(PLAIN, Counting()))

    def new_captures(length: int, times: int) -> int:
        before = len(captures)
        for _ in range(times):
            driver.close(driver.prefix(TOKENS[:length]))
        return len(captures) - before

    graphs = driver.engine._machine.prompt._graphs  # type: ignore[attr-defined]
    graphs._uses.clear()
    graphs._graphs.clear()
    assert [new_captures(length, 3) for length in (60, 100)] == [1, 0]  # three uses are not more than three
    assert [new_captures(length, 1) for length in (100, 100, 60)] == [1, 0, 0]


def test_closing_lets_the_device_go() -> None:
    closed: list[bool] = []

    class Watched(EmulatedDevice):
        def close(self) -> None:
            closed.append(True)

    engine = engine_of(PLAIN, Watched())
    pending = engine.submit(Plan(1))
    engine.close()
    engine.close()
    assert closed == [True] and pending.result() == StepResult(())


# ---- its check of itself


def bits(by_rows: dict[int, str]) -> dict[int, list[bytes]]:
    """Of a product at three places of each number of rows."""
    return {rows: [place.encode() for place in places] for rows, places in by_rows.items()}


@pytest.mark.parametrize(
    ("by_rows", "expected"),
    [
        ({64: "aaa", 128: "aaa", 192: "aaa"}, 64),
        ({64: "bbb", 128: "aaa", 192: "aaa"}, 128),
        ({64: "aaa", 128: "bbb", 192: "aaa"}, 192),  # what agrees by chance below is not used
        ({64: "aaa", 128: "baa", 192: "aaa"}, 192),
        ({64: "bbb", 512: "aaa", 576: "aaa"}, 512),
        ({64: "aaa", 512: "bbb", 576: "aaa"}, None),  # 576 rows for every short prompt are too many
        ({64: "aaa", 128: "aaa", 192: "aab"}, None),
    ],
)
def test_the_least_rows_of_a_product(by_rows: dict[int, str], expected: int | None) -> None:
    assert least_rows(bits(by_rows)) == expected


def test_a_product_has_its_least_rows_and_no_others_change() -> None:
    device = EmulatedDevice()
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal((rows, 64)).astype(np.float16) for rows in (2 * FIXED_ROWS, 8))
    x[64:] = np.nan  # what lies behind the rows that are wanted
    products = Products(device)
    products.set_least("down", 192)
    products.set_tiles("qkv")
    found = {}
    for kind, computed in (("o", 64), ("down", 192), ("qkv", FIXED_ROWS)):
        out = device.upload(np.full((len(x), 8), 7, np.float32))
        products.multiply(kind, device.upload(x), device.upload(weight), out, 64, accumulate=True)
        found[kind] = device.download(out)
        assert np.isnan(found[kind][64:computed]).all() and (found[kind][computed:] == 7).all()
        assert np.array_equal(found[kind][:64], found["o"][:64])
    assert np.allclose(found["o"][:64], 7 + x[:64].astype(np.float32) @ weight.T.astype(np.float32), atol=1e-3)


class PickyDevice(EmulatedDevice):  # type: ignore[misc]
    """Products of other numbers of rows than it likes have other bits in their first row."""

    def __init__(self, likes: Callable[[int], bool]) -> None:
        super().__init__()
        self.likes = likes

    def gemm(self, x: Any, weight: Any, out: Any, *, accumulate: bool = False, way: object | None = None) -> None:
        super().gemm(x, weight, out, accumulate=accumulate)
        if way == "other bits" or (way is None and not self.likes(len(x))):
            self.enqueue(lambda: out.__setitem__(0, out[0] * out.dtype.type(1 + len(x) / 512)))


class ResourcefulDevice(PickyDevice):
    """Has three other ways to products of some numbers of rows, one of which has the bits of many rows and is quick."""

    def gemm(self, x: Any, weight: Any, out: Any, *, accumulate: bool = False, way: object | None = None) -> None:
        super().gemm(x, weight, out, accumulate=accumulate, way=way)
        if way != "quick":
            self.enqueue(lambda: time.sleep(0.003 if way == "slow" else 0.001))

    def ways(self, x: Any, weight: Any, out: Any) -> tuple[object, ...]:
        return ("other bits", "slow", "quick") if len(x) in (64, 128) else ("slow",)


@pytest.mark.parametrize("likes", [lambda rows: rows >= 192, lambda rows: rows == FIXED_ROWS], ids=["many", "one"])
def test_products_whose_bits_depend_on_their_rows_get_numbers_of_rows_that_agree(likes: Callable[[int], bool]) -> None:
    """Then the engine is the one whose products do not, whatever earlier passes have left behind a short one."""
    driver, picky = Driver(shared_engine(PLAIN)), Driver(engine_of(PLAIN, PickyDevice(likes), max_chunk=2 * FIXED_ROWS))
    for one in (driver, picky):
        one.close(one.prefix(TOKENS[:200]))
    assert drawn_by(picky) == drawn_by(driver)


def drawn_by(driver: Driver) -> Drawn:
    prefix = driver.prefix(TOKENS[:70])
    drawn = driver.alone(prefix, TOKENS[70:90], 3)
    driver.close(prefix)
    return drawn


def test_short_products_take_the_quickest_way_with_the_bits_of_long_ones() -> None:
    device = ResourcefulDevice(lambda rows: rows >= 256)
    driver, found = Driver(shared_engine(PLAIN)), Driver(engine_of(PLAIN, device, max_chunk=2 * FIXED_ROWS))
    machine = found.engine._machine
    assert machine is not None
    ways = machine.prompt.products._ways
    assert {(kind, rows) for kind, rows in ways} == {
        (kind, rows) for kind in machine.prompt.kinds for rows in (64, 128)
    }
    assert all(way == "quick" and rows <= given <= 128 for (_, rows), (given, way) in ways.items())
    found.close(found.prefix(TOKENS[:200]))
    assert drawn_by(found) == drawn_by(driver)


def test_products_that_depend_on_their_place_are_a_fault() -> None:
    with pytest.raises(EngineFault, match="self-check: a row of a matrix product depends"):
        engine_of(PLAIN, PickyDevice(lambda rows: False))


@pytest.mark.parametrize("num_pages", [3, 5, 6, 29, 30])
def test_the_check_uses_no_page_that_is_not_there(num_pages: int) -> None:
    """Batches that there are no pages for are left out; each page has one owner."""
    engine, sizes = shared_engine(PLAIN), []

    class Small:
        limits = replace(engine.limits, num_pages=num_pages)

        def step(self, plan: Plan) -> StepResult:
            pages = [page for extend in plan.extend for block in extend.blocks for page in block]
            assert len(set(pages)) == len(pages) and max(pages, default=0) < num_pages
            sizes.append(len(plan.decode))
            return engine.step(plan)

    check_rows(Small(), (1, 8))
    most = max(sizes, default=None)  # three layers: two blocks of the prefix, one of each row
    assert most == {3: None, 5: None, 6: 0, 29: 1, 30: 8}[num_pages]


def test_long_sequences_make_batches_smaller() -> None:
    """By what attention keeps of every row, head and block: at 2^20 tokens 4.3 MB a row, of a model with one head."""
    long, counts = replace(PLAIN, max_seq_len=1 << 20), (1, 64, 80, 128)
    assert [affordable(counts, long, gib << 30)[-1] for gib in (1, 24, 36)] == [64, 80, 128]
    assert affordable(counts, PLAIN, 1 << 30) == counts


@pytest.mark.parametrize("max_seq_len", [1, 3, 4])
def test_the_check_stays_within_the_longest_sequence(max_seq_len: int) -> None:
    steps = []

    class Short:
        limits = replace(shared_engine(PLAIN).limits, max_seq_len=max_seq_len)

        def step(self, plan: Plan) -> StepResult:
            steps.append(plan)
            return shared_engine(PLAIN).step(plan)

    check_rows(Short(), (1,))
    fed = sum(plan.num_prompt_tokens for plan in steps)
    assert fed + sum(plan.num_steps for plan in steps if plan.decode) == (4 if max_seq_len == 4 else 0)


def test_rows_that_depend_on_company_are_a_fault() -> None:
    engine = shared_engine(PLAIN)

    class Sloppy:
        limits = engine.limits

        def step(self, plan: Plan) -> StepResult:
            result = engine.step(plan)
            if len(plan.decode) != 8:
                return result
            return StepResult(tuple(row._replace(tokens=row.tokens[:-1]) for row in result.rows))

    with pytest.raises(EngineFault, match=r"self-check: .* a row of a batch of 8 gets other bits"):
        check_rows(Sloppy(), ROW_COUNTS)
    engine.step(Plan(0, close=(-1,)))


def test_rows_that_several_thread_blocks_share_draw_what_they_draw_alone() -> None:
    """70 rows off two prefixes, two of them in a window: what 67 of them share is more than one item of attention."""
    driver = Driver(engine_of(PLAIN, kv_memory=32 << 20, row_counts=(1, 8, 72)))
    prefixes = driver.prefix(TOKENS[:130]), driver.prefix(TOKENS[100:170])

    def draw(numbers: range) -> list[Drawn]:
        rows = [
            driver.request(prefixes[i // 67], sampling=replace(HOT, seed=i), window=40 if i in (3, 68) else 0)
            for i in numbers
        ]
        driver.decode(rows, 6, at_once=3)
        driver.close(*rows)
        return [driver.drawn.pop(row.id) for row in rows]

    together = draw(range(70))
    for first in (0, 3, 64, 66):
        assert draw(range(first, first + 4)) == together[first : first + 4]
