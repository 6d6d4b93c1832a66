"""`CudaEngine`: plan → launches → result.

    submit   the host's bookkeeping of the whole plan, all its tables into page-locked memory     work.py
             everything that is to be launched; an event behind it                                machine.py
    result   waits for the event, reads what came back                                            flight.py

In: `Plan`s from one thread.  Out: a `PendingStep` for each, mostly before the device has begun.  Refuses to know about
names, tenants and queues.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.api import PAGE_TOKENS, Limits, Plan, SequenceId, StepResult
from tinyloop_service.engine.cache_modes import check_mode
from tinyloop_service.engine.cuda.decoding import Decoder
from tinyloop_service.engine.cuda.flight import Flight, PendingStep
from tinyloop_service.engine.cuda.hidden import Hidden
from tinyloop_service.engine.cuda.machine import Machine
from tinyloop_service.engine.cuda.memory import MOST_SLOTS, Arena, Budget, Layout, max_blocks
from tinyloop_service.engine.cuda.pages import Pages, PlainPages, SlabPages
from tinyloop_service.engine.cuda.products import FIXED_ROWS, Products
from tinyloop_service.engine.cuda.projection import Coded, Direct, Projection
from tinyloop_service.engine.cuda.prompt import PromptPass
from tinyloop_service.engine.cuda.selfcheck import check_products, check_rows
from tinyloop_service.engine.cuda.sequences import SequenceTable
from tinyloop_service.engine.cuda.slabs import SlabPool
from tinyloop_service.engine.cuda.states import States
from tinyloop_service.engine.cuda.weights import DeviceModel, load_weights, weight_bytes
from tinyloop_service.engine.cuda.work import Planner
from tinyloop_service.engine.limits import limits_of
from tinyloop_service.engine.spec import ModelSpec
from tinyloop_service.engine.tensors import ModelWeights
from tinyloop_service.errors import EngineFault
from tinyloop_service.kernels import page_layout
from tinyloop_service.kernels.cut import BLOCK_ROWS
from tinyloop_service.kernels.device import Device
from tinyloop_service.kernels.sample import SamplerTables
from tinyloop_service.types import CacheMode

ROW_COUNTS = (1, 2, 4, 8, *range(16, 65, 8), 80, 96, 112, 128)  # what a batch of decoding rows is padded to
MAX_ROWS = 256  # of a plan, in batches of at most ROW_COUNTS[-1]
MAX_CHUNK = 2048
MAX_STEPS = 8
BUSY_STEPS = 4  # about as long as it takes to plan, and to tell what came of it
GOES_ON = 64  # rows; more make a step so much longer that going on at once gains nothing
_SCRATCH_SHARE = 1 / 64  # of free memory, for batches of many rows
_KERNELS_PER_LINE = 20  # of progress
_GRAPHS_PER_LINE = 16


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
        check_mode(cache_mode, weights.spec)
        say, spec, layout = progress or (lambda _: None), weights.spec, Layout.of(cache_mode, weights.spec)
        budget = Budget(device.memory()[0], weight_bytes(weights), kv_memory)
        budget.check_weights()
        row_counts = affordable(row_counts, spec, device.memory()[0])
        say("repacking weights")
        model = load_weights(device, weights, q_apart=layout.stores_h)
        arena = Arena(device, spec, layout, MOST_SLOTS)
        sampler = SamplerTables(device, MOST_SLOTS, spec.vocab_size, row_counts[-1])
        products, rows = Products(device), _Rows(-(-max_chunk // FIXED_ROWS) * FIXED_ROWS, row_counts[-1])
        projection = _projection(device, model, layout, arena, products, rows)
        decoder = Decoder(device, model, arena, sampler, projection, row_counts=row_counts, max_steps=MAX_STEPS)
        prompt = PromptPass(
            device, model, arena, products, projection, max_rows=rows.of_pass, max_last=rows.of_step
        )  # fmt: skip
        hidden = projection if isinstance(projection, Hidden) else None
        states = States(device, spec, layout, arena)
        self._machine: Machine | None = Machine(device, spec, arena, sampler, decoder, prompt, hidden, states)
        self._flights = [Flight(device), Flight(device)]
        num_slabs = budget.num_slabs(layout, spec, device.memory()[0])
        arena.take_pool(device, layout, num_slabs)
        self._table = SequenceTable(MOST_SLOTS, spec.cache_layers(spec.max_loops), max_blocks(spec))
        self._pages = _pages(layout, spec, self._table, arena, num_slabs)
        planner = Planner(self._table, self._pages, arena, sampler, decoder, prompt, states, debug=debug)
        self._planner: Planner | None = planner
        self._limits = _limits(weights, layout, num_slabs, max_chunk, _snapshot_id(weights, device))
        self._warm(self._machine, say)

    @property
    def limits(self) -> Limits:
        return self._limits

    def submit(self, plan: Plan) -> PendingStep:
        """Queue `plan`.  A failure here or in the result is an EngineFault: its sequences are lost, the others live on;
        or DeviceLost."""
        assert self._machine is not None and self._planner is not None, "the engine was closed"
        flight = self._flights[0]
        flight.begin()
        self._flights.reverse()
        try:
            work = self._planner.work(plan, flight.staging)
            self._machine.begin(work, flight)
            self._planner.begun()
            self._machine.launch(work, flight)
            self._planner.launched()
        except EngineFault:
            raise
        except Exception as error:
            raise EngineFault(f"step {plan.number} failed: {type(error).__name__}: {error}") from error
        finally:  # what was queued of a plan that failed still reads the flight's memory
            pending = flight.end()
        return pending

    def step(self, plan: Plan) -> StepResult:
        return self.submit(plan).result()

    def close(self) -> None:
        """Wait for the device and let it and all its memory go."""
        if self._machine is None:
            return
        for flight in self._flights:
            flight.begin()
        device = self._machine.device
        self._machine = self._planner = None
        self._flights.clear()
        device.close()

    def read_kv(self, seq: SequenceId) -> NDArray[np.float16 | np.float32]:
        """What is read of a sequence's own tokens, inherited ones of its first page included.

        fp16, of int8 pages fp32, (cache layers, 2, n_kv_heads, tokens, head_dim).  For tests and tools; not part of the
        `Engine` protocol.
        """
        assert self._machine is not None
        sequence = self._table[seq]
        tokens = sequence.length - sequence.first_block * PAGE_TOKENS
        filled = sequence.blocks[: -(-tokens // PAGE_TOKENS)]
        blocks = np.array(filled, np.int32).reshape(len(filled), self._machine.spec.cache_layers(sequence.loops))
        return self._machine.read_pages(self._pages.find(blocks.T))[:, :, :, :tokens]

    def read_logits(self, prefix: SequenceId) -> NDArray[np.float32]:
        """The logits (vocab_size,) of a built prefix's last token.  For tests and tools, as `read_kv`."""
        assert self._machine is not None
        sequence = self._table[prefix]
        assert sequence.has_output, f"sequence {prefix} is no prefix, or not built"
        return self._machine.read_logits(sequence.slot)

    def _warm(self, machine: Machine, say: Callable[[str], None]) -> None:
        """Compile, capture the graphs of the default depth (others are captured in use), check."""
        decoder, loops = machine.decoder, machine.spec.default_loops
        schedule = decoder.schedule(loops)

        def compiled(ready: int, total: int) -> None:
            if ready % _KERNELS_PER_LINE == 0 or ready == total:
                say(f"compiling kernels, once for this machine: {ready} of {total} ready")

        def captured(done: int, total: int) -> None:
            if done % _GRAPHS_PER_LINE == 0 or done == total:
                say(f"capturing graphs of prompts: {done} of {total}")

        machine.prepare(compiled)
        say("trying matrix products")
        check_products(machine.device, machine.prompt, schedule)
        say("capturing graphs")
        for rows in decoder.row_counts:
            for quads in decoder.kinds(rows):
                decoder.capture(rows, loops, quads)
        machine.prompt.capture_common(schedule, loops, captured)
        if machine.hidden is not None:
            machine.hidden.capture_common(loops)
        say("checking that no row depends on its company")
        check_rows(self, decoder.row_counts)


def affordable(row_counts: tuple[int, ...], spec: ModelSpec, free: int) -> tuple[int, ...]:
    """Without the largest where long sequences make their scratch too dear; a plan's rows are more batches then."""
    of_row = 4 * spec.n_heads * max_blocks(spec) * (spec.head_dim + 2)
    return tuple(rows for rows in row_counts if rows <= BLOCK_ROWS or rows * of_row <= free * _SCRATCH_SHARE)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The most there are."""

    of_pass: int
    of_step: int


def _projection(
    device: Device, model: DeviceModel, layout: Layout, arena: Arena, products: Products, rows: _Rows
) -> Projection:
    if layout.stores_h:
        return Hidden(device, model, layout, arena, products, max_rows=rows.of_pass, step_rows=rows.of_step)
    if layout.mode is CacheMode.INT8:
        return Coded(device, model, arena, products, rows.of_pass, step_rows=rows.of_step)
    return Direct(device, model, arena, products, rows.of_pass)


def _pages(layout: Layout, spec: ModelSpec, table: SequenceTable, arena: Arena, num_slabs: int) -> Pages:
    if not layout.stores_h:
        return PlainPages()
    return SlabPages(spec, table, SlabPool(num_slabs, layout.per_slab), places_index=arena.places_index)


def _snapshot_id(weights: ModelWeights, device: Device) -> str:
    """What decides the bits of a prefix's state, beside the model file and the cache mode."""
    return f"cuda, pages {page_layout.VERSION}, {device.arithmetic}, {type(weights.loop[0].q).__name__}"


def _limits(weights: ModelWeights, layout: Layout, num_slabs: int, max_chunk: int, snapshot_id: str) -> Limits:
    return limits_of(
        weights,
        cache_mode=layout.mode,
        num_pages=num_slabs * layout.per_slab,
        page_bytes=layout.page_bytes,
        active_page_bytes=layout.slab_bytes if layout.stores_h else 0,
        pages_per_active=layout.per_slab if layout.stores_h else 0,
        max_rows=MAX_ROWS,
        max_chunk=max_chunk,
        max_steps=MAX_STEPS,
        busy_steps=BUSY_STEPS,
        goes_on=GOES_ON,
        least_chunk=FIXED_ROWS,
        split_tokens=PAGE_TOKENS,
        snapshot_id=snapshot_id,
    )
