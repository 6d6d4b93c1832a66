"""What generation returns to a Python caller, in process and over gRPC alike.

In: the scheduler's outputs (`types.Output`), as a stream gives them or as the client reads them off the wire.
Out: `Delta` for who streams, `Completion` for who waits.  Knows nothing of gRPC, engines or text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tinyloop_service import types
from tinyloop_service.types import Completed, FinishReason, Output, Started, Timings, TokenIds, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of one choice's output.  The last piece of a choice, and only it, has a finish_reason."""

    token_ids: TokenIds
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()  # parallel to token_ids, or empty
    choice: int = 0
    first_index: int = 0  # index of token_ids[0] in the choice's output
    finish_reason: FinishReason | None = None
    usage: Usage | None = None  # with finish_reason: of this choice
    timings: Timings | None = None  # with finish_reason
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole continuation: generated tokens only, without EOS and without the stop that ended it."""

    token_ids: TokenIds
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...]
    timings: Timings


@dataclass(frozen=True, slots=True)
class Completion:
    """All choices of one request; the short properties are those of choice 0."""

    choices: tuple[Choice, ...]
    usage: Usage  # prompt counted once, completion_tokens over all choices
    seed: int

    @property
    def token_ids(self) -> TokenIds:
        return self.choices[0].token_ids

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return self.choices[0].logprobs

    @property
    def timings(self) -> Timings:
        return self.choices[0].timings


@dataclass(slots=True)
class _Pieces:
    """What of one choice has arrived."""

    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    completed: Completed | None = None


class DeltaReader:
    """Turns outputs into Deltas, one at a time; remembers the seed that Started named."""

    def __init__(self) -> None:
        self._seed = 0

    def read(self, outputs: Iterable[Output]) -> Iterator[Delta]:
        for output in outputs:
            match output:
                case Started():
                    self._seed = output.seed
                case types.Delta():
                    yield Delta(
                        output.token_ids,
                        output.text,
                        output.logprobs,
                        output.choice,
                        output.first_index,
                        seed=self._seed,
                    )
                case Completed():
                    yield Delta(
                        (),
                        choice=output.choice,
                        first_index=output.usage.completion_tokens,
                        finish_reason=output.finish_reason,
                        usage=output.usage,
                        timings=output.timings,
                        seed=self._seed,
                    )


class CompletionBuilder:
    """Collects outputs until every choice is complete."""

    def __init__(self, num_choices: int = 1) -> None:
        self._pieces = [_Pieces() for _ in range(num_choices)]
        self._seed = 0

    def add(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            match output:
                case Started():
                    self._seed = output.seed
                case types.Delta():
                    pieces = self._pieces[output.choice]
                    pieces.token_ids.extend(output.token_ids)
                    pieces.text.append(output.text)
                    pieces.logprobs.extend(output.logprobs)
                case Completed():
                    self._pieces[output.choice].completed = output

    def completion(self) -> Completion:
        """The whole result; every choice must have completed."""
        choices: list[Choice] = []
        usages: list[Usage] = []
        for pieces in self._pieces:
            assert pieces.completed is not None, "the stream ended before every choice completed"
            done = pieces.completed
            usages.append(done.usage)
            choices.append(
                Choice(
                    tuple(pieces.token_ids),
                    "".join(pieces.text),
                    done.finish_reason,
                    tuple(pieces.logprobs),
                    done.timings,
                )
            )
        completion_tokens = sum(usage.completion_tokens for usage in usages)
        usage = Usage(usages[0].prompt_tokens, usages[0].cached_tokens, completion_tokens)
        return Completion(tuple(choices), usage, self._seed)
