"""All that an engine has on the device, and how the work of a plan is launched on it.

    one copy of all tables; stored pages moved; state saved; pages poisoned, page tables written, pages zeroed
    state restored; stored pages cloned and made active (h modes); partial pages cloned
    first tokens from kept outputs; prompts; decode steps, a graph replayed for each
    what was drawn on its way back

In: `Work`s, in order.  Out: arrays that a `Flight` receives.  Everything runs in the order of one stream, so pages and
slots that a plan gives back are the next plan's to use.  Refuses to know about sequences and plans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.api import PAGE_TOKENS
from tinyloop_service.engine.cuda.decoding import Decoder
from tinyloop_service.engine.cuda.flight import Flight
from tinyloop_service.engine.cuda.hidden import Hidden
from tinyloop_service.engine.cuda.memory import Arena, keys_and_values
from tinyloop_service.engine.cuda.pages import StoredWork
from tinyloop_service.engine.cuda.prompt import PassShape, PromptPass
from tinyloop_service.engine.cuda.states import States
from tinyloop_service.engine.cuda.work import Batch, DecodeWork, PromptWork, Work
from tinyloop_service.engine.spec import ModelSpec
from tinyloop_service.kernels.device import Array, Device
from tinyloop_service.kernels.embed import gather_rows
from tinyloop_service.kernels.page_layout import is_int8
from tinyloop_service.kernels.pages import clone, poison, zero
from tinyloop_service.kernels.sample import SamplerTables
from tinyloop_service.kernels.tables import copy_rows, write_words


@dataclass(frozen=True, slots=True)
class Machine:
    device: Device
    spec: ModelSpec
    arena: Arena
    sampler: SamplerTables
    decoder: Decoder
    prompt: PromptPass
    hidden: Hidden | None  # where h is stored
    states: States

    def prepare(self, heard: Callable[[int, int], None]) -> None:
        """Compile and load every kernel; `heard` is told how many are ready, of how many."""
        some = self.device.zeros((3,), np.int32)
        self.device.prepare(lambda: self._rehearse(some), heard)

    def begin(self, work: Work, flight: Flight) -> None:
        """Queue a plan's tables, and what must be done once, whatever becomes of the rest of it."""
        flight.staging.send()
        self.sampler.flush()
        if work.stored is not None and self.hidden is not None:
            for moves in work.stored.moved:
                self.hidden.clone(flight.staging.there(moves))

    def launch(self, work: Work, flight: Flight) -> None:
        """Queue everything else of a plan that was begun."""
        for save in work.saved:
            flight.save(self.states.save(save))
        self._change_memory(work, flight)
        for first in work.first:
            self._gather_outputs(flight.staging.there(first.index))
            self._draw(first.batch, flight)
        for prompt in work.prompts:
            self._run_prompt(prompt, flight)
        for decode in work.decode:
            self._run_decode(decode, flight)

    def _change_memory(self, work: Work, flight: Flight) -> None:
        device, arena, there = self.device, self.arena, flight.staging.there
        if work.poisoned.size:
            poison(device, arena.pool, there(work.poisoned))
        if work.copied.size:
            copy_rows(device, arena.table_rows, there(work.copied))
        if work.stored is not None and work.stored.cleared.size:
            copy_rows(device, arena.place_rows, there(work.stored.cleared))
        if work.written.size:
            write_words(device, arena.words, there(work.written))
        if work.zeroed.size:
            zero(device, arena.pool, there(work.zeroed))
        for restore in work.restored:
            flight.hold(self.states.restore(restore))
        if work.stored is not None and self.hidden is not None:
            self._make_active(work.stored, self.hidden, flight)
        if work.cloned.size:
            clone(device, arena.pool, there(work.cloned), head_dim=self.spec.head_dim)

    def _make_active(self, work: StoredWork, hidden: Hidden, flight: Flight) -> None:
        """After what is made active was stored; before it is cloned."""
        there = flight.staging.there
        if work.cloned.size:
            hidden.clone(there(work.cloned))
        if work.zeroed.size:
            zero(self.device, self.arena.pool, there(work.zeroed))
        for rebuild in work.rebuilt:
            hidden.rebuild(rebuild, flight.staging)

    def _run_prompt(self, work: PromptWork, flight: Flight) -> None:
        prompt, shape, schedule = self.prompt, work.shape, self.decoder.schedule(work.shape.loops)
        flight.staging.copy_to(prompt.tables, work.tables)
        prompt.run(shape, schedule)
        for at, slot in enumerate(work.kept):
            prompt.finish(prompt.last(shape, at, 1), schedule, self.arena.outputs[slot : slot + 1])
        at = len(work.kept)
        for batch in work.draws:
            count = len(batch.sequences)
            prompt.finish(prompt.last(shape, at, count), schedule, self.decoder.y[:count])
            self._draw(batch, flight)
            at += count

    def _run_decode(self, work: DecodeWork, flight: Flight) -> None:
        decoder = self.decoder
        decoder.batch.load(flight.staging, work.batch.tables)
        decoder.run(work.rows, work.loops, work.num_steps, work.quads)
        flight.receive(work.batch.sequences, work.batch.logprobs, decoder.outputs.of(work.rows, work.num_steps))

    def _draw(self, batch: Batch, flight: Flight) -> None:
        """First tokens out of the decoder's y."""
        rows = self.decoder.padded(len(batch.sequences))
        self.decoder.batch.load(flight.staging, batch.tables)
        self.decoder.draw(rows)
        flight.receive(batch.sequences, batch.logprobs, self.decoder.outputs.of(rows, 1))

    def _gather_outputs(self, slots: Array) -> None:
        """Kept outputs into the decoder's y; pairs of halves go as floats, bit for bit."""
        rows = self.decoder.y[: slots.shape[0]]
        gather_rows(self.device, self.arena.outputs.view(np.float32), slots, rows.view(np.float32))

    def read_logits(self, slot: int) -> NDArray[np.float32]:
        """[V], of a kept output."""
        self._gather_outputs(self.device.upload(np.array([slot], np.int32)))
        return self.decoder.read_logits()

    def read_pages(self, pages: NDArray[np.int32]) -> NDArray[np.float16 | np.float32]:
        """K and V in these pages of the pool, (layers, blocks) → (layers, 2, G, 64 · blocks, D)."""
        num_layers, num_blocks = pages.shape
        dtype = np.float32 if is_int8(self.arena.pool) else np.float16
        shape = num_layers, 2, self.spec.n_kv_heads, num_blocks * PAGE_TOKENS, self.spec.head_dim
        kv = np.empty(shape, dtype)
        for (layer, at), page in np.ndenumerate(pages):
            span = slice(at * PAGE_TOKENS, (at + 1) * PAGE_TOKENS)
            kv[layer, :, :, span] = keys_and_values(self.device.download(self.arena.pool[page]), self.spec)
        return kv

    def _rehearse(self, some: Array) -> None:
        """Every launch that a plan can ask for; nothing of it runs.  some: words to stand for tables."""
        device, arena, decoder = self.device, self.arena, self.decoder
        one, pair, triple = (some[:n].reshape(1, n) if n > 1 else some[:1] for n in (1, 2, 3))
        for rows in decoder.row_counts:
            decoder.rehearse(rows, self.spec.default_loops)
        loops = self.spec.default_loops
        schedule = decoder.schedule(loops)
        self.prompt.launch(PassShape(self.prompt.padded(1), 1, loops), schedule)
        self.prompt.finish(one, schedule, decoder.y[:1])
        self._gather_outputs(one)
        copy_rows(device, arena.table_rows, pair)
        write_words(device, arena.words, pair)
        zero(device, arena.pool, one)
        poison(device, arena.pool, one)
        clone(device, arena.pool, triple, head_dim=self.spec.head_dim)
        if self.hidden is not None:
            self.hidden.rehearse(one, triple)
