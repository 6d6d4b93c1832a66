"""Small fp16 models for the tests of this folder, one for every switch, and what the reference's linears read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray
from switches import switches

from tinyloop_service.engine.reference import Reference
from tinyloop_service.engine.spec import SIZES, ModelSpec
from tinyloop_service.engine.tensors import BLOCK_LINEARS, Linear, ModelWeights
from tinyloop_service.engine.weights import random_model
from tinyloop_service.quantize.calibration import Calibration

BASE = replace(
    SIZES["tiny"], vocab_size=96, d_model=64, n_heads=4, n_kv_heads=4, head_dim=16, d_ff=96, quant=None, max_loops=8
)
SWITCHES = switches(BASE)
SPECS = {
    "pre": BASE,
    **SWITCHES,
    "interleaved": replace(SWITCHES["interleaved"], rope_theta=500.0),
    "sandwich": replace(SWITCHES["sandwich"], norm_eps=1e-3),
    "wide attention": replace(BASE, n_heads=6, n_kv_heads=3, head_dim=32),
    "everything": replace(SWITCHES["everything"], tie_embeddings=True),
}


@cache
def model(name: str) -> ModelWeights:
    return random_model(SPECS[name], 1)


def windows(spec: ModelSpec, *lengths: int) -> Calibration:
    rng = np.random.default_rng(5)
    ids = sorted((rng.integers(0, spec.vocab_size, length) for length in lengths), key=len)
    return Calibration(tuple(ids), {"file": "random", "sha256": "0" * 64, "windows": len(ids), "tokens": sum(lengths)})


class Recording(Reference):
    """A reference that keeps what each linear reads, one array a call."""

    def read_by(self, windows: Sequence[NDArray[np.int64]], loops: int) -> dict[str, list[NDArray[np.float64]]]:
        """Name of a linear → its inputs, (tokens, in): a loop's after the other's, window by window."""
        names = {id(linear): name for name, linear in named_linears(self.weights).items()}
        inputs: dict[str, list[NDArray[np.float64]]] = {name: [] for name in names.values()}
        object.__setattr__(self, "_keep", lambda linear, x: inputs[names[id(linear)]].append(x))
        for ids in windows:
            self.forward(ids.tolist(), self.new_cache(loops))
        return inputs

    def _linear(self, x: NDArray[np.float64], linear: Linear) -> NDArray[np.float64]:
        self._keep(linear, x)  # type: ignore[attr-defined]
        return super()._linear(x, linear)


def named_linears(weights: ModelWeights) -> dict[str, Linear]:
    blocks = {
        f"{kind}.{index}.{name}": getattr(block, name.split(".")[1])
        for kind in ("pre", "loop", "post")
        for index, block in enumerate(getattr(weights, kind))
        for name in BLOCK_LINEARS
    }
    return {**blocks, "head": weights.head}
