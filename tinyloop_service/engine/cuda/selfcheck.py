"""The promise, tried on this device with this model before it serves: does a row get the same bits whatever stands
beside it?

    products    prompt rows in matrices of every padded size, at their beginning, middle and end.  A product gets so
                many rows that cuBLAS adds in one order only, or one fixed size (`products.py`)
    rows        requests off one prefix in batches of every padded size, against the smallest that they were in

In: an engine that is ready but for this.  Out: nothing, or an EngineFault that says which promise this device breaks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from tinyloop_service.engine.api import PAGE_TOKENS, Block, Clone, Extend, Limits, Open, Plan, Prefill, StepResult
from tinyloop_service.engine.cuda.products import FIXED_ROWS, ROW_MULTIPLE, ProductKind, least_rows
from tinyloop_service.engine.cuda.prompt import PromptPass
from tinyloop_service.engine.cuda.schedule import Schedule
from tinyloop_service.errors import EngineFault
from tinyloop_service.kernels.device import Array, Device
from tinyloop_service.types import MAX_LOGPROBS, Sampling

_COMPARED = 8  # rows at each place
_STEPS = 2
_PREFIX = -1  # sequence ids below zero are nobody else's
_FIRST_ROW = -2


class Engine(Protocol):
    @property
    def limits(self) -> Limits: ...

    def step(self, plan: Plan) -> StepResult: ...


def check_products(device: Device, prompt: PromptPass, schedule: Schedule) -> None:
    """Finds how many rows each product is given at least; raises EngineFault."""
    block = schedule.layers[0].block
    counts = range(ROW_MULTIPLE, prompt.max_rows + 1, ROW_MULTIPLE)
    for kind in prompt.kinds:
        trial = _Trial(device, prompt, kind, prompt.weight(kind, block))
        least = least_rows({rows: trial.bits(rows) for rows in counts})
        if least is not None:
            prompt.products.set_least(kind, least)
            continue
        prompt.products.set_tiles(kind)
        if least_rows({rows: trial.bits(rows) for rows in (ROW_MULTIPLE, FIXED_ROWS, prompt.max_rows)}) is None:
            raise EngineFault("self-check: a row of a matrix product depends on its place on this device")


class _Trial:
    """One product of the pass, of the same few rows again and again."""

    def __init__(self, device: Device, prompt: PromptPass, kind: ProductKind, weight: Array) -> None:
        self._device, self._prompt, self._kind, self._weight = device, prompt, kind, weight
        repeats = prompt.max_rows // ROW_MULTIPLE
        some = np.random.default_rng(0).standard_normal((ROW_MULTIPLE, weight.shape[1])).astype(np.float16)
        self._x = device.upload(np.tile(some, (repeats, 1)))
        self._ids = device.upload(np.zeros(prompt.max_rows, np.int32))

    def bits(self, rows: int) -> list[bytes]:
        """Of the first rows' product at the beginning, in the middle and at the end of `rows` rows."""
        out, accumulate = self._prompt.target(self._kind)
        if accumulate:
            self._prompt.begin(self._ids)  # something to add to
        self._prompt.products.multiply(self._kind, self._x, self._weight, out, rows, accumulate=accumulate)
        places = (0, rows // ROW_MULTIPLE // 2 * ROW_MULTIPLE, rows - ROW_MULTIPLE)
        return [self._device.download(out[at : at + _COMPARED]).tobytes() for at in places]


def check_rows(engine: Engine, row_counts: tuple[int, ...]) -> None:
    """Batches of every padded size, as far as there are pages for them; raises EngineFault."""
    check = _RowCheck(engine)
    if not check.has_pages(0):
        return
    check.build_prefix()
    for count in row_counts:
        if not check.has_pages(count):
            break
        for seq, drawn in check.batch(count):
            if check.known.setdefault(seq, drawn) != drawn:
                raise EngineFault(
                    f"self-check: on this device a row of a batch of {count} gets other bits than in a smaller batch"
                )
    engine.step(Plan(0, close=(_PREFIX,)))


class _RowCheck:
    def __init__(self, engine: Engine) -> None:
        self._engine, limits = engine, engine.limits
        self._loops, self._layers = limits.default_loops, limits.cache_layers(limits.default_loops)
        self._length = max(1, min(PAGE_TOKENS + 6, limits.max_seq_len - _STEPS - 2))
        self._tokens = np.random.default_rng(1).integers(0, limits.vocab_size, self._length).tolist()
        self._shared = self._length // PAGE_TOKENS  # whole blocks, that rows read through the prefix
        self._own = -(-(self._length + _STEPS + 2) // PAGE_TOKENS) - self._shared  # blocks of a row
        self.known: dict[int, object] = {}

    def has_pages(self, rows: int) -> bool:
        """For the prefix and so many rows, in the form that is read too, where that is another one."""
        limits, end = self._engine.limits, self._length + _STEPS + 2
        stored = (self._shared + 1 + rows * self._own) * self._layers
        active = limits.active_pages(0, self._length, self._loops)
        active += rows * limits.active_pages(self._length, end, self._loops)
        return stored + active <= limits.num_pages

    def build_prefix(self) -> None:
        self._engine.step(
            Plan(
                0,
                open=(Open(_PREFIX, None, 0, self._loops, 0, None),),
                extend=(Extend(_PREFIX, self._prefix_blocks()),),
                prefill=(Prefill(_PREFIX, 0, tuple(self._tokens)),),
            )
        )

    def batch(self, count: int) -> Iterator[tuple[int, object]]:
        """(sequence, everything it drew) of `count` rows, each with a suffix of one token of its own."""
        sampling, start = Sampling(logprobs=MAX_LOGPROBS), self._length
        rows = [_FIRST_ROW - i for i in range(count)]
        partial = start % PAGE_TOKENS
        tables = [self._blocks(self._shared + 1 + i * self._own, self._own) for i in range(count)]
        source = self._prefix_blocks()[-1]
        clones = [Clone(seq, source, table[0], partial) for seq, table in zip(rows, tables, strict=True)]
        began = self._engine.step(
            Plan(
                0,
                open=tuple(Open(seq, _PREFIX, start, self._loops, 0, sampling) for seq in rows),
                extend=tuple(Extend(seq, table) for seq, table in zip(rows, tables, strict=True)),
                clone=tuple(clones) if partial else (),
                prefill=tuple(Prefill(seq, start, (i % self._engine.limits.vocab_size,)) for i, seq in enumerate(rows)),
            )
        )
        went_on = self._engine.step(Plan(0, decode=tuple(rows), num_steps=_STEPS))
        self._engine.step(Plan(0, close=tuple(rows)))
        first = {row.seq: (row.tokens, row.logprobs) for row in began.rows}
        return ((row.seq, (first[row.seq], row.tokens, row.logprobs)) for row in went_on.rows)

    def _prefix_blocks(self) -> tuple[Block, ...]:
        return self._blocks(0, -(-self._length // PAGE_TOKENS))

    def _blocks(self, first: int, count: int) -> tuple[Block, ...]:
        """Blocks of the pages in order: the prefix has the first ones, then the rows."""
        starts = range(first * self._layers, (first + count) * self._layers, self._layers)
        return tuple(tuple(range(start, start + self._layers)) for start in starts)
