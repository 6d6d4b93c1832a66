"""Inputs, generation requests and their outputs: protobuf to our types and back, with every check that needs no state.

A refusal is InvalidArgument with the field's path as the caller sees it in the message.  Bounds are those of
`arguments.py`, so that a client in Python is told the same whether it calls a Model or a server.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from tinyloop_service import arguments, types
from tinyloop_service.arguments import Parameters
from tinyloop_service.completion import Completion
from tinyloop_service.engine.api import Limits
from tinyloop_service.errors import InvalidArgument, SequenceTooLong
from tinyloop_service.pb import generation_pb2, input_pb2
from tinyloop_service.types import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    Completed,
    FinishReason,
    Output,
    Sampling,
    Started,
    Stops,
    TokenIds,
    TokenLogprob,
)

COLLECTION = "prefixes/"
DEFAULT_MAX_TOKENS = 32
_DEFAULT = Sampling()
MAX_TOKEN_TEXT = 256  # characters: more than the longest token of any vocabulary in use

FINISH_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.EOS: generation_pb2.FINISH_REASON_EOS,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}


class inside:
    """Refusals within name their field below `field`."""

    def __init__(self, field: str) -> None:
        self._field = field

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, InvalidArgument):
            raise InvalidArgument(f"{self._field}.{error.field}", error.description) from None


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
            check_text_len(content, limits)
        case "tokens":
            content = read_ids(message.tokens, "input.tokens", limits)
    if not content and not may_be_empty:
        raise InvalidArgument("input", "is empty, expected at least one token")
    return content


def check_text_len(text: str, limits: Limits) -> None:
    """Before it is tokenised: what no sequence can hold takes seconds, and gigabytes."""
    if len(text) > MAX_TOKEN_TEXT * limits.max_seq_len:
        raise SequenceTooLong(
            f"sequence too long: the text has {len(text)} characters, far more than the "
            f"{limits.max_seq_len} tokens that the model takes in all"
        )


def read_parameters(message: generation_pb2.GenerateRequest, limits: Limits) -> Parameters:
    """Everything of the request but its prefix and its tokens."""
    return Parameters(
        max_tokens=arguments.integer(
            _given(message, "max_tokens", DEFAULT_MAX_TOKENS), "max_tokens", 1, arguments.INT64_MAX
        ),
        loops=arguments.loops(_given(message, "loops"), max_loops=limits.max_loops),
        cache_window=arguments.cache_window(_given(message, "cache_window")),
        sampling=_read_sampling(message, limits),
        stops=_read_stops(message, limits),
        n=arguments.integer(_given(message, "n", 1), "n", 1, MAX_CHOICES),
    )


def write_outputs(outputs: Iterable[Output], replica: str, *, packed: bool) -> list[generation_pb2.GenerateResponse]:
    """The messages for them; one if they may be packed."""
    messages: list[generation_pb2.GenerateResponse] = []
    for output in outputs:
        if messages and packed:
            message = messages[0].further.add()
        else:
            message = generation_pb2.GenerateResponse()
            messages.append(message)
        _write_output(message, output, replica)
    return messages


# Messages are filled in place: a part that is made first and then put into its message is copied.


def _write_output(message: generation_pb2.GenerateResponse, output: Output, replica: str) -> None:
    match output:
        case types.Delta():
            delta = message.delta
            delta.choice, delta.first_index, delta.text = output.choice, output.first_index, output.text
            delta.token_ids.extend(output.token_ids)
            _write_logprobs(delta, output.logprobs)
        case Completed():
            completed = message.completed
            completed.choice = output.choice
            completed.finish_reason = FINISH_REASONS[output.finish_reason]
            _write_usage(completed.usage, output.usage)
            _write_timings(completed.timings, output.timings)
        case Started():
            started = message.started
            started.replica, started.seed = replica, output.seed
            started.prompt_tokens, started.cached_tokens = output.prompt_tokens, output.cached_tokens
            started.queue_duration.FromNanoseconds(output.queue_ns)


def write_completion(completion: Completion, replica: str) -> generation_pb2.Completion:
    message = generation_pb2.Completion(seed=completion.seed, replica=replica)
    _write_usage(message.usage, completion.usage)
    for index, choice in enumerate(completion.choices):
        written = message.choices.add(index=index, token_ids=choice.token_ids, text=choice.text)
        written.finish_reason = FINISH_REASONS[choice.finish_reason]
        _write_logprobs(written, choice.logprobs)
        _write_timings(written.timings, choice.timings)
    return message


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
    wire = message.sampling
    logprobs = arguments.integer(message.logprobs, "logprobs", 0, MAX_LOGPROBS)
    with inside("sampling"):
        return arguments.sampling(
            temperature=wire.temperature,
            top_k=_given(wire, "top_k", _DEFAULT.top_k),
            top_p=_given(wire, "top_p", _DEFAULT.top_p),
            min_p=wire.min_p,
            repetition_penalty=_given(wire, "repetition_penalty", _DEFAULT.repetition_penalty),
            logit_bias=wire.logit_bias or None,
            logprobs=logprobs,
            seed_value=_given(message, "seed"),
            vocab_size=limits.vocab_size,
        )


def _read_stops(message: generation_pb2.GenerateRequest, limits: Limits) -> Stops:
    if not (message.stop_sequences or message.stop_token_ids):
        return Stops(ignore_eos=message.ignore_eos)
    arguments.check_num_stops(len(message.stop_sequences) + len(message.stop_token_ids))  # before millions are read
    for i, stop in enumerate(message.stop_sequences):
        arguments.check_stop_len(len(stop.tokens.ids), f"stop_sequences[{i}]")
    sequences = [
        stop.text if stop.WhichOneof("stop") == "text" else tuple(stop.tokens.ids) for stop in message.stop_sequences
    ]
    singles = tuple(message.stop_token_ids)
    return arguments.stops(sequences, singles, message.ignore_eos, vocab_size=limits.vocab_size)


def _write_logprobs(message: generation_pb2.Delta | generation_pb2.Choice, logprobs: tuple[TokenLogprob, ...]) -> None:
    for logprob in logprobs:
        written = message.logprobs.add(logprob=logprob.logprob)
        for token, value in logprob.top:
            written.top.add(token_id=token, logprob=value)


def _write_usage(message: generation_pb2.Usage, usage: types.Usage) -> None:
    message.prompt_tokens, message.cached_tokens = usage.prompt_tokens, usage.cached_tokens
    message.completion_tokens = usage.completion_tokens


def _write_timings(message: generation_pb2.Timings, timings: types.Timings) -> None:
    message.queue_duration.FromNanoseconds(timings.queue_ns)
    message.ttft_duration.FromNanoseconds(timings.ttft_ns)
    message.total_duration.FromNanoseconds(timings.total_ns)
