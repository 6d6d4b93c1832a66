"""ModelSpec: what a config may say, what it may not, and how it is told."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tinyloop_service.engine.spec import SIZES, ModelSpec, Quant
from tinyloop_service.errors import ModelFileError

TINY = SIZES["tiny"]


def config(**changes: Any) -> str:
    return json.dumps(json.loads(TINY.to_json()) | changes)


@pytest.mark.parametrize("size", SIZES)
def test_json_round_trip(size: str) -> None:
    assert ModelSpec.from_json(SIZES[size].to_json()) == SIZES[size]


def test_json_round_trip_of_every_switch() -> None:
    spec = replace(
        TINY,
        n_kv_heads=2,
        post_blocks=1,
        loop_blocks=3,
        rope_pairing="interleaved",
        norm_placement="sandwich",
        loop_norm=True,
        inject="add",
        tie_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2, 3),
        quant=Quant(4, 32),
    )
    assert ModelSpec.from_json(spec.to_json()) == spec


def test_reference_sizes_are_those_documented() -> None:
    large = SIZES["407m"]
    assert large.cache_layers(8) == 10
    assert large.kv_bytes(1024, 8) == 80 << 20
    assert (TINY.default_loops, TINY.max_loops, TINY.cache_layers(4)) == (4, 16, 6)


def test_schedule_numbers_cache_layers_in_order_of_computation() -> None:
    spec = replace(TINY, pre_blocks=1, loop_blocks=2, post_blocks=1)
    assert list(spec.schedule(2)) == [
        (0, "pre", 0),
        (1, "loop", 0),
        (2, "loop", 1),
        (3, "loop", 0),
        (4, "loop", 1),
        (5, "post", 0),
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 0),
        ("vocab_size", 2**40),
        ("vocab_size", True),
        ("d_model", "256"),
        ("n_heads", -4),
        ("n_kv_heads", 3),
        ("head_dim", 63),
        ("d_ff", 1.5),
        ("pre_blocks", -1),
        ("loop_blocks", 0),
        ("post_blocks", 10**9),
        ("default_loops", 17),
        ("max_loops", 0),
        ("max_seq_len", 2**20),  # a table in every block, whatever the tensors are
        ("rope_theta", 0),
        ("rope_theta", 10**400),
        ("norm_eps", 1e-45),  # nothing in float32
        ("rope_theta", float("nan")),
        ("norm_eps", float("inf")),
        ("norm_eps", "1e-5"),
        ("rope_pairing", "quarter"),
        ("norm_placement", ["pre"]),
        ("inject", None),
        ("loop_norm", 1),
        ("tie_embeddings", "no"),
        ("bos_token_id", 512),
        ("bos_token_id", True),
        ("eos_token_ids", 3),
        ("eos_token_ids", [-1]),
        ("eos_token_ids", [[1]]),
        ("quant", 4),
    ],
)
def test_a_value_out_of_bounds_is_named(field: str, value: Any) -> None:
    with pytest.raises(ModelFileError, match=field):
        ModelSpec.from_json(config(**{field: value}))


@pytest.mark.parametrize(
    ("quant", "message"),
    [
        ({"bits": 8, "group_size": 128}, "quant.bits"),
        ({"bits": 4, "group_size": 16}, "quant.group_size"),
        ({"bits": 4, "group_size": "128"}, "quant.group_size"),
        ({"bits": 4}, "group_size"),
        ({"bits": 4, "group_size": 128, "zero": 8}, "zero"),
    ],
)
def test_quant_is_checked(quant: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        ModelSpec.from_json(config(quant=quant))


def test_group_size_must_divide_every_input() -> None:
    with pytest.raises(ModelFileError, match="d_ff is 800"):
        ModelSpec.from_json(config(d_ff=800))


def test_unknown_and_missing_keys_are_named() -> None:
    with pytest.raises(ModelFileError, match="mixture_of"):
        ModelSpec.from_json(config(mixture_of=8))
    shorter = json.loads(TINY.to_json())
    del shorter["rope_theta"]
    with pytest.raises(ModelFileError, match="rope_theta"):
        ModelSpec.from_json(json.dumps(shorter))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"vocab_size": ' + "9" * 5000 + "}"])
def test_text_that_is_no_config(text: str) -> None:
    with pytest.raises(ModelFileError):
        ModelSpec.from_json(text)
