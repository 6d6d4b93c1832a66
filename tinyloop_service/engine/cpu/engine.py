"""`CpuEngine`: carries out plans.

In: `Plan`s, one after the other, from one thread.  Out: `StepResult`s.  Prefill chunks and the first decode step of a
plan go through the weights together, as one matrix.  Refuses to know about names, tenants and queues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.api import (
    PAGE_TOKENS,
    Finished,
    Limits,
    Plan,
    Prefill,
    RowOutput,
    Saved,
    SequenceId,
    StepResult,
)
from tinyloop_service.engine.cache_modes import check_mode, page_bytes
from tinyloop_service.engine.cgroup import usable_cores
from tinyloop_service.engine.cpu.decoding import DecodeGroup, GroupKey
from tinyloop_service.engine.cpu.memory import PagePool
from tinyloop_service.engine.cpu.model import Model, Pass
from tinyloop_service.engine.cpu.prefill import Chunk, PrefillRun
from tinyloop_service.engine.cpu.runtime import ORT_VERSION, Array, use_threads
from tinyloop_service.engine.cpu.sampling import RowSampler, sample
from tinyloop_service.engine.cpu.sequences import Sequence, SequenceTable
from tinyloop_service.engine.limits import limits_of
from tinyloop_service.engine.processor import processor_name
from tinyloop_service.engine.spec import ModelSpec
from tinyloop_service.engine.tensors import ModelWeights
from tinyloop_service.errors import EngineFault, InvalidArgument
from tinyloop_service.types import CacheMode, TokenLogprob

MAX_ROWS = 64
MAX_CHUNK = 512
LEAST_CHUNK = 16  # beside 8 rows of the demo model its tokens cost 1.6 to 1.8 times what those of large ones do
MAX_STEPS = 4  # a step takes long enough for a plan of few


class CpuEngine:
    """An `Engine`.  Construction compiles the kernels and checks that a row's bits do not depend on its company."""

    name = "cpu"

    def __init__(
        self,
        weights: ModelWeights,
        *,
        kv_memory: int,
        cache_mode: CacheMode = CacheMode.FP16,
        threads: int | None = None,
        accuracy_level: int = 4,
        debug: bool = False,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        """kv_memory: bytes for pages and active forms.

        accuracy_level: of INT4 products; 4 rounds activations to int8, 0 and 1 keep them float32.  threads: of the
        whole process, None for as many as help (`useful_threads`).  debug: pages are poisoned when given back.
        Raises InvalidArgument for what this engine cannot do, EngineFault if the self-check finds that this processor
        breaks a promise.
        """
        check_mode(cache_mode, weights.spec)
        report = progress or (lambda _: None)
        in_use = use_threads(threads or useful_threads(weights.spec))
        reason = "" if threads in (None, in_use) else f"; {threads} asked for, but the process has its pool already"
        report(f"compiling and checking kernels for {in_use} thread{'s' * (in_use > 1)}{reason}")
        self._limits = _limits(weights, kv_memory, cache_mode, _snapshot_id(weights, accuracy_level))
        self._model = Model(
            weights, cache_mode, max_rows=MAX_ROWS + MAX_CHUNK, accuracy_level=accuracy_level, threads=in_use
        )
        try:
            pool = PagePool(self._limits.num_pages, self._model.coding.fields)
        except MemoryError:
            raise InvalidArgument(
                "kv_memory", f"{kv_memory} bytes given, more than this machine has to give; take less"
            ) from None
        self._table = SequenceTable(weights.spec, pool, self._model.page_reader(), debug=debug)
        self._groups: dict[GroupKey, DecodeGroup] = {}
        self._seats: dict[SequenceId, DecodeGroup] = {}
        self._decode_pass: tuple[tuple[tuple[int, int], ...], Pass] | None = None

    @property
    def limits(self) -> Limits:
        return self._limits

    def submit(self, plan: Plan) -> Finished:
        """Run `plan`.  Any failure is an EngineFault: its sequences are lost, the engine and the others live on."""
        try:
            return Finished(self._step(plan))
        except EngineFault:
            raise
        except Exception as error:
            raise EngineFault(f"step {plan.number} failed: {type(error).__name__}: {error}") from error

    def step(self, plan: Plan) -> StepResult:
        return self.submit(plan).result()

    def close(self) -> None:
        self._decode_pass = None
        self._seats.clear()
        self._groups.clear()

    def read_kv(self, seq: SequenceId) -> Array:
        """What is read of a sequence's pages: its own tokens, inherited ones of its first page included.

        fp16 (cache layers, 2, n_kv_heads, tokens, head_dim).  For tests and tools; no part of the `Engine` protocol.
        """
        return self._table.read(seq)

    def read_logits(self, prefix: SequenceId) -> NDArray[np.float32]:
        """The logits (vocab_size,) of a built prefix's last token.  For tests and tools, as `read_kv`."""
        logits = self._table[prefix].logits
        assert logits is not None, f"sequence {prefix} is no prefix, or not built"
        return logits

    def _step(self, plan: Plan) -> StepResult:
        saved = self._change_sequences(plan)
        drawn = _Drawn()
        self._sample_first(plan.first, drawn)
        runs = self._prefill_runs(plan.prefill)
        self._seat([seq for seq in plan.decode if not self._table[seq].has_ended])
        if runs or self._seats:
            self._advance(runs, drawn)
        for _ in range(plan.num_steps - 1):
            if not self._seats:
                break
            self._advance([], drawn)
        for drop in plan.drop:
            self._table.drop(drop.seq, drop.first_block)
        return StepResult(drawn.rows(), saved)

    def _change_sequences(self, plan: Plan) -> tuple[Saved, ...]:
        for seq in plan.close:
            self._unseat(seq, keep=False)
            self._table.close(seq)
        self._table.released(plan.released)
        for seq in plan.deactivate:
            self._table.deactivate(seq)
        if plan.close or plan.deactivate:
            self._decode_pass = None  # it would keep their arrays alive
        saved = tuple(Saved(seq, self._table.save(seq)) for seq in plan.save)
        for opening in plan.open:
            self._table.open(opening)
        for extension in plan.extend:
            self._table.extend(extension.seq, extension.blocks)
        for clone in plan.clone:
            self._table.pool.copy(clone.source, clone.target, clone.num_tokens)
        for restore in plan.restore:
            self._table.restore(restore)
        for seq in plan.activate:
            self._table.activate(seq)
        return saved

    def _prefill_runs(self, prefills: Iterable[Prefill]) -> list[PrefillRun]:
        chunks: dict[GroupKey, list[Chunk]] = {}
        for prefill in prefills:
            sequence = self._table[prefill.seq]
            assert prefill.start == sequence.length, f"sequence {prefill.seq} has {sequence.length} tokens"
            track = self._table.grow_track(sequence, sequence.length + len(prefill.tokens), num_left=prefill.num_left)
            chunk = Chunk(sequence, track, prefill.tokens, prefill.last)
            chunks.setdefault(GroupKey.of(sequence), []).append(chunk)
        return [PrefillRun(self._model.attention, self._table.pool, alike) for alike in chunks.values()]

    def _seat(self, rows: Iterable[SequenceId]) -> None:
        """Exactly `rows` take part in the next decode step."""
        wanted = set(rows)
        for seq in self._seats.keys() - wanted:
            self._unseat(seq, keep=True)
        arriving: dict[GroupKey, list[Sequence]] = {}
        for seq in rows:
            if seq not in self._seats:
                arriving.setdefault(GroupKey.of(self._table[seq]), []).append(self._table[seq])
        for key, sequences in arriving.items():
            group = self._group(key)
            group.expect(sequences)
            for sequence in sequences:
                group.join(sequence)
                self._seats[sequence.id] = group

    def _group(self, key: GroupKey) -> DecodeGroup:
        if key not in self._groups:
            self._groups[key] = DecodeGroup(self._model.spec, self._model.attention, self._table, key)
        return self._groups[key]

    def _unseat(self, seq: SequenceId, *, keep: bool) -> None:
        group = self._seats.pop(seq, None)
        if group is not None:
            group.leave(seq, keep=keep)
            if not group.num_rows:
                del self._groups[group.key]

    def _advance(self, prefills: list[PrefillRun], drawn: _Drawn) -> None:
        """One forward pass of `prefills` and every seated row, and what is drawn from it."""
        groups = list(self._groups.values())
        for group in groups:
            group.prepare()
        forward = self._plan_pass(prefills, groups)
        self._model.run(forward)
        places = {id(placed.run): placed for placed in forward.placed}
        takers: list[tuple[Sequence, int]] = []  # who wants logits, and their row
        for run in prefills:
            for chunk, end in zip(run.chunks, run.ends, strict=True):
                chunk.sequence.length += len(chunk.tokens)
                if chunk.last:
                    takers.append((chunk.sequence, places[id(run)].start + end - 1))
        for group in groups:
            first = places[id(group)].start
            for i, sequence in enumerate(group.rows):
                sequence.length += 1
                takers.append((sequence, first + i))
        for at in range(0, len(takers), MAX_ROWS):
            part = takers[at : at + MAX_ROWS]
            self._draw([s for s, _ in part], self._model.logits(forward.result[[row for _, row in part]]), drawn)
        for seq in [seq for seq in self._seats if self._table[seq].has_ended]:
            self._unseat(seq, keep=False)

    def _plan_pass(self, prefills: list[PrefillRun], groups: list[DecodeGroup]) -> Pass:
        """Passes that only decode are kept: most of them are like the one before."""
        if prefills:
            return self._model.plan([*prefills, *groups])
        signature = tuple((id(group), group.revision) for group in groups)
        if self._decode_pass is None or self._decode_pass[0] != signature:
            self._decode_pass = signature, self._model.plan(groups)
        return self._decode_pass[1]

    def _sample_first(self, rows: Iterable[SequenceId], drawn: _Drawn) -> None:
        sequences = [self._table[seq] for seq in rows]
        if sequences:
            self._draw(sequences, np.stack([_kept_logits(s) for s in sequences]), drawn)

    def _draw(self, sequences: list[Sequence], logits: NDArray[np.float32], drawn: _Drawn) -> None:
        """Sample a request's next token; keep a prefix's logits.  logits: (sequences, vocab_size)."""
        rows: list[int] = []
        samplers: list[RowSampler] = []
        for i, sequence in enumerate(sequences):
            if sequence.sampler is None:
                sequence.logits = logits[i].copy()
            else:
                rows.append(i)
                samplers.append(sequence.sampler)
        if not rows:
            return
        if len(rows) < len(sequences):
            logits = logits[rows]
        tokens, logprobs = sample(logits, samplers, [sequences[i].length for i in rows])
        for i, token, logprob in zip(rows, tokens.tolist(), logprobs, strict=True):
            sequences[i].last_token = token
            drawn.add(sequences[i].id, token, logprob)


class _Drawn:
    """What a plan's rows drew so far."""

    def __init__(self) -> None:
        self._tokens: dict[SequenceId, list[int]] = {}
        self._logprobs: dict[SequenceId, list[TokenLogprob]] = {}

    def add(self, seq: SequenceId, token: int, logprob: TokenLogprob | None) -> None:
        self._tokens.setdefault(seq, []).append(token)
        if logprob is not None:
            self._logprobs.setdefault(seq, []).append(logprob)

    def rows(self) -> tuple[RowOutput, ...]:
        return tuple(
            RowOutput(seq, tuple(tokens), tuple(self._logprobs.get(seq, ()))) for seq, tokens in self._tokens.items()
        )


def _kept_logits(sequence: Sequence) -> NDArray[np.float32]:
    parent = sequence.parent
    assert parent is not None and parent.logits is not None, f"sequence {sequence.id}: no logits were kept"
    return parent.logits


def useful_threads(spec: ModelSpec) -> int:
    """One thread for every 4 M weights of a block, at most one per core that may be used.

    Threads wait for one another after every product.  At 2.4 M weights a second one gained nothing on an idle machine,
    and cost half the speed where the server's event loop or a client wanted the core.
    """
    block_weights = spec.d_model * (2 * spec.q_dim + 2 * spec.kv_dim + 3 * spec.d_ff)
    return max(1, min(usable_cores(), block_weights // 4_000_000))


def _snapshot_id(weights: ModelWeights, accuracy_level: int) -> str:
    """What decides the bits of a prefix's state, beside the model file and the cache mode."""
    weight = type(weights.loop[0].q).__name__
    libraries = f"onnxruntime {ORT_VERSION}, numpy {np.__version__}"
    return f"cpu 2, {libraries}, {processor_name()}, accuracy_level {accuracy_level}, {weight}"


def _limits(weights: ModelWeights, kv_memory: int, cache_mode: CacheMode, snapshot_id: str) -> Limits:
    spec = weights.spec
    stored, active = page_bytes(cache_mode, spec), PAGE_TOKENS * 2 * spec.kv_dim * 2
    limits = limits_of(
        weights,
        cache_mode=cache_mode,
        num_pages=kv_memory // stored,
        page_bytes=stored,
        max_rows=MAX_ROWS,
        max_chunk=MAX_CHUNK,
        least_chunk=LEAST_CHUNK,
        max_steps=MAX_STEPS,
        split_tokens=PAGE_TOKENS,
        active_page_bytes=active,
        snapshot_id=snapshot_id,
    )
    loops = spec.default_loops
    least = limits.cache_layers(loops) + limits.active_pages(0, PAGE_TOKENS, loops)
    if limits.num_pages < least:
        need = least * stored
        raise InvalidArgument("kv_memory", f"{kv_memory} bytes given; {PAGE_TOKENS} tokens alone take {need}")
    return limits
