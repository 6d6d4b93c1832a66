"""kernels_cu/swiglu.cu in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def swiglu(device: object, gu: NDArray[np.float16], h: NDArray[np.float16]) -> None:
    """h = silu(gate) · up in float32, rounded once.  gu [T, 2·ff], h [T, ff]."""
    gate, up = np.split(gu.astype(np.float32), 2, axis=1)
    with np.errstate(over="ignore"):  # then the quotient is the −0 that it should be
        gated: NDArray[Any] = gate / (1 + np.exp(-gate)) * up
    h[:] = gated.astype(np.float16)
