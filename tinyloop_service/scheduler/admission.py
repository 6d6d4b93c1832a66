"""Admission: who of those that wait may start, and what must make room.

In: the queue in order of arrival, the pool, the prefixes.  Out: started builds, admitted requests.  It refuses to
know what a step is.

A request is admitted when its prefix is READY, its rows fit, and every page it can come to need is free or can be
made free; so an admitted request never dies of memory.  A prefix that is missing is built first, once, for all who
wait for it.  Room is made from what is idle: active forms first, then unpinned prefixes nobody uses, those that nobody
waits for before others, each least recently used first.  Three rules keep this fair, thrifty and free of deadlock:

- Nobody evicts what somebody older waits for.  So the oldest can evict everything idle but its own chain, and a
  prefix built for one request is still there when its turn comes.
- Nobody evicts for a build that would only share the engine's time with another.  Both would end late, and what was
  evicted is missed meanwhile.  One that is much shorter than the others need not wait for them.
- Younger ones may overtake one that lacks room, until it has waited `aging_ns`; from then on it is next.  One that
  could make room and waits for another's build is then still overtaken by those who need none to be made.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from enum import Enum

from tinyloop_service.errors import OutOfMemory, PinBudgetExceeded, QueueFull, TinyLoopError
from tinyloop_service.scheduler.draft import Draft
from tinyloop_service.scheduler.line import Job, Line, still_waits
from tinyloop_service.scheduler.prefix import Prefix
from tinyloop_service.scheduler.prefixes import PrefixStore
from tinyloop_service.scheduler.quotas import Quotas
from tinyloop_service.scheduler.request import Request
from tinyloop_service.scheduler.requests import Requests
from tinyloop_service.scheduler.sequences import Extent, Feed, Sequences
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.types import PrefixState

WAYS_OUT = "use a shorter prompt, fewer loops, a compact cache mode or a cache_window"


class Turn(Enum):
    """How it went for one of those that wait."""

    MOVED = "moved"  # admitted, or a build was started for it
    WAITS = "waits"  # for a build that runs, or the next plan
    YIELDS = "yields"  # it would make room for a build, which others' builds are in the way of
    LACKS_ROOM = "lacks room"


class Admission:
    """The queue, and the budget that it draws on."""

    def __init__(
        self,
        sequences: Sequences,
        prefixes: PrefixStore,
        requests: Requests,
        quotas: Quotas,
        settings: SchedulerSettings,
    ) -> None:
        self._sequences = sequences
        self._pool = sequences.pool
        self._limits = sequences.limits
        self._prefixes = prefixes
        self._requests = requests
        self._quotas = quotas
        self._settings = settings
        self._line = Line(quotas)
        self._next_order = 1
        self.refusal: TinyLoopError | None = None  # what newcomers get while draining and after
        self._pinnings_seen = 0

    def check_open(self) -> None:
        if self.refusal is not None:
            raise copy.copy(self.refusal)

    def check_queue(self, tenant: str, now_ns: int) -> None:
        """Raise QueueFull, or TenantQuotaExceeded, if one more of the tenant may not wait."""
        most = self._settings.max_queue
        if self._line.num_queued >= most:
            self._line.forget_gone()
        waiting = self._line.waiting(tenant)
        if self._line.num_queued >= most or waiting.kept_back >= most:
            raise QueueFull(f"queue full: {most} requests wait; try again")
        self._quotas.check_line(tenant, waiting, now_ns)

    @property
    def is_waited_for(self) -> bool:
        """Somebody waits for more than a quota of his own."""
        return bool(self._line.num_queued)

    @property
    def next_start_ns(self) -> int | None:
        """When a quota lets the next one in, if time alone does."""
        return self._line.next_start_ns

    def take_order(self) -> int:
        """The next place in the order of arrival."""
        self._next_order += 1
        return self._next_order - 1

    def add(self, order: int, job: Job, now_ns: int) -> None:
        """A request, or a prefix that was asked for."""
        self._line.add(order, job, now_ns)

    def remove(self, order: int) -> None:
        self._line.remove(order)

    def admit(self, draft: Draft, now_ns: int) -> None:
        """Move everybody who can move, oldest first."""
        self._line.let_in(now_ns)
        overtaken, one_is_next = 0, False
        for order, job, since_ns in self._line.queued():
            if not still_waits(job, order):
                self._line.remove(order)
                continue
            if one_is_next and not self._has_room(job):
                continue
            turn = self._advance(order, job, draft, now_ns)
            if turn is Turn.MOVED and not still_waits(job, order):
                self._line.remove(order)
            has_aged = now_ns - since_ns >= self._settings.aging_ns
            one_is_next |= turn is Turn.YIELDS and has_aged
            if turn is not Turn.LACKS_ROOM:
                continue
            overtaken += 1
            if has_aged or overtaken > self._settings.max_overtaken:
                return

    def take_impossible(self) -> list[tuple[Job, OutOfMemory]]:
        """Those that can never fit any more, since pins have grown: they must not wait for ever."""
        if self._pinnings_seen == self._prefixes.num_pinnings:
            return []
        self._pinnings_seen = self._prefixes.num_pinnings
        impossible = []
        for order, job in self._line.jobs():
            if not still_waits(job, order):
                continue
            try:
                if isinstance(job, Request):
                    self.check_request_possible(job)
                else:
                    self.check_possible(job.tenant, job.chain(), [], 0)
            except OutOfMemory as error:
                impossible.append((job, error))
                self._line.remove(order)
        return impossible

    # ---- one job

    def _advance(self, order: int, job: Job, draft: Draft, now_ns: int) -> Turn:
        target = job if isinstance(job, Prefix) else job.prefix
        chain = target.chain() if target is not None else []
        missing = next((prefix for prefix in chain if prefix.state is not PrefixState.READY), None)
        if missing is None:
            assert isinstance(job, Request)
            return self._admit_request(job, chain, draft, now_ns)
        if missing.sequence is not None:
            return Turn.WAITS
        if draft.restores and self._prefixes.snapshots.state_for(missing) is not None:
            return Turn.WAITS  # for the next plan: copying a state takes the engine longer than a step
        ancestors = chain[: chain.index(missing)]
        turn = self._start_build(order, missing, ancestors, draft, now_ns)
        if turn is not Turn.MOVED:
            return turn
        if isinstance(job, Request) and missing.sequence is not None and missing.sequence.id in self._sequences.feeds:
            job.cached_tokens = min(job.cached_tokens, missing.recipe.extent.start)
        return turn

    def _has_room(self, job: Job) -> bool:
        """Whether it can be admitted with what is free: nothing is built or dropped for it."""
        if not isinstance(job, Request):
            return False
        chain = job.prefix.chain() if job.prefix is not None else []
        is_ready = all(prefix.state is PrefixState.READY for prefix in chain)
        return is_ready and job.num_pages + self._inactive_pages(chain) <= self._pool.free

    def _admit_request(self, request: Request, chain: list[Prefix], draft: Draft, now_ns: int) -> Turn:
        pages = request.num_pages + self._inactive_pages(chain)
        rows = self._requests.num_rows + request.spec.n
        if rows > self._limits.max_rows or not self._make_room(pages, 0, request.order, chain, draft):
            return Turn.LACKS_ROOM
        self._activate(chain, draft)
        self._requests.admit(request, now_ns)
        return Turn.MOVED

    def _start_build(self, order: int, prefix: Prefix, ancestors: list[Prefix], draft: Draft, now_ns: int) -> Turn:
        assert prefix.state is not PrefixState.FAILED, "somebody waits for a prefix that failed"
        extent = prefix.recipe.extent
        pages = extent.most_pages(self._limits) + self._inactive_pages(ancestors)
        state = self._prefixes.snapshots.state_for(prefix)
        if state is None and pages > self._pool.free and self._would_share(extent.end - extent.start):
            return Turn.YIELDS
        if not self._make_room(pages, 1, order, ancestors, draft):
            return Turn.LACKS_ROOM
        self._activate(ancestors, draft)
        sequence = self._prefixes.start_build(prefix, now_ns)
        prefix.wanted_order = None
        if state is not None:
            draft.restore(sequence, state)
        else:
            self._sequences.feed(Feed(sequence, prefix.recipe.tokens[extent.start :], order))
        return Turn.MOVED

    def _would_share(self, num_tokens: int) -> bool:
        """Builds that are at most twice as long have so much left that a plan does not hold it beside this one."""
        feeds = (self._sequences.feeds.get(seq) for seq in self._prefixes.building)
        ahead = sum(feed.remaining for feed in feeds if feed is not None and feed.remaining <= 2 * num_tokens)
        return bool(ahead) and ahead + num_tokens > self._limits.max_chunk

    def _inactive_pages(self, chain: Iterable[Prefix]) -> int:
        if not self._limits.has_active_form:
            return 0
        return sum(prefix.recipe.extent.active_pages(self._limits) for prefix in chain if not prefix.active)

    def _activate(self, chain: Iterable[Prefix], draft: Draft) -> None:
        for prefix in chain:
            assert prefix.sequence is not None
            if self._prefixes.hold_active_form(prefix, prefix.sequence):
                draft.activate(prefix.sequence)

    # ---- room

    def _make_room(self, pages: int, slots: int, order: int, keep: list[Prefix], draft: Draft) -> bool:
        """See that `pages` are free and `slots` more prefixes may be in memory; nothing is dropped if that fails."""
        surplus = len(self._prefixes.in_memory) + slots - self._settings.max_prefixes
        if pages <= self._pool.free and (not slots or surplus <= 0):
            return True
        in_memory = list(self._prefixes.in_memory.values())
        ready = [prefix for prefix in in_memory if prefix.state is PrefixState.READY]
        idle = [prefix for prefix in ready if prefix.active and not prefix.users and prefix not in keep]
        victims = self._victims(in_memory, order, keep)
        within_reach = self._pool.free + sum(self._pool.active(_id(p)) for p in idle)
        within_reach += sum(self._pool.stored(_id(p)) for p in victims)
        if within_reach < pages or len(victims) < surplus:
            return False
        for prefix in sorted(idle, key=lambda p: p.last_use_time_ns):
            if pages > self._pool.free:
                assert prefix.sequence is not None
                self._prefixes.drop_active_form(prefix)
                draft.deactivate(prefix.sequence)
        for prefix in victims:
            if pages > self._pool.free or surplus > 0:
                self._prefixes.evict(prefix)
                surplus -= 1
        return True

    def _victims(self, in_memory: list[Prefix], order: int, keep: list[Prefix]) -> list[Prefix]:
        """What may be evicted for a job, what is missed least first, children before their parents."""
        may_go = {
            prefix.uid: prefix
            for prefix in in_memory
            if prefix.state is PrefixState.READY
            and not (prefix.users or prefix.pinned or prefix in keep)
            and prefix.oldest_demand() >= order
        }
        for prefix in in_memory:  # what has pages below it that stay must stay too
            if prefix.uid not in may_go:
                for member in prefix.chain():
                    may_go.pop(member.uid, None)
        return sorted(may_go.values(), key=lambda p: (-p.oldest_demand(), p.last_use_time_ns, -len(p.chain())))

    # ---- what can never be; a tenant that has a name is told of its own and of fixed limits, never what others hold

    def check_possible(self, tenant: str, ancestors: list[Prefix], extents: list[Extent], own_pages: int) -> None:
        """Raise OutOfMemory if this would not fit with everything else gone that can go.

        `ancestors` and then `extents` are built one under the other; then `own_pages` are needed at once.
        """
        pinned = [prefix for prefix in self._effectively_pinned() if prefix not in ancestors]
        kept = self._pages(prefix.recipe.extent for prefix in pinned)
        held = needed = 0
        chain = [prefix.recipe.extent for prefix in ancestors] + extents
        for extent in chain:
            active = extent.active_pages(self._limits)
            needed = max(needed, held + extent.peak_pages(self._limits) + active)
            held += extent.final_pages(self._limits) + active
        needed = max(needed, held + own_pages)
        if needed + kept > self._limits.num_pages:
            mib = needed * self._limits.page_bytes / 2**20
            others = f"{kept} pinned, {self._pool.free} free now" if not tenant else f"{self._pin_budget} may be pinned"
            raise OutOfMemory(
                f"out of memory: {needed} pages ({mib:.1f} MiB) needed, {self._limits.num_pages} in all, {others}; "
                f"{WAYS_OUT}"
            )
        if len(chain) + len(pinned) > self._settings.max_prefixes:
            others = f" beside {len(pinned)} pinned ones" if not tenant else ""
            raise OutOfMemory(
                f"out of memory: {len(chain)} prefixes needed at once{others}, "
                f"{self._settings.max_prefixes} may be in memory, pinned ones included; unpin some"
            )

    def check_request_possible(self, request: Request) -> None:
        if not self._prefixes.pinned and self._has_room(request):  # of pins to come `take_impossible` hears
            return
        chain = request.prefix.chain() if request.prefix is not None else []
        self.check_possible(request.spec.tenant, chain, [], request.num_pages)

    def check_kept(self, tenant: str, extent: Extent) -> None:
        """Raise TenantQuotaExceeded if one more prefix passes the tenant's quota of bytes."""
        if self._quotas.of(tenant).prefix_bytes is None:
            return
        kept = [p.recipe.extent for p in self._prefixes if p.tenant == tenant and p.state is not PrefixState.FAILED]
        self._quotas.check_bytes(tenant, "prefix_bytes", self._bytes(kept), self._bytes([extent]))

    def check_pin(self, tenant: str, ancestors: list[Prefix], extents: list[Extent]) -> None:
        """Raise TenantQuotaExceeded, or PinBudgetExceeded, if these, pinned too, pass the quota or the budget."""
        pinned = self._effectively_pinned()
        extents = [prefix.recipe.extent for prefix in ancestors if prefix not in pinned] + extents
        own = [prefix.recipe.extent for prefix in pinned if prefix.tenant == tenant]
        self._quotas.check_bytes(tenant, "pinned_bytes", self._bytes(own), self._bytes(extents))
        needed = self._pages([prefix.recipe.extent for prefix in pinned] + extents)
        if needed > self._pin_budget:
            what = f"{needed} pages" if not tenant else f"{self._pages(own + extents)} pages of yours"
            raise PinBudgetExceeded(
                f"pin budget: {what} would be pinned, {self._pin_budget} may be in all; unpin or delete another prefix"
            )

    def _effectively_pinned(self) -> list[Prefix]:
        """Pinned prefixes and all that they hang from."""
        found = {member.uid: member for prefix in self._prefixes.pinned.values() for member in prefix.chain()}
        return list(found.values())

    def check(self) -> None:
        self._line.check()

    @property
    def _pin_budget(self) -> int:
        return int(self._settings.pin_fraction * self._limits.num_pages)

    def _pages(self, extents: Iterable[Extent]) -> int:
        """What they keep when they are built."""
        return sum(extent.final_pages(self._limits) for extent in extents)

    def _bytes(self, extents: Iterable[Extent]) -> int:
        return self._pages(extents) * self._limits.page_bytes


def _id(prefix: Prefix) -> int:
    assert prefix.sequence is not None
    return prefix.sequence.id
