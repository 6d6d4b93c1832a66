"""The host's half of the CUDA engine: tables of prompts and of pages, and the order of computation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulation.device import EmulatedDevice
from test_cuda_splits import Chains
from test_small_cases import PLAIN

from tinyloop_service.engine.api import Extend, Prefill
from tinyloop_service.engine.cuda.batch import (
    Span,
    prompt_tables,
    prompt_tiles,
    tile_order,
)
from tinyloop_service.engine.cuda.engine import MAX_ROWS
from tinyloop_service.engine.cuda.memory import MOST_SLOTS
from tinyloop_service.engine.cuda.schedule import schedule_of
from tinyloop_service.engine.cuda.staging import Staging
from tinyloop_service.engine.cuda.weights import DeviceBlock, DeviceModel
from tinyloop_service.engine.spec import ModelSpec
from tinyloop_service.settings import MOST_PREFIXES, SchedulerSettings


def test_tiles_of_a_chunk() -> None:
    chains = Chains()
    sequence = chains.open(0, window=9)
    slot = sequence.slot
    assert prompt_tiles([Span(sequence, 100, 50, 130)]) == [
        (slot, 100, 64, 50, 9, 0), (slot, 164, 64, 114, 9, 0), (slot, 228, 2, 178, 9, 0)
    ]  # fmt: skip


def test_suffixes_off_one_parent_share_tiles() -> None:
    """Not those with another window, nor off a parent without a whole block, nor one alone."""
    chains = Chains(slots=10)
    parent, short = chains.open(130), chains.open(20)
    wide = [chains.open(130, parent) for _ in range(3)]
    narrow, alone = chains.open(130, parent, window=70), chains.open(50)
    below = [chains.open(20, short) for _ in range(2)]
    spans, row = [], 0
    for sequence in sorted([*wide, narrow, alone, *below], key=tile_order):
        count = 30 if sequence in wide else 5
        spans.append(Span(sequence, row, sequence.length, count))
        row += count
    tiles = prompt_tiles(spans)
    own = [(s.sequence.slot, s.row, 5, s.position, s.sequence.window, 0) for s in spans if s.sequence not in wide]
    first = next(s for s in spans if s.sequence in wide)
    shared = [(first.sequence.slot, first.row, 64, 0, 0, 2), (first.sequence.slot, first.row + 64, 26, 0, 0, 2)]
    assert sorted(tiles) == sorted(own + shared)


def test_tables_of_a_pass() -> None:
    """One after the other: ids, slots, positions, tiles; many short chunks have empty tiles before theirs."""
    chains = Chains()
    sequences = [chains.open(0) for _ in range(3)]
    slots = [sequence.slot for sequence in sequences]
    spans = [Span(sequences[0], 0, 5, 70), Span(sequences[1], 70, 0, 2), Span(sequences[2], 72, 9, 1)]
    tables, num_tiles = prompt_tables(spans, np.arange(100, 173, dtype=np.int32).tobytes(), 128)
    ids, where, positions = tables[: 3 * 128].reshape(3, 128).tolist()
    assert num_tiles == 4 and tables.size == 3 * 128 + 6 * 4
    assert ids == [*range(100, 173), *[0] * 55]
    assert where == [*[slots[0]] * 70, *[slots[1]] * 2, slots[2], *[-1] * 55]
    assert positions == [*range(5, 75), 0, 1, 9, *[0] * 55]
    assert np.array_equal(tables[3 * 128 :].reshape(4, 6), prompt_tiles(spans))
    tables, num_tiles = prompt_tables(spans[1:], bytes(12), 64)
    assert num_tiles == 2
    tables, num_tiles = prompt_tables([*spans, Span(sequences[1], 73, 2, 3)], bytes(4 * 76), 128)
    assert num_tiles == 8 and tables[3 * 128 : -30].tolist() == [0] * 18


def test_pages_of_several_sequences_are_written_at_once() -> None:
    chains = Chains()
    first, second = chains.open(64), chains.open(0)
    blocks = Extend(first.id, ((5, 6), (7, 8))), Extend(second.id, ((9, 10, 11),))  # 2 and 3 layers of at most 4
    written = chains.table.extend(blocks)[0].tolist()
    places = [(first.slot, 0, 1), (first.slot, 1, 1), (first.slot, 0, 2), (first.slot, 1, 2)]
    places += [(second.slot, layer, 0) for layer in range(3)]
    at = [(slot * 4 + layer) * 10 + block for slot, layer, block in places]
    assert written == [list(pair) for pair in zip(at, range(5, 12), strict=True)]
    assert chains.table.extend([])[0].shape == (0, 2)
    with pytest.raises(AssertionError, match=r"sequence 1 grows to block 10"):
        chains.table.extend([Extend(first.id, ((0, 0),) * 8)])


@pytest.mark.parametrize(
    ("start", "count", "filled"), [(0, 256, "1234"), (0, 255, "123"), (1, 255, "234"), (70, 57, ""), (70, 130, "3")]
)
def test_pages_that_a_chunk_fills_need_no_zeros(start: int, count: int, filled: str) -> None:
    chains = Chains()
    chunked, other = chains.open(0), chains.open(0)
    blocks = tuple((10 * block, 10 * block + 1) for block in range(1, 5))
    extensions = Extend(chunked.id, blocks[:1]), Extend(other.id, ((7, 8),)), Extend(chunked.id, blocks[1:])
    chunk = Prefill(chunked.id, start, (0,) * count, num_left=1)
    pages, unfilled = chains.table.extend(extensions, [chunk])
    assert unfilled.tolist() == [page for page in pages[:, 1].tolist() if page < 10 or str(page // 10) not in filled]


def test_pages_that_no_chunk_fills_need_zeros() -> None:
    chains = Chains()
    pages, unfilled = chains.table.extend([Extend(chains.open(0).id, ((1, 2), (3, 4)))])
    assert pages[:, 1].tolist() == unfilled.tolist() == [1, 2, 3, 4]


def test_slots_come_back_and_run_out() -> None:
    chains = Chains()
    held = [chains.open(0) for _ in range(8)]
    with pytest.raises(AssertionError, match="8 sequences are open; keep fewer prefixes"):
        chains.open(0)
    assert chains.table.close(held[3].id) is held[3] and chains.table.close(99) is None
    chains.next = 99
    assert chains.open(0).slot == held[3].slot


def folds(spec: ModelSpec, loops: int) -> list[tuple[Any, ...]]:
    """Every fold as (post, loop, inject, gain), gains by name."""
    blocks = {}
    for kind, count in (("pre", spec.pre_blocks), ("loop", spec.loop_blocks), ("post", spec.post_blocks)):
        for i in range(count):
            names = [f"{kind}{i}.{name}" for name in ("attn", "mlp", "attn_post", "mlp_post")]
            post = names[2:] if spec.norm_placement == "sandwich" else [None, None]
            blocks[kind, i] = DeviceBlock(*names[:2], *post, *(None,) * 4)  # type: ignore[arg-type]
    nothing: Any = None
    schedule = schedule_of(DeviceModel(spec, nothing, "norm", *(nothing,) * 3, blocks), loops)  # type: ignore[arg-type]
    pairs = [fold for layer in schedule.layers for fold in (layer.before_attention, layer.before_mlp)]
    return [(fold.post, fold.loop, fold.inject, fold.gain) for fold in (*pairs, schedule.final)]


def test_the_schedule_of_a_plain_model() -> None:
    gains = ["pre0.attn", "pre0.mlp", "loop0.attn", "loop0.mlp", "loop0.attn", "loop0.mlp", "norm"]
    assert folds(PLAIN, 2) == [(None, None, "none", gain) for gain in gains]


def test_the_schedule_with_every_switch() -> None:
    spec = replace(PLAIN, norm_placement="sandwich", loop_norm=True, inject="add", loop_blocks=2, post_blocks=1)
    assert folds(spec, 2)[::2] == [  # before attention, and the final one
        (None, None, "none", "pre0.attn"),
        ("pre0.mlp_post", None, "store", "loop0.attn"),
        ("loop0.mlp_post", None, "none", "loop1.attn"),
        ("loop1.mlp_post", "norm", "add", "loop0.attn"),
        ("loop0.mlp_post", None, "none", "loop1.attn"),
        ("loop1.mlp_post", "norm", "none", "post0.attn"),
        ("post0.mlp_post", None, "none", "norm"),
    ]


def test_the_last_loop_s_norm_is_the_final_one() -> None:
    assert folds(replace(PLAIN, loop_norm=True), 2)[-3::2] == [
        (None, "norm", "none", "loop0.attn"),
        (None, None, "none", "norm"),
    ]


def test_injection_without_pre_blocks() -> None:
    assert folds(replace(PLAIN, pre_blocks=0, inject="add"), 2)[:3:2] == [
        (None, None, "store", "loop0.attn"),
        (None, None, "add", "loop0.attn"),
    ]


@pytest.mark.parametrize("first", [1, 31, 64, 65, 129, 1000])
def test_staged_tables_come_whole_however_large(first: int) -> None:
    """Whatever size one table makes the memory grow to, there is a place behind it for the next."""
    device = EmulatedDevice()
    staging = Staging(device, 64)
    tables = [np.arange(size, dtype=np.int32) for size in (first, 0, 7, 200)]
    for _ in range(2):
        staging.clear()
        sections = [(staging.put(table), staging.put_aside(table[::-1].copy())) for table in tables]
        staging.send()
        for (section, aside), table in zip(sections, tables, strict=True):
            assert np.array_equal(device.download(staging.there(section)), table)
            target = device.zeros((aside.size + 1,), np.int32)
            staging.copy_to(target, aside)
            assert device.download(target).tolist() == [*table[::-1], 0]


def test_there_are_tables_for_all_that_a_scheduler_may_open() -> None:
    """Prefixes, rows, and what several rows of a request have in common."""
    assert MOST_SLOTS >= MOST_PREFIXES + 2 * MAX_ROWS
    SchedulerSettings(max_prefixes=MOST_PREFIXES)
