"""Rotary positions: pair i of a head's D numbers is turned by position · theta^(−2i/D).

In: positions, a spec, heads.  Out: turned heads.  Arrays to be turned are those of `xp`, NumPy's or CuPy's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tinyloop_service.engine.spec import ModelSpec

Array = Any  # of `xp`


def angles(positions: NDArray[np.int64], spec: ModelSpec, dtype: DTypeLike) -> tuple[NDArray[Any], NDArray[Any]]:
    """Cosines and sines, (T, D/2) each: computed in float64, rounded once."""
    frequencies = spec.rope_theta ** (-2.0 * np.arange(spec.head_dim // 2) / spec.head_dim)
    angle = positions[:, None] * frequencies  # (T, D/2), float64
    return np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)


def turn(x: Array, cos: Array, sin: Array, spec: ModelSpec, xp: Any = np) -> Array:
    """x: (…, T, D), each T by its row of `cos` and `sin`, (T, D/2)."""
    half = spec.head_dim // 2
    if spec.rope_pairing == "half":
        a, b = slice(0, half), slice(half, None)
    else:
        a, b = slice(0, None, 2), slice(1, None, 2)
    turned = xp.empty_like(x)
    turned[..., a] = x[..., a] * cos - x[..., b] * sin
    turned[..., b] = x[..., b] * cos + x[..., a] * sin
    return turned
