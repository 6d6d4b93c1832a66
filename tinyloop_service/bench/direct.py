"""An engine driven by hand: prefills and decode steps with nothing between, through `engine.step(plan)`."""

from __future__ import annotations

import itertools
import time
from typing import Any

from tinyloop_service.bench.workload import Progress, Samples, Workload
from tinyloop_service.engine.api import PAGE_TOKENS, Block, Clone, Engine, Extend, Open, Plan, Prefill, SequenceId
from tinyloop_service.types import Sampling, TokenIds


class Direct:
    """Drives an engine with plans of its own making; pages are handed out in order and all taken back by `clear`."""

    PREFIX: SequenceId = 1

    def __init__(self, engine: Engine, loops: int) -> None:
        self.engine = engine
        self.loops = loops
        self.layers = engine.limits.cache_layers(loops)
        self._plans = itertools.count(1)
        self.pages_taken = 0  # by all that is open
        self._prefix_pages = 0
        self._open: list[SequenceId] = []
        self._last_block: Block = ()

    def prefill(self, tokens: TokenIds) -> float:
        """Build the prefix; milliseconds over all its plans."""
        blocks = self._take_blocks(self.engine.limits.own_blocks(0, len(tokens)))
        self._last_block = blocks[-1]
        self._open.append(self.PREFIX)
        opened = Open(self.PREFIX, None, 0, self.loops, 0, None)
        begins: dict[str, Any] = {"open": (opened,), "extend": (Extend(self.PREFIX, blocks),)}
        if self.engine.limits.has_active_form:
            begins["activate"] = (self.PREFIX,)
        size, elapsed = self.engine.limits.max_chunk, 0.0
        for start in range(0, len(tokens), size):
            chunk = Prefill(self.PREFIX, start, tokens[start : start + size], len(tokens[start + size :]))
            elapsed += self._step(Plan(next(self._plans), prefill=(chunk,), **begins))
            begins = {}
        return elapsed

    def activate(self) -> float:
        """Drop the prefix's active form and make it again from its pages; milliseconds of the making."""
        self._step(Plan(next(self._plans), deactivate=(self.PREFIX,)))
        return self._step(Plan(next(self._plans), activate=(self.PREFIX,)))

    def open_rows(self, length: int, count: int, room: int) -> tuple[SequenceId, ...]:
        """`count` requests off the prefix of `length` tokens, `room` own positions each, their first token sampled."""
        limits = self.engine.limits
        self._prefix_pages = self.pages_taken
        rows = tuple(range(self.PREFIX + 1, self.PREFIX + 1 + count))
        own = {seq: self._take_blocks(limits.own_blocks(length, length + room)) for seq in rows}
        partial = length % PAGE_TOKENS
        self._open.extend(rows)
        self._step(
            Plan(
                next(self._plans),
                open=tuple(Open(seq, self.PREFIX, length, self.loops, 0, Sampling()) for seq in rows),
                extend=tuple(Extend(seq, own[seq]) for seq in rows),
                clone=tuple(Clone(seq, self._last_block, own[seq][0], partial) for seq in rows if partial),
                first=rows,
            )
        )
        return rows

    def decode(self, rows: tuple[SequenceId, ...], steps: int) -> float:
        """Milliseconds of one decode step, of a plan of `steps`."""
        return self._step(Plan(next(self._plans), decode=rows, num_steps=steps)) / steps

    def close_rows(self) -> None:
        """Close what `open_rows` opened; the prefix stays."""
        released = tuple(range(self._prefix_pages, self.pages_taken))
        self._step(Plan(next(self._plans), close=tuple(self._open[1:]), released=released))
        self._open, self.pages_taken = self._open[:1], self._prefix_pages

    def clear(self) -> None:
        """Close every sequence, children first, and take all pages back."""
        released = tuple(range(self.pages_taken))
        self._step(Plan(next(self._plans), close=tuple(reversed(self._open)), released=released))
        self._open, self.pages_taken = [], 0

    def _step(self, plan: Plan) -> float:
        start = time.perf_counter()
        self.engine.step(plan)
        return (time.perf_counter() - start) * 1e3

    def _take_blocks(self, count: int) -> tuple[Block, ...]:
        first, total = self.pages_taken, self.engine.limits.num_pages
        self.pages_taken += count * self.layers
        if self.pages_taken > total:
            raise ValueError(f"{self.pages_taken} pages needed, the pool has {total}; give more with --kv-memory")
        return tuple(tuple(range(page, page + self.layers)) for page in range(first, self.pages_taken, self.layers))


def measure_prefill(direct: Direct, tokens: TokenIds, rounds: int, progress: Progress) -> list[float]:
    times = []
    for index in range(rounds):
        progress(f"prefill of {len(tokens)} tokens, {index + 1} of {rounds}")
        times.append(direct.prefill(tokens))
        direct.clear()
    return times


def measure_activation(direct: Direct, tokens: TokenIds, rounds: int, progress: Progress) -> list[float]:
    """Of a prefix that is stored; nothing where the stored form is what is read."""
    if not direct.engine.limits.has_active_form:
        return []
    progress("a prefix to make active")
    direct.prefill(tokens)
    times = [direct.activate() for _ in range(rounds + 1)]
    direct.clear()
    return times[1:]


def measure_steps(direct: Direct, tokens: TokenIds, workload: Workload, progress: Progress) -> Samples:
    """Steps per number of rows, one row always: the prediction needs it.  A shape's first plan is not counted.

    Rows are closed when they have as many tokens as the workload asks for, and opened again.
    """
    progress("a prefix to decode from")
    direct.prefill(tokens)
    at_once = min(workload.steps_at_once, workload.new_tokens)
    num_plans = workload.new_tokens // at_once
    times: Samples = {}
    for count in sorted({1, *workload.rows}):
        progress(f"decode steps of {count} row{'s' * (count > 1)}")
        samples: list[float] = []
        while len(samples) <= workload.steps:
            rows = direct.open_rows(len(tokens), count, room=num_plans * at_once)
            samples += [direct.decode(rows, at_once) for _ in range(num_plans)]
            direct.close_rows()
        times[str(count)] = samples[1:]
    direct.clear()
    return times
