"""Small CUDA engines on the emulated device: the GPU's kernels, compiled for this processor."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from emulation.device import EmulatedDevice
from engines import weights_of

from tinyloop_service.engine.cuda import CudaEngine
from tinyloop_service.engine.spec import ModelSpec
from tinyloop_service.types import Sampling

PAGE = 64
ROW_COUNTS = (1, 8)  # few, for each has kernels of its own that are compiled
TOKENS = tuple(np.random.default_rng(7).integers(0, 96, 250).tolist())
HOT = Sampling(temperature=0.9, top_k=40, top_p=0.95, logprobs=2, seed=3)


def engine_of(spec: ModelSpec, device: Any = None, **options: Any) -> CudaEngine:
    settings = {"kv_memory": 8 << 20, "debug": True, "row_counts": ROW_COUNTS, "max_chunk": 256, **options}
    return CudaEngine(weights_of(spec), device=device or EmulatedDevice(), **settings)


@cache
def shared_engine(spec: ModelSpec) -> CudaEngine:
    """For tests that close what they open: the next one's sequences have the same ids."""
    return engine_of(spec)
