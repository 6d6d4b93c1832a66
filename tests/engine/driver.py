"""A small scheduler for engine tests: hands out pages, builds plans, collects tokens.

It drives any engine, plans one operation at a time, or whatever a test asks to run together, and checks nothing but its
own page counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engines import ReadableEngine

from tinyloop_service.engine.api import (
    PAGE_TOKENS,
    Clone,
    Drop,
    Extend,
    Open,
    Plan,
    Prefill,
    Restore,
    SequenceId,
    StepResult,
)
from tinyloop_service.types import Sampling, TokenIds, TokenLogprob

Drawn = list[tuple[int, TokenLogprob | None]]
GREEDY = Sampling(logprobs=3)


@dataclass
class Held:
    id: SequenceId
    parent: Held | None
    loops: int
    window: int
    start: int
    length: int
    tokens: TokenIds  # the whole prompt
    blocks: dict[int, tuple[int, ...]] = field(default_factory=dict)  # absolute index → page ids
    end: int | None = None


class Driver:
    def __init__(self, engine: ReadableEngine, *, loops: int = 2) -> None:
        """loops: of every sequence for which a test does not ask for others."""
        self.engine, self.loops, self._limits = engine, loops, engine.limits
        self._free = list(range(engine.limits.num_pages))
        self._released: list[int] = []
        self._dropped: list[int] = []  # by the plan in the making, which may still read them
        self._next, self._number = 0, 0
        self._open: list[Open] = []
        self._extend: list[Extend] = []
        self._clone: list[Clone] = []
        self.drawn: dict[SequenceId, Drawn] = {}

    def step(self, **fields: object) -> StepResult:
        """Run a plan of `fields` and what was opened since the last one."""
        self._number += 1
        plan = Plan(
            self._number,
            released=tuple(self._released),
            open=tuple(self._open),
            extend=tuple(self._extend),
            clone=tuple(self._clone),
            **fields,  # type: ignore[arg-type]
        )
        self._released, self._dropped = self._dropped, []
        self._free.extend(self._released)
        self._open, self._extend, self._clone = [], [], []
        result = self.engine.step(plan)
        for row in result.rows:
            logprobs = row.logprobs or (None,) * len(row.tokens)
            self.drawn.setdefault(row.seq, []).extend(zip(row.tokens, logprobs, strict=True))
        return result

    def open(
        self,
        parent: Held | None = None,
        *,
        loops: int | None = None,
        window: int = 0,
        sampling: Sampling | None = None,
        prompt: TokenIds = (),
        max_tokens: int | None = None,
        stop_tokens: TokenIds = (),
    ) -> Held:
        self._next += 1
        start = parent.length if parent else 0
        loops = loops or self.loops
        held = Held(self._next, parent, loops, window, start, start, (parent.tokens if parent else ()) + prompt)
        told = held.tokens if sampling and sampling.repetition_penalty != 1 else ()
        end = None if max_tokens is None else len(held.tokens) + max_tokens - 1
        opened = Open(held.id, parent.id if parent else None, start, loops, window, sampling, told)
        self._open.append(opened._replace(end=end, stop_tokens=stop_tokens))
        held.end = end
        return held

    def room(self, held: Held, end: int) -> None:
        """Pages up to position `end`; the first of them cloned where the parent ends inside a page."""
        first = held.start // PAGE_TOKENS
        missing = range(max(held.blocks, default=first - 1) + 1, -(-end // PAGE_TOKENS))
        for i in missing:
            held.blocks[i] = tuple(self._free.pop() for _ in range(self._limits.cache_layers(held.loops)))
        if missing:
            self._extend.append(Extend(held.id, tuple(held.blocks[i] for i in missing)))
        if held.parent and held.start % PAGE_TOKENS and first in missing:
            self._clone.append(Clone(held.id, held.parent.blocks[first], held.blocks[first], held.start % PAGE_TOKENS))

    def chunk(self, held: Held, size: int) -> Prefill:
        """The next `size` tokens of the prompt."""
        self.room(held, held.length + size)
        tokens = held.tokens[held.length : held.length + size]
        prefill = Prefill(held.id, held.length, tokens, len(held.tokens) - held.length - size)
        held.length += size
        return prefill

    def prefill(self, held: Held, chunk: int | None = None) -> None:
        """The rest of the prompt, `chunk` tokens at a time, at most the engine's."""
        chunk = min(chunk or self._limits.max_chunk, self._limits.max_chunk)
        while held.length < len(held.tokens):
            self.step(prefill=(self.chunk(held, min(chunk, len(held.tokens) - held.length)),), drop=self._drops(held))

    def _drops(self, held: Held) -> tuple[Drop, ...]:
        """Own blocks that no later token reads go back; the one that may grow on stays."""
        first = max(0, held.length - held.window + 1) // PAGE_TOKENS if held.window else 0
        first = min(first, max(held.blocks, default=0))
        gone = [i for i in held.blocks if i < first]
        for i in gone:
            self._dropped.extend(held.blocks.pop(i))
        return (Drop(held.id, first),) if gone else ()

    def _give_back(self, block: tuple[int, ...]) -> None:
        self._free.extend(block)
        self._released.extend(block)

    def prefix(self, tokens: TokenIds, parent: Held | None = None, *, chunk: int | None = None, **options: int) -> Held:
        held = self.open(parent, prompt=tokens, **options)  # type: ignore[arg-type]
        self.prefill(held, chunk)
        return held

    def restored(self, state: object, tokens: TokenIds, parent: Held | None = None, **options: int) -> Held:
        """A prefix of `tokens` whose state was saved."""
        held = self.open(parent, prompt=tokens, **options)  # type: ignore[arg-type]
        held.length = len(held.tokens)
        self.room(held, held.length)
        self._clone.clear()  # it is among the state
        self.step(restore=(Restore(held.id, held.length, state),), activate=(held.id,))
        return held

    def request(
        self,
        parent: Held | None,
        tokens: TokenIds = (),
        *,
        sampling: Sampling = GREEDY,
        chunk: int | None = None,
        **options: int | TokenIds | None,
    ) -> Held:
        """Open a request and draw its first token."""
        held = self.open(parent, sampling=sampling, prompt=tokens, **options)  # type: ignore[arg-type]
        if tokens:
            self.prefill(held, chunk)
        else:
            self.step(first=(held.id,))
        return held

    def decode(self, rows: list[Held], steps: int = 1, *, at_once: int = 1) -> None:
        """`at_once` steps a plan, as far as the engine takes so many."""
        while steps:
            now = min(steps, at_once, self._limits.max_steps)
            steps -= now
            for held in rows:
                held.length = held.length + now if held.end is None else min(held.length + now, held.end)
                self.room(held, held.length)
            drops = tuple(drop for held in rows for drop in self._drops(held))
            self.step(decode=tuple(held.id for held in rows), num_steps=now, drop=drops)

    def close(self, *held: Held) -> None:
        for h in held:
            for block in h.blocks.values():
                self._give_back(block)
        self.step(close=tuple(h.id for h in held))

    def alone(self, parent: Held | None, tokens: TokenIds, steps: int, **options: object) -> Drawn:
        """What a request draws with nobody else there."""
        held = self.request(parent, tokens, **options)  # type: ignore[arg-type]
        self.decode([held], steps)
        self.close(held)
        return self.drawn.pop(held.id)
