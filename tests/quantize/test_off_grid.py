"""The script that takes a model off its grid: the same function, and a model that rounding to nearest harms."""

from __future__ import annotations

import numpy as np
import pytest
from fp16_models import model
from off_grid import off_grid

from tinyloop_service.engine.reference import Reference
from tinyloop_service.engine.tensors import BLOCK_LINEARS, ModelWeights, quantize_rtn


@pytest.mark.parametrize("name", ["everything", "gqa"])
def test_off_the_grid_is_the_same_function(name: str) -> None:
    """Products rounded to fp16, 2^-12 of a weight and independent: some 1e-3 of the logits through a dozen linears."""
    weights = model(name)
    moved = off_grid(weights, 32, 0)
    rounded = {
        tensor: quantize_rtn(value, 32).dequantize().astype(np.float16)
        for tensor, value in weights.tensors.items()
        if tensor.removesuffix(".weight").endswith(BLOCK_LINEARS)
    }
    trained = ModelWeights.from_tensors(weights.spec, {**weights.tensors, **rounded})
    references = (Reference(each, np.float64) for each in (trained, moved))
    before, after = (reference.forward(list(range(30)), reference.new_cache(3)) for reference in references)
    np.testing.assert_allclose(after, before, rtol=0, atol=0.03)
    for tensor, value in rounded.items():
        again = quantize_rtn(moved.tensors[tensor], 32).dequantize()
        assert np.abs(again - moved.tensors[tensor]).mean() > 0.02 * np.abs(value).mean(), "still on its grid"
