"""The seam between scheduler and engines: `submit(plan) -> pending`, `pending.result() -> result`.

A *sequence* is the engine's only object: a prefix and a request are both one.  It hangs from at most one
parent sequence, reads the parent's first `start` tokens through it, and owns the pages from there on.  The
scheduler decides which page ids a sequence owns; the engine owns what lies in them, the last token, the
length and the sampling state of each sequence.  So a plan can name a row whose last token is still on the
device, and one plan may be submitted while another runs.  Plans run strictly in the order of submission, from
one thread; within a plan the operations run in the order of its fields.

A plan may fail in `submit` or in `result`, and may then have run in part: a later one repeats its closes and
deactivations, and may close sequences that were never opened; engines ignore those.  One that failed in `submit` has
nothing submitted behind it.  One that failed in `result` may: what was submitted behind it runs, its lost sequences
stay open until they are closed, and what is read from them means nothing.

    open ──► extend pages, clone the parent's partial page ──► prefill chunks ──► decode steps ──► close

Pages: one page holds 64 tokens of one cache layer.  A *block* is the page ids of one 64-token stretch, one per
cache layer of the sequence (`Limits.cache_layers(loops)`), in layer order.  Block i of a sequence covers
absolute positions 64·i … 64·i+63.  A sequence with `start` inherited tokens reads its parents' blocks below
`start // 64` and owns those from `start // 64` on; when `start % 64` tokens of the first own block are
inherited, a Clone copies them.

This file refuses to know how an engine computes, and what a name, a tenant or a stream is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tinyloop_service.types import CacheMode, Sampling, TokenIds, TokenLogprob

PAGE_TOKENS = 64
MAX_STOP_TOKENS = 15  # of one sequence, that every engine looks for
SequenceId = int
Block = tuple[int, ...]  # page ids, one per cache layer


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine offers; constant over its life."""

    model_id: str
    vocab_size: int
    default_loops: int
    max_loops: int
    max_seq_len: int
    pre_blocks: int
    loop_blocks: int
    post_blocks: int
    eos_token_ids: TokenIds
    cache_mode: CacheMode
    num_pages: int
    page_bytes: int  # stored bytes of one page
    max_rows: int  # sequences decoded in one step
    max_chunk: int  # prompt tokens of one plan, over all its prefills
    max_steps: int  # decode steps of one plan
    busy_steps: int = 1  # of them, while somebody waits for the next plan; several where a step is short
    goes_on: int = 0  # a row may decode in the plan that draws its first token, if at most so many decode in all
    least_chunk: int = PAGE_TOKENS  # prompt tokens of one plan, below which fewer cost hardly less
    split_tokens: int = PAGE_TOKENS  # the fixed length of an attention split, a multiple of PAGE_TOKENS
    active_page_bytes: int = 0  # of a page in the form that is read, where that is not the stored one; else 0
    snapshot_id: str = ""  # names all that saved state depends on beside model and mode; empty: none can be saved
    pages_per_active: int = (
        0  # stored pages that fit where an active one lies; 0: memory has no such rooms, bytes count
    )

    @property
    def has_active_form(self) -> bool:
        return self.active_page_bytes > 0

    def cache_layers(self, loops: int) -> int:
        return self.pre_blocks + loops * self.loop_blocks + self.post_blocks

    def own_blocks(self, start: int, end: int) -> int:
        """Blocks that a sequence owns to hold positions start … end−1, its copy of a partial page included."""
        return -(-end // PAGE_TOKENS) - start // PAGE_TOKENS if end > start else 0

    def active_pages(self, start: int, end: int, loops: int) -> int:
        """Pages of budget that the active form of positions start … end−1 occupies, rounded out to splits."""
        if not self.active_page_bytes:
            return 0
        splits = -(-end // self.split_tokens) - start // self.split_tokens if end > start else 0
        pages = splits * (self.split_tokens // PAGE_TOKENS) * self.cache_layers(loops)
        return pages * self.pages_per_active or -(-pages * self.active_page_bytes // self.page_bytes)


class Open(NamedTuple):  # one for each row, as are Extend and RowOutput, and quickly made
    """A new sequence.  `sampling` None: a prefix; its last prefill keeps the logits of its last token.

    A request *ends* by itself, in the middle of a plan if need be: with the token drawn for position `end`, or with the
    first that is one of `stop_tokens`.  It then takes no more steps, whatever plans ask for, until it is closed.
    """

    seq: SequenceId
    parent: SequenceId | None
    start: int  # tokens read through the parent; equals the parent's length
    loops: int
    cache_window: int  # 0: all
    sampling: Sampling | None
    prompt: TokenIds = ()  # every prompt token, the parents' included; given when repetition_penalty ≠ 1
    first_block: int | None = None  # of its own, where it is restored and slides; None: start // 64
    end: int | None = None  # of a request: the position of its last token, which is never stored; None: there is none
    stop_tokens: TokenIds = ()  # of a request; engines may look for the first MAX_STOP_TOKENS alone

    @property
    def first_own_block(self) -> int:
        """Absolute index of the block that its first Extend brings."""
        return self.start // PAGE_TOKENS if self.first_block is None else self.first_block


class Extend(NamedTuple):
    """Blocks appended to the sequence's own table.  Their pages are zeroed as they are taken, but
    for those that a prefill of the same plan may fill."""

    seq: SequenceId
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Clone:
    """Copy the first `num_tokens` tokens of every page of block `source` to block `target`."""

    seq: SequenceId
    source: Block
    target: Block
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Fill a prefix's own pages, and its kept logits, with what they were when they were saved: in place of all its
    prefills and drops, and of a Clone.  With a window its pages begin with the first that a later token reads."""

    seq: SequenceId
    length: int  # absolute, from then on
    state: object  # of a `Saved` of an engine with the same `snapshot_id`, model and mode


@dataclass(frozen=True, slots=True)
class Prefill:
    """Append prompt tokens."""

    seq: SequenceId
    start: int  # absolute position of tokens[0]; equals the sequence's length
    tokens: TokenIds
    num_left: int = 0  # prompt tokens that later plans bring

    @property
    def last(self) -> bool:
        """Sample a request's first token, or keep a prefix's logits."""
        return not self.num_left


@dataclass(frozen=True, slots=True)
class Drop:
    """Own blocks below absolute block index `first_block` fell out of the window and were given back."""

    seq: SequenceId
    first_block: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One unit of work.  Fields are carried out from top to bottom.

    A sequence appears in at most one of `first`, `prefill` and `decode`; but where the engine `goes_on`, one that draws
    its first token may be in `decode` as well, and takes the steps behind it.  Decode rows may hang from any mix of
    prefixes and have any mix of loops; every one of them takes `num_steps` steps, or as many as there are before it
    ends (`Open`), and needs pages for those that its `end` lets it take.
    """

    number: int
    close: tuple[SequenceId, ...] = ()  # forget; their pages are already someone else's to take, and what plans in
    # flight still draw for them means nothing: who wants it waits for it first
    released: tuple[int, ...] = ()  # page ids given back since the last plan (poisoned in debug)
    deactivate: tuple[SequenceId, ...] = ()  # drop these active forms
    save: tuple[SequenceId, ...] = ()  # copy the state of these prefixes, built by earlier plans
    open: tuple[Open, ...] = ()
    extend: tuple[Extend, ...] = ()
    clone: tuple[Clone, ...] = ()
    restore: tuple[Restore, ...] = ()
    activate: tuple[SequenceId, ...] = ()  # make the active form of these prefixes, parents before children; a prefix
    # that is being built is named by the plan that opens it; a request's own pages are active from open to close
    first: tuple[SequenceId, ...] = ()  # sample the first token from the parent's kept logits (empty suffix)
    prefill: tuple[Prefill, ...] = ()
    decode: tuple[SequenceId, ...] = ()  # rows: feed the last sampled token, sample the next
    num_steps: int = 1  # decode steps, back to back
    drop: tuple[Drop, ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prefill.tokens) for prefill in self.prefill)

    def going_on(self) -> set[SequenceId]:
        """Rows that draw their first token and decode."""
        return {*self.first, *(prefill.seq for prefill in self.prefill)}.intersection(self.decode)

    def sequences(self) -> set[SequenceId]:
        """Every sequence whose state this plan advances; all of them fail if the step does."""
        named = {o.seq for o in self.open} | {e.seq for e in self.extend} | {c.seq for c in self.clone}
        return named | {p.seq for p in self.prefill} | {*self.first, *self.decode, *self.activate}


class RowOutput(NamedTuple):
    """Tokens sampled for one sequence, in order; logprobs are parallel to tokens or empty."""

    seq: SequenceId
    tokens: TokenIds
    logprobs: tuple[TokenLogprob, ...] = ()


def joined(outputs: Iterable[RowOutput]) -> tuple[RowOutput, ...]:
    """Those of one sequence, which follow one another, as one."""
    rows: dict[SequenceId, RowOutput] = {}
    for output in outputs:
        seq, tokens, logprobs = output
        before = rows.get(seq)
        rows[seq] = output if before is None else RowOutput(seq, before.tokens + tokens, before.logprobs + logprobs)
    return tuple(rows.values())


@dataclass(frozen=True, slots=True)
class Saved:
    """A copy of a prefix's own pages and its kept logits: name → array of bytes, for files and for `Restore`."""

    seq: SequenceId
    state: object


@dataclass(frozen=True, slots=True)
class StepResult:
    """One RowOutput for every `first`, every `last` prefill of a request, and every decode row that had not ended; one
    of all its tokens for a row that began and went on.  One Saved for every `save`."""

    rows: tuple[RowOutput, ...]
    saved: tuple[Saved, ...] = ()

    def rows_by_step(self, plan: Plan) -> tuple[int, ...]:
        """Sequences that took part in each step of `plan`, which this came of; prompt tokens are fed in the first.

        Steps behind the last that anybody took are left out: engines need not run them.
        """
        decoded, begun, fed = {*plan.decode}, plan.going_on(), len(plan.first) + len(plan.prefill)
        steps = Counter(len(row.tokens) - (row.seq in begun) for row in self.rows if row.seq in decoded)
        num_steps = max(steps, default=0) or bool(fed)
        rows = (sum(count for taken, count in steps.items() if taken > step) for step in range(num_steps))
        return tuple(count + fed * (step == 0) for step, count in enumerate(rows))

    def took_every_step(self, plan: Plan) -> bool:
        """Some row did; where every one has ended, the engine need not have run what was left, and took no time."""
        decoded, begun = {*plan.decode}, plan.going_on()
        taken = (len(row.tokens) - (row.seq in begun) for row in self.rows if row.seq in decoded)
        return any(count == plan.num_steps for count in taken)


class Pending(Protocol):
    """A plan that was submitted."""

    def result(self) -> StepResult:
        """Wait for what it gave.  Raises as `Engine.step`.  Any thread may call, one at a time, and again."""
        ...


@dataclass(frozen=True, slots=True)
class Finished:
    """The `Pending` of an engine that computes in `submit`."""

    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome


class Engine(Protocol):
    """Not thread-safe: one thread calls `submit`.  Construction includes warm-up and self-check."""

    @property
    def limits(self) -> Limits: ...

    @property
    def name(self) -> str:
        """Short label for logs and GetModel, for example "cpu"."""
        ...

    def submit(self, plan: Plan) -> Pending:
        """Hand `plan` over; it runs after all that were submitted before.  Raises as `step`."""
        ...

    def step(self, plan: Plan) -> StepResult:
        """Run `plan`: submit it and wait.  Raises EngineFault (the plan's sequences are lost) or DeviceLost (all)."""
        ...

    def close(self) -> None: ...
