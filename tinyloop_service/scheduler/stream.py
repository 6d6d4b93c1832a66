"""One request's stream: the mailbox between the scheduler and whoever reads.

In: the core's events of one request.  Out: a tuple of everything that is pending, each time the reader asks: Started
first, then one Delta per choice, then Completed per choice.  It refuses to know plans and pages.

The mailbox is bounded by max_tokens, since what is pending of a choice is one growing Delta: a slow reader gets fewer,
larger messages and never slows the batch.  Stops in text are found here, when tokens arrive and not when they are
read, and are reported back to the core.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Protocol, Self

from tinyloop_service.errors import TinyLoopError
from tinyloop_service.observer import Observer, RequestRecord
from tinyloop_service.scheduler.events import Admitted, Sampled
from tinyloop_service.text import OutputFilter, Piece, Tokenizer
from tinyloop_service.types import (
    Completed,
    Delta,
    FinishReason,
    GenerationRequest,
    Output,
    Started,
    Timings,
    TokenIds,
    TokenLogprob,
    Usage,
)


class Canceller(Protocol):
    """What a stream asks of the scheduler."""

    @property
    def observer(self) -> Observer: ...

    def now_ns(self) -> int: ...

    def cancel(self, request: int) -> None: ...


class _Choice:
    """What is pending of one choice.  Where no stop can end it, ids become text when they are read, and not before."""

    __slots__ = (
        "completed", "filter", "first_ns", "index", "is_over", "last_ns", "pieces", "unfed", "unfed_logprobs",
    )  # fmt: skip

    def __init__(self, index: int, output_filter: OutputFilter) -> None:
        self.index = index
        self.filter = output_filter
        self.unfed: list[int] = []  # not given to the filter yet
        self.unfed_logprobs: list[TokenLogprob] = []
        self.pieces: list[Piece] = []  # to be shown
        self.first_ns = 0  # when its first token came, EOS included; 0 before
        self.last_ns = 0  # when its last token came, EOS not included; 0 before
        self.is_over = False
        self.completed: Completed | None = None

    def feed(self, tokens: TokenIds, logprobs: tuple[TokenLogprob, ...]) -> bool:
        """True if there is more to show."""
        if self.filter.can_stop:
            return self._add(self.filter.feed(tokens, logprobs))
        self.unfed += tokens
        self.unfed_logprobs += logprobs
        return bool(tokens)

    def finish(self) -> None:
        self._feed_rest()
        self._add(self.filter.finish())

    def take_delta(self) -> Delta | None:
        self._feed_rest()
        pieces, self.pieces = self.pieces, []
        match pieces:
            case []:
                return None
            case [piece]:
                return Delta(self.index, piece.token_ids, piece.text, piece.logprobs, piece.first_index)
        ids = tuple(token for piece in pieces for token in piece.token_ids)
        logprobs = tuple(logprob for piece in pieces for logprob in piece.logprobs)
        return Delta(self.index, ids, "".join(piece.text for piece in pieces), logprobs, pieces[0].first_index)

    def _feed_rest(self) -> None:
        if self.unfed:
            self._add(self.filter.feed(self.unfed, self.unfed_logprobs))
            self.unfed, self.unfed_logprobs = [], []

    def _add(self, piece: Piece) -> bool:
        if not piece:
            return False
        self.pieces.append(piece)
        return True


class Stream:
    """Async context manager and iterator.  Leaving the context cancels what is unfinished.

    Iteration yields non-empty tuples of `Started | Delta | Completed` and ends after the last choice completed; it
    raises the request's error, after what was pending.
    """

    def __init__(
        self, spec: GenerationRequest, arrival_ns: int, scheduler: Canceller, tokenizer: Tokenizer | None
    ) -> None:
        """Raises InvalidArgument for string stops without a tokenizer."""
        self.request = 0  # the core's id, once it has taken the request
        self.record = RequestRecord(spec.tenant, spec.prefix, spec.n, arrival_ns)
        self._spec = spec
        self._scheduler = scheduler
        self._observer = scheduler.observer
        self._choices = [
            _Choice(index, OutputFilter(spec.stops, tokenizer, want_text=spec.want_text)) for index in range(spec.n)
        ]
        self._num_open = spec.n
        self._started: Started | None = None
        self._error: TinyLoopError | None = None
        self._pending = False  # something is there to be read
        self._due_ns = 0  # tokens that come sooner are held
        self.is_held = False  # something is there, but it waits for more
        self.is_over = False  # nothing more will arrive
        self._news = asyncio.Event()

    # ---- the scheduler's side

    def deliver_start(self, event: Admitted) -> None:
        record = self.record
        record.prompt_tokens, record.cached_tokens = event.prompt_tokens, event.cached_tokens
        record.admitted_ns = record.arrival_ns + event.queue_ns
        record.build_start_ns, record.build_end_ns = event.build_start_ns, event.build_end_ns
        self._observer.admitted(record)
        seed = self._spec.sampling.seed
        self._started = Started(event.cached_tokens, event.prompt_tokens, event.queue_ns, seed)
        self.is_held = True

    def deliver_tokens(self, event: Sampled, interval_ns: int = 0) -> bool:
        """True if a stop ended the choice here, which the core does not know yet.

        Tokens that come less than `interval_ns` after others were shown are held, but for the first and the last.
        """
        _, index, tokens, logprobs, ended, time_ns = event
        choice = self._choices[index]
        if choice.is_over:
            return False
        choice.first_ns = choice.first_ns or time_ns
        if tokens:
            self._observe(choice, len(tokens), time_ns)
        has_more = choice.feed(tokens, logprobs)
        reason = FinishReason.STOP if choice.filter.stopped else ended
        if reason is not None:
            self._complete(choice, reason, time_ns)
        if reason is not None or (has_more and time_ns >= self._due_ns):
            self._due_ns = time_ns + interval_ns
            self._wake()
        elif has_more:
            self.is_held = True
        return reason is not None and ended is None

    def show(self, interval_ns: int) -> None:
        """What is held waits no longer, if anything was shown long enough ago."""
        now_ns = self._scheduler.now_ns()
        if self.is_held and now_ns >= self._due_ns:
            if self.record.first_token_ns:  # the first token is due at once, whatever was shown before there was one
                self._due_ns = now_ns + interval_ns
            self._wake()

    def deliver_error(self, error: TinyLoopError) -> None:
        if self.is_held:
            self._wake()
        self._error, self.is_over = error, True
        self._cut_short("error")
        self._news.set()

    # ---- the reader's side

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[Output, ...]:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self.is_over:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._take()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Stop reading; what is unfinished is cancelled and its pages return at the next plan."""
        if not self.is_over:
            self.is_over = True
            self._cut_short("cancelled")
            self._scheduler.cancel(self.request)
            self._news.set()

    # ---- helpers

    def _observe(self, choice: _Choice, num_tokens: int, time_ns: int) -> None:
        """Tokens of a choice have come: none of its first ones has a gap before it, all later ones have."""
        record = self.record
        record.generated_tokens += num_tokens
        if not record.first_token_ns:
            record.first_token_ns = time_ns
            self._observer.first_token(record)
        if choice.last_ns:
            self._observer.generated(record.tenant, num_tokens, num_tokens, (time_ns - choice.last_ns) / num_tokens)
        else:
            self._observer.generated(record.tenant, num_tokens, num_tokens - 1, 0.0)  # they came at the same time
        choice.last_ns = time_ns

    def _cut_short(self, reason: str) -> None:
        if not self.record.end_ns:
            self.record.cut_short(reason, self._scheduler.now_ns())
            self._observer.request_ended(self.record)

    def _complete(self, choice: _Choice, reason: FinishReason, now_ns: int) -> None:
        choice.finish()
        choice.is_over = True
        record = self.record
        usage = Usage(record.prompt_tokens, record.cached_tokens, choice.filter.num_ids)
        timings = Timings(record.queue_ns, choice.first_ns - record.arrival_ns, now_ns - record.arrival_ns)
        choice.completed = Completed(choice.index, reason, usage, timings)
        record.finish_reasons.append(reason.value)
        self._num_open -= 1
        if self._num_open == 0:
            self.is_over = True
            record.end_ns = now_ns
            self._observer.request_ended(record)

    def _take(self) -> tuple[Output, ...]:
        self._pending = self.is_held = False
        outputs: list[Output] = []
        if self._started is not None:
            outputs.append(self._started)
            self._started = None
        outputs += [delta for choice in self._choices if (delta := choice.take_delta()) is not None]
        for choice in self._choices:
            if choice.completed is not None:
                outputs.append(choice.completed)
                choice.completed = None
        return tuple(outputs)

    def _wake(self) -> None:
        """Something is pending."""
        self._pending, self.is_held = True, False
        self._news.set()
