"""The scheduler's core: a pure state machine between callers and one engine.

    submit, cancel, finish, create, … ──►┐
                                         ├─► plan(now) ──► engine ──► commit(plan, result, now) │ fail(plan, error)
    take_events() ◄── what callers see ──┘◄─────────────────────────────────────────────────────┘

In: validated values and the time.  Out: plans for the engine, events for the loop.  It refuses to know asyncio,
arrays, text and clocks.  The parts: `door` refuses, `prefixes` and `requests` own their states, `admission` decides
who starts, `quotas` what a tenant may take, `catalog` and `adoption` change names, `batch` fills plans as `pace` and
`gathering` say, `sequences` and `pages` account for memory.

Plans may be ahead of results: `plan` may be called while earlier plans run, and results are committed in the order
of the plans.  After a plan failed, those behind it that were not submitted are given to `amend`, which says what to run
instead; those that were submitted run as they are, and what they give for lost sequences is dropped at their commit.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Mapping

from tinyloop_service.engine.api import Limits, Plan, SequenceId, StepResult
from tinyloop_service.errors import (
    DeviceLost,
    EngineFault,
    TinyLoopError,
)
from tinyloop_service.scheduler.admission import Admission
from tinyloop_service.scheduler.adoption import Adoption
from tinyloop_service.scheduler.batch import compose
from tinyloop_service.scheduler.catalog import Catalog
from tinyloop_service.scheduler.door import match_request
from tinyloop_service.scheduler.draft import Draft, amended
from tinyloop_service.scheduler.events import (
    BuildEnded,
    Event,
    PrefixChanged,
    SnapshotExpires,
    SnapshotTaken,
    SnapshotUnwanted,
)
from tinyloop_service.scheduler.gathering import Gathering
from tinyloop_service.scheduler.pace import Pace
from tinyloop_service.scheduler.prefix import Prefix
from tinyloop_service.scheduler.prefixes import PrefixStore
from tinyloop_service.scheduler.quotas import Quotas
from tinyloop_service.scheduler.request import Counters, Request, RequestState, RowPhase
from tinyloop_service.scheduler.requests import Requests
from tinyloop_service.scheduler.sequences import Sequences
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.types import GenerationRequest, Load, PrefixState, Quota

_BURST_NS = 2_000_000  # who came so lately is likely to be followed


def _new_uid() -> str:
    return uuid.uuid4().hex


class Core:
    """All state of the service but streams."""

    def __init__(self, limits: Limits, settings: SchedulerSettings, *, new_uid: Callable[[], str] = _new_uid) -> None:
        self.limits = limits
        self._settings = settings
        self._events: list[Event] = []
        self._sequences = Sequences(limits)
        self._prefixes = PrefixStore(self._sequences, new_uid)
        self._quotas = Quotas()
        self._requests = Requests(self._sequences, self._prefixes, self._quotas, self._events)
        self._admission = Admission(self._sequences, self._prefixes, self._requests, self._quotas, settings)
        self.catalog = Catalog(limits, self._prefixes, self._admission, self._quotas)
        self.adoption = Adoption(limits, self._prefixes, self._admission)
        self.snapshots = self._prefixes.snapshots
        self._pace = Pace(limits, settings.prefill_share)
        self._gathering = Gathering(self._pace)
        self._next_plan = 1
        self._last_arrival_ns = -_BURST_NS
        self._lost_device = False

    # ---- generation

    def submit(self, spec: GenerationRequest, now_ns: int) -> int:
        """Queue a request; its id.  The name is resolved here, once."""
        self._admission.check_open()
        prefix = self._look_up_for_use(spec, now_ns)
        loops, window = match_request(spec, prefix, self.limits)
        request = Request(self._admission.take_order(), spec, prefix, loops, window, now_ns, self.limits)
        self._admission.check_request_possible(request)
        self._admission.check_queue(spec.tenant, now_ns)
        self._requests.submit(request)
        self._admission.add(request.order, request, now_ns)
        self._last_arrival_ns = now_ns
        return request.order

    def cancel(self, request: int) -> None:
        """The row leaves at the next plan; unknown and finished ones are ignored."""
        self._requests.cancel(request)
        self._admission.remove(request)

    def finish(self, request: int, choice: int) -> None:
        """A stop was found in the text of a choice."""
        self._requests.finish(request, choice)

    # ---- plan, commit, fail

    def plan(self, now_ns: int) -> Plan | None:
        """The next unit of work, or None when there is nothing to do before a result or a call."""
        if self._lost_device:
            return None
        self._prefixes.expire(now_ns)
        self.snapshots.expire(now_ns)
        draft = Draft(self._sequences)
        self._refuse_impossible()  # first: they may hold up others
        self._admission.admit(draft, now_ns)
        is_busy = self._admission.is_waited_for or now_ns - self._last_arrival_ns < _BURST_NS
        compose(
            draft, self._sequences, self._requests, self.limits, self._settings, self._pace, self._gathering, is_busy
        )
        for prefix in self.snapshots.take_wanted():
            assert prefix.sequence is not None
            draft.save(prefix.sequence)
        if draft.is_empty and not self._sequences.has_closing:
            return None
        plan = draft.build(self._next_plan)
        self._next_plan += 1
        return plan

    def commit(self, plan: Plan, result: StepResult, now_ns: int, took_ns: int) -> None:
        """Apply what the engine answered, and how long it took.  Rows that ended in the meantime are dropped here."""
        if result.took_every_step(plan):
            self._pace.learn(plan, took_ns)
            self._gathering.learn(plan, took_ns)
        for prefill in plan.prefill:
            self._progress(prefill.seq, len(prefill.tokens), now_ns)
        for restore in plan.restore:
            self._progress(restore.seq, None, now_ns)
        for saved in result.saved:
            if (prefix := self.snapshots.taken(saved)) is not None:
                expiry = self._prefixes.state_expiry(prefix)
                self.snapshots.set_expiry(prefix.state_digest, expiry)
                self._events.append(SnapshotTaken(prefix.state_digest, saved.state, expiry))
        for output in result.rows:
            self._requests.sampled(output, now_ns)

    def _progress(self, seq: SequenceId, num_tokens: int | None, now_ns: int) -> None:
        """A build has come so much further; None: all the way, restored."""
        prefix = self._prefixes.building.get(seq)
        if prefix is None:
            return
        extent = prefix.recipe.extent
        self._prefixes.progress(prefix, extent.end - extent.start if num_tokens is None else num_tokens, now_ns)
        if prefix.state is PrefixState.READY:
            snapshot = prefix.state_digest if num_tokens is None else ""
            self._events.append(BuildEnded(*_identity(prefix), prefix.build_ns, snapshot=snapshot))
            if num_tokens is not None:
                self.snapshots.built(prefix)

    def fail(self, plan: Plan, error: EngineFault) -> None:
        """The plan met a fault: what it named is lost, and what hangs from that.  The rest lives."""
        self._sequences.repeat(plan)
        restoring = [self._prefixes.building[item.seq] for item in plan.restore if item.seq in self._prefixes.building]
        snapshots = {prefix.uid: prefix.state_digest for prefix in restoring}
        self.snapshots.failed(plan, [*snapshots.values()])
        lost = self._sequences.hanging_from(plan.sequences())
        for seq in lost:
            request = self._requests.owner_of(seq)
            if request is not None:
                self._requests.fail(request, copy.copy(error))
        gone = [prefix for prefix in self._prefixes if prefix.sequence is not None and prefix.sequence.id in lost]
        for prefix in sorted(gone, key=lambda p: -len(p.chain())):  # children before their parents
            if prefix.state is PrefixState.BUILDING:
                self._fail_build(prefix, error, snapshots.get(prefix.uid, ""))
            elif prefix.state is PrefixState.READY:
                self._prefixes.evict(prefix)

    def amend(self, plan: Plan) -> Plan:
        """What to run in place of a plan that was submitted behind one that failed: the same without the lost."""
        return amended(plan, self._sequences)

    def lose(self, error: DeviceLost) -> None:
        """No engine any more: everything ends, and `plan` has nothing to say."""
        self._lost_device = True
        self.abort(error)

    def abort(self, error: TinyLoopError) -> None:
        """Everything ends with this error, and nothing new is taken."""
        self.refuse(error)
        for request in self._requests.live():
            self._requests.fail(request, copy.copy(error))
        for prefix in sorted(self._prefixes, key=lambda p: -len(p.chain())):
            if prefix.state is PrefixState.BUILDING:
                self._fail_build(prefix, error)

    def set_quotas(self, quotas: Mapping[str, Quota], now_ns: int) -> None:
        """By tenant, in place of those before.  What was taken stays."""
        self._quotas.set(quotas, now_ns)

    def refuse(self, error: TinyLoopError) -> None:
        """From now on new requests and builds get this error; what was taken goes on."""
        self._admission.refusal = error

    def save_again(self, digest: str) -> bool:
        """What was taken of this digest could not be kept: save it anew if a prefix of it is in memory, else when one
        is built.  Whether one is in memory."""
        self.snapshots.lost(digest)
        same = (p for p in self._prefixes if p.state is PrefixState.READY and p.state_digest == digest)
        return any(self.snapshots.built(prefix) for prefix in same)

    # ---- what is going on

    def take_events(self) -> list[Event]:
        events = self._events[:]
        self._events.clear()
        if self._prefixes.changed or self.snapshots.has_news:  # seldom, and asked twice for each plan
            events += [PrefixChanged(uid) for uid in self._prefixes.take_changed()]
            events += [SnapshotExpires(*item) for item in self.snapshots.take_retimed()]
            events += map(SnapshotUnwanted, self.snapshots.take_unwanted())
        return events

    @property
    def num_rows(self) -> int:
        """Rows that are admitted and not done."""
        return self._requests.num_rows

    @property
    def is_idle(self) -> bool:
        """No request lives, no build is wanted, and what is worth saving is handed over."""
        is_building = any(prefix.state is PrefixState.BUILDING for prefix in self._prefixes)
        return not (len(self._requests) or is_building or self.snapshots.is_behind)

    @property
    def next_wake_ns(self) -> int | None:
        """When there may be something to do without a call: a prefix or a state expires, or a quota lets a request
        start."""
        times = (self._prefixes.next_expiry_ns, self.snapshots.next_expiry_ns, self._admission.next_start_ns)
        return min((time_ns for time_ns in times if time_ns is not None), default=None)

    @property
    def counters(self) -> Counters:
        return self._requests.counters()

    def load(self, tenant: str | None = None) -> Load:
        """What goes on now; of one tenant, its own part, as if it had the server to itself."""
        pool, counters = self._sequences.pool, self._requests.counters(tenant)
        prefixes = [prefix for prefix in self._prefixes if tenant in (None, prefix.tenant)]
        requests = [request for request in self._requests.live() if tenant in (None, request.spec.tenant)]
        states = [prefix.state for prefix in prefixes]
        of_prefixes = [prefix.sequence.id for prefix in prefixes if prefix.sequence is not None]
        of_requests = [sequence.id for request in requests for sequence in request.sequences()]
        stored, taken = sum(map(pool.stored, of_prefixes)), sum(map(pool.stored, of_requests))
        active = sum(map(pool.active, [*of_prefixes, *of_requests]))
        return Load(
            rows_running=sum(row.phase is not RowPhase.DONE for request in requests for row in request.rows),
            requests_waiting=sum(request.state is RequestState.QUEUED for request in requests),
            pages_total=pool.num_pages,
            pages_free=pool.num_pages - stored - taken - active,
            pages_prefixes=stored,
            pages_requests=taken,
            pages_active=active,
            page_bytes=self.limits.page_bytes,
            prefixes_ready=states.count(PrefixState.READY),
            prefixes_building=states.count(PrefixState.BUILDING),
            prefixes_evicted=states.count(PrefixState.EVICTED),
            accepting=self._admission.refusal is None,
            prefixes_failed=states.count(PrefixState.FAILED),
            requests_running=sum(request.state is RequestState.RUNNING for request in requests),
            prefix_evictions=self._prefixes.num_evictions(tenant),
            prompt_tokens=counters.prompt_hits + counters.prompt_misses,
            cached_tokens=counters.prompt_hits,
            generated_tokens=counters.generated,
        )

    def check(self) -> None:
        """Everything that must hold between any two calls; for tests, debug and after a drain."""
        self._sequences.check()
        self._prefixes.check()
        self._requests.check()
        self._admission.check()
        self._check_users()
        load = self.load()
        assert load.pages_free == self._sequences.pool.free, "pages that neither a prefix nor a request holds"
        if self.is_idle:
            assert load.pages_requests == 0, f"{load.pages_requests} pages held at idle by no prefix"

    # ---- helpers

    def _check_users(self) -> None:
        users: dict[str, int] = {}
        readers = [r.prefix for r in self._requests.live() if r.state is RequestState.RUNNING and r.prefix is not None]
        readers += [p.recipe.parent for p in self._prefixes.building.values() if p.recipe.parent is not None]
        for reader in readers:
            for member in reader.chain():
                users[member.uid] = users.get(member.uid, 0) + 1
        for prefix in self._prefixes:
            assert prefix.users == users.get(prefix.uid, 0), f"prefix {prefix.uid}: users miscounted"
            assert not prefix.users or prefix.state is PrefixState.READY, f"prefix {prefix.uid} is read without pages"

    def _look_up_for_use(self, spec: GenerationRequest, now_ns: int) -> Prefix | None:
        if spec.prefix is None and spec.prefix_uid is None:
            return None
        self._prefixes.expire(now_ns)
        if spec.prefix is not None:
            prefix = self._prefixes.look_up(spec.tenant, spec.prefix)
        else:
            prefix = self._prefixes.look_up_uid(spec.tenant, spec.prefix_uid or "")
        prefix.check_built()
        return prefix

    def _refuse_impossible(self) -> None:
        for job, error in self._admission.take_impossible():
            if isinstance(job, Request):
                self._requests.fail(job, error)
            else:
                self._fail_build(job, error)

    def _fail_build(self, prefix: Prefix, error: TinyLoopError, snapshot: str = "") -> None:
        """All who wait for it get the error: creates, queued requests, and builds below it with theirs."""
        children, queued = list(prefix.children.values()), list(prefix.queued)
        if prefix.state is PrefixState.BUILDING:
            self._prefixes.fail_build(prefix, copy.copy(error))
            self._events.append(BuildEnded(*_identity(prefix), 0, error, snapshot))
        for child in children:
            if child.is_wanted():
                self._fail_build(child, error)
        for order in queued:
            request = self._requests.peek(order)
            assert request is not None
            self._requests.fail(request, copy.copy(error))
            self._admission.remove(order)


def _identity(prefix: Prefix) -> tuple[str, str | None, int]:
    """Tenant, name and number of its own tokens."""
    return prefix.tenant, prefix.name, prefix.recipe.extent.end - prefix.recipe.extent.start
