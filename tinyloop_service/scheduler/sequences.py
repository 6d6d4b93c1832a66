"""The scheduler's half of the engine's sequences: lengths, page tables, and prompt tokens still to be fed.

In: what a prefix or a request needs.  Out: block tables for plans.  It refuses to know names, queues and streams.

A sequence covers absolute positions start … end−1; below `start` it reads its parents.  `length` is the *planned*
length, ahead of the device by the plans in flight.  With a window only the blocks that are still visible are held:

    start          first_block                length            end
      │  slid out, given back │  blocks (own, live)  │  reserved  │

The reservation is made once, for the most blocks that can be live at a time, so that a sequence never asks twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tinyloop_service.engine.api import PAGE_TOKENS, Block, Drop, Limits, Plan, SequenceId
from tinyloop_service.scheduler.pages import PagePool
from tinyloop_service.types import Sampling, TokenIds


def first_visible(length: int, window: int) -> int:
    """The lowest position that the token at `length` reads."""
    return max(0, length - window + 1) if window else 0


@dataclass(frozen=True, slots=True)
class Extent:
    """Positions start … end−1 at a depth and a window: what a sequence costs."""

    start: int
    end: int
    loops: int
    window: int

    def peak_blocks(self, limits: Limits) -> int:
        """Most own blocks that are live at a time."""
        own = limits.own_blocks(self.start, self.end)
        if not self.window:
            return own
        chunk, steps = limits.max_chunk, limits.max_steps
        visible = self.window - 1 + (chunk + steps if limits.goes_on else max(chunk, steps))
        return min(own, -(-visible // PAGE_TOKENS) + 1)

    def final_pages(self, limits: Limits) -> int:
        """Pages left when all of it is fed."""
        first = max(self.start, first_visible(self.end, self.window)) // PAGE_TOKENS
        blocks = -(-self.end // PAGE_TOKENS) - first if self.end > self.start else 0
        return blocks * limits.cache_layers(self.loops)

    def peak_pages(self, limits: Limits) -> int:
        return self.peak_blocks(limits) * limits.cache_layers(self.loops)

    def most_pages(self, limits: Limits) -> int:
        """That it can come to hold, its active form included."""
        return self.peak_pages(limits) + self.active_pages(limits)

    def active_pages(self, limits: Limits) -> int:
        """Budget of the active form of what is live at a time."""
        whole = limits.active_pages(self.start, self.end, self.loops)
        if not self.window:
            return whole
        span = self.peak_blocks(limits) * PAGE_TOKENS + limits.split_tokens  # a split more: it may lie across two
        return min(whole, limits.active_pages(0, span, self.loops))


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence of the engine, as planned."""

    id: SequenceId
    parent: Sequence | None
    extent: Extent
    num_layers: int
    peak_blocks: int
    length: int
    next_block: int  # absolute index of the first block not taken yet
    blocks: list[Block] = field(default_factory=list)
    opened: bool = False  # some plan names it, so the engine must be told when it closes
    cloned: bool = False  # the shared part of its first block is its own

    @property
    def first_block(self) -> int:
        """Absolute index of blocks[0]."""
        return self.next_block - len(self.blocks)

    def grow(self, pool: PagePool, length: int) -> tuple[Block, ...]:
        """Plan it to `length`; the blocks taken for that."""
        assert self.length <= length <= self.extent.end, f"sequence {self.id} grows to {length} of {self.extent.end}"
        self.length = length
        if length <= self.next_block * PAGE_TOKENS:
            return ()
        count = -(-length // PAGE_TOKENS) - self.next_block
        pages = pool.take(self.id, count * self.num_layers)
        new = tuple(pages[i : i + self.num_layers] for i in range(0, len(pages), self.num_layers))
        self.blocks.extend(new)
        self.next_block += count
        return new

    def skip(self, pool: PagePool) -> None:
        """It is restored: of what slides, the last blocks alone are there from the start, and no more are to come."""
        first = first_visible(self.extent.end, self.extent.window) // PAGE_TOKENS
        self.next_block = max(self.next_block, first)
        wanted = (-(-self.extent.end // PAGE_TOKENS) - self.next_block) * self.num_layers
        pool.release_reserved(self.id, pool.reserved(self.id) - wanted)

    def slide(self, pool: PagePool) -> Drop | None:
        """Give back the own blocks that no later token reads, keeping the promise as far as it is still needed."""
        first = min(first_visible(self.length, self.extent.window) // PAGE_TOKENS, self.next_block)
        if first <= self.first_block:
            return None
        count = first - self.first_block
        gone = [page for block in self.blocks[:count] for page in block]
        del self.blocks[:count]
        to_come = -(-self.extent.end // PAGE_TOKENS) - self.next_block
        wanted = min(self.peak_blocks - len(self.blocks), to_come) * self.num_layers
        keep = max(0, min(wanted - pool.reserved(self.id), len(gone)))
        pool.recycle(self.id, gone[:keep])
        pool.release(self.id, gone[keep:])
        return Drop(self.id, first)


class Drawing(NamedTuple):  # one for each row
    """What the engine is told of how a request's sequence draws tokens."""

    sampling: Sampling
    prompt: TokenIds  # every prompt token, where the engine needs them
    stop_tokens: TokenIds


@dataclass(slots=True, eq=False)
class Feed:
    """Prompt tokens that a sequence has still to be fed, chunk by chunk, from `sequence.start` on."""

    sequence: Sequence
    tokens: TokenIds
    order: int  # of arrival; the oldest feed is sure of half of every chunk
    drawing: Drawing | None = None  # None: of a prefix or a trunk

    @property
    def remaining(self) -> int:
        return self.sequence.extent.start + len(self.tokens) - self.sequence.length


class Sequences:
    """Every live sequence, its pages, and the closes that the next plan must carry."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pool = PagePool(limits.num_pages)
        self.feeds: dict[SequenceId, Feed] = {}
        self._live: dict[SequenceId, Sequence] = {}
        self._closing: list[SequenceId] = []
        self._deactivating: list[SequenceId] = []
        self._next_id = 1

    def __contains__(self, seq: SequenceId) -> bool:
        return seq in self._live

    def create(self, parent: Sequence | None, extent: Extent) -> Sequence:
        """A new sequence with its pages reserved; its active form is counted apart."""
        start, layers = extent.start, self.limits.cache_layers(extent.loops)
        assert parent is None or (parent.id in self._live and parent.extent.end == start), "not its parent's end"
        sequence = Sequence(
            self._next_id, parent, extent, layers, extent.peak_blocks(self.limits), start, start // PAGE_TOKENS
        )
        self._next_id += 1
        self._live[sequence.id] = sequence
        self.pool.reserve(sequence.id, sequence.peak_blocks * layers)
        return sequence

    def feed(self, feed: Feed) -> None:
        self.feeds[feed.sequence.id] = feed

    def fed(self, feed: Feed) -> None:
        """Its last token is planned."""
        del self.feeds[feed.sequence.id]

    def close(self, sequence: Sequence) -> None:
        """Its pages are free for the next plan, which also tells the engine."""
        del self._live[sequence.id]
        self.feeds.pop(sequence.id, None)
        self.pool.release_owner(sequence.id)
        if sequence.opened:
            self._closing.append(sequence.id)

    def hanging_from(self, lost: set[SequenceId]) -> set[SequenceId]:
        """`lost` and every live sequence below one of them (ids grow downwards)."""
        for sequence in self._live.values():
            if sequence.parent is not None and sequence.parent.id in lost:
                lost.add(sequence.id)
        return lost

    def repeat(self, failed: Plan) -> None:
        """What a plan that failed was to end: the engine may not have come to it."""
        self._closing.extend(failed.close)
        self._deactivating.extend(failed.deactivate)

    def take_closing(self, others: tuple[SequenceId, ...] = ()) -> tuple[SequenceId, ...]:
        """All closes that are due, and `others`, children before their parents (ids grow downwards)."""
        closing = tuple(sorted({*self._closing, *others}, reverse=True))
        self._closing.clear()
        return closing

    def take_deactivating(self) -> tuple[SequenceId, ...]:
        deactivating = tuple(seq for seq in dict.fromkeys(self._deactivating) if seq in self._live)
        self._deactivating.clear()
        return deactivating

    @property
    def has_closing(self) -> bool:
        return bool(self._closing)

    def check(self) -> None:
        self.pool.check()
        for sequence in self._live.values():
            self._check_one(sequence)
        assert self.feeds.keys() <= self._live.keys(), "tokens to feed into a closed sequence"

    def _check_one(self, sequence: Sequence) -> None:
        name, layers = f"sequence {sequence.id}", sequence.num_layers
        parent = sequence.parent
        assert parent is None or parent.id in self._live, f"{name} hangs from a closed parent"
        assert self.pool.held(sequence.id) == len(sequence.blocks) * layers, f"{name}: table and pool disagree"
        to_come = max(0, -(-sequence.extent.end // PAGE_TOKENS) - sequence.next_block)
        if sequence.extent.end == sequence.extent.start:
            to_come = 0
        promised = min(sequence.peak_blocks - len(sequence.blocks), to_come) * layers
        assert self.pool.reserved(sequence.id) == promised, f"{name}: {promised} pages to come are not reserved"
