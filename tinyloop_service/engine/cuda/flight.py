"""A plan on its way: the host memory that it needs until it is done, and how its answer is read.

    submit: tables → Staging → device … device → Landing, then an event       result: wait for the event, read Landing

In: what a batch draws, as device arrays, and state that is saved.  Out: a `StepResult`, from whatever thread asks.  Two
flights take turns, so that a plan never touches what the one before is still sending or receiving.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, count, takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.api import RowOutput, Saved, SequenceId, StepResult, joined
from tinyloop_service.engine.cuda.staging import Staging
from tinyloop_service.engine.cuda.states import SavedState
from tinyloop_service.errors import EngineFault
from tinyloop_service.kernels.device import Array, Device, Host
from tinyloop_service.kernels.sample import ENDED, NOT_FINITE
from tinyloop_service.types import TokenIds, TokenLogprob

_STAGED_WORDS = 1 << 16
_LANDED_WORDS = 1 << 14


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a batch drew, as `sample` tells it, on the host once its plan is done; rows past `sequences` are padding."""

    sequences: tuple[SequenceId, ...]
    logprobs_wanted: tuple[int, ...]  # of each sequence: 0 none, else how many beside the token's own
    tokens: NDArray[np.int32]  # (steps, rows)
    logprobs: NDArray[np.float32] | None  # (steps, rows, 21)
    top: NDArray[np.int32] | None  # (steps, rows, 20)

    def outputs(self) -> Iterable[RowOutput]:
        """Of the rows that drew anything."""
        tokens = self.tokens[:, : len(self.sequences)]
        drawn = list(zip(*tokens.tolist(), strict=True))  # by row
        some_end = (tokens < 0).any()
        if some_end:
            drawn = [self._until_end(seq, row) for seq, row in zip(self.sequences, drawn, strict=True)]
        rows = map(RowOutput, self.sequences, drawn)
        if any(self.logprobs_wanted):
            logprobs = map(self._logprobs, count(), self.logprobs_wanted, map(len, drawn))
            rows = map(RowOutput, self.sequences, drawn, logprobs)
        return (row for row in rows if row.tokens) if some_end else rows

    def _until_end(self, seq: SequenceId, tokens: TokenIds) -> TokenIds:
        tokens = tuple(takewhile(lambda token: token != ENDED, tokens))
        if NOT_FINITE in tokens:
            raise EngineFault(f"the logits of sequence {seq} are not finite")
        return tokens

    def _logprobs(self, row: int, wanted: int, num_tokens: int) -> tuple[TokenLogprob, ...]:
        if not wanted:
            return ()
        assert self.logprobs is not None and self.top is not None
        steps = zip(self.logprobs[:num_tokens, row].tolist(), self.top[:num_tokens, row].tolist(), strict=True)
        return tuple(
            TokenLogprob(values[0], tuple(zip(ids[:wanted], values[1 : 1 + wanted], strict=True)))
            for values, ids in steps
        )


class Landing:
    """Page-locked memory that answers are copied to; grows when a plan answers more than any before."""

    def __init__(self, device: Device, words: int) -> None:
        self._device = device
        self._host: NDArray[np.int32] = device.pinned((words,), np.int32)
        self._used = 0

    def clear(self) -> None:
        self._used = 0

    def receive(self, source: Array) -> NDArray[Any]:
        """Queue the copy of an array of 4-byte elements; where it will be."""
        size = math.prod(source.shape)
        if self._used + size > self._host.size:  # those that were received already keep the old memory
            self._host, self._used = self._device.pinned((2 * (self._host.size + size),), np.int32), 0
        words = self._host[self._used : self._used + size]
        self._used += size
        target = words.view(source.dtype).reshape(source.shape)
        self._device.copy_out(target, source)
        return target


class Flight:
    """One of the two; used for one plan after the other."""

    def __init__(self, device: Device) -> None:
        self.staging = Staging(device, _STAGED_WORDS)
        self._landing = Landing(device, _LANDED_WORDS)
        self._event = device.event()
        self._drawn: list[Drawn] = []
        self._saved: list[SavedState] = []
        self._held: list[Host] = []
        self._pending: PendingStep | None = None

    def begin(self) -> None:
        """Wait until the last plan from here is done and its answer read."""
        if self._pending is not None:
            self._pending.settle()
        self._pending = None
        self._drawn, self._saved, self._held = [], [], []
        self.staging.clear()
        self._landing.clear()

    def receive(
        self, sequences: tuple[SequenceId, ...], wanted: tuple[int, ...], arrays: tuple[Array, Array, Array]
    ) -> None:
        """Queue the copies of a batch's tokens and, if a row wants them, logprobs."""
        tokens, logprobs, top = arrays
        landed = self._landing.receive
        if any(wanted):
            self._drawn.append(Drawn(sequences, wanted, landed(tokens), landed(logprobs), landed(top)))
        else:
            self._drawn.append(Drawn(sequences, wanted, landed(tokens), None, None))

    def save(self, state: SavedState) -> None:
        """Its copies are queued."""
        self._saved.append(state)

    def hold(self, memory: Host) -> None:
        """Copies that read it are queued."""
        self._held.append(memory)

    def end(self) -> PendingStep:
        """Everything of the plan is queued."""
        self._event.record()
        self._pending = PendingStep(self._event, tuple(self._drawn), tuple(self._saved))
        return self._pending


class PendingStep:
    """A `Pending`."""

    def __init__(self, event: Any, drawn: tuple[Drawn, ...], saved: tuple[SavedState, ...]) -> None:
        self._event, self._drawn, self._saved = event, drawn, saved
        self._lock = threading.Lock()  # the engine's thread reads an answer that nobody came for
        self._outcome: StepResult | Exception | None = None

    def result(self) -> StepResult:
        outcome = self.settle()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def settle(self) -> StepResult | Exception:
        """Wait, and take the answer out of memory that the next plan will use."""
        with self._lock:
            if self._outcome is None:
                self._outcome = self._read()
            return self._outcome

    def _read(self) -> StepResult | Exception:
        try:
            self._event.synchronize()
            saved = tuple(Saved(state.seq, state.finish()) for state in self._saved)
            outputs = chain.from_iterable(drawn.outputs() for drawn in self._drawn)
            return StepResult(joined(outputs) if len(self._drawn) > 1 else tuple(outputs), saved)
        except EngineFault as error:
            return error
        except Exception as error:
            return EngineFault(f"a step's result cannot be read: {type(error).__name__}: {error}")
