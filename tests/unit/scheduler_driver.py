"""Drives the scheduler's core and a strict fake engine by hand, one plan at a time, without threads or clocks."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable

from tinyloop_service.engine.api import Limits, Pending, Plan
from tinyloop_service.engine.fake import FAKE_LIMITS, FakeEngine, FaultAt
from tinyloop_service.engine.fake_tokens import expected_tokens
from tinyloop_service.errors import EngineFault, TinyLoopError
from tinyloop_service.scheduler.core import Core
from tinyloop_service.scheduler.events import (
    Admitted,
    BuildEnded,
    Failed,
    Sampled,
    SnapshotExpires,
    SnapshotTaken,
    SnapshotUnwanted,
)
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.types import FinishReason, GenerationRequest, PrefixDefinition, PrefixInfo, TokenIds

SMALL = dataclasses.replace(
    FAKE_LIMITS,
    vocab_size=97,
    default_loops=1,
    max_loops=3,
    max_seq_len=400,
    eos_token_ids=(),
    num_pages=200,
    page_bytes=1000,
    max_rows=8,
    max_chunk=64,
    max_steps=4,
    least_chunk=16,
)


def tokens(length: int, seed: int = 0) -> TokenIds:
    return tuple((seed * 31 + i * 7 + i * i) % 97 for i in range(length))


@dataclasses.dataclass
class Watched:
    """A request under test: what it should give, and what it has given."""

    spec: GenerationRequest
    expected: list[TokenIds]  # by choice, before EOS is looked for
    got: list[list[int]]
    reasons: list[FinishReason | None]
    admitted: Admitted | None = None
    error: TinyLoopError | None = None
    steps_waited: int = 0

    @property
    def is_over(self) -> bool:
        return self.error is not None or all(self.reasons)


class Driver:
    """`fault` is what the next plan fails with; `cost_ns` says how long one takes, which `now_ns` knows nothing of."""

    def __init__(
        self, limits: Limits = SMALL, settings: SchedulerSettings | None = None, *, fault_at: FaultAt = FaultAt.START
    ) -> None:
        self.limits = limits
        self.core = Core(limits, settings or SchedulerSettings(), new_uid=self._new_uid)
        self.fault: EngineFault | None = None
        self.cost_ns: Callable[[Plan], int] = _step_cost_ns
        self.engine = FakeEngine(limits, strict=True, fault=self._take_fault, fault_at=fault_at)
        self.in_flight: deque[Plan] = deque()
        self.requests: dict[int, Watched] = {}
        self.changed: list[str] = []
        self.snapshots: dict[str, object] = {}  # once `core.snapshots.keep` was called: what is kept, by digest
        self.expiries: dict[str, int | None] = {}  # of those
        self.builds: list[BuildEnded] = []
        self.plans: list[Plan] = []
        self.now_ns = 10**9
        self._num_uids = 0

    # ---- calls

    def create(
        self,
        name: str | None,
        prompt: TokenIds,
        *,
        tenant: str = "",
        loops: int | None = None,
        window: int | None = None,
        parent: str | None = None,
        expire_time_ns: int | None = None,
        pinned: bool = False,
        wait: bool = True,
        detached: bool = False,
    ) -> str:
        definition = PrefixDefinition(prompt, loops, window, parent)
        return self.core.catalog.create(
            definition,
            tenant=tenant,
            name=name,
            expire_time_ns=expire_time_ns,
            pinned=pinned,
            wait=wait,
            detached=detached,
            now_ns=self.now_ns,
        )

    def submit(self, spec: GenerationRequest) -> int:
        segments, loops = self._segments(spec)
        order = self.core.submit(spec, self.now_ns)
        window = spec.cache_window or (segments[-1][1] if segments else 0)
        expected = [
            expected_tokens(
                [*segments, (spec.tokens, window)],
                spec.max_tokens,
                dataclasses.replace(spec.sampling, choice=choice),
                loops or spec.loops or self.limits.default_loops,
                self.limits,
            )
            for choice in range(spec.n)
        ]
        self.requests[order] = Watched(spec, expected, [[] for _ in range(spec.n)], [None] * spec.n)
        return order

    def cancel(self, order: int) -> None:
        self.core.cancel(order)
        del self.requests[order]

    def info(self, uid: str) -> PrefixInfo:
        info = self.core.catalog.peek(uid)
        assert info is not None
        return info

    def state(self, uid: str) -> str | None:
        info = self.core.catalog.peek(uid)
        return info.state.value if info is not None else None

    # ---- plans

    def plan(self) -> Plan | None:
        plan = self.core.plan(self.now_ns)
        if plan is not None:
            self.in_flight.append(plan)
            self.plans.append(plan)
        self.take_events()
        return plan

    def settle(self) -> None:
        """Run the oldest plan in flight and tell the core how it went.

        Behind a plan that could not be submitted nothing was; behind one without a result everything was.
        """
        plan = self.in_flight.popleft()
        try:
            pending = self.engine.submit(plan)
        except EngineFault as error:
            self.core.fail(plan, error)
            self.in_flight = deque(self.core.amend(behind) for behind in self.in_flight)
        else:
            self._commit(plan, pending)
        self.take_events()

    def _commit(self, plan: Plan, pending: Pending) -> None:
        try:
            result = pending.result()
        except EngineFault as error:
            self.core.fail(plan, error)
        else:
            self.core.commit(plan, result, self.now_ns, self.cost_ns(plan))

    def step(self) -> bool:
        """One plan, planned and settled; False when there was none, nor one in flight."""
        self.now_ns += 1_000_000
        busy = self.plan() is not None or bool(self.in_flight)
        if busy:
            self.settle()
        return busy

    def run(self, *, until: Callable[[], bool] | None = None, limit: int = 5000) -> int:
        """Steps until `until`, or until there is nothing to do; how many."""
        for count in range(limit):
            if until is not None and until():
                return count
            if not self.step() and not self._wait():
                assert until is None, "idle before it came true"
                return count
        raise AssertionError(f"still busy after {limit} steps")

    def _wait(self) -> bool:
        """To when a quota lets somebody start, if that is what is waited for."""
        start_ns = self.core._admission.next_start_ns
        waits = start_ns is not None and start_ns > self.now_ns
        self.now_ns = start_ns if start_ns is not None and waits else self.now_ns
        return waits

    def take_events(self) -> None:
        for event in self.core.take_events():
            if isinstance(event, (Admitted, Sampled, Failed)):
                watched = self.requests.get(event.request)
                if watched is not None:
                    self._apply(watched, event)
            elif isinstance(event, BuildEnded):
                self.builds.append(event)
            elif isinstance(event, SnapshotTaken):
                self.snapshots[event.digest] = event.state
                self.expiries[event.digest] = event.expire_time_ns
                self.core.snapshots.settled(event.digest)
                self.core.snapshots.offer(event.digest, event.state)
            elif isinstance(event, SnapshotExpires):
                self.expiries[event.digest] = event.expire_time_ns
            elif isinstance(event, SnapshotUnwanted):
                self.snapshots.pop(event.digest, None)
            else:
                self.changed.append(event.uid)

    def check(self) -> None:
        self.core.check()

    def check_empty(self) -> None:
        """After everything was deleted: all pages free, nothing open in the engine."""
        self.run()
        self.check()
        load = self.core.load()
        assert load.pages_free == load.pages_total, load
        self.engine.check_idle()

    # ---- helpers

    def _apply(self, watched: Watched, event: Admitted | Sampled | Failed) -> None:
        assert not watched.is_over, "an event after the end"
        if isinstance(event, Failed):
            watched.error = event.error
        elif isinstance(event, Admitted):
            assert watched.admitted is None, "admitted twice"
            watched.admitted = event
        else:
            assert watched.admitted is not None and watched.reasons[event.choice] is None
            got = watched.got[event.choice]
            got += event.tokens
            watched.reasons[event.choice] = event.reason
            assert tuple(got) == watched.expected[event.choice][: len(got)], "not what the request alone would get"
            if event.reason is not None:
                self._check_end(watched, event.choice, event.reason)

    def _check_end(self, watched: Watched, choice: int, reason: FinishReason) -> None:
        got, expected = watched.got[choice], watched.expected[choice]
        if reason is FinishReason.LENGTH:
            assert len(got) == watched.spec.max_tokens
        else:
            assert expected[len(got)] in self.limits.eos_token_ids
        if not watched.spec.stops.ignore_eos:
            assert not set(got) & set(self.limits.eos_token_ids), "an EOS was emitted"

    def _segments(self, spec: GenerationRequest) -> tuple[list[tuple[TokenIds, int]], int | None]:
        """The whole input of the prefix a request names, with its window; its loops."""
        if spec.prefix is not None:
            info = self.core.catalog.get(spec.tenant, spec.prefix, self.now_ns)
        elif spec.prefix_uid is not None:
            info = self.info(spec.prefix_uid)
        else:
            return [], None
        return [(info.tokens, info.cache_window)], info.loops

    def _take_fault(self, plan: Plan) -> EngineFault | None:
        fault, self.fault = self.fault, None
        return fault

    def _new_uid(self) -> str:
        self._num_uids += 1
        return f"uid{self._num_uids}"


def _step_cost_ns(plan: Plan) -> int:
    """Prompt tokens cost nothing, so that a chunk is as large as it may be."""
    return plan.num_steps * 1_000_000


def names(driver: Driver, tenant: str = "") -> list[str | None]:
    return [info.name for info in driver.core.catalog.named(tenant, driver.now_ns)]


def delete(driver: Driver, name: str) -> None:
    driver.core.catalog.delete("", name, None, driver.now_ns)


def builds(driver: Driver) -> int:
    """How many builds the engine has been asked for."""
    return sum(opened.sampling is None for plan in driver.plans for opened in plan.open)
