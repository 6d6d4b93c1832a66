"""Every kernel that an engine launches in a mode, in as few launches as reach them: for a sanitizer, under which each
takes hundreds of times as long (`sanitize.sh`).

A walk off two prefixes, without the engine's self-check, which launches nothing else.
That it reaches all that `tests/engine/test_small_cases.py` does is checked without a GPU, on a device that runs
nothing: every kernel in every variant, and every pair of which the second may start while the first one ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import test_small_cases as small
from driver import GREEDY, Driver
from emulation.device import EmulatedDevice
from engines import make_engine, weights_of
from test_small_cases import HOT, SPECS, TOKENS

from tinyloop_service.engine.cuda import CudaEngine
from tinyloop_service.engine.cuda import engine as cuda_engine
from tinyloop_service.types import CacheMode

OPTIONS: dict[str, Any] = {"kv_memory": 8 << 20, "row_counts": (1, 8), "max_chunk": 256}
LOOPS = {"int4": 1, "fp16, every switch": 2}  # the switches do something else in a second one
in_every_mode = pytest.mark.parametrize("mode", CacheMode, ids=lambda mode: mode.value)


@pytest.fixture(autouse=True)
def _no_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("check_products", "check_rows"):
        monkeypatch.setattr(cuda_engine, name, lambda *_: None)


def walk(driver: Driver) -> None:
    """Requests off two prefixes and off none, with and without tokens of their own, in one plan; then a step of all
    of them while a child of a partly filled prefix is built, and steps of one alone."""
    full, windowed = driver.open(prompt=TOKENS[:70]), driver.open(window=33, prompt=TOKENS[:64])
    driver.step(prefill=(driver.chunk(full, 40), driver.chunk(windowed, 64)))
    driver.step(prefill=(driver.chunk(full, 30),))
    if driver.engine.limits.has_active_form:
        driver.step(deactivate=(full.id, windowed.id))
        driver.step(activate=(windowed.id, full.id))
    asked = [(full, 0, GREEDY, 0), (full, 3, HOT, 0), (windowed, 1, GREEDY, 33), (None, 5, HOT, 0)]
    rows = [
        driver.open(parent, sampling=sampling, window=window, prompt=TOKENS[80 : 80 + suffix])
        for parent, suffix, sampling, window in asked
    ]
    chunks = tuple(driver.chunk(row, suffix) for row, (_, suffix, _, _) in zip(rows, asked, strict=True) if suffix)
    driver.step(first=(rows[0].id,), prefill=chunks)
    build = driver.open(full, prompt=TOKENS[100:110])
    chunk = driver.chunk(build, 10)
    for row in rows:
        driver.room(row, row.length + 1)
        row.length += 1
    driver.step(prefill=(chunk,), decode=tuple(row.id for row in rows))
    driver.decode(rows[:1], 2, at_once=2)
    assert [len(driver.drawn[row.id]) for row in rows] == [4, 2, 2, 2]
    driver.close(*rows, build, full, windowed)
    driver.step()  # what was given back is poisoned by the next plan


@pytest.mark.gpu
@in_every_mode
def test_every_launch(mode: CacheMode) -> None:
    """Draws that are not finite fail it, and so does whatever the sanitizer finds."""
    for name, spec in SPECS.items():
        driver = Driver(make_engine("cuda", weights_of(spec), cache_mode=mode, **OPTIONS), loops=LOOPS[name])
        walk(driver)
        driver.engine.close()


class NotingDevice(EmulatedDevice):  # type: ignore[misc]
    """Runs no kernel, and knows which it would have run, those of graphs when these are launched."""

    def __init__(self) -> None:
        super().__init__()
        self.variants: set[tuple[object, ...]] = set()
        self.num_launches = 0
        self.overlaps: set[tuple[object, ...]] = set()
        self._last: object = None

    def empty(self, shape: Any, dtype: Any) -> Any:
        array = super().empty(shape, dtype)
        array[...] = 0
        return array

    def prepare(self, work: Callable[[], None], progress: Callable[[int, int], None] | None = None) -> None:
        pass

    def launch(self, kernel: Any, grid: tuple[int, int, int], block: int, args: Sequence[Any], **options: Any) -> None:
        variant = (kernel.source.stem, kernel.name, *sorted(kernel.defines.items()))
        if 0 not in grid:
            self.enqueue(partial(self._note, variant, options.get("dependent", False)))

    def gemm(self, *arrays: Any, **options: Any) -> None:
        self.enqueue(partial(self._note, "product", False))

    def _note(self, variant: Any, dependent: bool) -> None:
        self.variants.add(variant)
        self.num_launches += 1
        if dependent:
            self.overlaps.add((self._last, variant))
        self._last = variant


def noted(name: str, mode: CacheMode, do: Callable[[Driver], None], loops: int) -> NotingDevice:
    device = NotingDevice()
    engine = CudaEngine(weights_of(SPECS[name]), device=device, cache_mode=mode, debug=True, **OPTIONS)
    do(Driver(engine, loops=loops))
    return device


@in_every_mode
@pytest.mark.parametrize("name", SPECS)
def test_the_walk_reaches_what_small_cases_do(name: str, mode: CacheMode) -> None:
    walked = noted(name, mode, walk, LOOPS[name])
    asked = noted(name, mode, small.test_company_and_a_build_change_nothing, 2)
    assert len(asked.variants) > 20 and len(asked.overlaps) > 9
    assert asked.variants <= walked.variants
    assert asked.overlaps <= walked.overlaps
    assert walked.num_launches < asked.num_launches / 3
