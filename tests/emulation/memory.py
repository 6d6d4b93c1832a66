"""Device memory for the emulator: NumPy arrays that show misuse.

Fresh memory is NaN (−1 in integers), and lies between two guards of 256 bytes: a kernel that reads outside gets NaNs,
one that writes outside is found at the end of its launch.  Pinned host memory is marked, so that a copy to or from
ordinary memory is refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

GUARD_BYTES = 256
POISON = 0xFF
GUARD = 0xFE  # two of them are a NaN in float16, four in float32


class DeviceBytes(np.ndarray[Any, Any]):
    """The bytes under device arrays: guard, memory, guard, from an address that is a multiple of 256."""


class PinnedBytes(np.ndarray[Any, Any]):
    """The bytes under page-locked arrays."""


def allocate(shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.full(nbytes + 3 * GUARD_BYTES, GUARD, np.uint8)
    start = -raw.ctypes.data % GUARD_BYTES
    owner = raw[start : start + nbytes + 2 * GUARD_BYTES].view(DeviceBytes)
    memory = owner[GUARD_BYTES : GUARD_BYTES + nbytes]
    memory[...] = POISON
    return memory.view(np.ndarray).view(dtype).reshape(shape)


def allocate_pinned(shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = PinnedBytes(nbytes, np.uint8)
    raw[...] = POISON
    return raw.view(np.ndarray).view(dtype).reshape(shape)


def owner_of(array: Any, kind: type[np.ndarray[Any, Any]]) -> NDArray[np.uint8] | None:
    """The whole allocation of `kind` that `array` is a view of."""
    found = None
    while array is not None:
        if isinstance(array, kind):
            found = array
        array = array.base
    return found


def guards_hold(owner: NDArray[np.uint8]) -> bool:
    return bool((owner[:GUARD_BYTES] == GUARD).all() and (owner[-GUARD_BYTES:] == GUARD).all())
