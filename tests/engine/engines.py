"""The engines that the tests of this folder run on, by name, and specs that each of them can run.

"cpu"        ONNX Runtime                                         everywhere
"cuda"       the kernels on a GPU                                 pytest -m gpu
"emulated"   the same engine, its kernels compiled for this CPU   slow: for a few small cases
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any, Literal, Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from tinyloop_service.demo import MODEL_PATH
from tinyloop_service.engine.api import Engine, SequenceId
from tinyloop_service.engine.cache_modes import H_MODES
from tinyloop_service.engine.cpu import CpuEngine
from tinyloop_service.engine.spec import ModelSpec
from tinyloop_service.engine.weights import ModelWeights, random_model, read_model
from tinyloop_service.types import CacheMode

Kind = Literal["cpu", "cuda", "emulated"]
Case = tuple[Kind, str, CacheMode]  # an engine, the name of a model, how state is stored


class ReadableEngine(Engine, Protocol):
    """What engines offer to tests beyond the seam."""

    def read_kv(self, seq: SequenceId) -> NDArray[np.float16 | np.float32]:
        """What is read of a sequence's own tokens: (cache layers, 2, n_kv_heads, tokens, head_dim)."""
        ...

    def read_logits(self, prefix: SequenceId) -> NDArray[np.float32]:
        """Of a built prefix's last token: (vocab_size,)."""
        ...


def cases(
    models: Iterable[str],
    *,
    only_cuda: Iterable[str] = (),
    on_cpu: Iterable[tuple[str, CacheMode]] = (),
    on_cuda: Iterable[tuple[str, CacheMode]] = (),
) -> list[Any]:
    """Parameters: `models` in fp16 on the CPU and on a GPU; `only_cuda`, which are too large for a CPU, there alone;
    and further ones on either alone, in other modes."""
    models, fp16 = tuple(models), CacheMode.FP16
    everywhere = [pytest.param(("cpu", name, fp16), id=f"cpu-{name}") for name in models]
    in_modes = [pytest.param(("cpu", name, mode), id=f"cpu-{name}-{mode.value}") for name, mode in on_cpu]
    of_gpu = [(name, fp16, f"cuda-{name}") for name in (*models, *only_cuda)]
    of_gpu += [(name, mode, f"cuda-{name}-{mode.value}") for name, mode in on_cuda]
    on_gpu = [pytest.param(("cuda", name, mode), marks=pytest.mark.gpu, id=label) for name, mode, label in of_gpu]
    return [*everywhere, *in_modes, *on_gpu]


def fitted(spec: ModelSpec, kind: Kind, mode: CacheMode = CacheMode.FP16) -> ModelSpec:
    """`spec` as `kind` can run it: CUDA kernels have heads of 64 or 128, and inputs in multiples of 64; a mode that
    stores h wants K and V of more than half its width."""
    if kind == "cpu":
        narrow = mode in H_MODES and 2 * spec.kv_dim <= spec.d_model
        return replace(spec, head_dim=spec.head_dim * (spec.d_model // spec.kv_dim)) if narrow else spec
    return replace(spec, head_dim=2 * spec.head_dim, d_ff=-(-spec.d_ff // 64) * 64)


@cache
def weights_of(spec: ModelSpec | str, seed: int = 0) -> ModelWeights:
    """Random weights of a spec or of a size; those of "demo" are trained."""
    return read_model(MODEL_PATH) if spec == "demo" else random_model(spec, seed)


def engine_of(
    spec: ModelSpec | str, cache_mode: CacheMode = CacheMode.FP16, *, seed: int = 0, accuracy_level: int = 4
) -> CpuEngine:
    options: dict[str, Any] = {"cache_mode": cache_mode, "accuracy_level": accuracy_level}
    return CpuEngine(weights_of(spec, seed), kv_memory=256 << 20, threads=2, debug=True, **options)


def make_engine(kind: Kind, weights: ModelWeights, *, kv_memory: int = 256 << 20, **options: Any) -> ReadableEngine:
    """An engine that poisons pages given back.  options: cache_mode, and `CudaEngine`'s; fewer row counts mean fewer
    kernels."""
    if kind == "cpu":
        mode = options.get("cache_mode", CacheMode.FP16)
        return CpuEngine(weights, kv_memory=kv_memory, cache_mode=mode, threads=2, debug=True)
    from tinyloop_service.engine.cuda import CudaEngine

    few = {"row_counts": (1, 8), "max_chunk": 256} if kind == "emulated" else {}
    return CudaEngine(weights, device=_device(kind, weights.spec), kv_memory=kv_memory, debug=True, **(few | options))


def _device(kind: Kind, spec: ModelSpec) -> Any:
    if kind == "emulated":
        from emulation.device import EmulatedDevice

        return EmulatedDevice()
    from tinyloop_service.engine.cuda import open_device

    return open_device(spec)
