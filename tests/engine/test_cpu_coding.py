"""The graphs' coding of what is stored against the oracle, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from tinyloop_service.engine.cache_modes import LARGEST, decode, encode
from tinyloop_service.engine.cpu.coding import Coding
from tinyloop_service.engine.cpu.runtime import F32, GraphBuilder, use_threads
from tinyloop_service.engine.spec import SIZES
from tinyloop_service.types import CacheMode

SPEC = SIZES["tiny"]
HALVES = np.arange(-8, 8) + 0.5


def values(width: int) -> np.ndarray:
    """Rows of every magnitude that fp16 has and some beyond, around zero and around other centres, with outliers."""
    rng = np.random.default_rng(4)
    rows = [
        rng.standard_normal((3, width)) * 2.0**exponent + centre
        for exponent in range(-30, 18, 3)
        for centre in (0.0, -3.0, 1e-5, 1e4, 7e4)
    ]
    special = np.zeros((4, width))
    special[1], special[2] = 0.1, LARGEST
    special[3, :16], special[3, 16] = HALVES, 127.0  # halfway between levels
    outliers = rng.standard_normal((3, width))
    outliers[:, 7] = 1e3, -1e30, 65519.0
    return np.concatenate([*rows, special, outliers]).astype(np.float32)


@pytest.mark.parametrize("mode", CacheMode)
def test_graphs_code_as_the_oracle(mode: CacheMode) -> None:
    use_threads(2)
    coding = Coding(mode, SPEC)
    leading = (1,) if coding.stores_h else (2, SPEC.n_kv_heads)  # of one token
    x = values(SPEC.d_model if coding.stores_h else leading[0] * leading[1] * SPEC.head_dim)
    if mode is CacheMode.FP16:
        x = np.clip(x, -LARGEST, LARGEST)  # NumPy warns of what becomes infinite
    shape = [SPEC.d_model] if coding.stores_h else [*leading, SPEC.head_dim]
    x = x.reshape(-1, *shape)
    g = GraphBuilder()
    coding.outputs(g, coding.encode(g, g.input("x", F32, ["n", *shape])))
    stored = {f.name: np.empty((len(x), *f.shape), f.dtype) for f in coding.fields}
    g.build().run({"x": x}, stored)
    expected = encode(mode, x)
    for name, array in expected.items():
        np.testing.assert_array_equal(stored[name], array, err_msg=name)
    g = GraphBuilder()
    axes = ["n"] if coding.stores_h else ["n", "parts", "heads"]
    g.output("y", coding.decode(g, coding.inputs(g, *axes)), F32, [*axes, shape[-1]])
    y = np.empty_like(x)
    g.build().run(stored, {"y": y})
    np.testing.assert_array_equal(y, decode(mode, expected))
