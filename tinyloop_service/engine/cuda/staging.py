"""How a plan's tables come to the device: collected in page-locked memory, sent in one copy.

In: arrays of 32-bit integers.  Out: where they lie on the device once `send` was called.  A plan in flight has a
Staging of its own, because the copy reads the host's memory after `send` has returned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.kernels.device import Array, Device

Ints = NDArray[np.int32]
_ALIGNMENT = 32  # words; 128 bytes


@dataclass(frozen=True, slots=True)
class Section:
    """An array inside a Staging."""

    offset: int  # words
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Staging:
    """Grows when a plan needs more than any before."""

    def __init__(self, device: Device, words: int) -> None:
        self._device = device
        words = _aligned(words)
        self._host: Ints = device.pinned((words,), np.int32)
        self._there: Array = device.empty((words,), np.int32)
        self._used = 0

    def clear(self) -> None:
        """Begin the next plan; the last one that was sent from here has finished."""
        self._used = 0

    def put(self, values: Ints) -> Section:
        """Collect a C-contiguous copy of `values`."""
        section = Section(self._used, values.shape)
        end = self._used + section.size
        if end > self._host.size:
            self._grow(end)
        self._host[section.offset : end] = values.reshape(-1)
        self._used = _aligned(end)
        return section

    def send(self) -> None:
        """Copy everything that was collected."""
        if self._used:
            self._device.copy_in(self._there[: self._used], self._host[: self._used])

    def there(self, section: Section) -> Array:
        """A section on the device, after `send`."""
        array: Array = self._there[section.offset : section.offset + section.size].reshape(section.shape)
        return array

    def copy_to(self, target: Array, section: Section) -> None:
        """Copy a section to the beginning of `target`, an int32 vector that graphs read."""
        host = self._host[section.offset : section.offset + section.size]
        self._device.copy_in(target[: section.size], host)

    def _grow(self, words: int) -> None:
        """Nothing was sent from here yet, so there is nobody who reads the old memory."""
        size = max(_aligned(words), 2 * self._host.size)
        host = self._device.pinned((size,), np.int32)
        host[: self._used] = self._host[: self._used]
        self._host, self._there = host, self._device.empty((size,), np.int32)


def _aligned(words: int) -> int:
    return -(-words // _ALIGNMENT) * _ALIGNMENT
