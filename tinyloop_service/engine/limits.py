"""What an engine offers of a model, whichever engine: the model's half of `Limits` from its weights."""

from __future__ import annotations

from typing import Any

from tinyloop_service.engine.api import Limits
from tinyloop_service.engine.tensors import ModelWeights


def limits_of(weights: ModelWeights, **engine: Any) -> Limits:
    """engine: the fields of `Limits` that are the engine's own, by name."""
    spec = weights.spec
    return Limits(
        model_id=weights.model_id,
        vocab_size=spec.vocab_size,
        default_loops=spec.default_loops,
        max_loops=spec.max_loops,
        max_seq_len=spec.max_seq_len,
        pre_blocks=spec.pre_blocks,
        loop_blocks=spec.loop_blocks,
        post_blocks=spec.post_blocks,
        eos_token_ids=spec.eos_token_ids,
        **engine,
    )
