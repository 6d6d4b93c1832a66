"""The launches of a real step or prefill, recorded to be repeated, and what each of them cannot do without.

`RecordingDevice` stands between an engine and its device and notes every launch and product that passes.  So what is
measured is what the engine does, on the data it does it with.

In: a device; later, launches.  Out: `Launched`, which can be called again, and its `Cost`.  Refuses to know about
clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tinyloop_service.engine.api import PAGE_TOKENS
from tinyloop_service.kernels.device import Device, Graph
from tinyloop_service.kernels.pack import TILE_ROWS

Array = Any  # of the device


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    name: str  # of the kernel, or "gemm"
    args: tuple[Any, ...]
    again: Callable[[], None]  # the same launch, but that a step's last one (`advance` = 0) leaves lengths as they are

    @property
    def label(self) -> str:
        """Launches of one label are shown as one line: those of all layers together, linears apart by their sizes."""
        if self.name == "gemm":
            x, weight, _ = self.args
            return f"gemm {x.shape[0]}×{x.shape[1]}×{weight.shape[0]}"
        if self.name.startswith("linear"):
            _, inputs, outputs = self.linear_sizes
            return f"{self.name} {inputs}→{outputs}"
        return self.name

    @property
    def linear_sizes(self) -> tuple[int, int, int]:
        """Rows, inputs, outputs of a decode linear; its arguments begin: weights, scales, y, rows, tiles, inputs."""
        rows, tiles, inputs = map(int, self.args[3:6])
        return rows, inputs, tiles * TILE_ROWS


@dataclass(frozen=True, slots=True)
class RecordedGraph:
    graph: Graph
    launches: list[Launched]
    device: RecordingDevice

    def launch(self) -> None:
        self.graph.launch()
        self.device.note(self.launches)


class RecordingDevice:
    """A device that passes everything on, and notes launches."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._launches: list[Launched] = []
        self.last_graph: list[Launched] = []  # launches of the graph that was launched last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def take(self) -> list[Launched]:
        """What was launched since the last call, alone or in graphs."""
        taken = list(self._launches)
        self._launches.clear()
        return taken

    def note(self, launches: list[Launched]) -> None:
        """A graph of these was launched."""
        self._launches.extend(launches)
        self.last_graph = launches

    def capture(self, work: Callable[[], None]) -> RecordedGraph:
        before = len(self._launches)

        def noted() -> None:
            del self._launches[before:]  # of a rehearsal
            work()

        graph = self._device.capture(noted)
        launches = self._launches[before:]
        del self._launches[before:]  # nothing ran yet
        return RecordedGraph(graph, launches, self)

    def launch(self, kernel: Any, grid: tuple[int, int, int], block: int, args: Sequence[Any], **options: Any) -> None:
        def run(arguments: Sequence[Any]) -> None:
            self._device.launch(kernel, grid, block, arguments, **options)

        run(args)
        standing = (*args[:-1], np.int32(0)) if kernel.name == "sample_finish" else args
        self._launches.append(Launched(kernel.name, tuple(args), partial(run, standing)))

    def gemm(self, x: Array, weight: Array, out: Array, **options: Any) -> None:
        again = partial(self._device.gemm, x, weight, out, **options)
        again()
        self._launches.append(Launched("gemm", (x, weight, out), again))


@dataclass(frozen=True, slots=True)
class Cost:
    """The least that a launch must do."""

    memory_bytes: int = 0  # nobody touched them since the step began
    cache_bytes: int = 0  # re-read, or written by the launch before
    flops: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.memory_bytes + other.memory_bytes, self.cache_bytes + other.cache_bytes, self.flops + other.flops
        )


class Costs:
    """Costs of a sequence of launches, in their order: weights come out of memory once and out of the cache later."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._seen: set[int] = set()

    def of(self, launched: Launched) -> Cost:
        """An unknown kernel costs nothing: it is timed all the same."""
        if launched.name.startswith("linear"):
            return self._linear(launched)
        rule = _RULES.get(launched.name)
        return rule(self, launched.args) if rule else Cost()

    def _linear(self, launched: Launched) -> Cost:
        rows, inputs, outputs = launched.linear_sizes
        moved = 2 * rows * inputs + 4 * rows * outputs
        return self._read(*launched.args[:2]) + Cost(cache_bytes=moved, flops=2 * rows * inputs * outputs)

    def gemm(self, args: tuple[Any, ...]) -> Cost:
        x, weight, out = args
        rows, inputs = x.shape
        moved = 2 * rows * inputs + rows * weight.shape[0] * out.dtype.itemsize
        return Cost(2 * weight.shape[0] * inputs, moved, 2 * rows * inputs * weight.shape[0])

    def decode_attention(self, args: tuple[Any, ...]) -> Cost:
        q, pool, _, _, items, num_items = args[:6]
        read = self._download(items)[: int(self._download(num_items)[0])]
        queries, shared = int(read[:, 3].sum()), int((read[:, 5] // 8 * 8).sum())  # tokens read through a source
        token_bytes = _page_bytes(pool) // PAGE_TOKENS
        return Cost(
            (len(read) * PAGE_TOKENS - shared) * token_bytes,
            2 * q.nbytes + shared * token_bytes,
            4 * queries * PAGE_TOKENS * q.shape[1],
        )

    def prefill_attention(self, args: tuple[Any, ...]) -> Cost:
        """Keys and values of the longest sequence, once: every launch has but one in these benchmarks."""
        q, pool, _, tiles = args[:4]
        pairs = blocks = 0
        for _, _, count, first, window, _ in self._download(tiles).tolist():
            seen = np.arange(first + 1, first + count + 1)
            pairs += int((np.minimum(seen, window) if window else seen).sum())
            blocks = max(blocks, -(-(first + count) // PAGE_TOKENS))
        return Cost(0, 2 * q.nbytes + blocks * _page_bytes(pool), 4 * pairs * q.shape[1])

    def fold_norm(self, args: tuple[Any, ...]) -> Cost:
        x, x_out, partials = args[:3]
        streams = sum(array.nbytes for array in (x, x_out, partials) if array is not None)
        return Cost(cache_bytes=streams + x.nbytes // 2)

    def stream(self, args: tuple[Any, ...]) -> Cost:
        """Rows of the residual stream, fp32, written from rows of a table that is half or just as wide."""
        source, out = args[0], next(arg for arg in reversed(args) if getattr(arg, "ndim", 0) == 2)
        return Cost(cache_bytes=out.nbytes + out.size * source.dtype.itemsize)

    def swiglu(self, args: tuple[Any, ...]) -> Cost:
        return Cost(cache_bytes=args[0].nbytes + args[1].nbytes)

    def rope(self, args: tuple[Any, ...]) -> Cost:
        return Cost(cache_bytes=2 * args[0].nbytes)  # what is read is written, to q and to pages

    def rope_int8(self, args: tuple[Any, ...]) -> Cost:
        qkv, q = args[0].nbytes, args[7].nbytes
        return Cost(cache_bytes=qkv + q + (qkv - q) // 2)

    def store_hidden(self, args: tuple[Any, ...]) -> Cost:
        x, page_bytes, y = args[0], int(args[10]), args[14]
        return Cost(cache_bytes=x.nbytes + y.nbytes + len(x) * page_bytes // PAGE_TOKENS)

    def round_hidden(self, args: tuple[Any, ...]) -> Cost:
        return Cost(cache_bytes=args[0].nbytes + args[4].nbytes)

    def load_hidden(self, args: tuple[Any, ...]) -> Cost:
        """args: pool, slab_bytes, per_slab, page_bytes, pages, …, y, d"""
        return Cost(args[4].shape[0] * int(args[3]), args[-2].nbytes)

    def clone_hidden(self, args: tuple[Any, ...]) -> Cost:
        triples = self._download(args[4])
        return Cost(2 * int(triples[:, 2].sum()) * int(args[3]) // PAGE_TOKENS)

    def sample_scan(self, args: tuple[Any, ...]) -> Cost:
        """Logits are read, scores written; only `row_logits` says how many rows there are."""
        scores = args[6]
        return Cost(cache_bytes=8 * args[0].shape[0] * scores.shape[1])

    def clone(self, args: tuple[Any, ...]) -> Cost:
        """args: pool, triples; sources are shared by many."""
        pool, triples = args[0], self._download(args[1])
        per_token = _page_bytes(pool) // PAGE_TOKENS
        sources = {int(source): int(count) for source, _, count in triples}
        return Cost(per_token * (int(triples[:, 2].sum()) + sum(sources.values())))

    def fill(self, args: tuple[Any, ...]) -> Cost:
        pool, ids = args[:2]
        return Cost(_page_bytes(pool) * ids.shape[0])

    def _read(self, *arrays: Array) -> Cost:
        total = Cost()
        for array in arrays:
            if array is not None:
                fresh = id(array) not in self._seen
                self._seen.add(id(array))
                total += Cost(memory_bytes=array.nbytes) if fresh else Cost(cache_bytes=array.nbytes)
        return total

    def _download(self, array: Array) -> np.ndarray:
        return np.asarray(self._device.download(array))


def _page_bytes(pool: Array) -> int:
    return int(pool.shape[1] * pool.dtype.itemsize)


_RULES: dict[str, Callable[[Costs, tuple[Any, ...]], Cost]] = {
    "gemm": Costs.gemm,
    "decode_attention": Costs.decode_attention,
    "prefill_attention": Costs.prefill_attention,
    "fold_norm": Costs.fold_norm,
    "embed": Costs.stream,
    "embed_prompt": Costs.stream,
    "gather_rows": Costs.stream,
    "rope": Costs.rope,
    "rope_int8": Costs.rope_int8,
    "swiglu": Costs.swiglu,
    "store_hidden": Costs.store_hidden,
    "round_hidden": Costs.round_hidden,
    "load_hidden": Costs.load_hidden,
    "clone_hidden": Costs.clone_hidden,
    "sample_scan": Costs.sample_scan,
    "clone": Costs.clone,
    "clone_int8": Costs.clone,
    "fill": Costs.fill,
}
