"""Rows of logits through `sample`, and the tokens that the book allows for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tinyloop_service.engine.noise import uniform
from tinyloop_service.kernels.device import Device
from tinyloop_service.kernels.sample import SamplerTables, sample
from tinyloop_service.types import MAX_LOGPROBS, Sampling, TokenIds

NEAR = 1e-6  # of the mass: how near to a boundary float32 weights (2^-23 each) may decide otherwise


@dataclass(frozen=True, slots=True)
class Row:
    logits: np.ndarray  # fp32 [V]
    sampling: Sampling
    position: int = 7  # of the token to be drawn
    prompt: TokenIds = ()
    end: int | None = None
    stop_tokens: TokenIds = ()


@dataclass(frozen=True, slots=True)
class Drawn:
    token: int
    logprobs: tuple[float, ...] = ()  # the token's, then the top's
    top: tuple[int, ...] = ()


def logits_of(seed: int, size: int = 1013, spread: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)


def random_row(rng: np.random.Generator, size: int, spread: float) -> Row:
    def one_of(*values):  # type: ignore[no-untyped-def]
        return values[rng.integers(len(values))]

    sampling = Sampling(
        temperature=one_of(0.0, 1e-6, 0.3, 1.0, 1.0, 3.0),
        top_k=one_of(0, 0, 1, 2, 50, 50, 300, 3000, size - 1, size, size + 1, 10**9),
        top_p=one_of(1e-6, 0.3, 0.95, 1.0, 1.0),
        min_p=one_of(0.0, 0.0, 0.02, 1.0),
        repetition_penalty=one_of(1.0, 1.0, 0.7, 1.5),
        logit_bias=one_of((), (), ((3, 5.0), (size - 1, -100.0)), ((3, 1.0), (3, 2.0)), ((0, 1e6),), ((0, -1e6),)),
        logprobs=one_of(0, 1, 20),
        seed=int(rng.integers(2**64, dtype=np.uint64)),
        choice=int(rng.integers(16)),
    )
    sampling = replace(sampling, logit_bias=tuple((token % size, value) for token, value in sampling.logit_bias))
    logits = np.round(rng.standard_normal(size) * spread, 2).astype(np.float32)  # rounded: ties abound
    return Row(logits, sampling, int(rng.integers(2**31 - 2)), tuple({0, size // 2, size - 1}))


class Batch:
    """Sequences on the device, one a slot, in the order of `rows`; `slots` puts them elsewhere, −1 adds padding."""

    def __init__(self, device: Device, rows: Sequence[Row], slots: Sequence[int] = (), *, num_steps: int = 1) -> None:
        self.device, self.rows, self.num_steps = device, rows, num_steps
        self.slots = list(slots) or list(range(len(rows)))
        self.vocab = rows[0].logits.size
        num_slots = max(self.slots) + 1
        self.tables = SamplerTables(device, num_slots, self.vocab)
        padded = np.full((len(self.slots), -(-self.vocab // 4) * 4), np.nan, np.float32)
        lengths = np.full(num_slots, -1, np.int32)
        base = np.full(len(self.slots), -1, np.int32)
        remaining = iter(rows)
        for i, slot in enumerate(self.slots):
            if slot >= 0:
                row = next(remaining)
                self.tables.write(slot, row.sampling, row.prompt, end=row.end, stop_tokens=row.stop_tokens)
                padded[i, : self.vocab] = row.logits
                lengths[slot] = base[i] = row.position
        self.tables.flush()
        self.logits = device.upload(padded)
        self.row_logits = device.upload(np.array([_address(self.logits[i]) for i in range(len(padded))], np.int64))
        self.row_slot = device.upload(np.array(self.slots, np.int32))
        self.base_length, self.length = device.upload(base), device.upload(lengths)
        self.token = device.upload(np.full(num_slots, 7, np.int32))
        shape = (num_steps, len(self.slots))
        self.out_tokens = device.upload(np.full(shape, -9, np.int32))
        self.out_logprobs = device.upload(np.full((*shape, 1 + MAX_LOGPROBS), -9, np.float32))
        self.out_top = device.upload(np.full((*shape, MAX_LOGPROBS), -9, np.int32))

    def sample(self, *, advance: bool = False) -> None:
        arrays = (self.row_logits, self.row_slot, self.base_length, self.token, self.length)
        outputs = (self.out_tokens, self.out_logprobs, self.out_top)
        sample(self.device, self.tables, *arrays, *outputs, advance=advance)

    def drawn(self, step: int = 0) -> list[Drawn]:
        """Of the rows that are no padding."""
        tokens, logprobs, top = (
            self.device.download(a)[step] for a in (self.out_tokens, self.out_logprobs, self.out_top)
        )
        counts = iter(min(row.sampling.logprobs, self.vocab) for row in self.rows)
        result = []
        for i, slot in enumerate(self.slots):
            if slot >= 0 and (count := next(counts)):
                result.append(
                    Drawn(int(tokens[i]), tuple(logprobs[i, : count + 1].tolist()), tuple(top[i, :count].tolist()))
                )
            elif slot >= 0:
                result.append(Drawn(int(tokens[i])))
        return result


def draw(device: Device, *rows: Row) -> list[Drawn]:
    batch = Batch(device, rows)
    batch.sample()
    return batch.drawn()


def draw_one(device: Device, logits: np.ndarray, sampling: Sampling, position: int = 7, prompt: TokenIds = ()) -> int:
    return draw(device, Row(logits, sampling, position, prompt))[0].token


def allowed(row: Row) -> Collection[int]:
    """What `engine.reference.sample` draws, and its neighbours where a decision is within NEAR of another."""
    sampling, scores = row.sampling, scores_by_the_book(row)
    if sampling.temperature == 0:
        return {int(scores.argmax())}
    order = np.argsort(-scores, kind="stable")
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((scores[order] - scores.max()) / sampling.temperature)
    weights = weights[: sampling.top_k or None]
    through = np.cumsum(weights)
    noise = uniform(sampling.seed, sampling.choice, row.position)
    fewest, most = (_kept(weights, through, sampling, sign * NEAR) for sign in (-1, 1))
    found: set[int] = set()
    for kept in range(fewest, most + 1):
        mass = through[kept - 1]
        ends = np.array([noise - NEAR, noise + NEAR]) * mass
        first, last = np.minimum(np.searchsorted(through[:kept], ends, side="right"), kept - 1)
        found.update(order[first : last + 1].tolist())
    return found


def _kept(weights: np.ndarray, through: np.ndarray, sampling: Sampling, slack: float) -> int:
    """How many the filters keep if they are this much more lenient."""
    by_top_p = weights.size
    if sampling.top_p < 1:
        by_top_p = int(np.count_nonzero(through - weights < (sampling.top_p + slack) * through[-1]))
    by_min_p = int(np.count_nonzero((weights >= sampling.min_p * (1 - slack)) | (weights == 1)))
    return max(1, min(by_top_p, by_min_p))


def scores_by_the_book(row: Row) -> np.ndarray:
    scores = row.logits.astype(np.float64)
    penalty = row.sampling.repetition_penalty
    for token in set(row.prompt) if penalty != 1 else ():
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token, addend in row.sampling.logit_bias:
        scores[token] += addend
    return scores.astype(np.float32).astype(np.float64)


def _address(array: Any) -> int:
    """Of device memory: of a CuPy array, or of a NumPy array in emulation."""
    return int(array.data.ptr) if hasattr(array.data, "ptr") else int(array.ctypes.data)
