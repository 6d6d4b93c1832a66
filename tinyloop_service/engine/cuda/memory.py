"""What lies on the device besides weights: pages, and the tables and state of every sequence.

    pool      fp16   [slabs][2·G·64·D]                of 64 tokens of a layer: K [G][64][D], V [G][8][D][8 tokens];
                                                      in h modes such an active page, or `per_slab` stored pages
              int8   [slabs][64·G·(2·D + 4)]          in mode int8: levels likewise, then fp16 scales [K and V][G][64]
    tables    int32  [slots][max_layers][max_blocks]  slab of a sequence's block, its parents' included
    places    int32  [slots + 1][…][…]                in h modes: where its h is stored (`slabs.py`), −1: it is not;
                                                      the last row names nothing
    token     int32  [slots]                          last sampled
    length    int32  [slots]                          tokens whose K and V are there
    outputs   fp16   [slots][d_model]                 a prefix's last token after the final norm: what the head reads

A *slab* is a page as attention reads it; where K and V are stored, it is the stored page.  tables, places, token and
length are one vector, `words`, so that a plan changes them in one launch.  Here is also how much of it all there is,
and what a start with too little memory is told.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine import cache_modes
from tinyloop_service.engine.api import PAGE_TOKENS
from tinyloop_service.engine.cache_modes import H_MODES
from tinyloop_service.engine.spec import ModelSpec
from tinyloop_service.errors import InvalidArgument
from tinyloop_service.kernels.device import Array, Device, Host
from tinyloop_service.types import CacheMode

MOST_SLOTS = 2560  # sequences open at a time, however much memory there is: those that slide may hold no page
SHARE = 0.9  # of what is free at the start; the rest is left to the driver, graphs and others
_MIB = 2**20
_WAYS_OUT = "free memory of the GPU, use a smaller model, or engine cpu"


def page_elements(spec: ModelSpec) -> int:
    return 2 * spec.kv_dim * PAGE_TOKENS


def max_blocks(spec: ModelSpec) -> int:
    """Blocks of the longest sequence."""
    return -(-spec.max_seq_len // PAGE_TOKENS)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a cache mode's pages lie in the pool."""

    mode: CacheMode
    page_bytes: int  # of a stored page
    slab_bytes: int
    dtype: type[np.float16 | np.int8]  # of the pool, which tells kernels what a slab is

    @classmethod
    def of(cls, mode: CacheMode, spec: ModelSpec) -> Layout:
        stored, read = (cache_modes.page_bytes(m, spec) for m in (mode, CacheMode.FP16 if mode in H_MODES else mode))
        return cls(mode, stored, read, np.int8 if mode is CacheMode.INT8 else np.float16)

    @property
    def slab_shape(self) -> tuple[int]:
        return (self.slab_bytes // np.dtype(self.dtype).itemsize,)

    @property
    def stores_h(self) -> bool:
        return self.mode in H_MODES

    @property
    def per_slab(self) -> int:
        """Stored pages that a slab has room for."""
        return self.slab_bytes // self.page_bytes

    def offsets(self, stored: NDArray[np.int32]) -> NDArray[np.int64]:
        """Bytes from the beginning of the pool on, of places or, where K and V are stored, of pages."""
        slabs, nth = np.divmod(stored.astype(np.int64), self.per_slab)
        offsets: NDArray[np.int64] = slabs * self.slab_bytes + nth * self.page_bytes
        return offsets

    def least_slabs(self, num_layers: int) -> int:
        """For one block, stored and read."""
        return num_layers + (-(-num_layers // self.per_slab) if self.stores_h else 0)


def keys_and_values(page: Host, spec: ModelSpec) -> tuple[NDArray[np.float16 | np.float32], ...]:
    """What is read of a page of the pool: K and V (G, 64, D), of an int8 page in float32."""
    shape = spec.n_kv_heads, PAGE_TOKENS, spec.head_dim
    keys, values = np.split(page[: page_elements(spec)], 2)
    octets = values.reshape(spec.n_kv_heads, PAGE_TOKENS // 8, spec.head_dim, 8)
    kv = keys.reshape(shape), octets.transpose(0, 1, 3, 2).reshape(shape)
    if page.dtype != np.int8:
        return kv
    levels = np.stack(kv)
    scales = page[page_elements(spec) :].view(np.float16).reshape(2, spec.n_kv_heads, PAGE_TOKENS, 1)
    return tuple(cache_modes.decode(CacheMode.INT8, {"levels": levels, "scales": scales}))


@dataclass(frozen=True, slots=True)
class Budget:
    """What was found out about memory before anything was taken; bytes."""

    free: int
    weights: int
    kv_memory: int | None  # asked for; None: all that is left

    def check_weights(self) -> None:
        if self.weights > self.free * SHARE:
            raise InvalidArgument(
                "engine",
                f"the model's weights need {self.weights // _MIB} MiB on the GPU, {self.free // _MIB} MiB are free; "
                f"{_WAYS_OUT}",
            )

    def num_slabs(self, layout: Layout, spec: ModelSpec, free_now: int) -> int:
        """In what is free after weights and buffers.  Raises InvalidArgument where they are too few to begin."""
        left = max(0, free_now - round(self.free * (1 - SHARE)))
        asked = left if self.kv_memory is None else self.kv_memory
        least = layout.least_slabs(spec.cache_layers(spec.default_loops)) * layout.slab_bytes
        if asked < least:
            given = f"{asked} bytes given" if self.kv_memory else f"{asked} bytes are left beside weights and buffers"
            raise InvalidArgument("kv_memory", f"{given}; {PAGE_TOKENS} tokens alone take {least}; {_WAYS_OUT}")
        if asked > left:
            raise InvalidArgument(
                "kv_memory",
                f"{asked // _MIB} MiB needed, {left // _MIB} MiB of the GPU are free beside weights and buffers; "
                f"give less kv_memory, or {_WAYS_OUT}",
            )
        return asked // layout.slab_bytes


class Arena:
    """The arrays of the drawing above."""

    def __init__(self, device: Device, spec: ModelSpec, layout: Layout, num_slots: int) -> None:
        layers, blocks = spec.cache_layers(spec.max_loops), max_blocks(spec)
        row = layers * blocks
        num_places = (num_slots + 1) * row if layout.stores_h else 0
        self.num_slots = num_slots
        self.places_index = num_slots * row  # of the first place in `words`
        self.length_index = self.places_index + num_places + num_slots  # of slot 0's length
        start = np.zeros(self.length_index + num_slots, np.int32)
        start[self.places_index : self.places_index + num_places] = -1
        self.words = device.upload(start)
        self.table_rows = self.words[: self.places_index].reshape(num_slots, row)
        self.tables = self.table_rows.reshape(num_slots, layers, blocks)
        self.place_rows = self.words[self.places_index : self.places_index + num_places].reshape(-1, row)
        self.places = self.place_rows.reshape(-1, layers, blocks)
        self.token = self.words[self.places_index + num_places : self.length_index]
        self.length = self.words[self.length_index :]
        self.outputs = device.zeros((num_slots, spec.d_model), np.float16)
        self.pool: Array = device.empty((0, *layout.slab_shape), layout.dtype)

    def take_pool(self, device: Device, layout: Layout, num_slabs: int) -> None:
        """Last of all, for it takes what is left."""
        self.pool = device.empty((num_slabs, *layout.slab_shape), layout.dtype)
