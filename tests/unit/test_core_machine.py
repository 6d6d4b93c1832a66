"""The scheduler's core under arbitrary calls, plans, results and faults: nothing leaks, nothing hangs, and every
request that ends gets exactly what it would get alone."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_driver import SMALL, Driver, tokens

from tinyloop_service.engine.fake import FaultAt
from tinyloop_service.errors import EngineFault, OutOfMemory, TinyLoopError
from tinyloop_service.scheduler.adoption import record_of
from tinyloop_service.scheduler.catalog import UNCHANGED
from tinyloop_service.scheduler.request import RequestState
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.types import GenerationRequest, PrefixRecord, Quota, Sampling, Stops

NAMES = st.sampled_from(["a", "b", "c"])
TENANTS = st.sampled_from(["", "", "other"])
QUOTAS = [
    Quota(),
    Quota(prefix_bytes=6000, pinned_bytes=2000, concurrent_requests=1, queued_requests=3, tokens_per_s=100),
    Quota(concurrent_requests=2, tokens_per_s=1000),
]
LENGTHS = st.sampled_from([1, 3, 63, 64, 65, 100, 128, 150])
WINDOWS = st.sampled_from([None, 0, 1, 20, 64, 65])


class CoreMachine(RuleBasedStateMachine):
    @initialize(
        num_pages=st.sampled_from([20, 40, 90]),
        active=st.sampled_from([0, 1, 1.9, 2]),
        split=st.sampled_from([64, 128]),
        max_prefixes=st.sampled_from([2, 4]),
        aging_ns=st.sampled_from([0, 5_000_000]),
        eos=st.sampled_from([(), (3, 9)]),
        fault_at=st.sampled_from(FaultAt),
        quota=st.sampled_from(QUOTAS),
        keeps=st.booleans(),
        goes_on=st.sampled_from([0, 2, 8]),
    )
    def start(
        self,
        num_pages: int,
        active: float,
        split: int,
        max_prefixes: int,
        aging_ns: int,
        eos: tuple[int, ...],
        fault_at: FaultAt,
        quota: Quota,
        keeps: bool,
        goes_on: int,
    ) -> None:
        limits = dataclasses.replace(
            SMALL,
            num_pages=num_pages,
            active_page_bytes=round(active * SMALL.page_bytes),
            split_tokens=split,
            eos_token_ids=eos,
            least_chunk=5,
            goes_on=goes_on,
        )
        options = SchedulerSettings(max_queue=12, max_prefixes=max_prefixes, aging_ns=aging_ns, max_overtaken=2)
        self.driver = Driver(limits, options, fault_at=fault_at)
        self.driver.cost_ns = lambda plan: 10 ** (plan.number * 37 % 11)  # no pace at all
        if keeps:
            self.driver.core.snapshots.keep()
        self.quota = quota
        self.driver.core.set_quotas({"other": quota}, self.driver.now_ns)
        self.waiting: list[str] = []  # uids of creates that wait
        self.handles: list[str] = []
        self.records: list[PrefixRecord] = []  # what a registry may say later
        self.faults = 0

    @rule(
        name=st.one_of(st.none(), NAMES),
        tenant=TENANTS,
        length=LENGTHS,
        seed=st.integers(0, 2),
        loops=st.sampled_from([None, 1, 2]),
        window=WINDOWS,
        parent=st.one_of(st.none(), st.none(), st.integers(0, 5)),
        ttl_ms=st.sampled_from([None, None, 5, 40]),
        pinned=st.sampled_from([False, False, True]),
        wait=st.booleans(),
    )
    def create(self, name, tenant, length, seed, loops, window, parent, ttl_ms, pinned, wait) -> None:  # type: ignore[no-untyped-def]
        if parent is not None:
            named = self.driver.core.catalog.named(tenant, self.driver.now_ns)
            parent = named[parent % len(named)].name if named else None
            loops = window = None
        try:
            uid = self.driver.create(
                name,
                tokens(length, seed),
                tenant=tenant,
                loops=loops,
                window=window,
                parent=parent,
                expire_time_ns=None if ttl_ms is None else self.driver.now_ns + ttl_ms * 1_000_000,
                pinned=pinned,
                wait=wait,
            )
        except TinyLoopError:
            return
        if wait and self.driver.state(uid) == "building":
            self.waiting.append(uid)
        if name is None:
            self.handles.append(uid)

    @rule(
        which=st.one_of(st.none(), st.integers(0, 9)),
        tenant=TENANTS,
        length=st.sampled_from([0, 1, 5, 64, 70]),
        seed=st.integers(0, 3),
        max_tokens=st.sampled_from([1, 2, 7, 20, 66]),
        n=st.sampled_from([1, 1, 2, 3]),
        window=st.sampled_from([None, None, 1, 10, 64]),
        temperature=st.sampled_from([0.0, 1.0]),
        penalty=st.sampled_from([1.0, 1.3]),
        ignore_eos=st.booleans(),
    )
    def submit(  # type: ignore[no-untyped-def]
        self, which, tenant, length, seed, max_tokens, n, window, temperature, penalty, ignore_eos
    ) -> None:
        prefix = uid = None
        known = [info.name for info in self.driver.core.catalog.named(tenant, self.driver.now_ns)]
        known += [handle for handle in self.handles if self.driver.state(handle) is not None]
        if which is not None and known:
            prefix = known[which % len(known)]
            if prefix.startswith("uid"):
                prefix, uid, tenant = None, prefix, self.driver.info(prefix).tenant
        sampling = Sampling(temperature=temperature, repetition_penalty=penalty, seed=seed)
        try:
            self.driver.submit(
                GenerationRequest(
                    tokens(length, seed + 10),
                    max_tokens,
                    tenant,
                    prefix,
                    uid,
                    cache_window=window,
                    sampling=sampling,
                    stops=Stops(ignore_eos=ignore_eos),
                    n=n,
                )
            )
        except TinyLoopError:
            return

    @precondition(lambda self: any(not r.is_over for r in self.driver.requests.values()))
    @rule(which=st.integers(0, 10), choice=st.one_of(st.none(), st.integers(0, 2)))
    def end_request(self, which: int, choice: int | None) -> None:
        """Cancel it, or report a text stop in one choice."""
        live = [order for order, watched in self.driver.requests.items() if not watched.is_over]
        order = live[which % len(live)]
        watched = self.driver.requests[order]
        if choice is None or watched.admitted is None:
            self.driver.cancel(order)
        else:
            choice %= watched.spec.n
            self.driver.core.finish(order, choice)
            watched.reasons[choice] = watched.reasons[choice] or "stop"

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 5))
    def leave(self, which: int) -> None:
        uid = self.waiting.pop(which % len(self.waiting))
        if self.driver.state(uid) == "building":
            self.driver.core.catalog.leave(uid)

    @precondition(lambda self: self.handles)
    @rule(which=st.integers(0, 5))
    def release(self, which: int) -> None:
        self.driver.core.catalog.release(self.handles.pop(which % len(self.handles)))

    @rule(name=NAMES, tenant=TENANTS)
    def delete(self, name: str, tenant: str) -> None:
        try:
            self.driver.core.catalog.delete(tenant, name, None, self.driver.now_ns)
        except TinyLoopError:
            return

    @rule(name=NAMES, tenant=TENANTS, pinned=st.sampled_from([UNCHANGED, False, True]), ttl_ms=st.integers(1, 30))
    def update(self, name, tenant, pinned, ttl_ms) -> None:  # type: ignore[no-untyped-def]
        expiry = UNCHANGED if ttl_ms > 10 else self.driver.now_ns + ttl_ms * 1_000_000
        try:
            self.driver.core.catalog.update(tenant, name, expiry, pinned, None, self.driver.now_ns)
        except TinyLoopError:
            return

    @rule(name=NAMES)
    def write_down(self, name: str) -> None:
        """Of the tenant without quotas: what a registry says is not refused for one."""
        prefix = self.driver.core._prefixes.peek("", name)
        if prefix is not None:
            self.records.append(record_of(prefix))

    @precondition(lambda self: self.records)
    @rule(
        which=st.integers(0, 9), uid=st.sampled_from(["", "", "-2"]), pinned=st.booleans(), ttl_ms=st.integers(-5, 60)
    )
    def adopt(self, which: int, uid: str, pinned: bool, ttl_ms: int) -> None:
        """Somebody else has changed the name, or deleted it and made it again as it was."""
        record = self.records[which % len(self.records)]
        expiry = None if ttl_ms > 40 else self.driver.now_ns + ttl_ms * 1_000_000
        changes = {"uid": record.uid + uid, "revision": record.revision + 1}
        record = dataclasses.replace(record, pinned=pinned, expire_time_ns=expiry, **changes)
        self.driver.core.adoption.adopt(record, self.driver.now_ns)
        self.records.append(record)

    @rule(name=NAMES)
    def forget(self, name: str) -> None:
        self.driver.core.adoption.forget("", name)

    @rule(milliseconds=st.sampled_from([1, 10, 50]))
    def wait(self, milliseconds: int) -> None:
        self.driver.now_ns += milliseconds * 1_000_000

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @precondition(lambda self: len(self.driver.in_flight) < 2)
    @rule()
    def plan_ahead(self) -> None:
        self.driver.plan()

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def settle(self) -> None:
        self.driver.settle()

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def fault(self) -> None:
        self.driver.fault = EngineFault("a fault of the test")
        self.faults += 1
        self.driver.settle()

    @invariant()
    def nothing_leaks(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.check()
        for watched in self.driver.requests.values():
            assert watched.error is None or isinstance(watched.error, (EngineFault, OutOfMemory)), watched.error
            assert not isinstance(watched.error, EngineFault) or self.faults
        self.check_quota()

    def check_quota(self) -> None:
        """Of the one tenant that has one: what it runs and keeps is within it."""
        core, most = self.driver.core, self.quota
        running = [r for r in core._requests.live() if r.spec.tenant == "other" and r.state is RequestState.RUNNING]
        kept = [prefix for prefix in core._prefixes if prefix.tenant == "other" and prefix.state.value != "failed"]
        pinned = [prefix for prefix in kept if prefix.pinned]
        for taken, limit in (
            (len(running), most.concurrent_requests),
            (sum(p.recipe.extent.final_pages(core.limits) for p in kept) * core.limits.page_bytes, most.prefix_bytes),
            (sum(p.recipe.extent.final_pages(core.limits) for p in pinned) * core.limits.page_bytes, most.pinned_bytes),
        ):
            assert limit is None or taken <= limit, (taken, limit)

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        driver.run()
        assert driver.core.is_idle, "somebody waits for ever"
        assert all(watched.is_over for watched in driver.requests.values()), "a request never ended"
        for uid in self.handles:
            driver.core.catalog.release(uid)
        for tenant in ("", "other"):
            for info in driver.core.catalog.named(tenant, driver.now_ns):
                driver.core.catalog.delete(tenant, info.name or "", None, driver.now_ns)
        driver.check_empty()
        counters = driver.core.counters
        admitted = [w.admitted.prompt_tokens for w in driver.requests.values() if w.admitted is not None]
        assert counters.prompt_hits + counters.prompt_misses >= sum(admitted)


TestCore = CoreMachine.TestCase
TestCore.settings = settings(
    max_examples=40,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)

_WEIGHTS = {"create": 10, "submit": 20, "end": 6, "leave": 2, "release": 1, "delete": 1, "update": 2, "wait": 1}
_WEIGHTS |= {"write": 2, "adopt": 3, "forget": 1}
_WEIGHTS |= {"steps": 20, "plan": 20, "settle": 13, "fault": 2}
CALLS = [call for call, weight in _WEIGHTS.items() for _ in range(weight)]


def walk(seed: int, num_calls: int) -> None:
    """One long life of a core, from one seed: calls in proportions that keep it busy."""
    rng = random.Random(seed)
    pick = rng.choice
    machine = CoreMachine()
    machine.start(
        num_pages=pick([20, 40, 90]),
        active=pick([0, 0, 1, 2]),
        split=pick([64, 128]),
        max_prefixes=pick([2, 4]),
        aging_ns=pick([0, 5_000_000]),
        eos=pick([(), (3, 9)]),
        fault_at=pick(list(FaultAt)),
        quota=pick(QUOTAS),
        keeps=pick([True, False]),
        goes_on=pick([0, 2, 8]),
    )
    driver = machine.driver
    for _ in range(num_calls):
        call = pick(CALLS)
        if call == "create":
            machine.create(
                name=pick([None, "a", "b", "c"]),
                tenant=pick(["", "", "other"]),
                length=pick([1, 3, 63, 64, 65, 100, 128, 150]),
                seed=rng.randrange(2),
                loops=pick([None, 1, 2]),
                window=pick([None, None, 0, 1, 20, 64, 65]),
                parent=pick([None, None, rng.randrange(6)]),
                ttl_ms=pick([None, None, None, 40]),
                pinned=rng.random() < 0.15,
                wait=pick([True, False]),
            )
        elif call == "submit":
            machine.submit(
                which=pick([None, *range(5)]),
                tenant=pick(["", "", "other"]),
                length=pick([0, 1, 5, 64, 70]),
                seed=rng.randrange(4),
                max_tokens=pick([1, 2, 7, 20, 66]),
                n=pick([1, 1, 2, 3]),
                window=pick([None, None, None, 1, 10, 64]),
                temperature=pick([0.0, 1.0]),
                penalty=pick([1.0, 1.3]),
                ignore_eos=pick([True, False]),
            )
        elif call == "end" and any(not watched.is_over for watched in driver.requests.values()):
            machine.end_request(which=rng.randrange(11), choice=pick([None, 0, 1, 2]))
        elif call == "leave" and machine.waiting:
            machine.leave(which=rng.randrange(6))
        elif call == "release" and machine.handles:
            machine.release(which=rng.randrange(6))
        elif call == "delete":
            machine.delete(name=pick("abc"), tenant=pick(["", "", "other"]))
        elif call == "update":
            machine.update(
                name=pick("abc"), tenant="", pinned=pick([UNCHANGED, False, True]), ttl_ms=rng.randrange(1, 30)
            )
        elif call == "write":
            machine.write_down(name=pick("abc"))
        elif call == "adopt" and machine.records:
            again = pick(["", "", "-2"])
            machine.adopt(which=rng.randrange(10), uid=again, pinned=pick([True, False]), ttl_ms=rng.randrange(-5, 60))
        elif call == "forget":
            machine.forget(name=pick("abc"))
        elif call == "wait":
            machine.wait(milliseconds=pick([1, 10, 50]))
        elif call == "steps":
            machine.steps(count=rng.randrange(1, 12))
        elif call == "plan" and len(driver.in_flight) < 2:
            machine.plan_ahead()
        elif call in ("settle", "fault") and driver.in_flight:
            (machine.settle if call == "settle" else machine.fault)()
        machine.nothing_leaks()
    machine.teardown()


@pytest.mark.parametrize("seed", range(24))
def test_long_walks(seed: int) -> None:
    walk(seed, 300)
