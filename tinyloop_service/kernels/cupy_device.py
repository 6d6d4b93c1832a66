"""The device seam on a GPU: CuPy's memory, streams and graphs, our own launches, cuBLAS.

Importing this file needs CuPy and cuda-bindings; `availability.open_cupy_device` says in one sentence what is missing.
Kernels are compiled in threads as soon as they are asked for, and loaded when first launched or prepared.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from numpy.typing import DTypeLike

from tinyloop_service.kernels.build import KERNELS, KernelBuilder
from tinyloop_service.kernels.cublas import WORKSPACE_BYTES, CuBlas
from tinyloop_service.kernels.cublaslt import open_cublaslt
from tinyloop_service.kernels.cuda_errors import cuda_errors
from tinyloop_service.kernels.device import Argument, Host, Shape, check_copy, check_gemm
from tinyloop_service.kernels.launching import CupyKernel, Launcher


class CupyDevice:
    """One GPU through CuPy, on a stream of its own.  See `Device`."""

    def __init__(
        self, ordinal: int = 0, *, sources: Path = KERNELS, cache: Path | None = None, precompiled: Path | None = None
    ) -> None:
        runtime = cupy.cuda.runtime
        properties = runtime.getDeviceProperties(ordinal)
        self.name: str = properties["name"].decode()
        self.arch = f"sm_{properties['major']}{properties['minor']}"
        self.num_sms = int(properties["multiProcessorCount"])
        self.max_shared_bytes: int = runtime.deviceGetAttribute(
            runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal
        )
        self._ordinal = ordinal
        self._thread: threading.Thread | None = None  # the one whose current context is ours
        self._bind()
        with cuda_errors("opening the CUDA device"):
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._workspace = self.empty(WORKSPACE_BYTES, np.uint8)
        self._launcher = Launcher(self._stream.ptr)
        self._blas = CuBlas(self._stream.ptr, self._workspace.data.ptr)
        self._ways = open_cublaslt(self._stream.ptr, self._workspace.data.ptr)
        self._builder = KernelBuilder(self.arch, sources=sources, cache=cache, precompiled=precompiled)
        self._compilers = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="compile")
        self._cubins: dict[tuple[Any, ...], Future[Path]] = {}
        self._kernels: dict[tuple[Any, ...], CupyKernel] = {}
        self._multiplied: set[tuple[Any, ...]] = set()  # layouts of products that were checked
        self._wanted: set[CupyKernel] | None = None  # while preparing: what would have been launched
        self._can_depend = int(self.arch.removeprefix("sm_")) >= 90

    @property
    def arithmetic(self) -> str:
        return f"{self.name}, {self.arch}, cuBLAS {self._blas.version}, kernels {self._builder.digest}"

    # ---- memory

    def empty(self, shape: Shape, dtype: DTypeLike) -> Any:
        self._bind()
        with cuda_errors(f"allocating {shape} {np.dtype(dtype)}"), self._stream:
            return cupy.empty(shape, dtype)

    def zeros(self, shape: Shape, dtype: DTypeLike) -> Any:
        array = self.empty(shape, dtype)
        if array.nbytes:
            with cuda_errors("filling with zeros"):
                array.data.memset_async(0, array.nbytes, self._stream)
        return array

    def upload(self, host: Host) -> Any:
        array = self.empty(host.shape, host.dtype)
        with cuda_errors("upload"):
            array.set(np.ascontiguousarray(host), stream=self._stream)
            self._stream.synchronize()
        return array

    def download(self, array: Any) -> Host:
        host = np.empty(array.shape, array.dtype)
        check_copy(host, array)
        self._bind()
        with cuda_errors("download"):
            array.get(stream=self._stream, out=host)
            self._stream.synchronize()
        return host

    def pinned(self, shape: Shape, dtype: DTypeLike) -> Host:
        self._bind()
        size, kind = int(np.prod(shape)), np.dtype(dtype)
        with cuda_errors("allocating page-locked memory"):
            memory = cupy.cuda.alloc_pinned_memory(max(1, size * kind.itemsize))
        return np.frombuffer(memory, kind, size).reshape(shape)

    def copy_in(self, target: Any, host: Host) -> None:
        self._copy(target, host, target.data.ptr, _address(host), cupy.cuda.runtime.memcpyHostToDevice)

    def copy_out(self, host: Host, source: Any) -> None:
        self._copy(host, source, _address(host), source.data.ptr, cupy.cuda.runtime.memcpyDeviceToHost)

    def _copy(self, target: Any, source: Any, to: int, from_: int, kind: int) -> None:
        check_copy(target, source)
        if self._wanted is None and target.nbytes:
            self._bind()
            with cuda_errors("copy"):
                cupy.cuda.runtime.memcpyAsync(to, from_, target.nbytes, kind, self._stream.ptr)

    def memory(self) -> tuple[int, int]:
        self._bind()
        with cuda_errors("asking for free memory"):
            cupy.get_default_memory_pool().free_all_blocks()  # what CuPy keeps of arrays that are gone
            free, total = cupy.cuda.runtime.memGetInfo()
        return free, total

    # ---- kernels

    def kernel(self, stem: str, name: str, /, **defines: int) -> CupyKernel:
        module = (stem, *sorted(defines.items()))
        key = (name, module)
        if key not in self._kernels:
            if module not in self._cubins:
                self._cubins[module] = self._cubin(stem, defines)
            self._kernels[key] = CupyKernel(name, self._cubins[module])
        return self._kernels[key]

    def _cubin(self, stem: str, defines: dict[str, int]) -> Future[Path]:
        there = self._builder.find(stem, defines)
        if there is None:
            return self._compilers.submit(self._builder.cubin, stem, defines)
        future = Future[Path]()
        future.set_result(there)
        return future

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        block: int,
        args: Sequence[Argument],
        *,
        shared_bytes: int = 0,
        dependent: bool = False,
    ) -> None:
        if self._wanted is not None:
            self._wanted.add(kernel)
        elif 0 not in grid:
            self._bind()
            self._launcher.launch(kernel, grid, block, args, shared_bytes, dependent and self._can_depend)

    def gemm(self, x: Any, weight: Any, out: Any, *, accumulate: bool = False, way: Any = None) -> None:
        layout = tuple((array.shape, array.strides, array.dtype) for array in (x, weight, out))
        if layout not in self._multiplied:
            check_gemm(x, weight, out)
            self._multiplied.add(layout)
        if self._wanted is not None or 0 in x.shape or 0 in out.shape:
            return
        self._bind()
        addresses = x.data.ptr, weight.data.ptr, out.data.ptr
        if way is not None and self._ways is not None:
            self._ways.gemm(way, *addresses, accumulate=accumulate, **_sizes(x, weight, out))
            return
        self._blas.gemm(
            *addresses,
            x_stride=x.strides[0] // 2,
            weight_stride=weight.strides[0] // 2,
            out_stride=out.strides[0] // out.itemsize,
            accumulate=accumulate,
            **_sizes(x, weight, out),
        )

    def ways(self, x: Any, weight: Any, out: Any) -> Sequence[object]:
        check_gemm(x, weight, out)
        self._bind()
        return [] if self._ways is None else self._ways.ways(**_sizes(x, weight, out))

    def prepare(self, work: Callable[[], None], progress: Callable[[int, int], None] | None = None) -> None:
        self._bind()
        self._wanted = set()
        try:
            work()
            wanted = list(self._wanted)
        finally:
            self._wanted = None
        compiling = {kernel.cubin for kernel in wanted if not kernel.cubin.done()}
        for ready, cubin in enumerate(as_completed(compiling), 1):
            cubin.result()  # raises at the first that fails
            if progress is not None:
                progress(ready, len(compiling))
        for kernel in wanted:
            kernel.load()

    # ---- order

    def capture(self, work: Callable[[], None]) -> CupyGraph:
        if self._wanted is not None:
            work()
            return CupyGraph(self, None)
        self.prepare(work)  # a module is not loaded while a stream captures
        with cuda_errors("capturing a graph"):
            self._stream.begin_capture()
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # the capture is broken, and why is on its way
                    self._stream.end_capture()
                raise
            graph = self._stream.end_capture()
            graph.upload(self._stream)
        return CupyGraph(self, graph)

    def launch_graph(self, graph: Any) -> None:
        self._bind()
        if self._wanted is None:
            with cuda_errors("launching a graph"):
                graph.launch(self._stream)

    def event(self) -> CupyEvent:
        self._bind()
        return CupyEvent(cupy.cuda.Event(disable_timing=True), self._stream)

    def synchronize(self) -> None:
        self._bind()
        with cuda_errors("waiting for the device"):
            self._stream.synchronize()

    def close(self) -> None:
        self._compilers.shutdown(cancel_futures=True)
        self._blas.close()
        if self._ways is not None:
            self._ways.close()

    def _bind(self) -> None:
        """Makes the GPU current in the calling thread; the driver's calls need it."""
        thread = threading.current_thread()  # not its number, which the next thread may get
        if thread is not self._thread:
            with cuda_errors("choosing the CUDA device"):
                cupy.cuda.Device(self._ordinal).use()
            self._thread = thread


class CupyGraph:
    def __init__(self, device: CupyDevice, graph: Any) -> None:
        self._device, self._graph = device, graph

    def launch(self) -> None:
        self._device.launch_graph(self._graph)


class CupyEvent:
    def __init__(self, event: Any, stream: Any) -> None:
        self._event, self._stream = event, stream

    def record(self) -> None:
        with cuda_errors("recording an event"):
            self._event.record(self._stream)

    def synchronize(self) -> None:
        with cuda_errors("waiting for the device"):
            self._event.synchronize()

    @property
    def done(self) -> bool:
        with cuda_errors("asking an event"):
            return bool(self._event.done)


def _address(host: Host) -> int:
    address: int = host.__array_interface__["data"][0]  # `ctypes.data` runs Python of NumPy's, which is seldom warm
    return address


def _sizes(x: Any, weight: Any, out: Any) -> dict[str, Any]:
    """Of a product, as both libraries are told them."""
    return {
        "tokens": x.shape[0],
        "outputs": weight.shape[0],
        "inputs": x.shape[1],
        "out_is_fp16": out.itemsize == 2,
    }
