"""Conversions: what is sent is what is read, bounds, names, page tokens, masks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from tinyloop_service import arguments, types
from tinyloop_service.client import wire
from tinyloop_service.completion import CompletionBuilder
from tinyloop_service.engine.fake import FAKE_LIMITS
from tinyloop_service.errors import InvalidArgument, SequenceTooLong
from tinyloop_service.pb import generation_pb2 as g
from tinyloop_service.pb import input_pb2
from tinyloop_service.pb import prefix_pb2 as p
from tinyloop_service.rpc import convert, convert_model, convert_prefix
from tinyloop_service.types import (
    CacheMode,
    Completed,
    FinishReason,
    Load,
    Output,
    PrefixInfo,
    PrefixState,
    Started,
    Timings,
    TokenLogprob,
    Usage,
)

NOW = 1_700_000_000 * 10**9
INFO = PrefixInfo(
    tenant="",
    name="p",
    uid="u",
    etag="e",
    state=PrefixState.READY,
    tokens=(1, 2, 3),
    loops=4,
    cache_window=7,
    cache_mode=CacheMode.H_INT4,
    parent="mother",
    pinned=True,
    size_bytes=2**40,
    shared_bytes=5,
    content_sha256="00",
    create_time_ns=NOW,
    expire_time_ns=NOW + 1,
    last_use_time_ns=NOW,
    use_count=2,
    build_ns=1500,
    tokens_built=3,
)
OUTPUTS: list[Output] = [
    Started(cached_tokens=0, prompt_tokens=3, queue_ns=123, seed=2**64 - 1),
    types.Delta(0, (5, 6), "ab", (TokenLogprob(-0.1, ((5, -0.1), (7, -2.5))), TokenLogprob(-1e-9)), 0),
    types.Delta(0, (), "é", (), 2),
    Completed(0, FinishReason.EOS, Usage(3, 0, 2), Timings(1, 2, 3)),
]


def ids(*tokens: int) -> input_pb2.Input:
    return input_pb2.Input(tokens=input_pb2.Tokens(ids=tokens))


@pytest.mark.parametrize("output", OUTPUTS)
def test_outputs_survive_the_wire_bit_by_bit(output: Output) -> None:
    (message,) = convert.write_outputs([output], "r", packed=False)
    assert wire.read_output(g.GenerateResponse.FromString(message.SerializeToString())) == output


@pytest.mark.parametrize("packed", [False, True])
def test_several_outputs_are_one_message_only_if_they_may_be_packed(packed: bool) -> None:
    messages = [
        g.GenerateResponse.FromString(message.SerializeToString())
        for message in convert.write_outputs(OUTPUTS, "r", packed=packed)
    ]
    assert len(messages) == (1 if packed else len(OUTPUTS))
    assert [output for message in messages for output in wire.read_outputs(message)] == OUTPUTS


def test_a_completion_survives_the_wire() -> None:
    builder = CompletionBuilder()
    builder.add(OUTPUTS)
    completion = builder.completion()
    assert completion.text == "abé" and completion.token_ids == (5, 6)
    assert wire.read_completion(convert.write_completion(completion, "r")) == completion


@pytest.mark.parametrize("state", PrefixState)
@pytest.mark.parametrize("mode", CacheMode)
def test_a_prefix_survives_the_wire(state: PrefixState, mode: CacheMode) -> None:
    read = wire.read_prefix(convert_prefix.write_prefix(replace(INFO, state=state, cache_mode=mode), full=True))
    same = ("uid", "etag", "tokens", "loops", "cache_window", "parent", "pinned", "size_bytes", "shared_bytes")
    assert all(getattr(read, field) == getattr(INFO, field) for field in (*same, "use_count", "tokens_built"))
    assert (read.id, read.state, read.cache_mode, read.token_count) == ("p", state, mode, 3)
    assert read.expire_time is not None and read.create_time.timestamp() == NOW / 1e9


def test_the_reason_of_a_failed_build_is_not_an_engines_text() -> None:
    failed = replace(INFO, state=PrefixState.FAILED, error="cudaErrorIllegalAddress at 0xdead")
    assert "0xdead" not in convert_prefix.write_prefix(failed).error


def test_load_and_every_config_key_survive_the_wire() -> None:
    load = Load(*range(1, 12), accepting=True)
    assert wire.read_load(convert_model.write_load(load)) == load
    config = {
        "vocab_size": 512, "d_model": 256, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "d_ff": 768,
        "pre_blocks": 2, "loop_blocks": 1, "post_blocks": 0, "default_loops": 4, "max_loops": 16,
        "max_seq_len": 2048, "rope_theta": 10000.5, "rope_pairing": "interleaved", "norm_eps": 1e-6,
        "norm_placement": "sandwich", "loop_norm": True, "inject": "add", "tie_embeddings": True,
        "bos_token_id": 0, "eos_token_ids": [1, 2], "quant": {"bits": 4, "group_size": 64},
    }  # fmt: skip
    assert wire.read_config(convert_model.write_spec(config)) == config
    bare = {**config, "bos_token_id": None, "eos_token_ids": [], "quant": None}
    assert wire.read_config(convert_model.write_spec(bare)) == bare


def test_what_a_client_writes_is_what_the_server_reads() -> None:
    given = arguments.parameters(
        3, 5, 0.7, 0, 0.9, 12, 1.3, ["END", (1, 2)],
        seed=2**64 - 1, min_p=0.1, ignore_eos=True, stop_token_ids=[9], logit_bias={4: -1.5}, logprobs=20, n=16,
    )  # fmt: skip
    message = wire.write_generate("p", "text", given, omit_text=True)
    assert convert.read_parameters(message, FAKE_LIMITS) == given
    assert (convert.read_name(message.prefix), message.omit_text) == ("p", True)


def test_absent_fields_mean_the_documented_defaults() -> None:
    read = convert.read_parameters(g.GenerateRequest(seed=0), FAKE_LIMITS)
    assert read.sampling == types.Sampling() and read.stops == types.Stops()
    assert (read.max_tokens, read.loops, read.cache_window, read.n) == (32, None, None, 1)


def test_ids_are_bounded_by_the_model() -> None:
    for bad in (-1, 512, 2**31 - 1):
        with pytest.raises(InvalidArgument) as caught:
            convert.read_input(ids(1, bad), FAKE_LIMITS, may_be_empty=False)
        assert caught.value.field == "input.tokens.ids[1]"
    with pytest.raises(SequenceTooLong, match="1000000"):
        convert.read_input(ids(*[1] * 1_000_000), FAKE_LIMITS, may_be_empty=False)
    assert convert.read_input(ids(), FAKE_LIMITS, may_be_empty=True) in ((), "")


@pytest.mark.parametrize("name", ["", "p", "prefixes/", "prefixes/P", "prefixes/a/b", "prefixes/a\n", "prefixes/.a"])
def test_a_resource_name_that_is_none(name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        convert.read_name(name)
    assert caught.value.field == "name"


@pytest.mark.parametrize("name", ["a", "0", "a" * 63, "a.b-c_d", "550e8400-e29b-41d4-a716-446655440000"])
def test_ids_of_prefixes(name: str) -> None:
    assert convert.read_name(f"prefixes/{name}") == name


@pytest.mark.parametrize("name", ["", "a" * 64, "-a", "a-", "A", "ä", "a b"])
def test_ids_that_no_prefix_may_have(name: str) -> None:
    with pytest.raises(InvalidArgument):
        arguments.prefix_id(name)


def test_page_tokens_are_ours_alone() -> None:
    assert convert_prefix.read_page_token("") == ""
    assert convert_prefix.read_page_token(convert_prefix.write_page_token("a.b")) == "a.b"
    assert [convert_prefix.read_page_size(n) for n in (0, 1, 5000)] == [50, 1, 1000]
    with pytest.raises(InvalidArgument):
        convert_prefix.read_page_size(-1)


@pytest.mark.parametrize(
    ("expiration", "field"),
    [
        ({"ttl": Duration(seconds=0)}, "ttl"),
        ({"ttl": Duration(seconds=-5)}, "ttl"),
        ({"ttl": Duration(seconds=2**62)}, "ttl"),
        ({"expire_time": Timestamp(seconds=1)}, "expire_time"),
        ({"expire_time": Timestamp(seconds=2**62)}, "expire_time"),
    ],
)
def test_expirations_out_of_bounds(expiration: dict[str, object], field: str) -> None:
    request = p.CreatePrefixRequest(input=ids(1), **expiration)
    with pytest.raises(InvalidArgument) as caught:
        convert_prefix.read_creation(request, FAKE_LIMITS, NOW)
    assert caught.value.field == field


def test_expirations() -> None:
    def expires(**expiration: object) -> int | None:
        request = p.CreatePrefixRequest(input=ids(1), **expiration)
        return convert_prefix.read_creation(request, FAKE_LIMITS, NOW).expiration.at(NOW)

    assert expires() is None
    assert expires(ttl=Duration(seconds=1, nanos=5)) == NOW + 10**9 + 5
    assert expires(expire_time=Timestamp(seconds=NOW // 10**9 + 1)) == NOW + 10**9
