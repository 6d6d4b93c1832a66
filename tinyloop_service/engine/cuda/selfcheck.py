"""The promise, tried on this device with this model before it serves: does a row get the same bits whatever stands
beside it?

    products    prompt rows in matrices of every padded size, at their beginning, middle and end.  A product gets so
                many rows that cuBLAS adds in one order only, or another way to the same bits that is quicker, or
                one fixed size (`products.py`)
    rows        requests off one prefix in batches of every padded size, against the smallest that they were in

In: an engine that is ready but for this.  Out: nothing, or an EngineFault that says which promise this device breaks.
"""

from __future__ import annotations

import time
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
_REPEATS, _TRIALS = 3, 5  # of a product that is timed
_STEPS = 2
_LEAST_SEQ_LEN = 2 + _STEPS  # a prefix and a suffix of one token each, and those steps
_PREFIX = -1  # sequence ids below zero are nobody else's
_FIRST_ROW = -2


class Engine(Protocol):
    @property
    def limits(self) -> Limits: ...

    def step(self, plan: Plan) -> StepResult: ...


def check_products(device: Device, prompt: PromptPass, schedule: Schedule) -> None:
    """Finds how many rows each product is given at least, and cheaper ways for fewer; raises EngineFault."""
    blocks = {id(layer.block): layer.block for layer in schedule.layers}.values()
    counts = range(ROW_MULTIPLE, prompt.max_rows + 1, ROW_MULTIPLE)
    for kind in prompt.kinds:
        trial = _Trial(device, prompt, kind, [prompt.weight(kind, block) for block in blocks])
        least = least_rows({rows: trial.bits(rows) for rows in counts})
        if least is not None:
            prompt.products.set_least(kind, least)
            for rows, (given, way) in trial.ways(least).items():
                prompt.products.set_way(kind, rows, given, way)
            continue
        prompt.products.set_tiles(kind)
        if least_rows({rows: trial.bits(rows) for rows in (ROW_MULTIPLE, FIXED_ROWS, prompt.max_rows)}) is None:
            raise EngineFault("self-check: a row of a matrix product depends on its place on this device")


class _Trial:
    """One product of the pass, of the same few rows again and again."""

    def __init__(self, device: Device, prompt: PromptPass, kind: ProductKind, weights: list[Array]) -> None:
        """weights: of different blocks, for times that a cache of one of them does not flatter."""
        self._device, self._prompt, self._kind, self._weights = device, prompt, kind, weights
        repeats = prompt.max_rows // ROW_MULTIPLE
        some = np.random.default_rng(0).standard_normal((ROW_MULTIPLE, weights[0].shape[1])).astype(np.float16)
        self._x = device.upload(np.tile(some, (repeats, 1)))
        self._ids = device.upload(np.zeros(prompt.max_rows, np.int32))

    def bits(self, rows: int, way: object | None = None) -> list[bytes]:
        """Of the first rows' product at the beginning, in the middle and at the end of `rows` rows."""
        out, accumulate = self._prompt.target(self._kind)
        if accumulate:
            self._prompt.begin(self._ids)  # something to add to
        if way is None:
            products = self._prompt.products
            products.multiply(self._kind, self._x, self._weights[0], out, rows, accumulate=accumulate)
        else:
            self._multiply(self._weights[0], rows, way)
        places = (0, rows // ROW_MULTIPLE // 2 * ROW_MULTIPLE, rows - ROW_MULTIPLE)
        return [self._device.download(out[at : at + _COMPARED]).tobytes() for at in places]

    def ways(self, least: int) -> dict[int, tuple[int, object]]:
        """For passes of fewer rows than `least`: of how many rows, and in which way, their product takes the least time
        with the bits of `least` rows; none where nothing is quicker than that."""
        if least == ROW_MULTIPLE:
            return {}
        out, _ = self._prompt.target(self._kind)
        expected, found = set(self.bits(least)), {}
        best: tuple[float, int, object] = (self._time(least, None), least, None)
        for rows in range(least - ROW_MULTIPLE, 0, -ROW_MULTIPLE):
            for way in self._device.ways(self._x[:rows], self._weights[0], out[:rows]):
                if set(self.bits(rows, way)) == expected:
                    best = min(best, (self._time(rows, way), rows, way), key=lambda timed: timed[0])
            if best[2] is not None:
                found[rows] = best[1:]
        return found

    def _multiply(self, weight: Array, rows: int, way: object | None) -> None:
        out, accumulate = self._prompt.target(self._kind)
        self._device.gemm(self._x[:rows], weight, out[:rows], accumulate=accumulate, way=way)

    def _time(self, rows: int, way: object | None) -> float:
        """Seconds of a few of them, one after the other: the least of some trials."""

        def products() -> None:
            for weight in self._weights * _REPEATS:
                self._multiply(weight, rows, way)

        graph = self._device.capture(products)
        graph.launch()
        times = []
        for _ in range(_TRIALS):
            self._device.synchronize()
            began = time.perf_counter()
            graph.launch()
            self._device.synchronize()
            times.append(time.perf_counter() - began)
        return min(times)


def check_rows(engine: Engine, row_counts: tuple[int, ...]) -> None:
    """Batches of every padded size, as far as there are pages for them; raises EngineFault."""
    check = _RowCheck(engine)
    if not check.has_pages(0) or engine.limits.max_seq_len < _LEAST_SEQ_LEN:
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
