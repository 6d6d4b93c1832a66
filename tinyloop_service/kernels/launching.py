"""Kernel launches through the driver, at a few µs of host time each.

In: a kernel, a grid, arguments as arrays and NumPy scalars.  CuPy's own launch takes 9 µs and cannot launch
a dependent grid.  Arguments are laid into one buffer of 8-byte slots, which the driver copies before the call returns.
Refuses to know how kernels are compiled.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from operator import attrgetter
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from cuda.bindings import driver

from tinyloop_service.kernels.cuda_errors import cuda_errors, error_of_code

MAX_ARGUMENTS = 64
WITHOUT_ASKING_BYTES = 48 * 1024  # dynamic shared memory a function may have before its limit is raised
_SCALARS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    np.int32: ("i4x", int),
    np.int64: ("q", int),
    np.float32: ("f4x", float),
    type(None): ("Q", lambda _: 0),
}
_Layout = tuple[struct.Struct, tuple[Callable[[Any], Any], ...]]


class CupyKernel:
    """A function of a cubin that may still be being compiled.  Loaded when first launched."""

    def __init__(self, name: str, cubin: Future[Path]) -> None:
        self.name = name
        self.cubin = cubin
        self._raw: Any = None
        self._function: Any = None
        self._shared_limit = WITHOUT_ASKING_BYTES

    def load(self) -> None:
        """Wait for the compiler and load.  Raises KernelBuildError or EngineFault."""
        if self._function is not None:
            return
        path = self.cubin.result()
        with cuda_errors(f"loading {self.name} from {path}"):
            self._raw = cupy.RawModule(path=str(path)).get_function(self.name)
            self._raw.preferred_shared_memory_carveout = 100  # so that a dependent kernel fits beside the one before it
            self._function = driver.CUfunction(self._raw.kernel.ptr)

    def function(self, shared_bytes: int) -> Any:
        """The CUfunction, allowed `shared_bytes` of dynamic shared memory."""
        self.load()
        if shared_bytes > self._shared_limit:
            with cuda_errors(f"{self.name}: {shared_bytes} bytes of shared memory"):
                self._raw.max_dynamic_shared_size_bytes = shared_bytes
            self._shared_limit = shared_bytes
        return self._function


class Launcher:
    """Launches on one stream."""

    def __init__(self, stream: int) -> None:
        self._stream = driver.CUstream(stream)
        self._kinds = _SCALARS | {cupy.ndarray: ("Q", attrgetter("data.ptr"))}
        self._layouts: dict[tuple[type, ...], _Layout] = {}
        self._slots = (ctypes.c_uint64 * MAX_ARGUMENTS)()
        first = ctypes.addressof(self._slots)
        self._pointers = (ctypes.c_uint64 * MAX_ARGUMENTS)(*range(first, first + 8 * MAX_ARGUMENTS, 8))
        self._params = ctypes.addressof(self._pointers)
        self._dependent = _dependent_config(self._stream)

    def launch(
        self,
        kernel: CupyKernel,
        grid: tuple[int, int, int],
        block: int,
        args: Sequence[Any],
        shared_bytes: int,
        dependent: bool,
    ) -> None:
        """`dependent`: the grid may start while the one before it ends (programmatic dependent launch)."""
        self._lay_out(kernel.name, args)
        function = kernel.function(shared_bytes)
        if dependent:
            config = self._dependent
            config.gridDimX, config.gridDimY, config.gridDimZ = grid
            config.blockDimX, config.sharedMemBytes = block, shared_bytes
            (status,) = driver.cuLaunchKernelEx(config, function, self._params, 0)
        else:
            (status,) = driver.cuLaunchKernel(function, *grid, block, 1, 1, shared_bytes, self._stream, self._params, 0)
        if status:
            doing = f"launch of {kernel.name}, grid {grid}, {block} threads, {shared_bytes} bytes of shared memory"
            raise error_of_code(int(status), doing)

    def _lay_out(self, name: str, args: Sequence[Any]) -> None:
        types = tuple(map(type, args))
        layout = self._layouts.get(types) or self._new_layout(name, types)
        packed, converters = layout
        packed.pack_into(self._slots, 0, *[convert(a) for convert, a in zip(converters, args, strict=True)])

    def _new_layout(self, name: str, types: tuple[type, ...]) -> _Layout:
        for position, kind in enumerate(types):
            if kind not in self._kinds:
                expected = "an array, None, np.int32, np.int64 or np.float32"
                raise TypeError(f"{name}: argument {position} is {kind.__name__}, expected {expected}")
        kinds = [self._kinds[kind] for kind in types]
        layout = struct.Struct("<" + "".join(letters for letters, _ in kinds)), tuple(convert for _, convert in kinds)
        self._layouts[types] = layout
        return layout


def _dependent_config(stream: Any) -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.blockDimY = config.blockDimZ = 1
    config.hStream = stream
    config.attrs, config.numAttrs = [attribute], 1
    return config
