"""How a plan's tables come to the device: collected in page-locked memory, each copied once.

    put        lies where `there` says, after `send`, which copies all of them in one go
    set_aside  goes, by a copy of its own (`copy_to`), to where a graph reads it

In: arrays of 32-bit integers.  Out: where they lie on the device.  A plan in flight has a Staging of its own, because
copies read the host's memory after the call has returned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.kernels.device import Array, Device

Ints = NDArray[np.int32]
_ALIGNMENT = 96  # words: a multiple of 128 bytes, and of the width of every table
_WIDTHS = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Section:
    """An array [n] or [n, 2 or 3] that was `put`."""

    offset: int  # words
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Aside:
    """A vector that was `set_aside`."""

    offset: int  # words
    size: int


class Staging:
    """Grows when a plan needs more than any before."""

    def __init__(self, device: Device, words: int) -> None:
        self._device = device
        self._sent, self._aside = _Collected(device, words), _Collected(device, words)
        self._there = self._views()  # by width

    def clear(self) -> None:
        """Begin the next plan; the last one that was sent from here has finished."""
        self._sent.used = self._aside.used = 0

    def put(self, values: Ints) -> Section:
        """Collect a C-contiguous copy of `values`."""
        if not values.size:
            return Section(0, values.shape)
        section = Section(self._sent.take(values.size), values.shape)
        self._sent.host[section.offset : section.offset + values.size] = values.reshape(-1)
        return section

    def set_aside(self, size: int) -> tuple[Ints, Aside]:
        """A vector to be filled, before anything else is collected; later `words` finds it."""
        aside = Aside(self._aside.take(size), size)
        return self.words(aside), aside

    def put_aside(self, values: Ints) -> Aside:
        """The same, filled with a C-contiguous copy of `values`."""
        words, aside = self.set_aside(values.size)
        words[:] = values.reshape(-1)
        return aside

    def send(self) -> None:
        """Copy everything that was put."""
        sent = self._sent
        if sent.host.size > self._there[1].shape[0]:
            self._there = self._views()
        if sent.used:
            self._device.copy_in(self._there[1][: sent.used], sent.host[: sent.used])

    def there(self, section: Section) -> Array:
        """A section on the device, after `send`."""
        width = section.shape[1] if len(section.shape) > 1 else 1
        first = section.offset // width
        array: Array = self._there[width][first : first + section.shape[0]]
        return array

    def copy_to(self, target: Array, aside: Aside) -> None:
        """Copy what was set aside to the beginning of `target`, an int32 vector."""
        self._device.copy_in(target[: aside.size], self.words(aside))

    def _views(self) -> dict[int, Array]:
        words = self._device.empty((self._sent.host.size,), np.int32)
        return {width: words.reshape(-1, width) if width > 1 else words for width in _WIDTHS}

    def words(self, aside: Aside) -> Ints:
        """What was set aside, where it is until anything else is collected."""
        return self._aside.host[aside.offset : aside.offset + aside.size]


class _Collected:
    """Page-locked memory that is filled from its beginning on."""

    def __init__(self, device: Device, words: int) -> None:
        self._device, self.used = device, 0
        self.host: Ints = device.pinned((_aligned(words),), np.int32)

    def take(self, size: int) -> int:
        """Where there are `size` words for whoever asks."""
        at = self.used
        if at + size > self.host.size:
            self._grow(at + size)
        self.used = _aligned(at + size)
        return at

    def _grow(self, words: int) -> None:
        """Nothing was copied from here since the plan began, so there is nobody who reads the old memory."""
        host = self._device.pinned((max(_aligned(words), 2 * self.host.size),), np.int32)
        host[: self.used] = self.host[: self.used]
        self.host = host


def _aligned(words: int) -> int:
    return -(-words // _ALIGNMENT) * _ALIGNMENT
