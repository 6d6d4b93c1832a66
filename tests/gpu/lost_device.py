"""An engine whose device is lost under it: prints the name of the error that its next step raises.

In a process of its own, for after a stray write nothing works on the device any more.
"""

from __future__ import annotations

import cupy

from tinyloop_service.engine.api import Extend, Open, Plan, Prefill
from tinyloop_service.engine.cuda import CudaEngine, open_device
from tinyloop_service.engine.spec import SIZES
from tinyloop_service.engine.weights import random_model
from tinyloop_service.errors import TinyLoopError

STRAY_WRITE = 'extern "C" __global__ void stray() { *(volatile int*)16 = 1; }'


def main() -> None:
    weights = random_model(SIZES["tiny"])
    engine = CudaEngine(weights, device=open_device(weights.spec), kv_memory=64 << 20)
    layers = engine.limits.cache_layers(2)
    cupy.RawKernel(STRAY_WRITE, "stray")((1,), (1,), ())
    opened, pages = Open(1, None, 0, 2, 0, None), Extend(1, (tuple(range(layers)),))
    for number in (1, 2):  # the second time it must not seem to have recovered
        try:
            engine.step(Plan(number, open=(opened,), extend=(pages,), prefill=(Prefill(1, 0, (5, 6)),)))
            print("nothing")
        except TinyLoopError as error:
            print(type(error).__name__)


if __name__ == "__main__":
    main()
