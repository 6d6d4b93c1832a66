"""Requests: every change of a request's state is in this file.

In: admitted work, sampled tokens, ends of every kind.  Out: events for delivery.  It refuses to know how plans are
composed, what a mailbox is, and what text is.

A request has n rows, one per choice, each one sequence of the engine.  With n > 1 and tokens of its own it has a
*trunk* too: a nameless sequence that is fed those tokens once, and from whose kept logits every row starts.

    request   event               to         rows
    –         submit              QUEUED     none yet
    QUEUED    admit, no trunk     RUNNING    → FEED (tokens of its own) or → FIRST (empty suffix)
    QUEUED    admit, trunk        RUNNING    → HELD
    RUNNING   last chunk planned  RUNNING    FEED → DECODE; the trunk's: HELD → FIRST
    RUNNING   first planned       RUNNING    FIRST → DECODE
    RUNNING   steps planned       RUNNING    DECODE → DECODE; → SPENT when max_tokens are planned
    RUNNING   EOS, max_tokens     RUNNING    FEED.. → DONE, seen when a result is committed
    RUNNING   text stop           RUNNING    any → DONE, found in delivery, told by `finish`
    RUNNING   last row DONE       DONE       all DONE
    any       cancel, fail        DONE       all DONE

Plans run ahead of results, so FEED … SPENT follow plans, DONE follows results.  A result for a row that is DONE is
dropped.  A row that is DONE has given its pages back; the next plan closes its sequence.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace

from tinyloop_service.engine.api import RowOutput, SequenceId
from tinyloop_service.errors import TinyLoopError
from tinyloop_service.scheduler.events import Admitted, Event, Failed, Sampled
from tinyloop_service.scheduler.prefix import use
from tinyloop_service.scheduler.prefixes import PrefixStore
from tinyloop_service.scheduler.quotas import Quotas
from tinyloop_service.scheduler.request import Counters, Request, RequestState, Row, RowPhase
from tinyloop_service.scheduler.sequences import Drawing, Extent, Feed, Sequence, Sequences
from tinyloop_service.types import FinishReason, PrefixState


class Requests:
    """All requests that are not DONE, and their rows by sequence."""

    def __init__(self, sequences: Sequences, prefixes: PrefixStore, quotas: Quotas, events: list[Event]) -> None:
        self._sequences = sequences
        self._prefixes = prefixes
        self._quotas = quotas
        self._events = events
        self._limits = sequences.limits
        self._eos = frozenset(self._limits.eos_token_ids)
        self._live: dict[int, Request] = {}
        self._rows: dict[SequenceId, Row] = {}
        self._trunks: dict[SequenceId, Request] = {}
        self.starting: dict[SequenceId, Row] = {}  # rows in FIRST
        self.decoding: dict[SequenceId, Row] = {}  # rows in DECODE
        self._counters: defaultdict[str, Counters] = defaultdict(Counters)  # by tenant

    @property
    def num_rows(self) -> int:
        """Rows that are admitted and not DONE."""
        return len(self._rows)

    def __len__(self) -> int:
        return len(self._live)

    def peek(self, order: int) -> Request | None:
        return self._live.get(order)

    def live(self) -> list[Request]:
        return list(self._live.values())

    def counters(self, tenant: str | None = None) -> Counters:
        """A copy: of one tenant, or the sums over all."""
        chosen = list(self._counters.values()) if tenant is None else [self._counters.get(tenant, Counters())]
        hits, misses = sum(c.prompt_hits for c in chosen), sum(c.prompt_misses for c in chosen)
        return Counters(hits, misses, sum(c.generated for c in chosen))

    # ---- arrival and admission

    def submit(self, request: Request) -> None:
        self._live[request.order] = request
        if request.prefix is not None:
            request.prefix.requests += 1
            request.prefix.queued[request.order] = None

    def admit(self, request: Request, now_ns: int) -> None:
        """Everything it can need is free: reserve it."""
        assert request.state is RequestState.QUEUED
        request.state = RequestState.RUNNING
        parent = self._join_prefix(request, now_ns)
        if request.trunk_extent is not None:
            request.trunk = parent = self._create(parent, request.trunk_extent)
            self._trunks[parent.id] = request
            self._sequences.feed(Feed(parent, request.spec.tokens, request.order))
        for index in range(request.spec.n):
            self._add_row(request, index, self._create(parent, request.row_extent))
        counters = self._counters[request.spec.tenant]
        counters.prompt_hits += request.cached_tokens
        counters.prompt_misses += request.prompt_len - request.cached_tokens
        queue_ns = now_ns - request.arrival_ns
        built = request.prefix.built_since(request.arrival_ns) if request.prefix is not None else ()
        self._events.append(Admitted(request.order, request.cached_tokens, request.prompt_len, queue_ns, *built))

    def drawing(self, row: Row) -> Drawing:
        """Of this choice."""
        request, sampling = row.request, row.request.spec.sampling
        sampling = replace(sampling, choice=row.index) if row.index else sampling
        return Drawing(sampling, request.prompt(), request.stop_tokens(self._limits.eos_token_ids))

    # ---- what was planned

    def fed(self, seq: SequenceId) -> None:
        """The last prompt token of a sequence is planned; a prefix's is none of ours."""
        if (row := self._rows.get(seq)) is not None:
            self._planned(row, 1)
        if (request := self._trunks.get(seq)) is not None:
            for row in request.rows:
                if row.phase is RowPhase.HELD:
                    row.phase = RowPhase.FIRST
                    self.starting[row.sequence.id] = row

    def started(self, row: Row) -> None:
        """Its first token is planned, from kept logits."""
        del self.starting[row.sequence.id]
        self._planned(row, 1)

    def stepped(self, rows: Iterable[Row], num_steps: int) -> None:
        for row in rows:
            self._planned(row, num_steps if num_steps < row.num_left else row.num_left)

    def _planned(self, row: Row, num_tokens: int) -> None:
        row.num_left -= num_tokens
        assert row.num_left >= 0
        if row.num_left == 0:
            row.phase = RowPhase.SPENT
            self.decoding.pop(row.sequence.id, None)
        elif row.phase is not RowPhase.DECODE:
            row.phase = RowPhase.DECODE
            self.decoding[row.sequence.id] = row

    # ---- what came back

    def sampled(self, output: RowOutput, now_ns: int) -> None:
        """Tokens of one row; those of a row that is DONE are dropped, and those from EOS on."""
        seq, tokens, logprobs = output
        row = self._rows.get(seq)
        if row is None:
            return
        request, reason = row.request, None
        if self._eos and not request.spec.stops.ignore_eos and not self._eos.isdisjoint(tokens):
            tokens = tokens[: next(i for i, token in enumerate(tokens) if token in self._eos)]
            logprobs = logprobs[: len(tokens)]
            reason = FinishReason.EOS
        row.num_emitted += len(tokens)
        self._counters[request.spec.tenant].generated += len(tokens)
        if reason is None and row.num_emitted >= request.spec.max_tokens:
            reason = FinishReason.LENGTH
        self._events.append(Sampled(request.order, row.index, tokens, logprobs, reason, now_ns))
        if reason is not None:
            self._end_row(row)

    # ---- ends

    def finish(self, order: int, choice: int) -> None:
        """Delivery found a stop in the text of a choice, and has told the caller."""
        request = self._live.get(order)
        if request is not None and request.state is RequestState.RUNNING:
            row = request.rows[choice]
            if row.phase is not RowPhase.DONE:
                self._end_row(row)

    def cancel(self, order: int) -> None:
        """Nobody listens any more.  Silent; a request that is DONE already stays so."""
        request = self._live.get(order)
        if request is not None:
            self._end(request)

    def fail(self, request: Request, error: TinyLoopError) -> None:
        if request.state is not RequestState.DONE:
            self._events.append(Failed(request.order, error))
            self._end(request)

    def owner_of(self, seq: SequenceId) -> Request | None:
        row = self._rows.get(seq)
        return row.request if row is not None else self._trunks.get(seq)

    def _join_prefix(self, request: Request, now_ns: int) -> Sequence | None:
        prefix = request.prefix
        if prefix is None:
            return None
        assert prefix.state is PrefixState.READY
        del prefix.queued[request.order]
        use(prefix, +1)
        prefix.use_count += 1
        for member in prefix.chain():
            member.last_use_time_ns = now_ns
        return prefix.sequence

    def _create(self, parent: Sequence | None, extent: Extent) -> Sequence:
        sequence = self._sequences.create(parent, extent)
        active = extent.active_pages(self._limits)
        if active:  # a request's own form is active from open to close
            self._sequences.pool.hold_active(sequence.id, active)
        return sequence

    def _add_row(self, request: Request, index: int, sequence: Sequence) -> None:
        row = Row(request, index, sequence, RowPhase.HELD, request.spec.max_tokens)
        request.rows.append(row)
        self._rows[sequence.id] = row
        if request.has_trunk:
            return
        if request.spec.tokens:
            row.phase = RowPhase.FEED
            self._sequences.feed(Feed(sequence, request.spec.tokens, request.order, self.drawing(row)))
        else:
            row.phase = RowPhase.FIRST
            self.starting[sequence.id] = row

    def _end_row(self, row: Row) -> None:
        self._close_row(row)
        if all(other.phase is RowPhase.DONE for other in row.request.rows):
            self._end(row.request)

    def _close_row(self, row: Row) -> None:
        if row.phase is RowPhase.DONE:
            return
        row.phase = RowPhase.DONE
        seq = row.sequence.id
        del self._rows[seq]
        self.starting.pop(seq, None)
        self.decoding.pop(seq, None)
        self._sequences.close(row.sequence)

    def _end(self, request: Request) -> None:
        was_running = request.state is RequestState.RUNNING
        request.state = RequestState.DONE
        del self._live[request.order]
        for row in request.rows:
            self._close_row(row)
        if request.trunk is not None:
            del self._trunks[request.trunk.id]
            self._sequences.close(request.trunk)
        if request.is_let_in:
            self._quotas.leave(request.spec.tenant, request.tokens_unused)
        self._leave_prefix(request, was_running)

    def _leave_prefix(self, request: Request, was_running: bool) -> None:
        prefix = request.prefix
        if prefix is None:
            return
        prefix.requests -= 1
        if was_running:
            use(prefix, -1)
        else:
            del prefix.queued[request.order]
        self._prefixes.settle(prefix)

    def check(self) -> None:
        """Phases, tables and sequences agree."""
        self._quotas.check(Counter(request.spec.tenant for request in self._live.values() if request.is_let_in))
        for request in self._live.values():
            assert request.state is not RequestState.DONE
            assert bool(request.rows) == (request.state is RequestState.RUNNING)
            for row in request.rows:
                self._check_row(row)
        assert all(row.request.order in self._live for row in self._rows.values()), "a row without its request"

    def _check_row(self, row: Row) -> None:
        seq, phase = row.sequence.id, row.phase
        name = f"request {row.request.order}, choice {row.index}, {phase.value}"
        assert (seq in self._rows) == (phase is not RowPhase.DONE) == (seq in self._sequences), name
        assert (seq in self.starting) == (phase is RowPhase.FIRST), name
        assert (seq in self.decoding) == (phase is RowPhase.DECODE), name
        assert (seq in self._sequences.feeds) == (phase is RowPhase.FEED), name
        assert row.num_emitted + row.num_left <= row.request.spec.max_tokens, name
