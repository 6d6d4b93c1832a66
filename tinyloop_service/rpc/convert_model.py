"""Model facts and load: our types to protobuf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from tinyloop_service.engine.api import Limits
from tinyloop_service.pb import model_pb2
from tinyloop_service.rpc.convert_prefix import CACHE_MODES
from tinyloop_service.types import Load


def write_model(
    limits: Limits, config: Mapping[str, Any], *, engine: str, replica: str, has_tokenizer: bool
) -> model_pb2.Model:
    """`config`: the model file's configuration, its keys those of ModelSpec."""
    return model_pb2.Model(
        model_id=limits.model_id,
        engine=engine,
        server_version=version("tinyloop-service"),
        replica=replica,
        spec=write_spec(config),
        default_loops=limits.default_loops,
        max_loops=limits.max_loops,
        max_seq_len=limits.max_seq_len,
        max_rows=limits.max_rows,
        cache_mode=CACHE_MODES[limits.cache_mode],
        has_tokenizer=has_tokenizer,
        eos_token_ids=limits.eos_token_ids,
    )


def write_spec(config: Mapping[str, Any]) -> model_pb2.ModelSpec:
    given = {key: value for key, value in config.items() if value is not None}
    if quant := given.pop("quant", None):
        given["quant"] = model_pb2.Quant(**quant)
    return model_pb2.ModelSpec(**given)


def write_load(load: Load) -> model_pb2.Load:
    return model_pb2.Load(**asdict(load))
