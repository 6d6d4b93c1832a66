"""Values at and beyond their bounds, and messages that are none: a clear status each time, and the server lives on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from rpc_harness import Served, collect, expected_tokens, field_of, ids, reason_of, refusal, serving

from tinyloop_service.errors import SequenceTooLong
from tinyloop_service.pb import generation_pb2 as g
from tinyloop_service.pb import input_pb2, model_pb2
from tinyloop_service.pb import prefix_pb2 as p

NAN, INF = float("nan"), float("inf")
PROMPT = (1, 2, 3)


def request(**changes: Any) -> g.GenerateRequest:
    fields = {"input": ids(*PROMPT), "max_tokens": 2, "ignore_eos": True, **changes}
    return g.GenerateRequest(**fields)


def sampling(**fields: Any) -> g.GenerateRequest:
    return request(sampling=g.Sampling(**fields))


def stop(*sequence: int) -> g.StopSequence:
    return g.StopSequence(tokens=input_pb2.Tokens(ids=sequence))


REFUSED: list[tuple[g.GenerateRequest, str]] = [
    (sampling(temperature=NAN), "sampling.temperature"),
    (sampling(temperature=INF), "sampling.temperature"),
    (sampling(temperature=-1), "sampling.temperature"),
    (sampling(top_p=0), "sampling.top_p"),
    (sampling(top_p=1.0001), "sampling.top_p"),
    (sampling(top_p=NAN), "sampling.top_p"),
    (sampling(top_k=-1), "sampling.top_k"),
    (sampling(min_p=2), "sampling.min_p"),
    (sampling(repetition_penalty=0), "sampling.repetition_penalty"),
    (sampling(logit_bias={512: 1.0}), "sampling.logit_bias[512]"),
    (sampling(logit_bias={1: INF}), "sampling.logit_bias[1]"),
    (sampling(logit_bias=dict.fromkeys(range(301), 1.0)), "sampling.logit_bias"),
    (request(max_tokens=0), "max_tokens"),
    (request(max_tokens=-(2**31)), "max_tokens"),
    (request(logprobs=21), "logprobs"),
    (request(logprobs=-1), "logprobs"),
    (request(n=0), "n"),
    (request(n=17), "n"),
    (request(loops=0), "loops"),
    (request(loops=17), "loops"),
    (request(cache_window=-1), "cache_window"),
    (request(input=None), "input"),
    (request(input=ids()), "input"),
    (request(input=input_pb2.Input(text="")), "input"),
    (request(input=ids(1, -1)), "input.tokens.ids[1]"),
    (request(input=ids(512)), "input.tokens.ids[0]"),
    (request(input=ids(2**31 - 1)), "input.tokens.ids[0]"),
    (request(stop_sequences=[stop(1), stop(512)]), "stop_sequences[1][0]"),
    (request(stop_sequences=[stop()]), "stop_sequences[0]"),
    (request(stop_sequences=[g.StopSequence(text="")]), "stop_sequences[0]"),
    (request(stop_token_ids=[-1]), "stop_token_ids[0]"),
    (request(prefix="p"), "prefix"),
    (request(prefix="prefixes/" + "x" * 64), "prefix"),
    (request(create_if_missing=p.CreatePrefixRequest(input=ids(1))), "create_if_missing.prefix_id"),
    (
        request(prefix="prefixes/a", create_if_missing=p.CreatePrefixRequest(prefix_id="b", input=ids(1))),
        "create_if_missing.prefix_id",
    ),
    (
        request(prefix="prefixes/a", create_if_missing=p.CreatePrefixRequest(input=ids(600))),
        "create_if_missing.input.tokens.ids[0]",
    ),
    (
        request(prefix="prefixes/a", create_if_missing=p.CreatePrefixRequest(input=ids(1), build_async=True)),
        "create_if_missing.build_async",
    ),
]


async def test_every_bound_is_kept_and_named_before_any_work(served: Served) -> None:
    for bad, field in REFUSED:
        error = await refusal(served.generation.Generate(bad))
        assert reason_of(error) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT"), bad
        assert field_of(error) == field
        unary = await refusal(served.generation.GenerateUnary(g.GenerateUnaryRequest(generation=bad)))
        assert field_of(unary) == f"generation.{field}"
    assert served.engine.num_steps == 0


MANY = 10**6  # in one message; each would be looked at for seconds, while everybody waits


async def test_what_is_too_much_is_counted_and_not_read(served: Served) -> None:
    """What is wrong with the first of them is never found out."""
    invalid = g.StopSequence()
    for bad, field in (
        (request(stop_sequences=[invalid] * 65), "stop_sequences"),
        (request(stop_token_ids=[-1] * MANY), "stop_sequences"),
        (request(stop_sequences=[stop(*[-1] * MANY)]), "stop_sequences[0]"),
    ):
        error = await refusal(served.generation.Generate(bad))
        assert field_of(error) == field and "at most" in (error.details() or "")
    mask = FieldMask(paths=["nonsense"] * MANY)
    error = await refusal(
        served.prefixes.UpdatePrefix(p.UpdatePrefixRequest(prefix=p.Prefix(name="prefixes/p"), update_mask=mask))
    )
    assert field_of(error) == "update_mask" and "at most" in (error.details() or "")
    error = await refusal(served.model.Tokenize(model_pb2.TokenizeRequest(text="a" * MANY)))
    assert reason_of(error) == ("INVALID_ARGUMENT", SequenceTooLong.reason)


ALLOWED = [
    sampling(temperature=1e-6),
    sampling(top_p=1),
    sampling(top_k=0),
    sampling(top_k=1, top_p=0.95),
    sampling(top_k=512),
    sampling(top_k=513),
    sampling(top_k=10**9),
    request(max_tokens=1),
    request(seed=0),
    request(seed=2**64 - 1),
    request(logprobs=20),
    request(n=16),
    request(stop_token_ids=[0], stop_sequences=[stop(511)]),
    request(input=ids(0)),
]


async def test_what_lies_on_a_bound_is_served(served: Served) -> None:
    for good in ALLOWED:
        messages = await collect(served.generation.Generate(good))
        assert sum(message.WhichOneof("output") == "completed" for message in messages) == (good.n or 1)


@pytest.mark.parametrize("max_tokens", [2048, 2**31, 2**63 - 1])
async def test_a_sequence_that_cannot_fit_is_refused(served: Served, max_tokens: int) -> None:
    error = await refusal(served.generation.Generate(request(max_tokens=max_tokens)))
    assert reason_of(error) == ("INVALID_ARGUMENT", "SEQUENCE_TOO_LONG") and "2048" in (error.details() or "")
    assert await collect(served.generation.Generate(request()))


async def test_a_prompt_of_a_million_tokens_and_one_beyond_the_message_limit(served: Served) -> None:
    error = await refusal(served.generation.Generate(request(input=ids(*[1] * 1_000_000))))
    assert reason_of(error) == ("INVALID_ARGUMENT", "SEQUENCE_TOO_LONG")
    text = input_pb2.Input(text="x" * (17 * 2**20))
    error = await refusal(served.prefixes.CreatePrefix(p.CreatePrefixRequest(prefix_id="p", input=text)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for size in (100_000, 200_000):  # the second is refused before anything is tokenised
        long = input_pb2.Input(text="word " * size)
        error = await refusal(served.prefixes.CreatePrefix(p.CreatePrefixRequest(prefix_id="p", input=long)))
        assert reason_of(error) == ("INVALID_ARGUMENT", "SEQUENCE_TOO_LONG")
        assert ("characters" in (error.details() or "")) == (size == 200_000)
    assert await collect(served.generation.Generate(request()))


RAW: list[tuple[str, bytes]] = [
    ("/tinyloop.v1.PrefixService/GetPrefix", b"\x0a\x02\xff\xfe"),  # name: not UTF-8
    ("/tinyloop.v1.PrefixService/GetPrefix", b"\xff\xff\xff"),  # no message at all
    ("/tinyloop.v1.GenerationService/GenerateUnary", b"\x0a\x7f\x01"),  # cut short
    ("/tinyloop.v1.ModelService/Tokenize", b"\x0a\x01\xc3"),  # half a character
]


@pytest.mark.parametrize(("method", "data"), RAW)
async def test_bytes_that_are_no_message_are_an_invalid_argument(served: Served, method: str, data: bytes) -> None:
    error = await refusal(served.channel.unary_unary(method)(data))
    assert reason_of(error) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT") and field_of(error) == "request"


async def test_malformed_bytes_on_a_stream_and_unknown_fields(served: Served) -> None:
    generate = "/tinyloop.v1.GenerationService/Generate"
    error = await refusal(served.channel.unary_stream(generate)(b"\x0a\x02\xff\xfe"))
    assert field_of(error) == "request"
    unknown = b"\xfa\x3f\x03abc"  # field 1023, a string
    data = await collect(served.channel.unary_stream(generate)(request().SerializeToString() + unknown))
    received = [token for raw in data for token in g.GenerateResponse.FromString(raw).delta.token_ids]
    assert tuple(received) == expected_tokens(PROMPT, 2)


async def test_a_model_without_a_tokenizer_takes_ids_only() -> None:
    calls: list[tuple[Callable[[Served], Any], str]] = [
        (lambda s: s.generation.Generate(request(input=input_pb2.Input(text="hello"))), "input.text"),
        (
            lambda s: s.prefixes.CreatePrefix(
                p.CreatePrefixRequest(prefix_id="p", input=input_pb2.Input(text="hello"))
            ),
            "input.text",
        ),
        (lambda s: s.generation.Generate(request(stop_sequences=[g.StopSequence(text="x")])), "stop_sequences"),
        (lambda s: s.model.Tokenize(model_pb2.TokenizeRequest(text="x")), "text"),
        (lambda s: s.model.Detokenize(model_pb2.DetokenizeRequest()), "tokens"),
    ]
    async with serving() as served:
        for call, field in calls:
            error = await refusal(call(served))
            assert reason_of(error)[0] == "INVALID_ARGUMENT" and field_of(error) == field
        assert await collect(served.generation.Generate(request()))


async def test_every_view_and_page_size_is_checked(served: Served) -> None:
    for call, field in (
        (served.prefixes.GetPrefix(p.GetPrefixRequest(name="prefixes/a", view=7)), "view"),
        (served.prefixes.ListPrefixes(p.ListPrefixesRequest(page_size=-1)), "page_size"),
        (served.prefixes.DeletePrefix(p.DeletePrefixRequest(name="a")), "name"),
        (served.prefixes.WatchPrefix(p.WatchPrefixRequest(name="prefixes/")), "name"),
    ):
        assert field_of(await refusal(call)) == field


async def test_a_request_id_is_kept_or_made(served: Served) -> None:
    for given, kept in (("abc-1.2_3", True), ("x" * 65, False), ("a b", False)):
        call = served.model.GetLoad(model_pb2.GetLoadRequest(), metadata=(("x-request-id", given),))
        await call
        seen = dict(await call.trailing_metadata())["x-request-id"]
        assert (seen == given) is kept and seen


async def test_get_model_says_what_the_server_is(served: Served) -> None:
    model = await served.model.GetModel(model_pb2.GetModelRequest())
    assert (model.model_id, model.engine, model.replica) == ("fake", "fake", "replica-0")
    assert model.has_tokenizer and model.spec.quant.group_size == 128 and model.max_loops == 16
    async with served.client() as client:
        config = await client.config()
        assert config["eos_token_ids"] == [0] and config["rope_pairing"] == "half"
        load = await client.load()
        assert load.pages_total == load.pages_free == 4096 and load.accepting


async def test_no_prompt_is_logged(served: Served, quiet_logs: list[dict[str, Any]]) -> None:
    marker = "xyzzy"
    text = input_pb2.Input(text=f"say {marker}")
    create = p.CreatePrefixRequest(prefix_id="p", input=text)
    await served.prefixes.CreatePrefix(create)
    await collect(served.generation.Generate(request(input=text, stop_sequences=[g.StopSequence(text=marker)])))
    await refusal(served.generation.Generate(request(input=text, max_tokens=0)))
    await refusal(served.prefixes.CreatePrefix(p.CreatePrefixRequest(prefix_id=f"{marker} is no id", input=text)))
    assert len([log for log in quiet_logs if log["event"] in ("answered", "refused")]) == 4
    assert marker not in repr(quiet_logs)


async def test_a_burst_beyond_what_grpc_lets_wait_hears_no_cancel(served: Served) -> None:
    """gRPC alone ends some of a thousand calls that the event loop has not got to, all beyond three, as CANCELLED."""
    calls = [served.model.GetLoad(model_pb2.GetLoadRequest()) for _ in range(2000)]
    codes = {await call.code() for call in calls}
    assert codes == {grpc.StatusCode.OK}
