"""Where K and V lie: the pool of stored pages, and the forms that attention reads.

    PagePool    as the cache mode stores it, the truth: a page is one cache layer of one 64-token stretch, its fields
                one after the other; K/V modes: [K or V, G, 64 tokens, …] each, h modes: [64 tokens, …]
    Track       fp16, contiguous over splits: what a sequence owns, [K or V, layers, splits, G, 64, D]
    Arena       fp16, contiguous over rows: the last own splits of decoding rows,
                [K or V, layers, rows, splits, G, t, D]

Every value in a Track or an Arena is the one that a page gives when it is read (`reading.py`).  Attention widens
them: what lies between two steps of one row is then half as large, and stays nearer.  Refuses to know about sequences
and attention.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.api import PAGE_TOKENS, Block
from tinyloop_service.engine.cache_modes import Field, Stored
from tinyloop_service.engine.cpu.runtime import Array
from tinyloop_service.engine.spec import ModelSpec

HALF_SPLIT = PAGE_TOKENS // 2  # zeros beyond change no bit
_HUGE, _MOST_LATE = 4 << 20, 64 << 20  # bytes: from the first on NumPy asks for huge pages
_POISON = 0xFF  # in every byte: fp16's NaN


def _late_zeros(num_bytes: int) -> NDArray[np.uint8]:
    """Committed as they are written, some KB at a time.

    Of NumPy's, 2 MB are where the kernel has huge pages.  To make one takes 0.1 to 5 ms (a virtual machine may have to
    ask for the memory), and the first tokens of all layers write to many: for so long no row gets a token.
    Raises MemoryError, as NumPy does.
    """
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        raise MemoryError(f"unable to allocate {num_bytes} bytes") from None
    with suppress(AttributeError, OSError):  # a system that has no huge pages has no such advice either
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class PagePool:
    """`num_pages` pages; memory is committed as pages are first written."""

    def __init__(self, num_pages: int, fields: Sequence[Field]) -> None:
        """Raises MemoryError."""
        sizes = [field.num_bytes * PAGE_TOKENS for field in fields]
        self._bytes: NDArray[np.uint8] = _late_zeros(num_pages * sum(sizes)).reshape(num_pages, -1)
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
        return {"k": self.track.kv[0, layer, at], "v": self.track.kv[1, layer, at]}


class Track:
    """Splits first … end−1 of a sequence, absolute; unwritten positions are zero."""

    def __init__(self, spec: ModelSpec, num_layers: int, first: int) -> None:
        self.first = first
        self.kv: Array = np.zeros((2, num_layers, 0, spec.n_kv_heads, PAGE_TOKENS, spec.head_dim), np.float16)

    @property
    def end(self) -> int:
        return self.first + len(self.kv[0, 0])

    def grow(self, end: int) -> None:
        """Make room up to split `end`, and for half as much again if this is not the first time."""
        if end > self.end:
            held = self.kv.shape[2]
            self.kv = _resized(self.kv, max(end - self.first, held + held // 2), least=_HUGE)

    def drop(self, first: int) -> None:
        """Forget the splits below `first`."""
        if first > self.first:
            self.kv, self.first = self.kv[:, :, first - self.first :].copy(), first

    def write_run(self, layer: int, position: int, kv: Array) -> None:
        """kv [n, 2, G, D] to n neighbouring positions of one split."""
        split, slot = divmod(position, PAGE_TOKENS)
        self.kv[:, layer, split - self.first, :, slot : slot + len(kv)] = kv.transpose(1, 2, 0, 3)

    def splits(self, first: int, end: int) -> Array:
        """Absolute splits first … end−1, [K or V, layers, splits, G, 64, D]; a view."""
        return self.kv[:, :, first - self.first : end - self.first]


def _resized(kv: Array, size: int, *, least: int = 1) -> Array:
    """A copy with `size` entries on the third axis, those beyond what is held zero.

    Of `least` to _MOST_LATE bytes, it is committed as it is written.  A model whose arrays are larger has longer steps
    anyway, and reads more.
    """
    shape = (*kv.shape[:2], size, *kv.shape[3:])
    num_bytes = math.prod(shape) * kv.itemsize
    late = least <= num_bytes <= _MOST_LATE
    new = _late_zeros(num_bytes).view(kv.dtype).reshape(shape) if late else np.zeros(shape, kv.dtype)
    new[:, :, : kv.shape[2]] = kv
    return new


@dataclass(frozen=True, slots=True)
class Stretch:
    """Splits first … end−1, absolute, of which the first `size` positions are held: 64, or fewer of a single split."""

    first: int
    end: int
    size: int


class Arena:
    """The same stretch of each of many rows; rows are dense: the last one fills a gap."""

    def __init__(self, spec: ModelSpec, num_layers: int, stretch: Stretch) -> None:
        self.stretch = stretch
        self.rows: list[int] = []  # sequence ids, by slot
        row = (stretch.end - stretch.first, spec.n_kv_heads, stretch.size, spec.head_dim)
        self.kv: Array = np.zeros((2, num_layers, 0, *row), np.float16)
        splits = np.arange(stretch.first, stretch.end).reshape(-1, 1, 1, 1)
        self.positions: Array = splits * PAGE_TOKENS + np.arange(stretch.size)  # (splits, 1, 1, size), absolute
        self._touched = 0  # slots from here on are zero still

    @property
    def mask_shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.positions.shape)

    def reserve(self, more: int) -> None:
        """Room for `more` further rows, in one move; memory is committed as they come."""
        held, used = self.kv.shape[2], len(self.rows)
        if used + more > held:
            self.kv = _resized(self.kv[:, :, :used], max(used + more, held + held // 2))
            self._touched = used

    def append(self, seq: int) -> int:
        """A slot, zeroed."""
        self.reserve(1)
        slot = len(self.rows)
        if slot < self._touched:
            self.kv[:, :, slot] = 0
        self._touched = max(self._touched, slot + 1)
        self.rows.append(seq)
        return slot

    def remove(self, slot: int) -> None:
        last = len(self.rows) - 1
        if slot != last:
            self.rows[slot] = self.rows[last]
            self.kv[:, :, slot] = self.kv[:, :, last]
        self.rows.pop()

    def last_splits(self, layer: int) -> Array:
        """The last split of each row, [K or V, rows, G, t, D]; a view."""
        return self.kv[:, layer, : len(self.rows), -1]

    def arrays(self, layer: int) -> dict[str, Array]:
        n = len(self.rows)
        return {"k": self.kv[0, layer, :n], "v": self.kv[1, layer, :n]}

    def splits(self, slot: int, first: int, end: int) -> Array:
        """Absolute splits first … end−1 of a row, [K or V, layers, splits, G, size, D]; a view."""
        return self.kv[:, :, slot, first - self.stretch.first : end - self.stretch.first]
