"""The CUDA engine where a block's input is stored: the form that is read comes and goes, bit for bit; what is stored is
moved to make room; and memory comes back, also from plans that fail.

In emulation, and the same on a GPU.  The promise in these modes: `test_cuda_modes.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import test_cuda_bits
from driver import GREEDY, Drawn, Driver, Held
from emulated import HOT, PAGE, TOKENS
from emulation.device import EmulatedDevice
from engines import Kind, make_engine, weights_of
from test_cuda_bits import SPECS, difference
from test_cuda_engine import LateEngine
from test_cuda_modes import KINDS, OPTIONS, shared_engine
from test_small_cases import PLAIN

from tinyloop_service.completion import CompletionBuilder
from tinyloop_service.engine.api import Drop, Plan
from tinyloop_service.engine.cache_modes import H_MODES, page_bytes
from tinyloop_service.engine.cuda import CudaEngine
from tinyloop_service.engine.cuda.rebuild import RebuildTables
from tinyloop_service.engine.cuda.slabs import SlabPool
from tinyloop_service.errors import EngineFault, InvalidArgument
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.types import CacheMode, GenerationRequest, PrefixDefinition

MODE = CacheMode.H_INT8  # where one is enough


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param  # type: ignore[no-any-return]


def engine_with(kind: Kind, slabs: int, device: Any = None, mode: CacheMode = MODE) -> CudaEngine:
    memory = slabs * page_bytes(CacheMode.FP16, PLAIN)
    if device is None:
        return make_engine(kind, weights_of(PLAIN), kv_memory=memory, cache_mode=mode, **OPTIONS)  # type: ignore
    return CudaEngine(weights_of(PLAIN), device=device, kv_memory=memory, cache_mode=mode, debug=True, **OPTIONS)


def held_pages(driver: Driver) -> tuple[int, int]:
    """Active and stored."""
    engine: Any = getattr(driver.engine, "_engine", driver.engine)  # a LateEngine's
    return engine._pages.num_active, engine._pages.num_stored


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        (CacheMode.H_FP16, "switched"),
        (CacheMode.H_INT8, "two loop blocks"),
        (CacheMode.H_INT4, "plain"),
        (CacheMode.H_INT4, "switched"),
    ],
)
def test_logits_are_the_reference_s(kind: Kind, mode: CacheMode, name: str) -> None:
    """In the mode, in chunks, in a window and in none.

    Beside what fp16 arithmetic does (`test_cuda_bits.py`), a value of h that is so near the edge between two levels
    falls to the other one.  h is off by 2^-12 of its size, a level of h-int4 is some 2^-3 of it: so does one value in
    500, and as a root of mean squares that is 0.045 of a level, where rounding to the nearest is 0.29 off.  In h-int8
    one in thirty does, which is as much as the rounding itself, but both are below what fp16 does.
    """
    driver = Driver(shared_engine(kind, name, mode))
    for window in (0, 20):
        got = test_cuda_bits.prompt_logits(driver, window)
        alike, unlike = (
            difference(got, test_cuda_bits.reference_logits(SPECS[name], window, state))
            for state in (mode, CacheMode.FP16)
        )
        assert alike < 3e-3 + unlike / 10, f"{name}: not the same model"
        assert mode is not CacheMode.H_INT4 or alike < unlike / 5, "another rounding of state than the reference's"


@pytest.mark.parametrize(
    ("mode", "name", "window"),
    [
        (CacheMode.H_FP16, "switched", 0),
        (CacheMode.H_INT8, "switched", 60),
        (CacheMode.H_INT8, "two loop blocks", 0),
        (CacheMode.H_INT4, "switched", 0),
    ],
)
def test_what_is_read_is_made_again_bit_for_bit(kind: Kind, mode: CacheMode, name: str, window: int) -> None:
    """Of a prefix, its child, which begins inside a page, and a grandchild; also when only the oldest was dropped, to
    which the tables of those below must be led again (T4)."""
    driver = Driver(shared_engine(kind, name, mode))
    parent = driver.prefix(TOKENS[:150], window=window, loops=3)
    child = driver.prefix(TOKENS[150:180], parent, window=window, loops=3)
    grandchild = driver.prefix(TOKENS[180:200], child, window=window, loops=3)
    family = (parent, child, grandchild)
    built = [driver.engine.read_kv(held.id) for held in family]
    options = {"window": window, "loops": 3, "sampling": HOT}
    before = driver.alone(grandchild, TOKENS[200:205], 6, **options)
    active = held_pages(driver)
    other = driver.prefix(TOKENS[:64])
    driver.step(deactivate=tuple(held.id for held in family))
    assert held_pages(driver)[0] == driver.engine.limits.cache_layers(2), "the other's alone"
    others = [driver.prefix(TOKENS[i : i + 64]) for i in (1, 2)]  # whose pages lie where those were
    driver.step(activate=tuple(held.id for held in family))
    for held, was in zip(family, built, strict=True):
        assert np.array_equal(driver.engine.read_kv(held.id), was)
    assert driver.alone(grandchild, TOKENS[200:205], 6, **options) == before
    driver.step(deactivate=(parent.id,))
    others += [driver.prefix(TOKENS[i : i + 64]) for i in (3, 4)]
    driver.step(activate=(parent.id,))
    assert driver.alone(grandchild, TOKENS[200:205], 6, **options) == before
    driver.close(other, *others)
    assert held_pages(driver) == active
    driver.close(*family)
    assert held_pages(driver) == (0, 0)


def test_activation_and_use_in_one_plan(kind: Kind) -> None:
    """A prefix is made active by the plan that opens a request and a child off its partly filled page."""
    driver = Driver(shared_engine(kind, "plain", MODE))
    prefix = driver.prefix(TOKENS[:70])
    alone = driver.alone(prefix, TOKENS[70:75], 5)
    whole = driver.prefix(TOKENS[:90])
    driver.step(deactivate=(prefix.id,))
    row, child = driver.open(prefix, sampling=GREEDY, prompt=TOKENS[70:75]), driver.open(prefix, prompt=TOKENS[70:90])
    chunks = driver.chunk(row, 5), driver.chunk(child, 20)
    driver.step(activate=(prefix.id,), prefill=chunks)
    driver.decode([row], 5)
    assert driver.drawn.pop(row.id) == alone
    driver.step(deactivate=(child.id,))
    driver.step(activate=(child.id,))
    assert np.array_equal(driver.engine.read_kv(child.id), driver.engine.read_kv(whole.id)[:, :, :, PAGE:])
    driver.close(row, child, prefix, whole)
    assert held_pages(driver) == (0, 0)


def test_a_long_activation_goes_in_batches(kind: Kind) -> None:
    """Four pages of three loops are twelve of one block, and a pass of 256 rows has room for four."""
    driver = Driver(shared_engine(kind, "plain", MODE))
    prefix = driver.prefix(TOKENS[:240], loops=3)
    before = driver.engine.read_kv(prefix.id)
    driver.step(deactivate=(prefix.id,))
    driver.step(activate=(prefix.id,))
    assert np.array_equal(driver.engine.read_kv(prefix.id), before)
    driver.close(prefix)


def test_a_graph_makes_active_what_launches_do(kind: Kind) -> None:
    """Two prefixes at once, of a depth of which there are no graphs at first: launch by launch, in graphs that are
    captured, and in the same again.  One that holds no page is none."""
    driver = Driver(shared_engine(kind, "plain", MODE))
    family = [driver.prefix(TOKENS[:40], loops=3), driver.prefix(TOKENS[:130], loops=3)]
    built = [driver.engine.read_kv(held.id) for held in family]
    slid = driver.prefix(TOKENS[:64], window=1, loops=3)
    driver._dropped.extend(slid.blocks.pop(0))
    driver.step(drop=(Drop(slid.id, 1),))
    named = tuple(held.id for held in (*family, slid))
    graphs = driver.engine._machine.hidden._graphs  # type: ignore[attr-defined]
    before = set(graphs._graphs)
    for num_new in (0, 2, 2):
        driver.step(deactivate=named)
        other = driver.prefix(TOKENS[5:69], loops=3)  # lies where those were
        driver.step(activate=named)
        assert len(set(graphs._graphs) - before) == num_new
        for held, was in zip(family, built, strict=True):
            assert np.array_equal(driver.engine.read_kv(held.id), was)
        driver.close(other)
    driver.close(*family, slid)


class CountingDevice(EmulatedDevice):  # type: ignore[misc]
    """Knows how many words were copied to it, a number a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[int] = []

    def copy_in(self, target: Any, host: Any) -> None:
        self.copied.append(host.size)
        super().copy_in(target, host)


def test_making_active_takes_one_copy() -> None:
    device = CountingDevice()
    driver = Driver(engine_with("emulated", 30, device))
    prefix = driver.prefix(TOKENS[:128])
    driver.step(deactivate=(prefix.id,))
    device.copied.clear()
    driver.step(activate=(prefix.id,))
    assert device.copied == [RebuildTables.words(2 * driver.engine.limits.cache_layers(2))]


def test_requests_store_nothing_and_slide(kind: Kind) -> None:
    driver = Driver(shared_engine(kind, "plain", MODE))
    prefix = driver.prefix(TOKENS[:70], window=5)
    assert held_pages(driver) == (3, 3), "the first of two blocks slid out"
    row = driver.request(prefix, TOKENS[70:100], window=5)
    driver.decode([row], 110, at_once=5)
    assert held_pages(driver) == (3 + 3 * len(row.blocks), 3) and len(row.blocks) <= 2
    driver.close(row, prefix)
    assert held_pages(driver) == (0, 0)


def test_a_request_in_a_prefix_s_slot_stores_nothing(kind: Kind) -> None:
    """The device's table of places still names those of the prefix that was there before, which others have now."""
    driver = Driver(shared_engine(kind, "plain", MODE))
    driver.close(driver.prefix(TOKENS[:70]))
    row = driver.open(sampling=GREEDY, prompt=TOKENS[100:170])  # in the slot that is free since
    driver.step(prefill=(driver.chunk(row, 5),))
    keeper = driver.prefix(TOKENS[:70])  # in the places that are
    before = driver.engine.read_kv(keeper.id)
    driver.prefill(row)
    driver.step(deactivate=(keeper.id,))
    driver.step(activate=(keeper.id,))
    assert np.array_equal(driver.engine.read_kv(keeper.id), before)
    driver.close(keeper, row)


def test_reading_what_is_not_active_shows(kind: Kind) -> None:
    """T18: the slabs of a form that was dropped are poisoned, and a copy of its page is refused."""
    driver = Driver(engine_with(kind, 60))
    prefix, whole = driver.prefix(TOKENS[:70]), driver.prefix(TOKENS[:128])
    driver.step(deactivate=(prefix.id, whole.id))
    with pytest.raises(EngineFault, match="not finite"):
        driver.request(whole, TOKENS[128:130])
    with pytest.raises(EngineFault, match=r"page \d+ is read or copied but not active"):
        driver.request(prefix, TOKENS[70:72])


# ---- little memory


def crowd(driver: Driver) -> list[Held]:
    """Nine idle prefixes of two pages, three of which fit in a slab; every second goes: some slabs are partly full."""
    held = []
    for i in range(9):
        held.append(driver.prefix(TOKENS[i : i + 20], loops=1))
        driver.step(deactivate=(held[-1].id,))
    driver.close(*held[::2])
    assert driver.engine.limits.pages_per_active == 3 and held_pages(driver) == (0, 8)
    return held[1::2]


def drawn_of(driver: Driver, held: list[Held]) -> list[Drawn]:
    """Each made active, read and dropped."""
    drawn = []
    for prefix in held:
        driver.step(activate=(prefix.id,))
        drawn.append(driver.alone(prefix, TOKENS[100:103], 3, loops=1))
        driver.step(deactivate=(prefix.id,))
    return drawn


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many stored pages were moved by each `take` that moved some."""
    counts: list[int] = []
    take = SlabPool.take

    def counted(self: SlabPool, count: int) -> Any:
        slabs, moved = take(self, count)
        counts.extend([len(moved)] if moved else [])
        return slabs, moved

    monkeypatch.setattr(SlabPool, "take", counted)
    return counts


def test_room_is_made_by_moving_what_is_stored(kind: Kind, moves: list[int]) -> None:
    """Ten slabs, of which the stored pages leave four or five free; a request takes six."""
    driver = Driver(engine_with(kind, 10))
    staying = crowd(driver)
    expected = drawn_of(driver, staying)
    assert not moves
    row = driver.request(None, TOKENS[:100])
    assert len(moves) == 1
    driver.close(row)
    assert drawn_of(driver, staying) == expected
    driver.close(*staying)
    assert held_pages(driver) == (0, 0)


def lose_a_plan(driver: Driver, says: str) -> None:
    """The request of the test above, in a plan that fails; then it is closed, as the scheduler does."""
    row = driver.open(sampling=GREEDY, prompt=TOKENS[:100])
    chunk = driver.chunk(row, 100)
    plan = Plan(
        900, open=tuple(driver._open), extend=tuple(driver._extend), prefill=(chunk,), decode=(row.id,), num_steps=99
    )
    driver._open, driver._extend = [], []
    with pytest.raises(EngineFault, match=says):
        driver.engine.submit(plan if says.startswith("sequence") else replace(plan, decode=(), num_steps=1))
    driver.close(row)


def test_a_plan_that_fails_before_it_is_launched_owes_its_moves(kind: Kind, moves: list[int]) -> None:
    driver = Driver(engine_with(kind, 10))
    staying = crowd(driver)
    expected = drawn_of(driver, staying)
    lose_a_plan(driver, r"sequence \d+ has pages for 128 tokens")
    assert len(moves) == 1
    assert held_pages(driver) == (0, 8)
    assert drawn_of(driver, staying) == expected
    driver.close(*staying)
    assert held_pages(driver) == (0, 0)


class FailingDevice(EmulatedDevice):  # type: ignore[misc]
    """Refuses the next launch of one kernel."""

    refused = ""

    def launch(self, kernel: Any, *args: Any, **options: Any) -> None:
        if kernel.name == self.refused:
            self.refused = ""
            raise RuntimeError("refused")
        super().launch(kernel, *args, **options)


def test_a_plan_that_fails_while_it_is_launched_has_moved(moves: list[int]) -> None:
    device = FailingDevice()
    driver = Driver(engine_with("emulated", 10, device))
    staying = crowd(driver)
    expected = drawn_of(driver, staying)
    device.refused = "fill"
    lose_a_plan(driver, "refused")
    assert len(moves) == 1 and not device.refused
    assert drawn_of(driver, staying) == expected
    driver.close(*staying)
    assert held_pages(driver) == (0, 0)


def test_slabs_of_a_plan_in_flight_are_the_next_one_s() -> None:
    """On a device that runs nothing before somebody waits."""

    def story(driver: Driver) -> list[Held]:
        staying = crowd(driver)[:2]
        rows = []
        for prefix in staying:
            driver.step(activate=(prefix.id,))
            rows.append(driver.request(prefix, TOKENS[100:103], sampling=HOT, loops=1))
            driver.decode(rows[-1:], 4, at_once=2)
            driver.close(rows[-1])
            driver.step(deactivate=(prefix.id,))
            driver.close(driver.request(None, TOKENS[:100], sampling=HOT))
        return rows

    driver = Driver(engine_with("emulated", 10))
    late = Driver(LateEngine(engine_with("emulated", 10, EmulatedDevice(deferred=True))))  # type: ignore[arg-type]
    rows, late_rows = story(driver), story(late)
    late.engine.settle()  # type: ignore[attr-defined]
    assert [late.drawn[row.id] for row in late_rows] == [driver.drawn[row.id] for row in rows]


# ---- by the scheduler


async def answer(scheduler: Scheduler, name: str) -> tuple[int, ...]:
    builder = CompletionBuilder(1)
    async with scheduler.generate(GenerationRequest((5,), 2, prefix=name)) as stream:
        async for outputs in stream:
            builder.add(outputs)
    return builder.completion().choices[0].token_ids


@pytest.mark.parametrize(("mode", "most"), [(CacheMode.H_FP16, 6), (CacheMode.H_INT8, 9)])
async def test_memory_holds_as_many_prefixes_as_slabs_promise(kind: Kind, mode: CacheMode, most: int) -> None:
    """Twelve slabs: all prefixes stored beside the active form of one.  Each answers in turn, as active forms come and
    go; an empty service has all its memory back."""
    engine = engine_with(kind, 12, mode=mode)
    layers, per_slab = engine.limits.cache_layers(2), engine.limits.pages_per_active
    assert most == (12 - layers) * per_slab // layers
    answering = ((12 - 2 * layers) * per_slab - layers) // layers  # one is read; a request has a block, in both forms
    scheduler = Scheduler(engine, SchedulerSettings())
    await scheduler.start()
    for i in range(most + 1):
        if i == answering:
            answers = [await answer(scheduler, f"p{n}") for n in range(answering)]
            assert await answer(scheduler, "p0") == answers[0]
            assert scheduler.load().prefixes_ready == answering
        await scheduler.create_prefix(PrefixDefinition(TOKENS[i : i + PAGE]), name=f"p{i}")
    load = scheduler.load()
    assert (load.prefixes_ready, load.prefixes_evicted) == (most, 1), "one more than there is room for"
    for i in range(most + 1):
        scheduler.delete_prefix(f"p{i}")
    assert scheduler.load().pages_free == engine.limits.num_pages
    await scheduler.create_prefix(PrefixDefinition(TOKENS[:PAGE]), name="last")  # closes are told with the next plan
    assert (engine._pages.num_active, engine._pages.num_stored) == (layers, layers)
    await scheduler.close()


@pytest.mark.parametrize("mode", sorted(H_MODES))
def test_memory_for_less_than_a_block_is_refused_with_what_it_takes(mode: CacheMode) -> None:
    slab = page_bytes(CacheMode.FP16, PLAIN)
    need = 3 + -(-3 // (slab // page_bytes(mode, PLAIN)))  # three layers: read, and stored
    with pytest.raises(InvalidArgument, match=f"64 tokens alone take {need * slab}"):
        engine_with("emulated", need - 1, mode=mode)
    limits = engine_with("emulated", need, mode=mode).limits
    assert limits.num_pages >= 3 + limits.active_pages(0, PAGE, 2)
