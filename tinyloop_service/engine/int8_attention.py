"""Attention as a GPU computes it for a decoded token where K and V are int8: products of levels (`cache_modes.py`).

    scores    q of a head becomes levels −127 … 127:  ⌊q · f⌉ / f,  f = 127 / largest |q|, rounded to fp16
    weights   w = 2^(score − a whole number), score in base 2.  w · (V's scale) of 64 neighbouring positions becomes
              levels 0 … 255:  ⌊w · scale / unit · 255⌉ · unit / 255,  unit the power of two above the largest of them
    sum       of the weights before they are rounded; o = Σ rounded weights · levels of V / sum

The whole number is free: it moves unit by a power of two, and no level.  Tokens of a prompt are attended exactly.

In: q, and K and V as they are read.  Out: what the attention mixes.  This is the oracle that kernels must equal, but
for fp16 and for the order of sums.  Refuses to know about models and where pages lie.
Shapes: H heads, T queries, P positions, D head_dim; further axes may stand before them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.api import PAGE_TOKENS
from tinyloop_service.engine.cache_modes import encode
from tinyloop_service.types import CacheMode

Array = NDArray[Any]

MOST_QUERY_LEVEL = 127
MOST_WEIGHT_LEVEL = 255
LEAST_QUERY = 2.0**-8  # the largest of a q counts as at least this, or f would be too large for fp16


def attend(q: Array, keys: Array, values: Array, visible: NDArray[np.bool_]) -> Array:
    """[H, T, D], in q's dtype.

    q [H, T, D]; keys and values [H, P, D], levels · scales, from position 0 on; visible [T, P], in each row something.
    """
    scores = round_query(q) @ keys.swapaxes(-2, -1) * q.dtype.type(math.log2(math.e) / math.sqrt(q.shape[-1]))
    scores = np.where(visible, scores, -np.inf)  # (H, T, P)
    weights = np.exp2(scores - np.ceil(scores.max(axis=-1, keepdims=True)))
    scales = encode(CacheMode.INT8, values)["scales"].astype(q.dtype).swapaxes(-2, -1)  # (H, 1, P)
    mixed: Array = round_weights(weights * scales) / scales @ values
    mixed /= weights.sum(axis=-1, keepdims=True)
    return mixed


def round_query(q: Array) -> Array:
    """q [..., D] as its levels stand for it."""
    largest = np.maximum(np.abs(q).max(axis=-1, keepdims=True), q.dtype.type(LEAST_QUERY))
    factor = (MOST_QUERY_LEVEL / largest).astype(np.float16).astype(q.dtype)
    rounded: Array = np.rint(q * factor) / factor
    return rounded


def round_weights(weights: Array) -> Array:
    """Weights [..., P], of position 0 and on, times the scales of V, as their levels stand for them."""
    *leading, num_positions = weights.shape
    num_blocks = -(-num_positions // PAGE_TOKENS)
    padded = np.zeros((*leading, num_blocks * PAGE_TOKENS), weights.dtype)
    padded[..., :num_positions] = weights
    blocks = padded.reshape(*leading, num_blocks, PAGE_TOKENS)
    _, exponent = np.frexp(blocks.max(axis=-1, keepdims=True))
    unit = np.ldexp(weights.dtype.type(1), exponent)
    rounded: Array = np.rint(blocks / unit * MOST_WEIGHT_LEVEL) * (unit / MOST_WEIGHT_LEVEL)
    return rounded.reshape(padded.shape)[..., :num_positions]
