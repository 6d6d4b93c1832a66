"""fold_norm in NumPy: float32, partials summed in the kernel's order, squares in NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.kernels.norm import InjectMode

Array = NDArray[Any]


def fold_norm(
    x: Array,
    partials: Array | None,
    y: Array,
    *,
    eps: float,
    gain: Array | None,
    post_gain: Array | None = None,
    loop_gain: Array | None = None,
    inject: InjectMode = "none",
    injected: Array | None = None,
) -> None:
    if partials is not None:
        total = sum_tree(partials)
        x += total if post_gain is None else normalised(total, post_gain, eps)
    if loop_gain is not None:
        x[:] = normalised(x, loop_gain, eps)
    if injected is not None:
        if inject == "store":
            injected[:] = x
        x += injected
    y[:] = (x if gain is None else normalised(x, gain, eps)).astype(np.float16)


def sum_tree(partials: Array) -> Array:
    """Σ over the first axis, a power of two long, as a balanced binary tree."""
    while len(partials) > 1:
        partials = partials[0::2] + partials[1::2]
    total: Array = partials[0]
    return total


def normalised(x: Array, gain: Array, eps: float) -> Array:
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    result: Array = x * (1 / np.sqrt(mean_square + np.float32(eps))) * gain.astype(np.float32)
    return result
