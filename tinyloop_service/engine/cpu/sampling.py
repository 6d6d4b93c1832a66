"""Logits in, token ids and logprobs out, for all rows of a step.

What is drawn for a row depends on its logits, its `RowSampler` and its position alone, bit for bit: work that spans
rows is exact (maxima), sums run over one row in a fixed order, noise is `noise.uniform(seed, choice, position)`.

    logits → repetition penalty, bias → ÷ temperature → top_k → top_p → min_p → inverse CDF, likeliest first

Every filter keeps a head of the candidates in order (likeliest first, lowest id on ties), so a vocabulary is never
sorted whole when a head of it decides.  Scores and exponentials are float32, sums float64.  `reference.sample` does
the same by the book.  Bounds of parameters are checked where requests come in, not here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.noise import uniform
from tinyloop_service.errors import EngineFault
from tinyloop_service.types import Sampling, TokenIds, TokenLogprob

Scores = NDArray[np.float32]
Weights = NDArray[np.floating[Any]]
Ids = NDArray[np.intp]

_BLOCK = 32  # entries under one maximum
_HEADS = (256, 8192)  # candidates sorted at first, and next, when nothing but top_p or min_p bounds them
_LARGEST = float(np.finfo(np.float32).max)  # scores and logprobs stay finite in float32


class RowSampler:
    """The sampling parameters of one sequence, and the set of tokens it has seen when a penalty asks for it."""

    __slots__ = ("_bias_ids", "_bias_values", "_seen", "sampling")

    def __init__(self, sampling: Sampling, vocab_size: int, prompt: TokenIds = ()) -> None:
        """prompt: every prompt token, the prefix's included; read only if repetition_penalty ≠ 1."""
        self.sampling = sampling
        self._bias_ids = np.array([token for token, _ in sampling.logit_bias], np.intp)
        self._bias_values = np.array([addend for _, addend in sampling.logit_bias], np.float64)
        self._seen: NDArray[np.bool_] | None = None
        if sampling.repetition_penalty != 1:
            self._seen = np.zeros(vocab_size, np.bool_)
            self._seen[list(prompt)] = True

    @property
    def adjusts(self) -> bool:
        """Do the scores differ from the logits?"""
        return self._seen is not None or self._bias_ids.size > 0

    @property
    def is_argmax(self) -> bool:
        """Is the likeliest token of the raw logits the answer?"""
        return self.sampling.temperature == 0 and not self.adjusts

    def observe(self, token: int) -> None:
        """`token` belongs to the sequence from now on; `sample` says so itself for what it draws."""
        if self._seen is not None:
            self._seen[token] = True

    def adjust(self, logits: Scores) -> Scores:
        """(vocab_size,): l > 0 ? l/p : l·p once for each distinct token seen, then the bias; rounded once."""
        scores = logits.astype(np.float64)
        if self._seen is not None:
            ids = np.flatnonzero(self._seen)
            seen, penalty = scores[ids], self.sampling.repetition_penalty
            scores[ids] = np.where(seen > 0, seen / penalty, seen * penalty)
        np.add.at(scores, self._bias_ids, self._bias_values)
        return np.clip(scores, -_LARGEST, _LARGEST).astype(np.float32)


def sample(
    logits: NDArray[np.float32], rows: Sequence[RowSampler], positions: Sequence[int]
) -> tuple[NDArray[np.int64], tuple[TokenLogprob | None, ...]]:
    """Draw one token for each row.

    logits: (rows, vocab_size), left as they are; positions: absolute, of the tokens to be drawn.  Returns ids (rows,)
    and logprobs of the raw distribution where asked for.  Raises EngineFault if a row's largest logit is not finite.
    """
    if all(row.is_argmax and not row.sampling.logprobs for row in rows):
        ids = np.argmax(logits, axis=1)  # the first of equals
        _check_finite(logits[np.arange(len(rows)), ids])
        return ids.astype(np.int64), (None,) * len(rows)
    maxima = _block_maxima(logits)
    _check_finite(maxima.max(axis=1))
    chosen = [_choose(logits[i], maxima[i], row, positions[i]) for i, row in enumerate(rows)]
    for row, token in zip(rows, chosen, strict=True):
        row.observe(token)
    return np.array(chosen, np.int64), tuple(
        _logprob(logits[i], maxima[i], chosen[i], row.sampling.logprobs) if row.sampling.logprobs else None
        for i, row in enumerate(rows)
    )


def _check_finite(largest: Scores) -> None:
    if not np.isfinite(largest).all():
        row = int(np.flatnonzero(~np.isfinite(largest))[0])
        raise EngineFault(f"the logits of row {row} are not finite")


def _choose(logits: Scores, maxima: Scores, row: RowSampler, position: int) -> int:
    if row.adjusts:
        scores = row.adjust(logits)
        maxima = _block_maxima(scores[None])[0]
    else:
        scores = logits
    sampling = row.sampling
    if sampling.temperature == 0:
        return int(np.argmax(scores))
    noise = uniform(sampling.seed, sampling.choice, position)
    if 0 < sampling.top_k < scores.size:
        order = _likeliest(scores, maxima, sampling.top_k)
        weights = _weights(scores[order], maxima, sampling.temperature)
        return int(order[_pick(weights, float(np.cumsum(weights, dtype=np.float64)[-1]), sampling, noise, whole=True)])
    return _draw_from_all(scores, maxima, sampling, noise)


def _draw_from_all(scores: Scores, maxima: Scores, sampling: Sampling, noise: float) -> int:
    """No top_k: sort a head of the candidates, a longer one only if that does not decide.

    A longer head begins with the shorter one, sums included, so which of them decided does not show.
    """
    weights = _weights(scores, maxima, sampling.temperature)
    mass = float(weights.sum(dtype=np.float64))
    for count in _HEADS:
        if count < scores.size:
            order = _likeliest(scores, maxima, count)
            index = _pick(weights[order], mass, sampling, noise, whole=False)
            if index >= 0:
                return int(order[index])
    order = _likeliest(scores, maxima, scores.size)
    return int(order[_pick(weights[order], mass, sampling, noise, whole=True)])


def _weights(scores: Scores, maxima: Scores, temperature: float) -> Scores:
    """exp((score − largest) / temperature): 1 for the likeliest, 0 where it underflows."""
    with np.errstate(over="ignore", under="ignore"):
        exponents = (scores.astype(np.float64) - np.float64(maxima.max())) / temperature
        return np.exp(exponents.astype(np.float32))


def _pick(weights: Weights, mass: float, sampling: Sampling, noise: float, *, whole: bool) -> int:
    """Index of the drawn candidate; −1 if `weights`, not being the whole list, is too short a head to tell.

    weights: falling; mass: the sum of the whole list's.
    """
    cumulative = np.cumsum(weights, dtype=np.float64)  # one addition after the other
    kept = weights.size
    if sampling.top_p < 1:  # keep what the likelier ones leave below top_p
        kept = min(kept, 1 + int(np.searchsorted(cumulative, sampling.top_p * mass)))
    if sampling.min_p > 0:
        kept = min(kept, int(np.count_nonzero(weights >= sampling.min_p * weights[0])))
    filters = sampling.top_p < 1 or sampling.min_p > 0
    if filters and kept == weights.size and not whole:
        return -1
    target = noise * (float(cumulative[kept - 1]) if filters else mass)
    if target >= cumulative[kept - 1] and not whole:
        return -1
    index = int(np.searchsorted(cumulative[:kept], target, side="right"))
    last = int(np.searchsorted(cumulative[:kept], cumulative[kept - 1]))  # the last of weight above 0
    return min(index, last)


def _block_maxima(scores: Scores) -> Scores:
    """(rows, blocks): entry b is the largest of every blocks-th score from b on; not a number if one of them is not."""
    blocks = -(-scores.shape[1] // _BLOCK)
    maxima = scores[:, :blocks].copy()
    for start in range(blocks, scores.shape[1], blocks):
        part = scores[:, start : start + blocks]
        held = maxima[:, : part.shape[1]]
        np.maximum(held, part, out=held)
    return maxima


def _likeliest(scores: Scores, maxima: Scores, count: int) -> Ids:
    """Ids of the `count` largest scores, largest first, lowest id on ties.  scores: (vocab_size,)."""
    if count >= scores.size:
        return _sorted_ids(scores)
    # Either `count` blocks each hold an entry at least as large as the bound, or the bound is exact.
    source = maxima if count * 4 <= maxima.size else scores
    ids = np.flatnonzero(scores >= np.partition(source, -count)[-count])
    return ids[_sorted_ids(scores[ids])[:count]]


def _sorted_ids(scores: Scores) -> Ids:
    """All ids in order: one sort of integers whose high half falls as the score rises and whose low half is the id."""
    bits = (scores + np.float32(0)).view(np.uint32)  # −0 becomes +0, its equal
    falling = np.where(bits >> 31 == 1, bits, ~bits & np.uint32(0x7FFFFFFF))
    keys = falling.astype(np.uint64) << np.uint64(32) | np.arange(scores.size, dtype=np.uint64)
    return (np.sort(keys) & np.uint64(0xFFFFFFFF)).astype(np.intp)


def _logprob(logits: Scores, maxima: Scores, token: int, count: int) -> TokenLogprob:
    largest = maxima.max()
    with np.errstate(over="ignore", under="ignore"):
        mass = float(np.exp(logits - largest).sum(dtype=np.float64))
    top = _likeliest(logits, maxima, count)
    shifted = logits[np.append(top, token)].astype(np.float64) - float(largest)
    values = np.maximum(shifted - math.log(mass), -_LARGEST).tolist()
    return TokenLogprob(values[-1], tuple(zip(top.tolist(), values, strict=False)))
