"""Requests that the clients send and what they read from responses: our types to protobuf and back, no calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from tinyloop_service import types
from tinyloop_service.arguments import Parameters
from tinyloop_service.client.results import ModelInfo, Prefix
from tinyloop_service.completion import Choice, Completion
from tinyloop_service.pb import generation_pb2, input_pb2, model_pb2, prefix_pb2
from tinyloop_service.rpc.convert import COLLECTION, FINISH_REASONS, write_duration
from tinyloop_service.rpc.convert_prefix import CACHE_MODES, STATES
from tinyloop_service.types import Completed, Load, Output, Started, Timings, TokenIds, TokenLogprob, Usage

_STATES = {number: state for state, number in STATES.items()}
_CACHE_MODES = {number: mode for mode, number in CACHE_MODES.items()}
_FINISH_REASONS = {number: reason for reason, number in FINISH_REASONS.items()}


def write_input(content: str | TokenIds) -> input_pb2.Input:
    if isinstance(content, str):
        return input_pb2.Input(text=content)
    return input_pb2.Input(tokens=input_pb2.Tokens(ids=content))


def write_create(
    prefix_id: str,
    content: str | TokenIds,
    *,
    loops: int | None,
    cache_window: int | None,
    ttl_ns: int | None,
    pinned: bool,
    parent: str | None,
    wait: bool,
) -> prefix_pb2.CreatePrefixRequest:
    request = prefix_pb2.CreatePrefixRequest(
        prefix_id=prefix_id,
        input=write_input(content),
        loops=loops,
        cache_window=cache_window,
        pinned=pinned,
        parent=f"{COLLECTION}{parent}" if parent else "",
        build_async=not wait,
    )
    if ttl_ns is not None:
        request.ttl.CopyFrom(write_duration(ttl_ns))
    return request


def write_generate(
    prefix: str | None, content: str | TokenIds, parameters: Parameters, *, omit_text: bool, packed: bool = False
) -> generation_pb2.GenerateRequest:
    sampling, stops = parameters.sampling, parameters.stops
    return generation_pb2.GenerateRequest(
        prefix=f"{COLLECTION}{prefix}" if prefix else "",
        input=write_input(content),
        loops=parameters.loops,
        cache_window=parameters.cache_window,
        max_tokens=parameters.max_tokens,
        sampling=generation_pb2.Sampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=dict(sampling.logit_bias),
        ),
        stop_sequences=[
            *(generation_pb2.StopSequence(tokens=input_pb2.Tokens(ids=ids)) for ids in stops.token_sequences),
            *(generation_pb2.StopSequence(text=text) for text in stops.strings),
        ],
        ignore_eos=stops.ignore_eos,
        seed=sampling.seed,
        n=parameters.n,
        logprobs=sampling.logprobs,
        omit_text=omit_text,
        packed=packed,
    )


def read_output(message: generation_pb2.GenerateResponse) -> Output:
    match message.WhichOneof("output"):
        case "started":
            started = message.started
            return Started(
                started.cached_tokens, started.prompt_tokens, started.queue_duration.ToNanoseconds(), started.seed
            )
        case "delta":
            delta = message.delta
            logprobs = _read_logprobs(delta.logprobs)
            return types.Delta(delta.choice, tuple(delta.token_ids), delta.text, logprobs, delta.first_index)
        case _:
            done = message.completed
            reason = _FINISH_REASONS[done.finish_reason]
            return Completed(done.choice, reason, _read_usage(done.usage), _read_timings(done.timings))


def read_outputs(message: generation_pb2.GenerateResponse) -> Iterator[Output]:
    """All that came in one message."""
    yield read_output(message)
    for further in message.further:
        yield read_output(further)


def read_completion(message: generation_pb2.Completion) -> Completion:
    choices = tuple(
        Choice(
            tuple(choice.token_ids),
            choice.text,
            _FINISH_REASONS[choice.finish_reason],
            _read_logprobs(choice.logprobs),
            _read_timings(choice.timings),
        )
        for choice in message.choices
    )
    return Completion(choices, _read_usage(message.usage), message.seed)


def read_prefix(message: prefix_pb2.Prefix) -> Prefix:
    return Prefix(
        id=message.name.removeprefix(COLLECTION),
        uid=message.uid,
        etag=message.etag,
        state=_STATES[message.state],
        error=message.error or None,
        token_count=message.token_count,
        loops=message.loops,
        cache_window=message.cache_window,
        cache_mode=_CACHE_MODES[message.cache_mode],
        size_bytes=message.size_bytes,
        shared_bytes=message.shared_bytes,
        content_sha256=message.content_sha256,
        parent=message.parent.removeprefix(COLLECTION) or None,
        pinned=message.pinned,
        create_time=_read_time(message.create_time),
        expire_time=_read_time(message.expire_time) if message.HasField("expire_time") else None,
        last_use_time=_read_time(message.last_use_time) if message.HasField("last_use_time") else None,
        use_count=message.use_count,
        build_duration=timedelta(microseconds=message.build_duration.ToNanoseconds() / 1000),
        tokens_built=message.tokens_built,
        tokens=tuple(message.input.tokens.ids) if message.HasField("input") else None,
    )


def read_config(spec: model_pb2.ModelSpec) -> dict[str, Any]:
    """The configuration with the model file's own keys."""
    config: dict[str, Any] = {}
    for field in spec.DESCRIPTOR.fields:
        value = getattr(spec, field.name)
        if field.name in ("bos_token_id", "quant"):
            config[field.name] = value if spec.HasField(field.name) else None
        else:
            config[field.name] = list(value) if field.name == "eos_token_ids" else value
    if quant := config["quant"]:
        config["quant"] = {"bits": quant.bits, "group_size": quant.group_size}
    return config


def read_model(message: model_pb2.Model) -> ModelInfo:
    return ModelInfo(
        model_id=message.model_id,
        engine=message.engine,
        server_version=message.server_version,
        replica=message.replica,
        default_loops=message.default_loops,
        max_loops=message.max_loops,
        max_seq_len=message.max_seq_len,
        max_rows=message.max_rows,
        cache_mode=_CACHE_MODES[message.cache_mode],
        has_tokenizer=message.has_tokenizer,
        eos_token_ids=tuple(message.eos_token_ids),
        config=read_config(message.spec),
    )


def read_load(message: model_pb2.Load) -> Load:
    return Load(**{field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields})


def _read_time(message: Any) -> datetime:
    return datetime.fromtimestamp(message.ToNanoseconds() / 1e9, UTC)


def _read_logprobs(messages: Iterable[generation_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(message.logprob, tuple((top.token_id, top.logprob) for top in message.top)) for message in messages
    )


def _read_usage(message: generation_pb2.Usage) -> Usage:
    return Usage(message.prompt_tokens, message.cached_tokens, message.completion_tokens)


def _read_timings(message: generation_pb2.Timings) -> Timings:
    return Timings(
        message.queue_duration.ToNanoseconds(),
        message.ttft_duration.ToNanoseconds(),
        message.total_duration.ToNanoseconds(),
    )
