"""Where the trajectory is computed: NumPy on the CPU, or CuPy on a GPU.

In: what the user asked for.  Out: `Arrays`, the module whose functions to call and the way to and from it.  A GPU is
tried with the operations that are needed before it is taken, because CuPy may be installed without what it compiles
with.  Rounding itself always runs on the CPU, in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.errors import InvalidArgument

Device = Literal["auto", "cpu", "cuda"]

CPU_BATCH_TOKENS = 2048  # of one product: its activations stay near the caches
GPU_BATCH_TOKENS = 16384


@dataclass(frozen=True, slots=True)
class Arrays:
    """`xp` is numpy or cupy."""

    xp: Any
    name: str  # for people
    batch_tokens: int

    def to_device(self, array: NDArray[Any]) -> Any:
        return self.xp.asarray(array)

    def to_host(self, array: Any) -> NDArray[Any]:
        host: NDArray[Any] = array if self.xp is np else self.xp.asnumpy(array)
        return host


def open_arrays(device: Device) -> Arrays:
    """ "auto" takes a GPU if there is one that works; "cuda" raises InvalidArgument where there is none."""
    if device == "cpu":
        return _cpu()
    try:
        return _gpu()
    except Exception as error:  # of CuPy, of the driver, of a compiler that is missing
        if device == "auto":
            return _cpu()
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise InvalidArgument(
            "device",
            f"cuda cannot be used ({reason}); install CuPy with its headers, the extra cuda13 or cuda12, or take cpu",
        ) from None


def _cpu() -> Arrays:
    return Arrays(np, "cpu", CPU_BATCH_TOKENS)


def _gpu() -> Arrays:
    import cupy

    probe = cupy.exp(cupy.ones((8, 8), cupy.float32)) @ cupy.ones((8, 8), cupy.float32)
    assert float(probe.sum()) > 0
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    return Arrays(cupy, name, GPU_BATCH_TOKENS)
