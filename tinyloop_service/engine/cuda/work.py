"""The host's half of a plan: bookkeeping, and every table that its launches read.

In: a `Plan`.  Out: a `Work`: where in a Staging the tables lie, and in which batches rows run.  Sequences are moved on
here, ahead of the device.  A plan that breaks the contract fails here, before anything is launched.  Refuses to know
about the device.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import numpy as np

from tinyloop_service.engine.api import PAGE_TOKENS, Plan, Prefill, Restore, SequenceId
from tinyloop_service.engine.cuda.batch import AttentionTables, Ints, Span, prompt_tables, tile_order
from tinyloop_service.engine.cuda.buffers import BatchSections
from tinyloop_service.engine.cuda.decoding import Decoder
from tinyloop_service.engine.cuda.memory import Arena
from tinyloop_service.engine.cuda.pages import Pages, StoredWork
from tinyloop_service.engine.cuda.prompt import PassShape, PromptPass
from tinyloop_service.engine.cuda.sequences import Sequence, SequenceTable
from tinyloop_service.engine.cuda.splits import SplitTables
from tinyloop_service.engine.cuda.staging import Aside, Section, Staging
from tinyloop_service.engine.cuda.states import RestoreWork, SaveWork, States
from tinyloop_service.kernels.sample import SamplerTables

T = TypeVar("T")
_NO_WORDS: Ints = np.zeros(0, np.int32)
_NONE: dict[int, Ints] = {width: np.zeros((0, width), np.int32) for width in (2, 3)}
_NO_SPLITS = AttentionTables(np.zeros((0, 6), np.int32), np.zeros((0, 2), np.int32), _NO_WORDS)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that draw together."""

    sequences: tuple[SequenceId, ...]
    logprobs: tuple[int, ...]  # wanted by each
    tables: BatchSections


@dataclass(frozen=True, slots=True)
class FirstWork:
    """Rows that draw their first token; index int32 [rows]: of what the head reads."""

    batch: Batch
    index: Section


@dataclass(frozen=True, slots=True)
class PromptWork:
    """Chunks of one depth."""

    shape: PassShape
    tables: Aside  # as PassShape.words says, and behind them rows of the pass: of those in `kept`, then of `draws`
    kept: tuple[int, ...]  # slots of prefixes that are complete
    draws: tuple[Batch, ...]  # that draw their first token


@dataclass(frozen=True, slots=True)
class DecodeWork:
    batch: Batch
    loops: int
    rows: int  # padded
    num_steps: int
    quads: bool  # among its splits


@dataclass(frozen=True, slots=True)
class Work:
    """Pages are indices into the pool."""

    saved: tuple[SaveWork, ...]
    poisoned: Section  # pages [n]
    copied: Section  # (target, source) [n, 2] rows of the page tables
    written: Section  # (index, value) [n, 2] of the arena's words; empty where a pass does it
    zeroed: Section  # pages [n]
    restored: tuple[RestoreWork, ...]
    stored: StoredWork | None
    cloned: Section  # (source, target, tokens) [n, 3]
    first: tuple[FirstWork, ...]
    prompts: tuple[PromptWork, ...]
    decode: tuple[DecodeWork, ...]


class Planner:
    """Makes the Work of one plan after the other."""

    def __init__(
        self,
        table: SequenceTable,
        pages: Pages,
        arena: Arena,
        sampler: SamplerTables,
        decoder: Decoder,
        prompt: PromptPass,
        states: States,
        *,
        debug: bool,
    ) -> None:
        self._table, self._pages, self._arena, self._sampler = table, pages, arena, sampler
        self._states = states
        self._decoder, self._prompt, self._debug = decoder, prompt, debug
        self._splits = SplitTables(decoder.takes_quads)

    def work(self, plan: Plan, staging: Staging) -> Work:
        lengths: dict[int, int] = {}  # by slot
        self._give_back(plan)
        poisoned = self._pages.take_poisoned(plan.released)  # also where nothing is poisoned: else they would add up
        copied = self._open(plan, lengths)
        extended, unfilled = self._table.extend(plan.extend, plan.prefill)
        activated = [self._table[seq] for seq in plan.activate]
        restored = [self._begin_restored(restore, lengths) for restore in plan.restore]
        changes = self._pages.change(extended, activated, restored, plan.clone, staging)
        zeroed = self._pages.find(unfilled)
        cloned = self._clones(plan)
        first = tuple(self._first(plan.first, staging))
        prompts = tuple(self._prompts(plan.prefill, lengths, staging))
        decode = tuple(self._decodes(plan.decode, plan.num_steps, staging))
        for drop in plan.drop:
            self._pages.release(self._table.drop(drop.seq, drop.first_block))
        at = self._arena.length_index
        moved = _ints([(at + slot, length) for slot, length in lengths.items()], 2)
        written = np.concatenate([changes.written, moved])
        if len(prompts) == 1 and not first and len(written) <= prompts[0].shape.rows:  # nobody reads them before
            self._prompt.written(prompts[0].shape, staging.words(prompts[0].tables))[: len(written)] = written
            written = _NONE[2]
        return Work(
            saved=tuple(self._save_work(self._table[seq]) for seq in plan.save),
            poisoned=staging.put(np.array(poisoned, np.int32) if self._debug else _NO_WORDS),
            copied=staging.put(copied),
            written=staging.put(written),
            zeroed=staging.put(zeroed),
            restored=tuple(self._restore_work(self._table[restore.seq], restore) for restore in plan.restore),
            stored=changes.stored,
            cloned=staging.put(cloned),
            first=first,
            prompts=prompts,
            decode=decode,
        )

    def begun(self) -> None:
        """The last Work's moves are queued."""
        self._pages.begun()

    def launched(self) -> None:
        """All of the last Work is."""
        self._pages.launched()

    def _give_back(self, plan: Plan) -> None:
        """What sequences that end, and active forms, had; those of failed plans may not be there."""
        for seq in plan.close:
            if (sequence := self._table.close(seq)) is not None:
                self._pages.release(sequence.blocks)
        for seq in plan.deactivate:
            if (sequence := self._table.peek(seq)) is not None:
                self._pages.deactivate(sequence)

    def _clones(self, plan: Plan) -> Ints:
        """(source, target, tokens) of every page, (n, 3)."""
        if not plan.clone:
            return _ints((), 3)
        source, target = (
            self._pages.find(np.fromiter(chain.from_iterable(getattr(clone, name) for clone in plan.clone), np.int32))
            for name in ("source", "target")
        )
        tokens = [clone.num_tokens for clone in plan.clone for _ in clone.source]
        return np.stack([source, target, np.array(tokens, np.int32)], axis=1)

    def _open(self, plan: Plan, lengths: dict[int, int]) -> Ints:
        """Rows of the page tables to copy, (n, 2)."""
        copied = []
        for opening in plan.open:
            sequence = self._table.open(opening)
            self._pages.open(sequence)
            lengths[sequence.slot] = sequence.length
            if sequence.parent is not None:
                copied.append((sequence.slot, sequence.parent.slot))
            if opening.sampling is not None:
                sequence.logprobs = min(opening.sampling.logprobs, self._sampler.vocab_size)
                self._sampler.write(
                    sequence.slot, opening.sampling, opening.prompt, end=opening.end, stop_tokens=opening.stop_tokens
                )
        return _ints(copied, 2)

    def _save_work(self, sequence: Sequence) -> SaveWork:
        assert sequence.is_prefix and sequence.has_output, f"sequence {sequence.id} is no prefix, or not built"
        last_tokens = sequence.length - (sequence.next_block - 1) * PAGE_TOKENS
        return SaveWork(sequence.id, sequence.slot, self._stored(sequence), last_tokens)

    def _begin_restored(self, restore: Restore, lengths: dict[int, int]) -> Sequence:
        sequence = self._table[restore.seq]
        assert sequence.is_prefix and sequence.length == sequence.start, f"sequence {restore.seq} has begun"
        (sequence.length,) = self._table.lengths_after([sequence], restore.length - sequence.length)
        lengths[sequence.slot] = sequence.length
        sequence.has_output = True
        return sequence

    def _restore_work(self, sequence: Sequence, restore: Restore) -> RestoreWork:
        stored = self._stored(sequence)
        return RestoreWork(sequence.slot, stored, self._states.check(restore.state, *stored.shape))

    def _stored(self, sequence: Sequence) -> Ints:
        """[blocks, layers]"""
        pages = np.array(sequence.blocks, np.int32).reshape(len(sequence.blocks), -1)
        return self._pages.find_stored(pages)

    def _first(self, rows: Iterable[SequenceId], staging: Staging) -> Iterator[FirstWork]:
        for part in _cut([self._table[seq] for seq in rows], self._decoder.max_rows):
            parents = [sequence.parent for sequence in part]
            for sequence, parent in zip(part, parents, strict=True):
                assert parent is not None and parent.has_output, f"sequence {sequence.id} has nothing to start from"
            index = np.array([parent.slot for parent in parents if parent is not None], np.int32)
            yield FirstWork(self._batch(part, _NO_SPLITS, staging), staging.put(index))

    def _prompts(self, prefills: Iterable[Prefill], lengths: dict[int, int], staging: Staging) -> Iterator[PromptWork]:
        by_loops: dict[int, list[Prefill]] = {}
        for prefill in prefills:
            by_loops.setdefault(self._table[prefill.seq].loops, []).append(prefill)
        for loops, group in by_loops.items():
            yield self._prompt_work(loops, group, lengths, staging)

    def _prompt_work(
        self, loops: int, prefills: list[Prefill], lengths: dict[int, int], staging: Staging
    ) -> PromptWork:
        """What it writes to the arena is a length, until there is more."""
        rows = self._prompt.padded(sum(len(prefill.tokens) for prefill in prefills))
        assert rows <= self._prompt.max_rows, f"{rows} prompt tokens in one plan"
        spans: list[Span] = []
        tokens = b""  # 32-bit each; packing is the fast way to them
        drawing: list[tuple[Sequence, int]] = []  # with its last row
        complete: list[tuple[Sequence, int]] = []
        at = 0
        for prefill in sorted(prefills, key=lambda prefill: tile_order(self._table[prefill.seq])):
            sequence, count = self._table[prefill.seq], len(prefill.tokens)
            assert prefill.start == sequence.length, f"sequence {prefill.seq} has {sequence.length} tokens"
            spans.append(Span(sequence, at, prefill.start, count))
            tokens += struct.pack(f"{count}i", *prefill.tokens)
            at += count
            (sequence.length,) = self._table.lengths_after([sequence], count)
            lengths[sequence.slot] = sequence.length
            if prefill.last:
                (complete if sequence.sampling is None else drawing).append((sequence, at - 1))
        for sequence, _ in complete:
            sequence.has_output = True
        tables, num_tiles = prompt_tables(spans, tokens, rows)
        shape = PassShape(rows, num_tiles, loops)
        words, aside = staging.set_aside(shape.words + len(complete) + len(drawing))
        words[: tables.size] = tables
        written = self._prompt.written(shape, words)
        written[:, 0], written[:, 1] = self._arena.length_index + sequence.slot, sequence.length
        words[shape.words :] = [row for _, row in chain(complete, drawing)]
        parts = _cut([sequence for sequence, _ in drawing], self._decoder.max_rows)
        draws = tuple(self._batch(part, _NO_SPLITS, staging) for part in parts)
        return PromptWork(shape, aside, tuple(sequence.slot for sequence, _ in complete), draws)

    def _decodes(self, rows: Iterable[SequenceId], num_steps: int, staging: Staging) -> Iterator[DecodeWork]:
        sequences = [self._table[seq] for seq in rows]
        for loops in dict.fromkeys([sequence.loops for sequence in sequences]):
            alike = [sequence for sequence in sequences if sequence.loops == loops]
            for part in _cut(alike, self._decoder.max_rows):
                lengths = self._table.lengths_after(part, num_steps)
                tables = self._splits.tables(part, lengths)
                batch = self._batch(part, tables, staging)
                for sequence, length in zip(part, lengths, strict=True):
                    sequence.length = length
                yield DecodeWork(batch, loops, self._decoder.padded(len(part)), num_steps, tables.num_quads > 0)

    def _batch(self, rows: Listed[Sequence], tables: AttentionTables, staging: Staging) -> Batch:
        sections = self._decoder.batch.stage(
            staging,
            [row.slot for row in rows],
            [row.length for row in rows],
            [row.window for row in rows],
            tables,
        )
        return Batch(tuple([row.id for row in rows]), tuple([row.logprobs for row in rows]), sections)


def _cut(items: list[T], size: int) -> Iterator[list[T]]:
    return (items[at : at + size] for at in range(0, len(items), size))


def _ints(rows: Listed[tuple[int, ...]], width: int) -> Ints:
    return np.array(rows, np.int32).reshape(-1, width) if rows else _NONE[width]
