"""A sequence as the engine holds it: its place in the chain of parents, its pages, its active form, its last token.

In: the Open, Extend, Clone, Drop and close operations of a plan, carried out by the `SequenceTable`.  Out: for a
sequence and a range of splits, the tracks that hold them.  Refuses to know how attention reads them.

    positions   0 ………… parent.start ………… start ………………… length
    read from   grandparent's track   parent's track   own track │ own tail, while decoding (`decoding.py`)

A sequence's own track begins with the split in which its inherited tokens end, and holds a copy of those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.api import PAGE_TOKENS, Block, Open, Restore, SequenceId
from tinyloop_service.engine.cpu.memory import PagePool, SplitRange, Track
from tinyloop_service.engine.cpu.reading import PageReader
from tinyloop_service.engine.cpu.runtime import Array
from tinyloop_service.engine.cpu.sampling import RowSampler
from tinyloop_service.engine.spec import ModelSpec
from tinyloop_service.types import Sampling


@dataclass(slots=True)
class Sequence:
    """Mutable; owned by the engine thread."""

    id: SequenceId
    parent: Sequence | None
    start: int  # inherited tokens
    loops: int
    window: int
    sampler: RowSampler | None  # None: a prefix
    length: int
    first_block: int  # absolute index of blocks[0]
    blocks: list[Block] = field(default_factory=list)
    track: Track | None = None
    last_token: int = -1
    logits: NDArray[np.float32] | None = None  # of a prefix's last token, (vocab_size,)
    end: int | None = None  # of a request: the position of its last token
    stop_tokens: frozenset[int] = frozenset()

    @property
    def has_ended(self) -> bool:
        """A request whose last token is drawn."""
        return self.last_token in self.stop_tokens or (self.end is not None and self.length >= self.end)

    @property
    def first_split(self) -> int:
        """The first split of its own track."""
        return self.start // PAGE_TOKENS

    def page(self, block: int, layer: int) -> int:
        return self.blocks[block - self.first_block][layer]

    def first_visible(self, position: int) -> int:
        """The first split that a token at `position` reads."""
        return max(0, position - self.window + 1) // PAGE_TOKENS if self.window else 0


class SequenceTable:
    """All open sequences, and the making and dropping of tracks."""

    def __init__(self, spec: ModelSpec, pool: PagePool, reader: PageReader, *, debug: bool) -> None:
        self._spec, self._reader, self._debug = spec, reader, debug
        self._open: dict[SequenceId, Sequence] = {}
        self.pool = pool

    def __getitem__(self, seq: SequenceId) -> Sequence:
        return self._open[seq]

    def open(self, o: Open) -> Sequence:
        parent = None if o.parent is None else self._open[o.parent]
        assert o.seq not in self._open, f"sequence {o.seq} is open already"
        assert o.start == (parent.length if parent else 0), (
            f"sequence {o.seq} starts at {o.start}, not at its parent's end"
        )
        sampler = None if o.sampling is None else self._sampler(o.sampling, o.prompt)
        sequence = Sequence(
            o.seq, parent, o.start, o.loops, o.cache_window, sampler, o.start, o.first_own_block,
            end=o.end, stop_tokens=frozenset(o.stop_tokens),
        )  # fmt: skip
        self._open[o.seq] = sequence
        return sequence

    def _sampler(self, sampling: Sampling, prompt: tuple[int, ...]) -> RowSampler:
        return RowSampler(sampling, self._spec.vocab_size, prompt)

    def close(self, seq: SequenceId) -> None:
        """Forget a sequence; one that a failed plan never came to open is not there."""
        self._open.pop(seq, None)

    def released(self, pages: tuple[int, ...]) -> None:
        if self._debug:
            self.pool.poison(pages)

    def extend(self, seq: SequenceId, blocks: tuple[Block, ...]) -> None:
        self.pool.zero(blocks)
        self._open[seq].blocks.extend(blocks)

    def save(self, seq: SequenceId) -> dict[str, NDArray[np.uint8]]:
        """A copy of a built prefix: its own pages, and the logits of its last token."""
        sequence = self._open[seq]
        assert sequence.logits is not None, f"sequence {seq} is no prefix, or not built"
        return {"pages": self.pool.save(sequence.blocks), "logits": sequence.logits.copy().view(np.uint8)}

    def restore(self, restore: Restore) -> None:
        """What `save` gave, in place of prefills; ValueError where it does not fit."""
        sequence, state = self._open[restore.seq], restore.state
        assert isinstance(state, Mapping) and sequence.sampler is None
        self.pool.restore(sequence.blocks, state["pages"])
        logits = np.array(state["logits"]).view(np.float32)  # a copy: aligned, and no map of a file
        if logits.shape != (self._spec.vocab_size,):
            raise ValueError(f"saved logits of {logits.shape}, expected {self._spec.vocab_size}")
        sequence.logits, sequence.length = logits, restore.length

    def drop(self, seq: SequenceId, first_block: int) -> None:
        sequence = self._open[seq]
        gone = first_block - sequence.first_block
        if gone > 0:
            del sequence.blocks[:gone]
            sequence.first_block = first_block
            if sequence.track:
                sequence.track.drop(first_block)

    def deactivate(self, seq: SequenceId) -> None:
        self._open[seq].track = None

    def activate(self, seq: SequenceId) -> None:
        """Make the track of a sequence from its pages, if it has none."""
        sequence = self._open[seq]
        filled = -(-sequence.length // PAGE_TOKENS) - sequence.first_block
        if sequence.track is not None or filled <= 0:  # one that has only been opened: prefill makes it
            return
        sequence.track = Track(self._spec, self._spec.cache_layers(sequence.loops), sequence.first_block)
        sequence.track.grow(sequence.first_block + filled)
        self._read(sequence, filled, sequence.track.kv)

    def read(self, seq: SequenceId) -> Array:
        """K and V of its own pages as they are read, (layers, 2, G, tokens, D)."""
        sequence, spec = self._open[seq], self._spec
        tokens = sequence.length - sequence.first_block * PAGE_TOKENS
        filled, layers = -(-tokens // PAGE_TOKENS), spec.cache_layers(sequence.loops)
        kv = np.empty((2, layers, filled, spec.n_kv_heads, PAGE_TOKENS, spec.head_dim), np.float16)
        self._read(sequence, filled, kv)
        joined = kv.transpose(1, 0, 3, 2, 4, 5).reshape(layers, 2, spec.n_kv_heads, -1, spec.head_dim)
        return joined[:, :, :, :tokens]

    def _read(self, sequence: Sequence, filled: int, kv: Array) -> None:
        """Its first `filled` blocks into [K or V, layers, blocks, G, 64, D]."""
        for layer, kind, index in self._spec.schedule(sequence.loops):
            for i, block in enumerate(sequence.blocks[:filled]):
                first = (sequence.first_block + i) * PAGE_TOKENS
                self._reader.read(self.pool.page(block[layer]), kind, index, first, *kv[:, layer, i])

    def grow_track(self, sequence: Sequence, end: int, *, num_left: int = 0) -> Track:
        """The sequence's track with room for positions up to `end`, inherited tokens of its first split copied.

        Room for `num_left` more is made at once where nothing slides out meanwhile: a track that grows is copied, for
        which rows that decode beside a long prompt would wait.
        """
        splits = -(-(end if sequence.window else end + num_left) // PAGE_TOKENS)
        if sequence.track is None:
            sequence.track = Track(self._spec, self._spec.cache_layers(sequence.loops), sequence.first_block)
            sequence.track.grow(splits)
            inherited = sequence.start % PAGE_TOKENS
            if inherited and sequence.first_block == sequence.first_split:
                mine = sequence.track.splits(sequence.first_split, sequence.first_split + 1)
                mine[..., :inherited, :] = inherited_split(sequence)[..., :inherited, :]
        sequence.track.grow(splits)
        return sequence.track


def inherited_split(sequence: Sequence) -> Array:
    """The parent's K and V of the split in which the inherited tokens end, [K or V, layers, 1, G, 64, D]."""
    assert sequence.parent is not None and sequence.parent.track is not None, "the parent is not active"
    return sequence.parent.track.splits(sequence.first_split, sequence.first_split + 1)


def inherited_ranges(sequence: Sequence, first: int) -> Iterator[SplitRange]:
    """The whole splits that `sequence` reads through its parents, from split `first` on, in order."""
    if sequence.parent is None:
        return
    yield from inherited_ranges(sequence.parent, first)
    begin, end = max(first, sequence.parent.first_split), sequence.first_split
    if begin < end:
        assert sequence.parent.track is not None, f"sequence {sequence.parent.id} is read but not active"
        yield SplitRange(sequence.parent.track, begin, end)
