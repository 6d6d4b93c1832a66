"""The device seam without a GPU: kernels run as C++ on fibers, arrays are NumPy's.

Stricter than a GPU where that finds mistakes: it refuses arrays that are not device memory, scalars of another kind
than the kernel's parameter, unpinned copies, allocation or waiting inside a capture, and writes outside an array.
Launches alternate between ascending and descending order of blocks, warps and lanes, so that a result that depends on
the order does not repeat.  `deferred`: queued work runs only when somebody waits for it, as late as a GPU might; host
memory that is reused too early then shows.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from emulation import builder
from emulation.memory import DeviceBytes, PinnedBytes, allocate, allocate_pinned, guards_hold, owner_of
from tinyloop_service.kernels.device import check_copy, check_gemm

Work = Callable[[], None]
MOST_ALONG_Y = 65535  # blocks of a grid, along z too
SCALARS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    np.int32: ("i", ctypes.c_int32),
    np.int64: ("l", ctypes.c_int64),
    np.float32: ("f", ctypes.c_float),
}


@dataclass(slots=True)
class EmulatedKernel:
    """Built when first needed."""

    name: str
    source: Path
    defines: dict[str, int]
    num_launches: int = 0
    _function: builder.Function | None = None

    @property
    def function(self) -> builder.Function:
        if self._function is None:
            self._function = builder.function(builder.load(builder.build(self.source, self.defines)), self.name)
        return self._function


@dataclass(slots=True)
class EmulatedGraph:
    device: EmulatedDevice
    work: list[Work]

    def launch(self) -> None:
        for item in self.work:
            self.device.enqueue(item)


@dataclass(slots=True)
class EmulatedEvent:
    device: EmulatedDevice
    position: int = 0

    def record(self) -> None:
        self.position = self.device.num_queued

    def synchronize(self) -> None:
        self.device.run_until(self.position)

    @property
    def done(self) -> bool:
        self.device.run_until(self.position)
        return True


@dataclass(slots=True, repr=False)
class EmulatedDevice:
    deferred: bool = False
    sources: Path = builder.KERNELS
    name: str = "emulated"
    arch: str = "sm_90"
    arithmetic: str = f"emulated, numpy {np.__version__}"
    num_sms: int = 4
    max_shared_bytes: int = 227 * 1024
    num_queued: int = 0
    _num_run: int = 0
    _queue: list[Work] = field(default_factory=list)
    _capturing: list[Work] | None = None
    _capturer: threading.Thread | None = None  # others may wait meanwhile
    _running: threading.RLock = field(default_factory=threading.RLock)  # held while work runs
    _wanted: list[EmulatedKernel] | None = None  # while preparing: what would have been launched
    _kernels: dict[tuple[Any, ...], EmulatedKernel] = field(default_factory=dict)

    # ---- memory

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        self._refuse_in_capture("allocate")
        return allocate(shape, dtype)

    def zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        array = self.empty(shape, dtype)
        array[...] = 0
        return array

    def upload(self, host: NDArray[Any]) -> NDArray[Any]:
        array = self.empty(host.shape, host.dtype)
        array[...] = host
        return array

    def download(self, array: Any) -> NDArray[Any]:
        self.synchronize()
        _require_device(array)
        host = np.empty(array.shape, array.dtype)
        check_copy(host, array)
        host[...] = array
        return host

    def pinned(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        return allocate_pinned(shape, dtype)

    def copy_in(self, target: Any, host: NDArray[Any]) -> None:
        self._copy(target, host, device=target, host=host)

    def copy_out(self, host: NDArray[Any], source: Any) -> None:
        self._copy(host, source, device=source, host=host)

    def _copy(self, target: NDArray[Any], source: NDArray[Any], *, device: Any, host: Any) -> None:
        _require_device(device)
        if owner_of(host, PinnedBytes) is None:
            raise TypeError("copies are from and to host memory made by device.pinned()")
        check_copy(target, source)
        self.enqueue(partial(np.copyto, target.reshape(-1), source.reshape(-1)))

    def memory(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    # ---- kernels

    def kernel(self, stem: str, name: str, /, **defines: int) -> EmulatedKernel:
        key = (stem, name, *sorted(defines.items()))
        if key not in self._kernels:
            self._kernels[key] = EmulatedKernel(name, self.sources / f"{stem}.cu", defines)
        return self._kernels[key]

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        block: int,
        args: Sequence[Any],
        *,
        shared_bytes: int = 0,
        dependent: bool = False,
    ) -> None:
        if self._wanted is not None:
            self._wanted.append(kernel)
            return
        pairs = [_convert(kernel.name, i, a) for i, a in enumerate(args)]
        given = "".join(kind for kind, _ in pairs)
        if given != kernel.function.signature:
            raise TypeError(f"{kernel.name}: arguments are {given}, its parameters {kernel.function.signature}")
        if shared_bytes > self.max_shared_bytes:
            raise ValueError(
                f"{kernel.name}: {shared_bytes} bytes of shared memory, {self.max_shared_bytes} are possible"
            )
        if grid[1] > MOST_ALONG_Y or grid[2] > MOST_ALONG_Y:
            raise ValueError(f"{kernel.name}: a grid of {grid}; along y and z at most {MOST_ALONG_Y} are possible")
        if 0 not in grid:
            self.enqueue(partial(self._run, kernel, grid, block, [c for _, c in pairs], list(args), shared_bytes))

    def _run(self, kernel: Any, grid: tuple[int, int, int], block: int, values: Any, args: Any, shared: int) -> None:
        kernel.num_launches += 1
        kernel.function(grid, block, values, shared_bytes=shared, reverse=kernel.num_launches % 2 == 0)
        for position, array in enumerate(args):
            if isinstance(array, np.ndarray) and not guards_hold(_require_device(array)):
                raise builder.EmulationError(f"{kernel.name} wrote outside the array it got as argument {position}")

    def ways(self, x: Any, weight: Any, out: Any) -> tuple[object, ...]:
        return ()

    def gemm(self, x: Any, weight: Any, out: Any, *, accumulate: bool = False, way: object | None = None) -> None:
        for array in (x, weight, out):
            _require_device(array)
        check_gemm(x, weight, out)
        self.enqueue(partial(_multiply, x, weight, out, accumulate))

    # ---- order

    def enqueue(self, work: Work) -> None:
        if self._capturing is not None:
            self._capturing.append(work)
            return
        self._queue.append(work)
        self.num_queued += 1
        if not self.deferred:
            self.run_until(self.num_queued)

    def run_until(self, position: int) -> None:
        self._refuse_in_capture("wait")
        with self._running:
            while self._num_run < position:
                self._num_run += 1
                self._queue.pop(0)()

    def prepare(self, work: Work, progress: Callable[[int, int], None] | None = None) -> None:
        """Nothing is heard of progress: what g++ does is not the service's business."""
        self._wanted = []
        try:
            self.capture(work)  # what it queues is dropped
            sources = {(kernel.source, *sorted(kernel.defines.items())) for kernel in self._wanted}
        finally:
            self._wanted = None
        with ThreadPoolExecutor(os.cpu_count()) as compilers:
            list(compilers.map(lambda key: builder.build(key[0], dict(key[1:])), sources))

    def capture(self, work: Work) -> EmulatedGraph:
        outer, captured = self._capturing, list[Work]()  # a rehearsal may capture
        self._capturing, self._capturer = captured, threading.current_thread()
        try:
            work()
            return EmulatedGraph(self, captured)
        finally:
            self._capturing = outer

    def event(self) -> EmulatedEvent:
        return EmulatedEvent(self)

    def synchronize(self) -> None:
        self.run_until(self.num_queued)

    def close(self) -> None:
        self.synchronize()

    def _refuse_in_capture(self, verb: str) -> None:
        if self._capturing is not None and self._capturer is threading.current_thread():
            raise RuntimeError(f"the work of a capture may not {verb}")


def _require_device(array: Any) -> NDArray[np.uint8]:
    owner = owner_of(array, DeviceBytes)
    if owner is None:
        raise TypeError("an array is not device memory: use device.upload, empty or zeros")
    return owner


def _convert(kernel: str, position: int, argument: Any) -> tuple[str, Any]:
    if argument is None:
        return "p", ctypes.c_void_p(None)
    if isinstance(argument, np.ndarray):
        _require_device(argument)
        return "p", ctypes.c_void_p(argument.ctypes.data)
    if type(argument) not in SCALARS:
        expected = "an array, None, np.int32, np.int64 or np.float32"
        raise TypeError(f"{kernel}: argument {position} is {type(argument).__name__}, expected {expected}")
    kind, convert = SCALARS[type(argument)]
    return kind, convert(argument)


def _multiply(x: Any, weight: Any, out: Any, accumulate: bool) -> None:
    """Row by row, so that a row's bits do not depend on the others."""
    wide = weight.astype(np.float32)
    with np.errstate(all="ignore"):  # what overflows is infinite, as on a GPU
        for row in range(len(x)):
            product = wide @ x[row].astype(np.float32)
            out[row] = out[row].astype(np.float32) + product if accumulate else product
