"""What the fake engine keeps: sequences, and what stands in their pages.

In: pages as plans give them out and take them back.  Out: the entries that a sequence sees, or a `PlanViolation` where
a page is not what the sequence takes it for.  It refuses to know plans, limits and what an entry means.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.api import PAGE_TOKENS, Block, Open, Restore, SequenceId
from tinyloop_service.engine.fake_tokens import NO_TOKENS


class PlanViolation(AssertionError):
    """The scheduler broke the contract of engine/api.py."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise PlanViolation(what)


@dataclass(slots=True, eq=False)
class Page:
    """What one page holds: the entries of its block, shared by the block's layers, and which layer it is."""

    entries: list[int]
    layer: int


class Pages:
    """What every page holds and who owns it.  A page keeps what it holds until it is disowned or released."""

    def __init__(self, num_pages: int) -> None:
        self._held: list[Page | None] = [None] * num_pages
        self._owner: dict[int, SequenceId] = {}

    @property
    def owners(self) -> set[SequenceId]:
        return set(self._owner.values())

    def take(self, block: Block, owner: SequenceId) -> None:
        """One page for each layer, empty."""
        entries: list[int] = []
        for layer, page in enumerate(block):
            require(0 <= page < len(self._held), f"page {page} does not exist")
            require(page not in self._owner, f"page {page} is taken but owned by {self._owner.get(page)}")
            self._owner[page] = owner
            self._held[page] = Page(entries, layer)

    def disown(self, block: Block) -> None:
        for page in block:
            del self._owner[page]
            self._held[page] = None

    def release(self, page: int) -> None:
        require(page not in self._owner, f"page {page} is released but owned by {self._owner.get(page)}")
        self._held[page] = None

    def entries(self, block: Block) -> list[int]:
        """Those of the block's owner, to be written."""
        page = self._held[block[0]]
        if page is None:
            raise PlanViolation(f"page {block[0]} is written after it was released")
        return page.entries

    def read(self, block: Block, reader: SequenceId) -> list[int]:
        """The block's entries, when each of its pages still holds them."""
        first = self._held[block[0]]
        for layer, page_id in enumerate(block):
            page = self._held[page_id]
            if page is None or first is None or page.entries is not first.entries or page.layer != layer:
                raise PlanViolation(f"sequence {reader} reads page {page_id}, which was released or reused")
        assert first is not None
        return first.entries


@dataclass(slots=True, eq=False)
class Sequence:
    """An open sequence: a prefix or a row."""

    opened: Open
    parent: Sequence | None
    length: int
    first_block: int  # absolute index of blocks[0]
    blocks: list[Block] = field(default_factory=list)
    kept: int | None = None  # the entry of the last prompt token: a prefix's logits
    last_token: int | None = None
    seen: frozenset[int] = NO_TOKENS  # tokens under repetition penalty
    total: int | None = None  # sum of what the next token sees, where it may be carried on

    @property
    def has_ended(self) -> bool:
        """As `Open` says of a request."""
        is_last = self.opened.end is not None and self.length >= self.opened.end
        return self.last_token is not None and (is_last or self.last_token in self.opened.stop_tokens)

    def block_entries(self, index: int, pages: Pages) -> list[int]:
        """The entries of absolute block `index`, own or a parent's; checks every page of it."""
        owner: Sequence | None = self
        while owner is not None and index < owner.opened.start // PAGE_TOKENS:
            owner = owner.parent
        if owner is None or not owner.first_block <= index < owner.first_block + len(owner.blocks):
            raise PlanViolation(f"sequence {self.opened.seq} reads block {index}, which nobody holds")
        return pages.read(owner.blocks[index - owner.first_block], self.opened.seq)

    def visible_sum(self, pages: Pages) -> int:
        """The sum of all entries that the next token sees, read from their pages."""
        position, window = self.length, self.opened.cache_window
        start = max(0, position - window + 1) if window else 0
        total = 0
        for index in range(start // PAGE_TOKENS, -(-position // PAGE_TOKENS)):
            low, high = max(start - index * PAGE_TOKENS, 0), min(position - index * PAGE_TOKENS, PAGE_TOKENS)
            if low < high:
                entries = self.block_entries(index, pages)
                require(len(entries) >= high, f"block {index} holds {len(entries)} tokens, {high} are read")
                total += sum(entries[low:high])
        return total


def save_state(sequence: Sequence, pages: Pages) -> dict[str, NDArray[np.uint8]]:
    """The entries of a built prefix's own blocks, and the one it keeps."""
    require(sequence.opened.sampling is None and sequence.kept is not None, "what is saved is no built prefix")
    entries = [entry for block in sequence.blocks for entry in pages.read(block, sequence.opened.seq)]
    return {
        "pages": np.array(entries, np.int64).view(np.uint8),
        "logits": np.array([sequence.kept], np.int64).view(np.uint8),
    }


def restore_state(sequence: Sequence, pages: Pages, restore: Restore) -> None:
    """What `save_state` gave; the cloned entries are among it."""
    opened = sequence.opened
    require(opened.sampling is None, "what is restored is no prefix")
    require(sequence.length == opened.start, f"sequence {opened.seq} has begun")
    assert isinstance(restore.state, dict)
    entries = restore.state["pages"].view(np.int64).tolist()
    require(len(entries) == restore.length - sequence.first_block * PAGE_TOKENS, "state of another length")
    for i, block in enumerate(sequence.blocks):
        pages.entries(block)[:] = entries[i * PAGE_TOKENS : (i + 1) * PAGE_TOKENS]
    sequence.length, sequence.kept = restore.length, int(restore.state["logits"].view(np.int64)[0])
