"""The seam between the CUDA engine and what runs its kernels.

`Device` is all that wrappers and engine know.  Two fit: `CupyDevice` (cupy_device.py) on a GPU, and the
emulated one of the tests, where an Array is a NumPy array and a kernel is C++ on fibers.  Work is queued in order on
one stream; only what says so waits.  One thread at a time uses a device.  Refuses to know a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

Shape = int | tuple[int, ...]
Host = NDArray[Any]


class Array(Protocol):
    """Device memory: what cupy.ndarray and numpy.ndarray have in common and code above this file may use."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def flags(self) -> Any: ...
    def reshape(self, *shape: Any) -> Any: ...
    def view(self, dtype: Any) -> Any: ...
    def __getitem__(self, index: Any, /) -> Any: ...


Scalar = np.int32 | np.int64 | np.float32
Argument = Array | Scalar | None


class Kernel(Protocol):
    """A compiled `extern "C" __global__` function."""

    @property
    def name(self) -> str: ...


class Graph(Protocol):
    """Captured work, run again as one launch, on the same addresses and with the same scalars."""

    def launch(self) -> None: ...


class Event(Protocol):
    """A point in the stream."""

    def record(self) -> None: ...
    def synchronize(self) -> None:
        """Wait until all work before the record has finished; raises what went wrong with it."""
        ...

    @property
    def done(self) -> bool: ...


class Device(Protocol):
    @property
    def name(self) -> str:
        """For example "NVIDIA H200"."""
        ...

    @property
    def arch(self) -> str:
        """For example "sm_90"."""
        ...

    @property
    def arithmetic(self) -> str:
        """Names all that decides the bits of what kernels and products give: hardware, libraries, sources."""
        ...

    @property
    def num_sms(self) -> int: ...

    @property
    def max_shared_bytes(self) -> int:
        """Dynamic shared memory that a block can ask for."""
        ...

    def empty(self, shape: Shape, dtype: DTypeLike) -> Array: ...
    def zeros(self, shape: Shape, dtype: DTypeLike) -> Array: ...

    def upload(self, host: Host) -> Array:
        """A new array with the values of `host`, which may be reused at once."""
        ...

    def download(self, array: Array) -> Host:
        """The values of a contiguous array, after waiting for all queued work."""
        ...

    def pinned(self, shape: Shape, dtype: DTypeLike) -> Host:
        """Page-locked host memory for copy_in and copy_out."""
        ...

    def copy_in(self, target: Array, host: Host) -> None:
        """Queue target ← host.  Both contiguous, of one dtype and size; `host` pinned and left alone until it ran."""
        ...

    def copy_out(self, host: Host, source: Array) -> None:
        """Queue host ← source, likewise."""
        ...

    def kernel(self, stem: str, name: str, /, **defines: int) -> Kernel:
        """Function `name` of kernels_cu/<stem>.cu compiled with -D<define>=<value>; compiled and loaded once."""
        ...

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: int,
        args: Sequence[Argument],
        *,
        shared_bytes: int = 0,
        dependent: bool = False,
    ) -> None:
        """Queue a launch.  Arrays go as pointers, None as null, scalars as they are; anything else is a TypeError.

        `dependent`: the grid may start while the kernel before it ends (the kernel calls dependency_wait); sm_90 and
        later, elsewhere ignored.  A grid with a zero is no launch.
        """
        ...

    def gemm(self, x: Array, weight: Array, out: Array, *, accumulate: bool = False, way: object | None = None) -> None:
        """Queue out = x · weightᵀ, or out += with `accumulate`; sums in float32.

        x float16 [T, K], weight float16 [N, K], out float16 or float32 [T, N].  Rows may be further apart than they
        are long (views of columns), elements of a row not.  `way`: one of `ways` for these sizes, whose rows are dense.
        """
        ...

    def ways(self, x: Array, weight: Array, out: Array) -> Sequence[object]:
        """Other ways to the product of dense arrays, which add up every element in one piece.  There may be none."""
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """What `work` queues, as a graph; it does not run now.  `work` may launch, copy and multiply, no more."""
        ...

    def prepare(self, work: Callable[[], None], progress: Callable[[int, int], None] | None = None) -> None:
        """Compile and load every kernel that `work` launches, in threads, without running any of it.

        `work` may launch, copy, multiply and capture.  `progress` hears of sources that had to be
        compiled, how many are ready, of how many.
        """
        ...

    def event(self) -> Event: ...

    def synchronize(self) -> None:
        """Wait for all queued work; raises what went wrong with it."""
        ...

    def memory(self) -> tuple[int, int]:
        """Device bytes free and in all."""
        ...

    def close(self) -> None: ...


def check_gemm(x: Any, weight: Any, out: Any) -> None:
    """What every device's gemm refuses.  Raises ValueError."""
    for array in (x, weight, out):
        if array.ndim != 2 or array.strides[1] != array.itemsize:
            raise ValueError(f"gemm: {array.shape} with strides {array.strides}, expected dense rows")
    if x.dtype != np.float16 or weight.dtype != np.float16 or out.dtype not in (np.float16, np.float32):
        raise ValueError(f"gemm: {out.dtype} = {x.dtype} · {weight.dtype}, expected float16 operands")
    if (*out.shape, x.shape[1]) != (x.shape[0], *weight.shape):
        raise ValueError(f"gemm: x {x.shape}, weight {weight.shape}, out {out.shape}, expected (T, K), (N, K), (T, N)")


def check_copy(target: Any, source: Any) -> None:
    """What every device's copies refuse.  Raises ValueError."""
    if (target.dtype, target.size) != (source.dtype, source.size):
        raise ValueError(f"copy of {source.dtype} {source.shape} to {target.dtype} {target.shape}")
    if not (target.flags.c_contiguous and source.flags.c_contiguous):
        raise ValueError("copies are between contiguous arrays")
