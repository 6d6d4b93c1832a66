"""One row of kernels_cu/sample.cu in NumPy: everything sorted, the same integers.

Weights are made by the kernel's own float32 operations and summed as integers, so a draw is the kernel's exactly (but
where NumPy's fused multiply-add, made of two roundings, is not one: 2^-29 of all cases).  `engine.reference.sample`
is the same by the book, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.types import Sampling

Floats = NDArray[np.float32]
_LARGEST = float(np.finfo(np.float32).max)
_WEIGHT_BITS, _NOISE_BITS = 44, 53
_POWER = (1.54614478e-4, 1.33908668e-3, 9.61805694e-3, 5.55035695e-2, 2.40226507e-1, 6.93147182e-1, 1.0)


def sample(
    logits: Floats, sampling: Sampling, seen: Collection[int], uniform: float
) -> tuple[int, Floats, NDArray[np.int32]]:
    """The token (−1: the largest logit is not finite), the logprobs of it and of the top, the top's ids.

    logits (V,); seen: tokens of the sequence so far; uniform: the noise, a multiple of 2^-53 in [0, 1).
    """
    if not np.isfinite(logits.max()):
        return -1, np.zeros(0, np.float32), np.zeros(0, np.int32)
    scores = adjust(logits, sampling, seen)
    token = int(scores.argmax()) if sampling.temperature == 0 else _draw(scores, sampling, uniform)
    top = np.argsort(-logits, kind="stable")[: sampling.logprobs].astype(np.int32)
    return token, _log_probabilities(logits, np.append(np.int32(token), top)), top


def adjust(logits: Floats, sampling: Sampling, seen: Collection[int]) -> Floats:
    """Penalty and bias in float64, rounded once, kept finite."""
    scores = logits.astype(np.float64)
    if sampling.repetition_penalty != 1:
        ids, penalty = sorted(set(seen)), sampling.repetition_penalty
        scores[ids] = np.where(scores[ids] > 0, scores[ids] / penalty, scores[ids] * penalty)
    elif not sampling.logit_bias:
        return logits
    for token, addend in sampling.logit_bias:
        scores[token] += addend
    return np.clip(scores, -_LARGEST, _LARGEST).astype(np.float32)


def weights(scores: Floats, temperature: float) -> NDArray[np.uint64]:
    """exp((s − max s) / T) in units of 2^-44."""
    wanted = min(max(math.log2(math.e) / temperature, 1e-30), 3e38)
    scale, largest = np.float32(wanted), scores.max()
    scale_low = np.float32(wanted - float(scale))
    with np.errstate(all="ignore"):
        difference = scores - largest
        part = difference - scores
        lost = (scores - (difference - part)) + (-largest - part)
        exponent = difference * scale
        whole = np.rint(exponent)
        rest = _fused(difference, scale, -exponent) + _fused(difference, scale_low, lost * scale)
        fraction = (exponent - whole) + rest
        power = np.full_like(fraction, _POWER[0])
        for coefficient in _POWER[1:]:
            power = _fused(power, fraction, np.float32(coefficient))
        counted = exponent > -46  # false where a product of infinities is no number
    mantissa = np.where(counted, power * np.float32(2**24), 0).astype(np.uint64)
    shift = np.where(counted, whole, 0).astype(np.int64) + _WEIGHT_BITS - 24
    return np.where(
        shift >= 0,
        mantissa << np.maximum(shift, 0).astype(np.uint64),
        mantissa >> np.maximum(-shift, 0).astype(np.uint64),
    )


def _fused(a: Floats, b: Floats | np.float32, c: Floats | np.float32) -> Floats:
    exact = a.astype(np.float64) * np.float64(b) + np.float64(c)
    return np.asarray(exact, np.float32)


def _draw(scores: Floats, sampling: Sampling, uniform: float) -> int:
    order = np.argsort(-scores, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    falling = weights(scores, sampling.temperature)[order]
    through = np.cumsum(falling)
    mass = int(through[-1])
    kept = int(falling[falling >= math.ceil(sampling.min_p * 2**_WEIGHT_BITS)].sum())
    if sampling.top_p < 1:
        last = max(min(math.ceil(sampling.top_p * float(mass)), mass), 1) - 1
        kept = min(kept, int(through[np.searchsorted(through, np.uint64(last), side="right")]))
    target = int(uniform * 2**_NOISE_BITS) * kept >> _NOISE_BITS
    return int(order[np.searchsorted(through, np.uint64(target), side="right")])


def _log_probabilities(logits: Floats, ids: NDArray[np.int32]) -> Floats:
    shifted = logits.astype(np.float64) - float(logits.max())
    values = shifted[ids] - math.log(np.exp(shifted).sum())
    return np.maximum(values, -_LARGEST).astype(np.float32)
