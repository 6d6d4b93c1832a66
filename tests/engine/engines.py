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
from tinyloop_service.engine.cpu import CpuEngine
from tinyloop_service.engine.spec import ModelSpec
from tinyloop_service.engine.weights import ModelWeights, random_model, read_model

Kind = Literal["cpu", "cuda", "emulated"]
Case = tuple[Kind, str]  # an engine, and the name of a model


class ReadableEngine(Engine, Protocol):
    """What engines offer to tests beyond the seam."""

    def read_kv(self, seq: SequenceId) -> NDArray[np.float16]:
        """Of a sequence's own tokens: (cache layers, 2, n_kv_heads, tokens, head_dim)."""
        ...

    def read_logits(self, prefix: SequenceId) -> NDArray[np.float32]:
        """Of a built prefix's last token: (vocab_size,)."""
        ...


def cases(models: Iterable[str], *, only_cuda: Iterable[str] = ()) -> list[Any]:
    """Parameters: `models` on the CPU and on a GPU, and `only_cuda`, which are too large for a CPU, there alone."""
    models = tuple(models)
    on_gpu = [pytest.param(("cuda", name), marks=pytest.mark.gpu, id=f"cuda-{name}") for name in (*models, *only_cuda)]
    return [*(pytest.param(("cpu", name), id=f"cpu-{name}") for name in models), *on_gpu]


def fitted(spec: ModelSpec, kind: Kind) -> ModelSpec:
    """`spec` as `kind` can run it: CUDA kernels have heads of 64 or 128, and inputs in multiples of 64."""
    if kind == "cpu":
        return spec
    return replace(spec, head_dim=2 * spec.head_dim, d_ff=-(-spec.d_ff // 64) * 64)


@cache
def weights_of(spec: ModelSpec | str, seed: int = 0) -> ModelWeights:
    """Random weights of a spec or of a size; those of "demo" are trained."""
    return read_model(MODEL_PATH) if spec == "demo" else random_model(spec, seed)


def engine_of(spec: ModelSpec | str, *, seed: int = 0, accuracy_level: int = 4) -> CpuEngine:
    return CpuEngine(weights_of(spec, seed), kv_memory=256 << 20, threads=2, accuracy_level=accuracy_level, debug=True)


def make_engine(kind: Kind, weights: ModelWeights, *, kv_memory: int = 256 << 20, **options: Any) -> ReadableEngine:
    """An engine that poisons pages given back.  options: of `CudaEngine`; fewer row counts mean fewer kernels."""
    if kind == "cpu":
        return CpuEngine(weights, kv_memory=kv_memory, threads=2, debug=True)
    from tinyloop_service.engine.cuda import CudaEngine

    few = {"row_counts": (1, 8), "max_chunk": 256} if kind == "emulated" else {}
    return CudaEngine(weights, device=_device(kind, weights.spec), kv_memory=kv_memory, debug=True, **(few | options))


def _device(kind: Kind, spec: ModelSpec) -> Any:
    if kind == "emulated":
        from emulation.device import EmulatedDevice

        return EmulatedDevice()
    from tinyloop_service.engine.cuda import open_device

    return open_device(spec)
