"""The CPU engine as an object: its limits, what it refuses, what a failed step leaves behind, its check of itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from driver import GREEDY, Driver
from engines import engine_of, weights_of

from tinyloop_service.demo import MODEL_PATH
from tinyloop_service.engine.api import Extend, Open, Plan, Prefill
from tinyloop_service.engine.cpu import CpuEngine
from tinyloop_service.engine.cpu import rows as rows_module
from tinyloop_service.engine.cpu.attention import AttentionKernels
from tinyloop_service.engine.cpu.engine import useful_threads
from tinyloop_service.engine.cpu.rows import Fold, RowArrays, Step
from tinyloop_service.engine.cpu.runtime import Array, Kernel
from tinyloop_service.engine.cpu.selfcheck import check_attention, row_multiple
from tinyloop_service.engine.spec import SIZES, Quant
from tinyloop_service.engine.weights import read_model
from tinyloop_service.errors import EngineFault, InvalidArgument
from tinyloop_service.types import CacheMode, Sampling

SPEC = replace(
    SIZES["tiny"], vocab_size=300, d_model=64, head_dim=16, d_ff=128, pre_blocks=1, max_seq_len=512, quant=Quant(4, 32)
)
TOKENS = tuple(range(200))


def test_limits_say_what_memory_holds() -> None:
    limits = engine_of(SPEC).limits
    assert limits.page_bytes == 2 * 4 * 64 * 16 * 2  # K and V, heads, tokens, dim, fp16
    assert limits.num_pages == (256 << 20) // limits.page_bytes
    assert limits.active_pages(0, 65, 2) == 2 * 3  # two splits of three layers, as large as they are stored
    assert (limits.model_id, limits.cache_mode) == (weights_of(SPEC).model_id, CacheMode.FP16)


def test_refuses_what_it_cannot_do() -> None:
    weights = weights_of(SPEC)
    with pytest.raises(InvalidArgument, match=r"kv_memory: 1000 bytes given; 64 tokens alone take \d+"):
        CpuEngine(weights, kv_memory=1000)
    for too_much in (1 << 62, 1 << 80):  # no address space has as much
        with pytest.raises(InvalidArgument, match=f"kv_memory: {too_much} bytes given, more than this machine has"):
            CpuEngine(weights, kv_memory=too_much)
    with pytest.raises(InvalidArgument, match=r"cache_mode: h-int4 given, .* groups of 64"):
        CpuEngine(weights_of(replace(SPEC, d_model=96)), kv_memory=1 << 20, cache_mode=CacheMode.H_INT4)


def test_a_model_of_short_sequences_is_served_like_any_other() -> None:
    """Also where more rows are computed at once than a sequence has tokens."""
    drawn = []
    for length in (40, 512):
        driver = Driver(engine_of(replace(SPEC, max_seq_len=length)))
        driver.decode([driver.request(None, TOKENS[i : i + 3]) for i in range(50)], 4)
        drawn.append(driver.drawn)
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(("threads", "named"), [(1, "1 thread"), (2, "2 threads")])
def test_progress_names_the_threads(monkeypatch: pytest.MonkeyPatch, threads: int, named: str) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        "tinyloop_service.engine.cpu.engine.use_threads", lambda asked: asked
    )  # the process has its pool already
    CpuEngine(weights_of(SPEC), kv_memory=1 << 20, threads=threads, progress=said.append)
    assert said == [f"compiling and checking kernels for {named}"]


def test_a_failed_step_costs_only_its_own_sequences() -> None:
    driver = Driver(engine_of(SPEC))
    prefix = driver.prefix(TOKENS[:70])
    alone = driver.alone(prefix, TOKENS[70:72], 6)
    survivor = driver.request(prefix, TOKENS[70:72])
    driver.decode([survivor], 3)
    engine, lost = driver.engine, 999
    bad = Plan(900, open=(Open(lost, None, 0, 2, 0, GREEDY),), prefill=(Prefill(lost, 0, (1, 2)),))
    with pytest.raises(EngineFault, match="step 900 failed"):
        engine.step(bad)  # no pages were given to it
    engine.step(Plan(901, close=(lost,)))
    driver.decode([survivor], 3)
    assert driver.drawn[survivor.id] == alone


@pytest.mark.parametrize("sampling", [None, GREEDY], ids=["prefix", "request"])
def test_a_prompt_gets_its_room_with_its_first_chunk(sampling: Sampling | None) -> None:
    """To be moved with all its tokens in the middle would keep waiting who decodes beside it."""
    driver = Driver(engine_of(SPEC))
    held = driver.open(prompt=TOKENS, sampling=sampling)
    driver.step(prefill=(driver.chunk(held, 30),))
    track = driver.engine._table[held.id].track
    assert track is not None
    first = track.kv
    driver.prefill(held, chunk=30)
    assert track.kv is first and track.end == 4


def test_a_prompt_that_slides_has_no_more_room_than_it_shows() -> None:
    driver = Driver(engine_of(SPEC))
    held = driver.open(prompt=TOKENS, window=33)
    driver.step(prefill=(driver.chunk(held, 30),))
    track = driver.engine._table[held.id].track
    assert track is not None and track.end == 1


def test_a_short_chunk_across_two_splits_reads_those_before_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice would take twice as long, for who decodes in the same plan too."""
    driver = Driver(engine_of(SPEC))
    held = driver.open(prompt=TOKENS)
    driver.step(prefill=(driver.chunk(held, 120),))
    read: list[tuple[int, int]] = []  # splits and rows of the folds over one layer

    def fold_steps(kernels: object, folds: list[Fold], layer: int, rows: RowArrays, **options: bool) -> list[Step]:
        if layer == 0:
            read.extend((fold.splits.num_splits, len(rows.q)) for fold in folds)
        return rows_module.fold_steps(kernels, folds, layer, rows, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("tinyloop_service.engine.cpu.prefill.fold_steps", fold_steps)
    driver.step(prefill=(driver.chunk(held, 16),))
    assert read == [(1, 16), (1, 8)]  # the first split for all rows, then the second one for those in the third


def test_pages_given_back_are_poisoned_and_pages_taken_are_zero() -> None:
    driver = Driver(engine_of(SPEC))
    held = driver.prefix(TOKENS[:64])
    pages = held.blocks[0]
    driver.close(held)
    driver.step()
    pool = driver.engine._table.pool
    assert all(np.isnan(pool.page(page)["kv"]).all() for page in pages)
    driver.engine.step(Plan(700, open=(Open(500, None, 0, 2, 0, None),), extend=(Extend(500, (pages,)),)))
    assert not any(pool.page(page)["kv"].any() for page in pages)


def counting(multiple: int):  # type: ignore[no-untyped-def]
    """A linear that gives other bits to matrices whose rows are no multiple of `multiple`."""

    def linear(x: Array) -> Array:
        return x + np.float32(1e-7 * (len(x) % multiple > 0))

    return linear


@pytest.mark.parametrize(("kept_at", "chosen"), [(2, 2), (4, 4), (16, 16)])
def test_row_multiple_falls_back(kept_at: int, chosen: int) -> None:
    assert row_multiple([("good", 8, counting(1)), ("picky", 8, counting(kept_at))]) == chosen


def test_no_row_multiple_is_a_fault() -> None:
    with pytest.raises(EngineFault, match="self-check: the head gives a row other bits"):
        row_multiple([("the head", 8, lambda x: x + np.float32(1e-4 * len(x)))])


def test_threads_by_the_size_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinyloop_service.engine.cpu.engine.usable_cores", lambda: 8)
    assert useful_threads(read_model(MODEL_PATH).spec) == 1
    assert useful_threads(SIZES["407m"]) == 8  # 67 M weights a block: every core


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_passes_its_check(kv_heads: int) -> None:
    spec = replace(SPEC, n_kv_heads=kv_heads)
    check_attention(AttentionKernels(spec), spec)


def test_attention_that_depends_on_company_is_a_fault() -> None:

    class Sloppy(AttentionKernels):
        def fold(self, *, going_on: bool, masked: bool) -> Kernel:
            return _Nudged(super().fold(going_on=going_on, masked=masked))

    with pytest.raises(EngineFault, match="breaks a promise: 1 of 9 rows"):
        check_attention(Sloppy(SPEC), SPEC)


class _Nudged(Kernel):
    """The right kernel, one bit off for a single row."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def run(self, inputs: object, outputs: object) -> None:
        self._kernel.run(inputs, outputs)  # type: ignore[arg-type]
        if len(outputs["acc"]) == 1:  # type: ignore[index]
            outputs["acc"][:] = np.nextafter(outputs["acc"], np.inf)  # type: ignore[index]
