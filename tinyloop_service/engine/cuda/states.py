"""State of prefixes between the device and the host: stored pages, and the output that the head reads.

    save       to page-locked memory, in the order of the stream: it is there when the plan is done
    restore    from page-locked memory, likewise

    pages      uint8 [blocks][cache layers][bytes of a page]   as they are stored: kernels/page_layout.py, of h
               kernels_cu/include/hidden_codes.cuh; what lies behind the last token is zero
    logits     uint8: fp16 [d_model]                           of the last token, after the final norm

Pages are copied as they lie, neighbours in one copy.  On the device that takes as long as the bus needs for the bytes;
page-locked memory comes from a pool, in sizes that are powers of two, so that it is taken once.

In: where pages are stored, a slot, a state.  Out: a state, or memory that must live until the plan is done.  Refuses to
know whose a page is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.api import PAGE_TOKENS, SequenceId
from tinyloop_service.engine.cache_modes import fields_of
from tinyloop_service.engine.cuda.memory import Arena, Layout
from tinyloop_service.engine.cuda.sequences import Ints
from tinyloop_service.engine.spec import ModelSpec
from tinyloop_service.kernels.device import Array, Device

Bytes = NDArray[np.uint8]
State = Mapping[str, Bytes]


@dataclass(frozen=True, slots=True)
class SaveWork:
    seq: SequenceId
    slot: int
    stored: Ints  # pages or places [blocks, layers]
    last_tokens: int  # in the last block


@dataclass(frozen=True, slots=True)
class RestoreWork:
    slot: int
    stored: Ints
    state: State


@dataclass(frozen=True, slots=True)
class SavedState:
    """Complete once the plan is done, and `finish` called."""

    seq: SequenceId
    state: State
    nobody_s: tuple[Bytes, ...]  # parts of it

    def finish(self) -> State:
        for part in self.nobody_s:
            part[...] = 0
        return self.state


class States:
    """For one engine."""

    def __init__(self, device: Device, spec: ModelSpec, layout: Layout, arena: Arena) -> None:
        self._device, self._layout, self._arena = device, layout, arena
        self._output_bytes = 2 * spec.d_model
        self._h_token_bytes = [f.num_bytes for f in fields_of(layout.mode, spec)] if layout.stores_h else []

    def check(self, state: object, num_blocks: int, num_layers: int) -> State:
        """Raises ValueError where it is not the state of so many pages."""
        expected = {
            "pages": (num_blocks, num_layers, self._layout.page_bytes),
            "logits": (self._output_bytes,),
        }
        given = {name: part.shape for name, part in state.items()} if isinstance(state, Mapping) else {}
        if given != expected:
            raise ValueError(f"saved state of {given}, expected {expected}")
        assert isinstance(state, Mapping)
        return state

    def save(self, work: SaveWork) -> SavedState:
        pages, output = self._parts(self._pinned(work.stored), work.stored)
        for there, here in self._runs(work.stored, pages):
            self._device.copy_out(here, there)
        self._device.copy_out(output, self._output(work.slot))
        return SavedState(work.seq, {"pages": pages, "logits": output}, tuple(self._nobody_s(pages, work.last_tokens)))

    def restore(self, work: RestoreWork) -> Bytes:
        """The memory that copies read."""
        memory = self._pinned(work.stored)
        pages, output = self._parts(memory, work.stored)
        pages[...], output[...] = work.state["pages"], work.state["logits"]
        for there, here in self._runs(work.stored, pages):
            self._device.copy_in(there, here)
        self._device.copy_in(self._output(work.slot), output)
        return memory

    def _pinned(self, stored: Ints) -> Bytes:
        size = stored.size * self._layout.page_bytes + self._output_bytes
        memory: Bytes = self._device.pinned((1 << (size - 1).bit_length(),), np.uint8)[:size]
        return memory

    def _parts(self, memory: Bytes, stored: Ints) -> tuple[Bytes, Bytes]:
        size = stored.size * self._layout.page_bytes
        return memory[:size].reshape(*stored.shape, self._layout.page_bytes), memory[size:]

    def _runs(self, stored: Ints, pages: Bytes) -> Iterator[tuple[Array, Bytes]]:
        """Neighbouring pages of the pool, and where they are in `pages`."""
        if not stored.size:
            return
        layout, pool, host = self._layout, self._arena.pool.reshape(-1).view(np.uint8), pages.reshape(-1)
        at, size = layout.offsets(stored.reshape(-1)), layout.page_bytes
        begins = np.flatnonzero(np.diff(at, prepend=at[0] - 2 * size) != size).tolist()
        for begin, end in zip(begins, [*begins[1:], at.size], strict=True):
            first, num_bytes = int(at[begin]), (end - begin) * size
            yield pool[first : first + num_bytes], host[begin * size : end * size]

    def _output(self, slot: int) -> Array:
        output: Array = self._arena.outputs[slot].view(np.uint8)
        return output

    def _nobody_s(self, pages: Bytes, last_tokens: int) -> Iterator[Bytes]:
        """Behind the last token: pages of K and V have zeros there, of h whatever lay there before."""
        at = 0
        for token_bytes in self._h_token_bytes:
            end = at + PAGE_TOKENS * token_bytes
            yield pages[-1:, :, at + last_tokens * token_bytes : end]
            at = end
