"""A fake engine: fast, deterministic, and strict about the plan contract.

In: plans.  Out: tokens that follow from every token a sequence can see, read *through its pages*: an entry of each
token is stored where the scheduler said, and a wrong, stale or foreign page gives other tokens, or a `PlanViolation`.
There is no arithmetic of a model in it; `fake_tokens` has what there is.

Knobs for tests: `gate` holds every step, `fault` may fail a plan before it ran, after, or in its result, `step_s`
sleeps, `next_token` overrides what is sampled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from tinyloop_service.engine.api import (
    PAGE_TOKENS,
    Clone,
    Drop,
    Extend,
    Finished,
    Limits,
    Open,
    Pending,
    Plan,
    Prefill,
    RowOutput,
    Saved,
    SequenceId,
    StepResult,
    joined,
)
from tinyloop_service.engine.fake_state import Pages, PlanViolation, Sequence, require, restore_state, save_state
from tinyloop_service.engine.fake_tokens import MASK, NO_TOKENS, draw, draw_logprob, expected_tokens, mix
from tinyloop_service.errors import DeviceLost, EngineFault
from tinyloop_service.types import CacheMode, TokenLogprob

__all__ = ["FAKE_LIMITS", "FakeEngine", "FaultAt", "expected_tokens"]

FAKE_LIMITS = Limits(
    model_id="fake",
    vocab_size=512,
    default_loops=2,
    max_loops=16,
    max_seq_len=2048,
    pre_blocks=1,
    loop_blocks=1,
    post_blocks=0,
    eos_token_ids=(0,),
    cache_mode=CacheMode.FP16,
    num_pages=4096,
    page_bytes=65536,
    max_rows=64,
    max_chunk=256,
    max_steps=8,
    snapshot_id="fake",
)


class FaultAt(Enum):
    """Where a plan fails.  After START and END its sequences are gone; after RESULT they are there until closed."""

    START = "start"  # in submit, nothing has run
    END = "end"  # in submit, all has run
    RESULT = "result"


@dataclass(frozen=True, slots=True)
class _Failed:
    error: EngineFault

    def result(self) -> StepResult:
        raise self.error


class FakeEngine:
    """`strict`: read every visible entry at every step, so that a page lost later shows too; slower."""

    def __init__(
        self,
        limits: Limits = FAKE_LIMITS,
        *,
        strict: bool = False,
        step_s: float = 0.0,
        gate: threading.Event | None = None,
        fault: Callable[[Plan], EngineFault | None] | None = None,
        fault_at: FaultAt = FaultAt.START,
        next_token: Callable[[Open, int, int], int] | None = None,
    ) -> None:
        self._limits = limits
        self._strict = strict
        self._step_s = step_s
        self._gate = gate
        self._fault = fault
        self._fault_at = fault_at
        self._next_token = next_token
        self._sequences: dict[SequenceId, Sequence] = {}
        self._has_lost = False  # from then on a close may name what is gone or never came
        self._pages = Pages(limits.num_pages)
        self._active: set[SequenceId] = set()
        self._last_plan = 0
        self.num_steps = 0
        self.tokens_prefilled = 0
        self.is_closed = False

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def name(self) -> str:
        return "fake"

    def submit(self, plan: Plan) -> Pending:
        if self._gate is not None:
            self._gate.wait()
        if self._step_s:
            time.sleep(self._step_s)
        require(not self.is_closed, "a step after close")
        require(plan.number > self._last_plan, f"plan {plan.number} after {self._last_plan}")
        self._last_plan = plan.number
        self.num_steps += 1
        error = self._fault(plan) if self._fault is not None else None
        if error is not None and self._fault_at is FaultAt.START:
            self._lose(plan, error)
        result = self._run(plan)
        if error is None:
            return Finished(result)
        if self._fault_at is FaultAt.END:
            self._lose(plan, error)
        self._has_lost = True
        return _Failed(error)

    def step(self, plan: Plan) -> StepResult:
        return self.submit(plan).result()

    def close(self) -> None:
        self.is_closed = True

    def check_idle(self, num_sequences: int = 0) -> None:
        """Nothing is left but `num_sequences` prefixes."""
        require(len(self._sequences) == num_sequences, f"{len(self._sequences)} sequences are open")
        require(self._pages.owners <= self._sequences.keys(), "pages of closed sequences are held")

    # ---- one plan, in the order of its fields

    def _run(self, plan: Plan) -> StepResult:
        self._check_size(plan)
        for seq in plan.close:
            self._close(seq)
        for page in plan.released:
            self._pages.release(page)
        for seq in plan.deactivate:
            self._sequence(seq)
            self._active.discard(seq)
        saved = tuple(Saved(seq, save_state(self._sequence(seq), self._pages)) for seq in plan.save)
        for opened in plan.open:
            self._open(opened)
        for extend in plan.extend:
            self._extend(extend)
        for clone in plan.clone:
            self._clone(clone)
        for restore in plan.restore:
            restore_state(self._sequence(restore.seq), self._pages, restore)
        for seq in plan.activate:
            self._activate(seq)
        rows = [self._first(seq) for seq in plan.first]
        rows += [output for prefill in plan.prefill if (output := self._prefill(prefill)) is not None]
        rows += [self._decode(seq, plan.num_steps) for seq in plan.decode if not self._sequence(seq).has_ended]
        for drop in plan.drop:
            self._drop(drop)
        return StepResult(joined(rows), saved)

    def _check_size(self, plan: Plan) -> None:
        limits = self._limits
        begun = {*plan.first, *(prefill.seq for prefill in plan.prefill if prefill.last)}
        begun = begun if len(plan.decode) <= limits.goes_on else set()
        parts = [*plan.first, *(p.seq for p in plan.prefill), *(seq for seq in plan.decode if seq not in begun)]
        require(len(set(parts)) == len(parts), "a sequence takes part twice")
        require(len(plan.decode) <= limits.max_rows, f"{len(plan.decode)} rows")
        require(sum(len(p.tokens) for p in plan.prefill) <= limits.max_chunk, "a chunk that is too large")
        require(1 <= plan.num_steps <= limits.max_steps, f"{plan.num_steps} steps")

    def _close(self, seq: SequenceId) -> None:
        sequence = self._sequences.pop(seq, None)
        require(sequence is not None or self._has_lost, f"sequence {seq} is closed but not open")
        hanging = [s.opened.seq for s in self._sequences.values() if sequence is not None and s.parent is sequence]
        require(not hanging, f"sequence {seq} is closed under {hanging}")
        self._active.discard(seq)
        if sequence is not None:
            for block in sequence.blocks:
                self._pages.disown(block)

    def _open(self, opened: Open) -> None:
        require(opened.seq not in self._sequences, f"sequence {opened.seq} is open")
        parent = self._sequence(opened.parent) if opened.parent is not None else None
        require(opened.start == (parent.length if parent is not None else 0), "start is not the parent's length")
        require(1 <= opened.loops <= self._limits.max_loops, f"{opened.loops} loops")
        penalised = opened.sampling is not None and opened.sampling.repetition_penalty != 1.0
        seen = frozenset(opened.prompt) if penalised else NO_TOKENS
        self._sequences[opened.seq] = Sequence(opened, parent, opened.start, opened.first_own_block, seen=seen)

    def _extend(self, extend: Extend) -> None:
        sequence = self._sequence(extend.seq)
        for block in extend.blocks:
            layers = self._limits.cache_layers(sequence.opened.loops)
            require(len(block) == layers, f"a block of {len(block)} pages for {layers} layers")
            self._pages.take(block, extend.seq)
            sequence.blocks.append(block)

    def _clone(self, clone: Clone) -> None:
        sequence = self._sequence(clone.seq)
        parent, start = sequence.parent, sequence.opened.start
        require(parent is not None and clone.num_tokens == start % PAGE_TOKENS > 0, "a clone of the wrong size")
        assert parent is not None
        require(clone.target == sequence.blocks[0] and sequence.length == start, "a clone into the wrong block")
        require(bool(parent.blocks) and clone.source == parent.blocks[-1], "a clone of the wrong block")
        source = parent.block_entries(start // PAGE_TOKENS, self._pages)
        self._pages.entries(clone.target).extend(source[: clone.num_tokens])

    def _activate(self, seq: SequenceId) -> None:
        sequence = self._sequence(seq)
        require(sequence.opened.sampling is None, f"sequence {seq} is no prefix")
        require(self._limits.has_active_form, "this engine has no active form")
        if sequence.parent is not None:
            self._require_active(sequence.parent)
        self._active.add(seq)

    def _first(self, seq: SequenceId) -> RowOutput:
        sequence = self._sequence(seq)
        parent = sequence.parent
        require(parent is not None and parent.kept is not None, f"sequence {seq} has no kept logits to start from")
        assert parent is not None and parent.kept is not None
        require(sequence.length == sequence.opened.start, f"sequence {seq} has begun")
        self._require_active(parent)
        return self._output(sequence, parent.kept)

    def _prefill(self, prefill: Prefill) -> RowOutput | None:
        sequence = self._sequence(prefill.seq)
        require(prefill.start == sequence.length, f"prefill at {prefill.start} of {sequence.length}")
        require(bool(prefill.tokens), "an empty prefill")
        require(sequence.kept is None and sequence.last_token is None, "a prefill after the last one")
        self._require_active(sequence if sequence.opened.sampling is None else sequence.parent)
        entry = 0
        for token in prefill.tokens:
            entry = self._append(sequence, token)
        self.tokens_prefilled += len(prefill.tokens)
        if not prefill.last:
            return None
        if sequence.opened.sampling is None:
            sequence.kept = entry
            return None
        return self._output(sequence, entry)

    def _decode(self, seq: SequenceId, num_steps: int) -> RowOutput:
        sequence = self._sequence(seq)
        self._require_active(sequence.parent)
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        for _ in range(num_steps):
            if sequence.last_token is None:
                raise PlanViolation(f"sequence {seq} decodes before its first token")
            tokens.append(self._sample(sequence, self._append(sequence, sequence.last_token), logprobs))
            if sequence.has_ended:
                break
        return RowOutput(seq, tuple(tokens), tuple(logprobs))

    def _drop(self, drop: Drop) -> None:
        sequence = self._sequence(drop.seq)
        count = drop.first_block - sequence.first_block
        require(0 < count <= len(sequence.blocks), f"a drop below block {drop.first_block}")
        for block in sequence.blocks[:count]:
            self._pages.disown(block)
        del sequence.blocks[:count]
        sequence.first_block = drop.first_block

    # ---- tokens and pages

    def _append(self, sequence: Sequence, token: int) -> int:
        """Store one token where the scheduler said; its entry."""
        position, opened = sequence.length, sequence.opened
        total = sequence.total
        if total is None or self._strict or opened.cache_window:
            total = sequence.visible_sum(self._pages)
        index = position // PAGE_TOKENS - sequence.first_block
        if not 0 <= index < len(sequence.blocks):
            raise PlanViolation(f"sequence {opened.seq} has no block for position {position}")
        if not 0 <= token < self._limits.vocab_size:
            raise PlanViolation(f"token {token} is outside the vocabulary")
        entry = mix(total & MASK, token, position, opened.loops)
        entries = self._pages.entries(sequence.blocks[index])
        if len(entries) != position % PAGE_TOKENS:
            raise PlanViolation(f"position {position} does not follow what is stored")
        entries.append(entry)
        sequence.total, sequence.length = total + entry, position + 1
        return entry

    def _output(self, sequence: Sequence, entry: int) -> RowOutput:
        logprobs: list[TokenLogprob] = []
        token = self._sample(sequence, entry, logprobs)
        return RowOutput(sequence.opened.seq, (token,), tuple(logprobs))

    def _sample(self, sequence: Sequence, entry: int, logprobs: list[TokenLogprob]) -> int:
        """The next token after `entry`; its logprob is appended where one was asked for."""
        sampling, vocab_size = sequence.opened.sampling, self._limits.vocab_size
        if sampling is None:
            raise PlanViolation(f"sequence {sequence.opened.seq} is a prefix and samples nothing")
        token = draw(entry, sampling, sequence.seen, vocab_size)
        if self._next_token is not None:
            token = self._next_token(sequence.opened, sequence.length, token)
        sequence.last_token = token
        if sampling.repetition_penalty != 1.0:
            sequence.seen |= {token}
        if sampling.logprobs:
            logprobs.append(draw_logprob(entry, token, sampling.logprobs, vocab_size))
        return token

    def _sequence(self, seq: SequenceId) -> Sequence:
        sequence = self._sequences.get(seq)
        if sequence is None:
            raise PlanViolation(f"sequence {seq} is not open")
        return sequence

    def _require_active(self, sequence: Sequence | None) -> None:
        while self._limits.has_active_form and sequence is not None:
            require(sequence.opened.seq in self._active, f"sequence {sequence.opened.seq} is read but not active")
            sequence = sequence.parent

    def _lose(self, plan: Plan, error: EngineFault) -> None:
        """The plan's sequences are gone, and with a lost device all are; their pages hold nothing that can be read."""
        lost = set(self._sequences) if isinstance(error, DeviceLost) else plan.sequences()
        for sequence in list(self._sequences.values()):  # opened in order, parents first
            if sequence.parent is not None and sequence.parent.opened.seq in lost:
                lost.add(sequence.opened.seq)
        for seq in lost:
            sequence_lost = self._sequences.pop(seq, None)
            for block in sequence_lost.blocks if sequence_lost is not None else ():
                self._pages.disown(block)
        self._has_lost = True
        self._active -= lost
        raise error
