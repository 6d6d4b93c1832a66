"""State of prefixes saved from and restored to the CUDA engine's memory, wherever in it their pages lie.

In emulation, and the same on a GPU.  Through the scheduler and files: `test_snapshots.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from driver import Driver, Held
from emulated import HOT, TOKENS
from emulation.device import EmulatedDevice
from engines import Kind
from test_cuda_engine import LateEngine
from test_cuda_h_modes import crowd, engine_with
from test_cuda_modes import KINDS, shared_engine

from tinyloop_service.engine.api import Open, Plan, Restore
from tinyloop_service.engine.cache_modes import H_MODES, fields_of
from tinyloop_service.errors import EngineFault
from tinyloop_service.kernels import page_layout
from tinyloop_service.types import CacheMode

MODES = [CacheMode.FP16, CacheMode.INT8, CacheMode.H_INT8]  # of those that store h one; they differ in sizes alone
State = dict[str, Any]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=MODES)
def driver(request: pytest.FixtureRequest, kind: Kind) -> Driver:
    return Driver(shared_engine(kind, "plain", request.param))


def saved(driver: Driver, *held: Held, **fields: object) -> list[State]:
    """Of each, by a plan of `fields` that saves them too."""
    result = driver.step(save=tuple(each.id for each in held), **fields)
    assert [each.seq for each in result.saved] == [each.id for each in held]
    return [each.state for each in result.saved]  # type: ignore[misc]


def equal(state: State, other: State) -> bool:
    return all(np.array_equal(state[part], other[part]) for part in ("pages", "logits"))


def test_what_was_saved_is_read_again_bit_for_bit(driver: Driver) -> None:
    """A prefix and a child that begins inside a page, saved while a row decodes, then in other pages, out of order."""
    engine: Any = driver.engine
    mother = driver.prefix(TOKENS[:150])
    child = driver.prefix(TOKENS[150:200], mother)
    expected = [driver.alone(held, TOKENS[200:203], 4, sampling=HOT) for held in (mother, child)]
    read = [(engine.read_kv(held.id), engine.read_logits(held.id)) for held in (mother, child)]
    row = driver.request(mother, TOKENS[200:203], sampling=HOT)
    driver.room(row, row.length + 4)
    row.length += 4
    states = saved(driver, mother, child, decode=(row.id,), num_steps=4)
    assert driver.drawn[row.id] == expected[0]
    driver.close(row, child, mother)
    others = [driver.prefix(TOKENS[i : i + 30]) for i in range(4)]
    driver.close(*others[::2])
    mother = driver.restored(states[0], TOKENS[:150])
    child = driver.restored(states[1], TOKENS[150:200], mother)
    for held, (kv, logits), drawn in zip((mother, child), read, expected, strict=True):
        assert np.array_equal(engine.read_kv(held.id), kv)
        assert np.array_equal(engine.read_logits(held.id), logits)
        assert driver.alone(held, TOKENS[200:203], 4, sampling=HOT) == drawn
    assert all(map(equal, saved(driver, mother, child), states)), "and can be saved again"
    driver.close(*others[1::2], child, mother)


@pytest.mark.parametrize("mode", [CacheMode.FP16, CacheMode.H_INT8])
def test_state_is_of_the_moment_of_its_plan(mode: CacheMode) -> None:
    """On a device that runs nothing before somebody waits; the next plan gives the prefix's memory to others."""

    def story(driver: Driver) -> list[State]:
        prefix = driver.prefix(TOKENS[:70])
        states = [driver.step(save=(prefix.id,)).saved]
        driver.close(prefix)
        states.append(driver.step(prefill=(driver.chunk(driver.open(prompt=TOKENS[90:220]), 130),)).saved)
        return [each.state for found in states for each in found]  # type: ignore[misc]

    at_once = story(Driver(engine_with("emulated", 16, mode=mode)))
    late = LateEngine(engine_with("emulated", 16, EmulatedDevice(deferred=True), mode))
    states: list[State] = []
    submit = late.step
    late.step = lambda plan: keep(submit(plan), states)  # type: ignore[method-assign]
    story(Driver(late))  # type: ignore[arg-type]
    late.settle()
    assert len(states) == 1 and equal(states[0], at_once[0])


def keep(result: Any, states: list[State]) -> Any:
    states.extend(each.state for each in result.saved)
    return result


def test_state_is_found_where_the_plan_moves_it() -> None:
    """A request takes the slabs that stored pages are moved out of, in the very plan that saves those."""
    driver = Driver(engine_with("emulated", 10))
    staying = crowd(driver)
    expected = saved(driver, *staying)
    row = driver.open(sampling=HOT, prompt=TOKENS[:100])
    states = saved(driver, *staying, prefill=(driver.chunk(row, 100),))
    assert all(map(equal, states, expected))
    driver.close(row, *staying)


def test_nothing_lies_behind_the_last_token(driver: Driver) -> None:
    """What others left in a page is not written to files."""
    driver.close(driver.prefix(TOKENS[:128]))
    prefix = driver.prefix(TOKENS[130:140])
    (state,) = saved(driver, prefix)
    driver.close(prefix)
    mode = driver.engine.limits.cache_mode
    spec = driver.engine._machine.spec  # type: ignore[attr-defined]
    axes = (64,) if mode in H_MODES else (2, 64)  # one head: K and V
    if mode is CacheMode.INT8:
        levels, scales = state["pages"][..., :-256], state["pages"][..., -256:]
        parts = [levels.reshape(-1, 2, 64, 64)[:, 0], scales.reshape(-1, 2, 64, 2)]  # K's levels; V's are in octets
    elif mode is CacheMode.FP16:
        parts = [state["pages"].reshape(-1, *axes, 128)[:, 0]]
    else:
        sizes = np.cumsum([64 * field.num_bytes for field in fields_of(mode, spec)])
        parts = [part.reshape(-1, 64, part.shape[-1] // 64) for part in np.split(state["pages"], sizes[:-1], axis=-1)]
    for part in parts:
        assert part[..., :10, :].any() and not part[..., 10:, :].any()


def test_other_state_is_refused_and_costs_its_own_sequence_alone(driver: Driver) -> None:
    prefix = driver.prefix(TOKENS[:70])
    (state,) = saved(driver, prefix)
    for wrong in (
        {**state, "pages": state["pages"][:1]},
        {**state, "logits": state["logits"][2:]},
        {"pages": state["pages"]},
        None,
    ):
        with pytest.raises(
            EngineFault, match=r"saved state of .*, expected \{'pages': \(2, 3, \d+\), 'logits': \(128,\)\}"
        ):
            driver.restored(wrong, TOKENS[:70])
        driver._open, driver._extend = [], []
        lost = driver._next
        driver.step(close=(lost,))
    expected = driver.alone(prefix, TOKENS[70:72], 3)
    again = driver.restored(state, TOKENS[:70])
    assert driver.alone(again, TOKENS[70:72], 3) == expected
    driver.close(prefix, again)


def test_what_cannot_be_saved_or_restored(driver: Driver) -> None:
    row = driver.request(None, TOKENS[:3])
    with pytest.raises(EngineFault, match=f"sequence {row.id} is no prefix, or not built"):
        driver.step(save=(row.id,))
    with pytest.raises(EngineFault, match="sequence 999 has pages for 0 tokens, 3 are written"):
        driver.engine.step(Plan(900, open=(Open(999, None, 0, 2, 0, None),), restore=(Restore(999, 3, {}),)))
    driver.step(close=(999,))
    driver.close(row)


def test_what_state_is_of_says_how_pages_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """So state of another layout, device or weights is refused by whoever keeps it."""
    before = engine_with("emulated", 16).limits.snapshot_id
    assert "emulated, numpy" in before
    monkeypatch.setattr(page_layout, "VERSION", page_layout.VERSION + 1)
    assert engine_with("emulated", 16).limits.snapshot_id != before
