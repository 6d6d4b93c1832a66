"""Inputs, generation requests and their outputs: protobuf to our types and back, with every check that needs no state.

A refusal is InvalidArgument with the field's path as the caller sees it in the message.  Bounds are those of
`arguments.py`, so that a client in Python is told the same whether it calls a Model or a server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from tinyloop_service import arguments, types
from tinyloop_service.completion import Completion
from tinyloop_service.engine.api import Limits
from tinyloop_service.errors import InvalidArgument, SequenceTooLong
from tinyloop_service.pb import generation_pb2, input_pb2
from tinyloop_service.types import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    Completed,
    FinishReason,
    GenerationRequest,
    Output,
    Sampling,
    Started,
    Stops,
    TokenIds,
    TokenLogprob,
)

COLLECTION = "prefixes/"
DEFAULT_MAX_TOKENS = 32
MAX_TOKEN_TEXT = 256  # characters: more than the longest token of any vocabulary in use

FINISH_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.EOS: generation_pb2.FINISH_REASON_EOS,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}


@contextmanager
def inside(field: str) -> Iterator[None]:
    """Refusals within name their field below `field`."""
    try:
        yield
    except InvalidArgument as error:
        raise InvalidArgument(f"{field}.{error.field}", error.description) from None


def read_name(name: str, field: str = "name") -> str:
    """The id in `prefixes/{id}`."""
    if not name.startswith(COLLECTION):
        raise InvalidArgument(field, f"is {name[:80]!r}, expected prefixes/ and an id")
    return arguments.prefix_id(name.removeprefix(COLLECTION), field)


def read_ids(tokens: input_pb2.Tokens, field: str, limits: Limits) -> TokenIds:
    """Ids within the vocabulary, no more than a sequence can hold."""
    if len(tokens.ids) > limits.max_seq_len:
        raise SequenceTooLong(
            f"sequence too long: {field} has {len(tokens.ids)} tokens, the model takes {limits.max_seq_len} in all"
        )
    ids = tuple(tokens.ids)
    arguments.check_ids(ids, f"{field}.ids", vocab_size=limits.vocab_size)
    return ids


def read_input(message: input_pb2.Input, limits: Limits, *, may_be_empty: bool) -> str | TokenIds:
    """Text or ids of the field `input`."""
    content: str | TokenIds = ""
    match message.WhichOneof("input"):
        case "text":
            content = message.text
            if len(content) > MAX_TOKEN_TEXT * limits.max_seq_len:  # seconds of work for nothing
                raise SequenceTooLong(
                    f"sequence too long: the text has {len(content)} characters, far more than the "
                    f"{limits.max_seq_len} tokens that the model takes in all"
                )
        case "tokens":
            content = read_ids(message.tokens, "input.tokens", limits)
    if not content and not may_be_empty:
        raise InvalidArgument("input", "is empty, expected at least one token")
    return content


def read_generation(message: generation_pb2.GenerateRequest, limits: Limits) -> GenerationRequest:
    """Everything of the request but its tokens, which may have to be made from text first."""
    return GenerationRequest(
        tokens=(),
        max_tokens=arguments.integer(
            _given(message, "max_tokens", DEFAULT_MAX_TOKENS), "max_tokens", 1, arguments.INT64_MAX
        ),
        prefix=read_name(message.prefix, "prefix") if message.prefix else None,
        loops=arguments.loops(_given(message, "loops"), max_loops=limits.max_loops),
        cache_window=arguments.cache_window(_given(message, "cache_window")),
        sampling=_read_sampling(message, limits),
        stops=_read_stops(message, limits),
        n=arguments.integer(_given(message, "n", 1), "n", 1, MAX_CHOICES),
        want_text=not message.omit_text,
    )


def write_output(output: Output, replica: str) -> generation_pb2.GenerateResponse:
    match output:
        case Started():
            started = generation_pb2.Started(
                replica=replica,
                prompt_tokens=output.prompt_tokens,
                cached_tokens=output.cached_tokens,
                queue_duration=write_duration(output.queue_ns),
                seed=output.seed,
            )
            return generation_pb2.GenerateResponse(started=started)
        case types.Delta():
            delta = generation_pb2.Delta(
                choice=output.choice,
                token_ids=output.token_ids,
                text=output.text,
                logprobs=map(_write_logprob, output.logprobs),
                first_index=output.first_index,
            )
            return generation_pb2.GenerateResponse(delta=delta)
        case Completed():
            completed = generation_pb2.Completed(
                choice=output.choice,
                finish_reason=FINISH_REASONS[output.finish_reason],
                usage=_write_usage(output.usage),
                timings=_write_timings(output.timings),
            )
            return generation_pb2.GenerateResponse(completed=completed)


def write_outputs(outputs: Sequence[Output], replica: str, *, packed: bool) -> list[generation_pb2.GenerateResponse]:
    """The messages for them; one if they may be packed."""
    first, *others = (write_output(output, replica) for output in outputs)
    if not packed:
        return [first, *others]
    first.further.extend(others)
    return [first]


def write_completion(completion: Completion, replica: str) -> generation_pb2.Completion:
    choices = [
        generation_pb2.Choice(
            index=index,
            token_ids=choice.token_ids,
            text=choice.text,
            logprobs=map(_write_logprob, choice.logprobs),
            finish_reason=FINISH_REASONS[choice.finish_reason],
            timings=_write_timings(choice.timings),
        )
        for index, choice in enumerate(completion.choices)
    ]
    return generation_pb2.Completion(
        choices=choices, usage=_write_usage(completion.usage), seed=completion.seed, replica=replica
    )


def write_tokens(ids: TokenIds) -> input_pb2.Tokens:
    return input_pb2.Tokens(ids=ids)


def write_duration(nanoseconds: int) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(nanoseconds)
    return duration


def write_time(nanoseconds: int) -> Timestamp:
    time = Timestamp()
    time.FromNanoseconds(nanoseconds)
    return time


def _given(message: Any, field: str, default: Any = None) -> Any:
    """The value of an optional field, or `default` where it is absent."""
    return getattr(message, field) if message.HasField(field) else default


def _read_sampling(message: generation_pb2.GenerateRequest, limits: Limits) -> Sampling:
    wire, default = message.sampling, Sampling()
    with inside("sampling"):
        sampling = arguments.sampling(
            temperature=wire.temperature,
            top_k=_given(wire, "top_k", default.top_k),
            top_p=_given(wire, "top_p", default.top_p),
            min_p=wire.min_p,
            repetition_penalty=_given(wire, "repetition_penalty", default.repetition_penalty),
            logit_bias=dict(wire.logit_bias),
            seed_value=0,
            vocab_size=limits.vocab_size,
        )
    return replace(
        sampling,
        logprobs=arguments.integer(message.logprobs, "logprobs", 0, MAX_LOGPROBS),
        seed=arguments.seed(_given(message, "seed")),
    )


def _read_stops(message: generation_pb2.GenerateRequest, limits: Limits) -> Stops:
    sequences = [
        stop.text if stop.WhichOneof("stop") == "text" else tuple(stop.tokens.ids) for stop in message.stop_sequences
    ]
    singles = tuple(message.stop_token_ids)
    return arguments.stops(sequences, singles, message.ignore_eos, vocab_size=limits.vocab_size)


def _write_logprob(logprob: TokenLogprob) -> generation_pb2.TokenLogprob:
    top = [generation_pb2.TopLogprob(token_id=token, logprob=value) for token, value in logprob.top]
    return generation_pb2.TokenLogprob(logprob=logprob.logprob, top=top)


def _write_usage(usage: types.Usage) -> generation_pb2.Usage:
    return generation_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
    )


def _write_timings(timings: types.Timings) -> generation_pb2.Timings:
    return generation_pb2.Timings(
        queue_duration=write_duration(timings.queue_ns),
        ttft_duration=write_duration(timings.ttft_ns),
        total_duration=write_duration(timings.total_ns),
    )
