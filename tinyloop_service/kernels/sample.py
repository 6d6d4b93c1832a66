"""Launches of kernels_cu/sample.cu: one token for each row of logits, drawn on the device.

`SamplerTables` holds what a slot's draws depend on besides its logits: its parameters, its bias, the tokens it has
seen.  `sample` draws for a batch, reading everything that differs from step to step from device memory, so that it
can be part of a graph.  Bounds of parameters are checked where requests come in; here only what memory depends on.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.kernels.device import Array, Device
from tinyloop_service.kernels.match import KernelArgumentError, match, require
from tinyloop_service.types import MAX_LOGIT_BIAS, MAX_LOGPROBS, Sampling, TokenIds

MAX_ROWS = 64  # unless more are asked for
_SCAN_THREADS, _FINISH_THREADS = 256, 512
_CHUNK, _GROUP = 2048, 32  # elements a block of the scan reads, and under one maximum
_WEIGHT_BITS = 44
MAX_VOCAB = 2**19
MAX_STOPS = 15
NOT_FINITE, ENDED = -1, -2  # in place of a token
_RECORD = struct.Struct(f"<QdddQffiIiii{4 * MAX_STOPS}s")  # draw.cuh: struct Record
_NO_END, _NO_STOP = 2**31 - 1, -3


class SamplerTables:
    """The sampling state of every slot, and the scratch of one batch of up to `max_rows` rows.

    `write` fills page-locked memory on the host, `flush` copies what was written to the device, in the order of the
    stream and without waiting.  A slot may be written again as soon as nobody wants what its last owner draws: should
    an earlier copy still be under way, what it carries too early reaches that owner's rows only, and any mixture of two
    records is one that the kernel survives.
    """

    def __init__(self, device: Device, num_slots: int, vocab_size: int, max_rows: int = MAX_ROWS) -> None:
        fits = vocab_size < MAX_VOCAB
        require("sample", fits, f"the vocabulary has {vocab_size} tokens, expected fewer than {MAX_VOCAB}")
        self.device = device
        self.num_slots, self.vocab_size, self.max_rows = num_slots, vocab_size, max_rows
        self.num_chunks = -(-vocab_size // _CHUNK)
        widths = {
            "records": (_RECORD.size // 4, np.int32),
            "bias_ids": (MAX_LOGIT_BIAS, np.int32),
            "bias_values": (MAX_LOGIT_BIAS, np.float64),
            "seen": (-(-vocab_size // 32), np.uint32),
        }
        self._host: dict[str, NDArray[np.generic]] = {}
        self._there: dict[str, Array] = {}
        for name, (width, dtype) in widths.items():
            self._host[name] = device.pinned((num_slots, width), dtype)
            self._host[name][:] = 0
            self._there[name] = device.zeros((num_slots, width), dtype)
        nobody_s = _RECORD.pack(*_record(Sampling(), vocab_size, 0, None, ()))  # a slot that nobody wrote: argmax
        self._host["records"][:] = np.frombuffer(nobody_s, np.int32)
        self._records = self._host["records"].data
        self._copy("records", (0, num_slots))
        self._written: set[int] = set()  # since the last flush
        self._biased: set[int] = set()  # of these
        self._penalised: set[int] = set()
        self._scores = device.empty((max_rows, -(-vocab_size // 4) * 4), np.float32)
        self._best = device.empty((max_rows, 2, self.num_chunks), np.uint64)
        self._maxima = device.empty((max_rows, 2, self.num_chunks * _CHUNK // _GROUP), np.uint32)
        self._mass = device.empty((max_rows, self.num_chunks), np.uint64)

    @property
    def num_bytes(self) -> int:
        """Of device memory."""
        scratch = (self._scores, self._best, self._maxima, self._mass)
        return sum(int(array.nbytes) for array in (*self._there.values(), *scratch))

    def write(
        self,
        slot: int,
        sampling: Sampling,
        prompt: TokenIds = (),
        *,
        end: int | None = None,
        stop_tokens: TokenIds = (),
    ) -> None:
        """The slot's draws follow `sampling` from the next flush on.

        prompt: every token of the sequence so far, its prefix's included; read only if a penalty asks for it.  Tokens
        that `sample` draws are seen by themselves.  The slot ends with the token for position `end`, or with one of
        the first MAX_STOPS `stop_tokens`.
        """
        if not 0 <= slot < self.num_slots:
            raise KernelArgumentError(f"sample: slot is {slot}, expected 0 to {self.num_slots - 1}")
        bias = _bias(sampling)
        count = len(bias)
        if count > MAX_LOGIT_BIAS:
            raise KernelArgumentError(f"sample: {count} biases, expected at most {MAX_LOGIT_BIAS}")
        record = _record(sampling, self.vocab_size, count, end, stop_tokens)
        _RECORD.pack_into(self._records, slot * _RECORD.size, *record)
        self._written.add(slot)
        if count:
            self._host["bias_ids"][slot, :count] = list(bias)
            self._host["bias_values"][slot, :count] = list(bias.values())
            self._biased.add(slot)
        if sampling.repetition_penalty != 1:
            self._host["seen"][slot] = _bits(prompt, self.vocab_size)
            self._penalised.add(slot)

    def flush(self) -> None:
        """Queue the copies of what was written since the last flush: mostly one, of a few records."""
        # What lies between two slots is on the device as it is here, so one copy may span it: not so tokens seen.
        if self._written:
            self._copy("records", _span(self._written))
        if self._biased:
            self._copy("bias_ids", _span(self._biased))
            self._copy("bias_values", _span(self._biased))
        for run in _runs(sorted(self._penalised)):
            self._copy("seen", run)
        for slots in (self._written, self._biased, self._penalised):
            slots.clear()

    def _copy(self, name: str, slots: tuple[int, int]) -> None:
        there = slice(*slots)
        self.device.copy_in(self._there[name][there], self._host[name][there])

    def tables(self) -> tuple[Array, Array, Array, Array]:
        """On the device: records, bias_ids, bias_values, seen."""
        there = self._there
        return there["records"], there["bias_ids"], there["bias_values"], there["seen"]

    def scratch(self) -> tuple[Array, Array, Array, Array]:
        """On the device: scores, best, maxima, mass."""
        return self._scores, self._best, self._maxima, self._mass


def sample(
    device: Device,
    tables: SamplerTables,
    row_logits: Array,
    row_slot: Array,
    base_length: Array,
    token: Array,
    length: Array,
    out_tokens: Array,
    out_logprobs: Array,
    out_top: Array,
    *,
    advance: bool,
    dependent: bool = False,
) -> None:
    """Draw a token for each row whose slot is not −1, into token[slot] and the outputs.

    row_logits int64 [R]: device addresses of fp32 logits, 16-byte aligned, readable up to a multiple of 4 elements.
    row_slot, base_length int32 [R]; token, length int32 [slots].  Outputs of a row go to step length[slot] −
    base_length[row], and nowhere if there is no such step: out_tokens int32 [steps, R] (NOT_FINITE: the row's largest
    logit is not), out_logprobs fp32 [steps, R, 1 + 20] (the token's first), out_top int32 [steps, R, 20].

    advance: a decode step, which has just stored the token at length[slot]: the token drawn is for position
    length[slot] + 1, and length[slot] grows by one.  Else it is for position length[slot], and lengths stay.  A slot
    that has ended, token[slot] being ENDED, draws nothing in a decode step: out_tokens has ENDED behind what it drew
    since base_length, and what is there behind that means nothing.
    """
    sizes = match(
        "sample",
        row_logits=(row_logits, "int64", "R"),
        row_slot=(row_slot, "int32", "R"),
        base_length=(base_length, "int32", "R"),
        token=(token, "int32", "S"),
        length=(length, "int32", "S"),
        out_tokens=(out_tokens, "int32", "T, R"),
        out_logprobs=(out_logprobs, "float32", f"T, R, {1 + MAX_LOGPROBS}"),
        out_top=(out_top, "int32", f"T, R, {MAX_LOGPROBS}"),
    )
    rows = sizes["R"]
    fits = rows <= tables.max_rows and sizes["S"] == tables.num_slots
    expected = f"at most {tables.max_rows} of {tables.num_slots}"
    require("sample", fits, f"{rows} rows of {sizes['S']} slots, expected {expected}")
    records, bias_ids, bias_values, seen = tables.tables()
    scores, best, maxima, mass = tables.scratch()
    vocab, chunks = np.int32(tables.vocab_size), np.int32(tables.num_chunks)
    device.launch(
        device.kernel("sample", "sample_scan"),
        (tables.num_chunks, rows, 1),
        _SCAN_THREADS,
        (row_logits, row_slot, records, bias_ids, bias_values, seen, scores, best, maxima, mass, vocab),
        dependent=dependent,
    )
    outputs = (out_tokens, out_logprobs, out_top)
    device.launch(
        device.kernel("sample", "sample_finish"),
        (rows, 1, 1),
        _FINISH_THREADS,
        (
            *(row_logits, row_slot, base_length, records, scores, best, maxima, mass, seen, token, length),
            *(*outputs, vocab, chunks, np.int32(sizes["T"]), np.int32(advance)),
        ),
        dependent=dependent,
    )


def _record(
    sampling: Sampling, vocab_size: int, num_bias: int, end: int | None, stop_tokens: TokenIds
) -> tuple[int | float | bytes, ...]:
    """The fields of `_RECORD`."""
    scale = high = 0.0
    if sampling.temperature > 0:  # bounds: finite, and not the 0 that means argmax
        scale = min(max(math.log2(math.e) / sampling.temperature, 1e-30), 3e38)
        high = float(np.float32(scale))
    return (
        sampling.seed,
        sampling.top_p,
        sampling.repetition_penalty,
        1 / sampling.repetition_penalty,
        math.ceil(sampling.min_p * 2**_WEIGHT_BITS),
        high,
        scale - high,
        sampling.top_k if sampling.top_k < vocab_size else 0,
        sampling.choice,
        min(sampling.logprobs, MAX_LOGPROBS, vocab_size),
        num_bias,
        _NO_END if end is None else end,
        _stops(stop_tokens),
    )


@lru_cache(maxsize=64)  # most requests of a server stop alike
def _stops(tokens: TokenIds) -> bytes:
    return struct.pack(f"{MAX_STOPS}i", *(*tokens, *(_NO_STOP,) * MAX_STOPS)[:MAX_STOPS])


def _bias(sampling: Sampling) -> dict[int, float]:
    """By token; several addends of one are summed."""
    bias: dict[int, float] = {}
    for token, addend in sampling.logit_bias:
        bias[token] = bias.get(token, 0.0) + addend
    return bias


def _bits(tokens: TokenIds, vocab_size: int) -> NDArray[np.uint32]:
    seen = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    seen[np.asarray(tokens, np.intp)] = True
    return np.packbits(seen, bitorder="little").view(np.uint32)


def _span(slots: set[int]) -> tuple[int, int]:
    """(first, end)"""
    return min(slots), max(slots) + 1


def _runs(slots: Iterable[int]) -> list[tuple[int, int]]:
    """(first, end) of the runs of consecutive numbers in a rising sequence."""
    runs: list[tuple[int, int]] = []
    for slot in slots:
        if runs and runs[-1][1] == slot:
            runs[-1] = (runs[-1][0], slot + 1)
        else:
            runs.append((slot, slot + 1))
    return runs
