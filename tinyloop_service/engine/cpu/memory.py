"""Where K and V lie: the pool of stored pages, and the forms that attention reads.

    PagePool    as the cache mode stores it, the truth: a page is one cache layer of one 64-token stretch, its fields
                one after the other; K/V modes: [K or V, G, 64 tokens, …] each, h modes: [64 tokens, …]
    Track       fp16, contiguous over splits: what a sequence owns, per layer K and V [splits, G, 64, D]
    Arena       fp16, contiguous over rows: the last own splits of decoding rows, per layer [rows, splits, G, t, D]

Every value in a Track or an Arena is the one that a page gives when it is read (`reading.py`).  Attention widens
them: what lies between two steps of one row is then half as large, and stays nearer.  Refuses to know about sequences
and attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.api import PAGE_TOKENS, Block
from tinyloop_service.engine.cache_modes import Field, Stored
from tinyloop_service.engine.cpu.runtime import Array
from tinyloop_service.engine.spec import ModelSpec

HALF_SPLIT = PAGE_TOKENS // 2  # zeros beyond change no bit
_POISON = 0xFF  # in every byte: fp16's NaN


class PagePool:
    """`num_pages` pages; memory is committed as pages are first written."""

    def __init__(self, num_pages: int, fields: Sequence[Field]) -> None:
        sizes = [field.num_bytes * PAGE_TOKENS for field in fields]
        self._bytes: NDArray[np.uint8] = np.zeros((num_pages, sum(sizes)), np.uint8)
        self._touched = np.zeros(num_pages, np.bool_)  # the others are zero still
        self._fields: Stored = {}  # views [pages, …, 64, …] of the bytes
        start = 0
        for field, size in zip(fields, sizes, strict=True):
            view = self._bytes[:, start : start + size].view(field.dtype)
            self._fields[field.name] = view.reshape(num_pages, *field.shape[:-1], PAGE_TOKENS, field.shape[-1])
            start += size

    @property
    def num_pages(self) -> int:
        return len(self._bytes)

    def zero(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            for page in block:
                if self._touched[page]:
                    self._bytes[page] = 0
                self._touched[page] = True

    def poison(self, pages: Iterable[int]) -> None:
        """NaN: whoever reads a page that was given back shows at once."""
        for page in pages:
            self._bytes[page], self._touched[page] = _POISON, True

    def copy(self, source: Block, target: Block, num_tokens: int) -> None:
        for a, b in zip(source, target, strict=True):
            for field in self._fields.values():
                field[b, ..., :num_tokens, :] = field[a, ..., :num_tokens, :]

    def write_run(self, page: int, slot: int, stored: Stored) -> None:
        """stored [n, …] to n neighbouring slots of one page."""
        for name, rows in stored.items():
            self._fields[name][page, ..., slot : slot + len(rows), :] = np.moveaxis(rows, 0, -2)

    def write_rows(self, pages: Array, slots: Array, stored: Stored) -> None:
        """stored [n, …], each row to a slot of a page of its own."""
        for name, rows in stored.items():
            self._fields[name][pages, ..., slots, :] = rows

    def save(self, blocks: Sequence[Block]) -> NDArray[np.uint8]:
        """A copy of whole pages, [blocks, layers, bytes of a page]."""
        return self._bytes[np.array(blocks, np.int64)]

    def restore(self, blocks: Sequence[Block], saved: NDArray[np.uint8]) -> None:
        """What `save` gave, into other pages.  ValueError where it does not fit."""
        pages = np.array(blocks, np.int64)
        if saved.shape != (*pages.shape, self._bytes.shape[1]):
            raise ValueError(
                f"saved pages of shape {saved.shape} for {pages.shape} pages of {self._bytes.shape[1]} bytes"
            )
        self._bytes[pages], self._touched[pages] = saved, True

    def page(self, page: int) -> Stored:
        """Views of what a page holds; K/V modes [2, G, 64, …], h modes [64, …]."""
        return {name: field[page] for name, field in self._fields.items()}


@dataclass(frozen=True, slots=True)
class SplitRange:
    """Splits first … end−1, absolute, of one track."""

    track: Track
    first: int
    end: int

    @property
    def num_splits(self) -> int:
        return self.end - self.first

    def arrays(self, layer: int) -> dict[str, Array]:
        """k and v, [splits, G, 64, D] each."""
        at = slice(self.first - self.track.first, self.end - self.track.first)
        return {"k": self.track.keys[layer][at], "v": self.track.values[layer][at]}


class Track:
    """Splits first … end−1 of a sequence, absolute; unwritten positions are zero."""

    def __init__(self, spec: ModelSpec, num_layers: int, first: int) -> None:
        self._spec, self.first = spec, first
        self.keys: list[Array] = [self._zeros(0) for _ in range(num_layers)]
        self.values: list[Array] = [self._zeros(0) for _ in range(num_layers)]

    @property
    def end(self) -> int:
        return self.first + len(self.keys[0])

    def _zeros(self, splits: int) -> Array:
        return np.zeros((splits, self._spec.n_kv_heads, PAGE_TOKENS, self._spec.head_dim), np.float16)

    def grow(self, end: int) -> None:
        """Make room up to split `end`, and for half as much again if this is not the first time."""
        held = len(self.keys[0])
        if end - self.first > held:
            self._move(0, max(end - self.first, held + held // 2))

    def drop(self, first: int) -> None:
        """Forget the splits below `first`."""
        if first > self.first:
            gone = min(first - self.first, len(self.keys[0]))
            self._move(gone, len(self.keys[0]) - gone)
            self.first = first

    def _move(self, skipped: int, size: int) -> None:
        for arrays in (self.keys, self.values):
            for layer, old in enumerate(arrays):
                kept = old[skipped : skipped + size]
                arrays[layer] = self._zeros(size)
                arrays[layer][: len(kept)] = kept

    def write_run(self, layer: int, position: int, kv: Array) -> None:
        """kv [n, 2, G, D] to n neighbouring positions of one split."""
        split, slot = divmod(position, PAGE_TOKENS)
        for arrays, x in ((self.keys, kv[:, 0]), (self.values, kv[:, 1])):
            arrays[layer][split - self.first, :, slot : slot + len(x)] = x.transpose(1, 0, 2)

    def split(self, layer: int, index: int) -> tuple[Array, Array]:
        """K and V [G, 64, D] of one absolute split; views."""
        return self.keys[layer][index - self.first], self.values[layer][index - self.first]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Splits first … end−1, absolute, of which the first `size` positions are held: 64, or fewer of a single split."""

    first: int
    end: int
    size: int


class Arena:
    """The same stretch of each of many rows; rows are dense: the last one fills a gap."""

    def __init__(self, spec: ModelSpec, num_layers: int, stretch: Stretch) -> None:
        self._spec, self.stretch = spec, stretch
        self.rows: list[int] = []  # sequence ids, by slot
        self.keys: list[Array] = [self._zeros(0) for _ in range(num_layers)]
        self.values: list[Array] = [self._zeros(0) for _ in range(num_layers)]
        self._touched = 0  # slots from here on are zero still

    @property
    def mask_shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.positions.shape)

    @property
    def positions(self) -> Array:
        """(splits, 1, 1, size), absolute."""
        splits = np.arange(self.stretch.first, self.stretch.end).reshape(-1, 1, 1, 1)
        return splits * PAGE_TOKENS + np.arange(self.stretch.size)

    def _zeros(self, rows: int) -> Array:
        splits, size = self.stretch.end - self.stretch.first, self.stretch.size
        return np.zeros((rows, splits, self._spec.n_kv_heads, size, self._spec.head_dim), np.float16)

    def reserve(self, more: int) -> None:
        """Room for `more` further rows, in one move; memory is committed as they come."""
        held, used = len(self.keys[0]), len(self.rows)
        if used + more <= held:
            return
        for arrays in (self.keys, self.values):
            for layer, old in enumerate(arrays):
                arrays[layer] = self._zeros(max(used + more, held + held // 2))
                arrays[layer][:used] = old[:used]
        self._touched = used

    def append(self, seq: int) -> int:
        """A slot, zeroed."""
        self.reserve(1)
        slot = len(self.rows)
        if slot < self._touched:
            for x in (*self.keys, *self.values):
                x[slot] = 0
        self._touched = max(self._touched, slot + 1)
        self.rows.append(seq)
        return slot

    def remove(self, slot: int) -> None:
        last = len(self.rows) - 1
        if slot != last:
            self.rows[slot] = self.rows[last]
            for arrays in (self.keys, self.values):
                for x in arrays:
                    x[slot] = x[last]
        self.rows.pop()

    def arrays(self, layer: int) -> dict[str, Array]:
        n = len(self.rows)
        return {"k": self.keys[layer][:n], "v": self.values[layer][:n]}

    def split(self, layer: int, slot: int, index: int) -> tuple[Array, Array]:
        """K and V [G, size, D] of one absolute split of a row; views."""
        at = slot, index - self.stretch.first
        return self.keys[layer][at], self.values[layer][at]
