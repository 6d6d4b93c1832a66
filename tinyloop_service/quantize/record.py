"""What a quantised file says of how it was made: `quantization` in its provenance.

In: what went in and what came out.  Out: JSON.  Nothing of time and place, so that two runs write the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from tinyloop_service.engine.tensors import ModelWeights
from tinyloop_service.quantize.calibration import Calibration
from tinyloop_service.quantize.procedure import Layer, Quantized, Recipe


def quantized_model(
    weights: ModelWeights, quantized: Quantized, recipe: Recipe, calibration: Calibration | None
) -> ModelWeights:
    """The model to write; what was known of the fp16 model stays known."""
    record = _record(weights.model_id, quantized.layers, recipe, calibration)
    provenance = {**weights.provenance, "quantization": record}
    return ModelWeights.from_tensors(quantized.spec, quantized.tensors, provenance=provenance)


def _record(source: str, layers: Sequence[Layer], recipe: Recipe, calibration: Calibration | None) -> Mapping[str, Any]:
    by_gptq: dict[str, Any] = {}
    if calibration is not None:
        by_gptq = {
            "passes": recipe.passes,
            "damping": recipe.damping,
            "loops": len(recipe.depth_weights),
            "depth_weights": list(recipe.depth_weights),
            "calibration": calibration.provenance,
        }
    return {
        "method": "gptq" if calibration else "rtn",
        "group_size": recipe.group_size,
        "head": "int4" if recipe.int4_head else "fp16",
        "source_model_id": source,
        **by_gptq,
        "mean_rtn_error": _short(fmean(layer.rtn_error for layer in layers)),
        "mean_error": _short(fmean(layer.error for layer in layers)),
        "layers": [_layer(layer) for layer in layers],
    }


def _layer(layer: Layer) -> dict[str, Any]:
    row = asdict(layer)
    row |= {"rtn_error": _short(layer.rtn_error), "error": _short(layer.error)}
    row["errors_by_pass"] = [_short(error) for error in layer.errors_by_pass]
    return row


def _short(value: float) -> float:
    return float(f"{value:.6g}")
