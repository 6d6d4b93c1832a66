"""`CudaEngine`: plan → launches → result.

    submit   the host's bookkeeping of the whole plan, all its tables into page-locked memory     (work.py)
             one copy; pages poisoned, page tables written, pages zeroed, partial pages cloned
             first tokens from kept outputs; prompts; decode steps, a graph replayed for each
             what was drawn on its way back, an event behind it
    result   waits for the event                                                                  (flight.py)

In: `Plan`s from one thread.  Out: a `PendingStep` for each, mostly before the device has begun.  Everything runs in the
order of one stream, so pages and slots that a plan gives back are the next plan's to use.  Refuses to know about names,
tenants and queues.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.api import PAGE_TOKENS, Limits, Plan, SequenceId, StepResult
from tinyloop_service.engine.cuda.decoding import Decoder
from tinyloop_service.engine.cuda.flight import Flight, PendingStep
from tinyloop_service.engine.cuda.memory import MOST_SLOTS, Arena, Budget, max_blocks, page_bytes
from tinyloop_service.engine.cuda.prompt import PassShape, PromptPass
from tinyloop_service.engine.cuda.selfcheck import check_products, check_rows
from tinyloop_service.engine.cuda.sequences import SequenceTable
from tinyloop_service.engine.cuda.weights import load_weights, weight_bytes
from tinyloop_service.engine.cuda.work import Batch, DecodeWork, Planner, PromptWork, Work
from tinyloop_service.engine.spec import ModelSpec
from tinyloop_service.engine.tensors import ModelWeights
from tinyloop_service.errors import EngineFault, InvalidArgument
from tinyloop_service.kernels.device import Array, Device
from tinyloop_service.kernels.embed import gather_rows
from tinyloop_service.kernels.pages import clone, poison, zero
from tinyloop_service.kernels.sample import SamplerTables
from tinyloop_service.kernels.tables import copy_rows, write_words
from tinyloop_service.types import CacheMode

ROW_COUNTS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)  # what a batch of decoding rows is padded to
MAX_ROWS = 256  # of a plan, in batches of at most ROW_COUNTS[-1]
MAX_CHUNK = 2048
MAX_STEPS = 8
_KERNELS_PER_LINE = 20  # of progress


class CudaEngine:
    """An `Engine`.  Construction compiles, captures graphs, and checks that no row depends on its company."""

    name = "cuda"

    def __init__(
        self,
        weights: ModelWeights,
        *,
        device: Device,
        kv_memory: int | None = None,
        cache_mode: CacheMode = CacheMode.FP16,
        debug: bool = False,
        progress: Callable[[str], None] | None = None,
        row_counts: tuple[int, ...] = ROW_COUNTS,
        max_chunk: int = MAX_CHUNK,
    ) -> None:
        """kv_memory: bytes for pages; None: nine tenths of what is free, beside weights and buffers.

        debug: pages are poisoned when given back.  Raises InvalidArgument for what this engine cannot do or what
        memory does not hold, EngineFault if the self-check finds that this device breaks a promise.
        """
        if cache_mode is not CacheMode.FP16:
            raise InvalidArgument("cache_mode", f"{cache_mode.value} given; the CUDA engine stores fp16")
        say, spec = progress or (lambda _: None), weights.spec
        self._device, self._spec = device, spec
        budget = Budget(device.memory()[0], weight_bytes(weights), kv_memory)
        budget.check_weights()
        say("repacking weights")
        model = load_weights(device, weights)
        slots = min(MOST_SLOTS, 2 * MAX_ROWS + budget.free // (page_bytes(spec) * spec.cache_layers(1)))
        self._arena = Arena(device, spec, slots)
        self._sampler = SamplerTables(device, slots, spec.vocab_size, row_counts[-1])
        self._decoder = Decoder(device, model, self._arena, self._sampler, row_counts=row_counts, max_steps=MAX_STEPS)
        self._prompt = PromptPass(device, model, self._arena, max_tokens=max_chunk, max_last=row_counts[-1])
        self._table = SequenceTable(slots, spec.cache_layers(spec.max_loops), max_blocks(spec))
        self._planner = Planner(self._table, self._arena, self._sampler, self._decoder, self._prompt, debug=debug)
        self._flights = [Flight(device), Flight(device)]
        num_pages = budget.num_pages(spec, device.memory()[0])
        self._arena.take_pages(device, spec, num_pages)
        self._limits = _limits(weights, cache_mode, num_pages, max_chunk)
        self._warm(say)

    @property
    def limits(self) -> Limits:
        return self._limits

    def submit(self, plan: Plan) -> PendingStep:
        """Queue `plan`.  A failure here or in the result is an EngineFault: its sequences are lost, the others live on;
        or DeviceLost."""
        try:
            return self._submit(plan)
        except EngineFault:
            raise
        except Exception as error:
            raise EngineFault(f"step {plan.number} failed: {type(error).__name__}: {error}") from error

    def step(self, plan: Plan) -> StepResult:
        return self.submit(plan).result()

    def close(self) -> None:
        """Wait for the device and let it go."""
        for flight in self._flights:
            flight.begin()
        self._device.close()

    def read_kv(self, seq: SequenceId) -> NDArray[np.float16]:
        """What the pages of a sequence hold of its own tokens, inherited ones of its first page included.

        fp16 (cache layers, 2, n_kv_heads, tokens, head_dim).  For tests and tools; not part of the `Engine` protocol.
        """
        sequence, spec = self._table[seq], self._spec
        tokens = sequence.length - sequence.first_block * PAGE_TOKENS
        filled = sequence.blocks[: -(-tokens // PAGE_TOKENS)]
        shape = (spec.n_kv_heads, PAGE_TOKENS, spec.head_dim)
        kv = np.empty(
            (spec.cache_layers(sequence.loops), 2, *shape[:1], len(filled) * PAGE_TOKENS, shape[2]), np.float16
        )
        for at, block in enumerate(filled):
            span = slice(at * PAGE_TOKENS, (at + 1) * PAGE_TOKENS)
            for layer, page in enumerate(block):
                keys, values = np.split(self._device.download(self._arena.pool[page]), 2)
                kv[layer, 0, :, span] = keys.reshape(shape)
                kv[layer, 1, :, span] = values.reshape(shape[0], shape[2], shape[1]).transpose(0, 2, 1)
        return kv[:, :, :, :tokens]

    def read_logits(self, prefix: SequenceId) -> NDArray[np.float32]:
        """The logits (vocab_size,) of a built prefix's last token.  For tests and tools, as `read_kv`."""
        sequence = self._table[prefix]
        assert sequence.has_output, f"sequence {prefix} is no prefix, or not built"
        self._gather_outputs(self._device.upload(np.array([sequence.slot], np.int32)))
        return self._decoder.read_logits()

    # ---- start

    def _warm(self, say: Callable[[str], None]) -> None:
        """Compile, capture the graphs of the default depth (others are captured on first use), check."""
        spec, decoder = self._spec, self._decoder

        def compiled(ready: int, total: int) -> None:
            if ready % _KERNELS_PER_LINE == 0 or ready == total:
                say(f"compiling kernels, once for this machine: {ready} of {total} ready")

        some = self._device.zeros((3,), np.int32)
        self._device.prepare(lambda: self._rehearse(some), compiled)
        say("capturing graphs")
        for rows in decoder.row_counts:
            decoder.capture(rows, spec.default_loops)
        say("checking that no row depends on its company")
        check_products(self._device, self._prompt, decoder.schedule(spec.default_loops))
        check_rows(self, decoder.row_counts)

    def _rehearse(self, some: Array) -> None:
        """Every launch that a plan can ask for; nothing of it runs.  some: words to stand for tables."""
        device, arena, decoder = self._device, self._arena, self._decoder
        one, pair, triple = (some[:n].reshape(1, n) if n > 1 else some[:1] for n in (1, 2, 3))
        for rows in decoder.row_counts:
            decoder.rehearse(rows, self._spec.default_loops)
        loops = self._spec.default_loops
        schedule = decoder.schedule(loops)
        self._prompt.launch(PassShape(self._prompt.padded(1), 1, loops), schedule)
        self._prompt.finish(one, schedule, decoder.y[:1])
        self._gather_outputs(one)
        copy_rows(device, arena.table_rows, pair)
        write_words(device, arena.words, pair)
        zero(device, arena.pool, one)
        poison(device, arena.pool, one)
        clone(device, arena.pool, triple, head_dim=self._spec.head_dim)

    # ---- one plan

    def _submit(self, plan: Plan) -> PendingStep:
        flight = self._flights[0]
        flight.begin()
        self._flights.reverse()
        try:
            self._launch(self._planner.work(plan, flight.staging), flight)
        finally:  # what was queued of a plan that failed still reads the flight's memory
            pending = flight.end()
        return pending

    def _launch(self, work: Work, flight: Flight) -> None:
        flight.staging.send()
        self._sampler.flush()
        self._change_memory(work, flight)
        for first in work.first:
            self._gather_outputs(flight.staging.there(first.index))
            self._draw(first.batch, flight)
        for prompt in work.prompts:
            self._run_prompt(prompt, flight)
        for decode in work.decode:
            self._run_decode(decode, flight)

    def _change_memory(self, work: Work, flight: Flight) -> None:
        device, arena, there = self._device, self._arena, flight.staging.there
        if work.poisoned.size:
            poison(device, arena.pool, there(work.poisoned))
        if work.copied.size:
            copy_rows(device, arena.table_rows, there(work.copied))
        if work.written.size:
            write_words(device, arena.words, there(work.written))
        if work.zeroed.size:
            zero(device, arena.pool, there(work.zeroed))
        if work.cloned.size:
            clone(device, arena.pool, there(work.cloned), head_dim=self._spec.head_dim)

    def _run_prompt(self, work: PromptWork, flight: Flight) -> None:
        there, schedule = flight.staging.there, self._decoder.schedule(work.shape.loops)
        flight.staging.copy_to(self._prompt.tables, work.tables)
        self._prompt.run(work.shape, schedule)
        for slot, row in work.kept:
            self._prompt.finish(there(row), schedule, self._arena.outputs[slot : slot + 1])
        for draw in work.draws:
            self._prompt.finish(there(draw.index), schedule, self._decoder.y[: draw.index.size])
            self._draw(draw.batch, flight)

    def _run_decode(self, work: DecodeWork, flight: Flight) -> None:
        decoder = self._decoder
        decoder.batch.load(flight.staging, work.batch.tables)
        decoder.run(work.rows, work.loops, work.num_steps)
        flight.receive(work.batch.sequences, work.batch.logprobs, decoder.outputs.of(work.rows, work.num_steps))

    def _draw(self, batch: Batch, flight: Flight) -> None:
        """First tokens out of the decoder's y."""
        rows = self._decoder.padded(len(batch.sequences))
        self._decoder.batch.load(flight.staging, batch.tables)
        self._decoder.draw(rows)
        flight.receive(batch.sequences, batch.logprobs, self._decoder.outputs.of(rows, 1))

    def _gather_outputs(self, slots: Array) -> None:
        """Kept outputs into the decoder's y; pairs of halves go as floats, bit for bit."""
        rows = self._decoder.y[: slots.shape[0]]
        gather_rows(self._device, self._arena.outputs.view(np.float32), slots, rows.view(np.float32))


def _limits(weights: ModelWeights, cache_mode: CacheMode, num_pages: int, max_chunk: int) -> Limits:
    spec: ModelSpec = weights.spec
    return Limits(
        model_id=weights.model_id,
        vocab_size=spec.vocab_size,
        default_loops=spec.default_loops,
        max_loops=spec.max_loops,
        max_seq_len=spec.max_seq_len,
        pre_blocks=spec.pre_blocks,
        loop_blocks=spec.loop_blocks,
        post_blocks=spec.post_blocks,
        eos_token_ids=spec.eos_token_ids,
        cache_mode=cache_mode,
        num_pages=num_pages,
        page_bytes=page_bytes(spec),
        max_rows=MAX_ROWS,
        max_chunk=max_chunk,
        max_steps=MAX_STEPS,
        split_tokens=PAGE_TOKENS,
        active_pages_per_page=0,
    )
