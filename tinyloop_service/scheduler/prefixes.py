"""Prefixes: names, states, lifetimes, and who holds what.

In: definitions that were checked at the door, times, and the fate of builds.  Out: records, snapshots, errors of
look-up.  It refuses to know queues, streams and how a build is planned.

    create ──► BUILDING ──built──► READY ──evicted, lost──► EVICTED
                  │  ▲                                          │
                  │  └───────────────next use, create───────────┤
                  ├──fault, never built before──► FAILED        │
                  ├──fault, unwanted; built before──────────────┘
                  └──unwanted, never built before──► gone

A record lives while a name, a handle, a waiting create, a request or a child record holds it; its pages live while it
is READY or being built.  Only delete and expiry end a name.  FAILED keeps its name until the next create.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator

from tinyloop_service.engine.api import Limits, SequenceId
from tinyloop_service.errors import EtagMismatch, PrefixExpired, PrefixNotFound, TinyLoopError
from tinyloop_service.scheduler.prefix import Prefix, Recipe, latest, snapshot, use
from tinyloop_service.scheduler.saved import SavedStates
from tinyloop_service.scheduler.sequences import Sequence, Sequences
from tinyloop_service.types import PrefixInfo, PrefixState

_MAX_REMEMBERED_EXPIRIES = 4096  # of each tenant


class PrefixStore:
    """Every record by name and by uid."""

    def __init__(self, sequences: Sequences, new_uid: Callable[[], str]) -> None:
        self._sequences = sequences
        self._limits: Limits = sequences.limits
        self.new_uid = new_uid
        self._names: dict[tuple[str, str], Prefix] = {}
        self._by_uid: dict[str, Prefix] = {}
        self._by_content: dict[tuple[str, str], dict[str, Prefix]] = {}  # by `Prefix.content`, then uid
        self._expiries: list[tuple[int, str]] = []
        self._expired: dict[str, OrderedDict[str, None]] = {}  # names by tenant, so that none pushes out another's
        self.building: dict[SequenceId, Prefix] = {}
        self.in_memory: dict[str, Prefix] = {}  # by uid: those that have pages
        self.pinned: dict[str, Prefix] = {}  # by uid
        self.snapshots = SavedStates(self._limits)
        self.num_pinnings = 0  # how often a pin was set
        self._evictions: Counter[str] = Counter()  # by tenant
        self.changed: dict[str, None] = {}  # uids to report, in order

    def __iter__(self) -> Iterator[Prefix]:
        return iter(self._by_uid.values())

    # ---- look-up

    def look_up(self, tenant: str, name: str) -> Prefix:
        """The live prefix of that name; the caller has expired what is due."""
        prefix = self._names.get((tenant, name))
        if prefix is not None:
            return prefix
        if name in self._expired.get(tenant, ()):
            raise PrefixExpired(f"prefix {name!r} has expired; create it again")
        raise PrefixNotFound(f"no prefix {name!r}; create it first")

    def look_up_uid(self, tenant: str, uid: str) -> Prefix:
        prefix = self.peek_uid(uid)
        if prefix is None or prefix.tenant != tenant:
            raise PrefixNotFound(f"no prefix with uid {uid!r}: it was released or never made")
        return prefix

    def peek(self, tenant: str, name: str) -> Prefix | None:
        return self._names.get((tenant, name))

    def peek_uid(self, uid: str) -> Prefix | None:
        return self._by_uid.get(uid)

    def names(self) -> list[tuple[str, str]]:
        """Tenant and name of every named one."""
        return list(self._names)

    def named(self, tenant: str, after: str = "", limit: int | None = None) -> list[Prefix]:
        """A tenant's, by name, the first `limit` of those beyond `after`."""
        names = sorted(key for key in self._names if key[0] == tenant and key[1] > after)
        return [self._names[key] for key in names[:limit]]

    def info(self, prefix: Prefix) -> PrefixInfo:
        return snapshot(prefix, self._limits)

    # ---- names and lifetimes

    def add(self, tenant: str, name: str | None, recipe: Recipe, now_ns: int, uid: str | None = None) -> Prefix:
        """A new record in BUILDING; without a name it is held by one handle.  `uid`: a new one is chosen if absent."""
        prefix = self._insert(Prefix(uid or self.new_uid(), tenant, None, recipe, now_ns, now_ns))
        if name is None:
            prefix.handles = 1
        else:
            self._give_name(prefix, name)
        return prefix

    def restore(
        self, uid: str, tenant: str, name: str | None, recipe: Recipe, create_time_ns: int, now_ns: int
    ) -> Prefix:
        """The prefix that was built once, in another process, and is known by its uid: in EVICTED unless it is here
        already.  Without a name it must be given a child at once."""
        prefix = self._by_uid.get(uid)
        if prefix is None:
            prefix = Prefix(uid, tenant, None, recipe, create_time_ns, now_ns, revision=0, was_ready=True)
            self._insert(prefix).state = PrefixState.EVICTED
        elif prefix.state is PrefixState.FAILED:
            prefix.state, prefix.error, prefix.was_ready = PrefixState.EVICTED, None, True
        if name is not None:
            self._give_name(prefix, name)
        return prefix

    def _insert(self, prefix: Prefix) -> Prefix:
        self._by_uid[prefix.uid] = prefix
        self._by_content.setdefault(prefix.content, {})[prefix.uid] = prefix
        if (parent := prefix.recipe.parent) is not None:
            parent.children[prefix.uid] = prefix
            for member in parent.chain():  # so that a parent was never used longer ago than its child
                member.last_use_time_ns = prefix.last_use_time_ns
        self.changed[prefix.uid] = None
        return prefix

    def _give_name(self, prefix: Prefix, name: str) -> None:
        key = (prefix.tenant, name)
        assert prefix.name is None and key not in self._names, f"{name} is taken"
        prefix.name = name
        self._names[key] = prefix
        self._expired.get(prefix.tenant, OrderedDict()).pop(name, None)
        self.changed[prefix.uid] = None
        self._tell_lifetime(prefix)

    def set_lifetime(
        self, prefix: Prefix, expire_time_ns: int | None, pinned: bool, revision: int | None = None
    ) -> None:
        """A new ttl and pin; the etag changes even when they are the old ones.  `revision`: the next one if absent."""
        self.num_pinnings += pinned and not prefix.pinned
        prefix.expire_time_ns = expire_time_ns
        self._pin(prefix, pinned)
        prefix.revision = prefix.revision + 1 if revision is None else revision
        if expire_time_ns is not None:
            heapq.heappush(self._expiries, (expire_time_ns, prefix.uid))
            if len(self._expiries) > 2 * len(self._by_uid) + 64:  # most are of lifetimes that were renewed
                self._expiries = [(p.expire_time_ns, p.uid) for p in self if p.expire_time_ns is not None]
                heapq.heapify(self._expiries)
        self.changed[prefix.uid] = None
        self._tell_lifetime(prefix)

    def state_expiry(self, prefix: Prefix) -> int | None:
        """When the last name that needs its state ends; None: never."""
        return latest(alike.lasts_until() for alike in self._by_content[prefix.content].values())

    @staticmethod
    def check_etag(prefix: Prefix, etag: str | None) -> None:
        if etag is not None and etag != prefix.etag:
            raise EtagMismatch(f"etag {etag!r} is stale: the prefix changed; read it again")

    def expire(self, now_ns: int) -> list[Prefix]:
        """End the names and handles whose time has come."""
        ended = []
        while self._expiries and self._expiries[0][0] <= now_ns:
            time_ns, uid = heapq.heappop(self._expiries)
            prefix = self._by_uid.get(uid)
            if prefix is None or prefix.expire_time_ns != time_ns or not (prefix.name is not None or prefix.handles):
                continue
            ended.append(prefix)
            if prefix.name is not None:
                self.expire_name(prefix.tenant, prefix.name)
            else:
                self.end_name(prefix)
        return ended

    def expire_name(self, tenant: str, name: str) -> None:
        """The time of a name is over; it is remembered for who asks, also where it was not known."""
        prefix = self._names.get((tenant, name))
        if prefix is not None:
            self.end_name(prefix)
        expired = self._expired.setdefault(tenant, OrderedDict())
        expired[name] = None
        if len(expired) > _MAX_REMEMBERED_EXPIRIES:
            expired.popitem(last=False)

    @property
    def next_expiry_ns(self) -> int | None:
        return self._expiries[0][0] if self._expiries else None

    def end_name(self, prefix: Prefix) -> None:
        """Name and handles are gone; what runs on it goes on.  A build goes on only if somebody else wants it."""
        if prefix.name is not None:
            del self._names[prefix.tenant, prefix.name]
        prefix.name, prefix.handles, prefix.waiters, prefix.detached = None, 0, 0, False
        self._pin(prefix, False)
        self.changed[prefix.uid] = None
        self._tell_lifetime(prefix)
        self.settle(prefix)

    def settle(self, prefix: Prefix) -> None:
        """After somebody let go: end a build that nobody wants, and the record if nobody holds it."""
        if prefix.state is PrefixState.BUILDING and not prefix.is_wanted():
            self._abandon_build(prefix)
        if not prefix.is_held and prefix.uid in self._by_uid:
            self.drop_pages(prefix)
            self._remove(prefix)
            self.changed[prefix.uid] = None
            if prefix.recipe.parent is not None:
                del prefix.recipe.parent.children[prefix.uid]
                self._tell_lifetime(prefix.recipe.parent)
        if prefix.recipe.parent is not None and prefix.recipe.parent.uid in self._by_uid:
            self.settle(prefix.recipe.parent)

    # ---- states

    def ask_build(self, prefix: Prefix) -> None:
        """It is to be built as soon as its turn comes."""
        prefix.state, prefix.error = PrefixState.BUILDING, None
        self.changed[prefix.uid] = None

    def start_build(self, prefix: Prefix, now_ns: int) -> Sequence:
        """Pages are reserved, it reads its parents, and its own active form is there from the start."""
        parent = prefix.recipe.parent
        sequence = self._sequences.create(parent.sequence if parent is not None else None, prefix.recipe.extent)
        self.hold_active_form(prefix, sequence)
        prefix.sequence, prefix.build_start_ns, prefix.tokens_built = sequence, now_ns, prefix.recipe.extent.start
        prefix.state, prefix.error = PrefixState.BUILDING, None
        self.building[sequence.id] = self.in_memory[prefix.uid] = prefix
        if parent is not None:
            use(parent, +1)
        self.changed[prefix.uid] = None
        return sequence

    def progress(self, prefix: Prefix, num_tokens: int, now_ns: int) -> None:
        """A chunk of the build has run; after the last one the prefix is READY."""
        prefix.tokens_built += num_tokens
        if prefix.tokens_built == prefix.recipe.extent.end:
            assert prefix.sequence is not None
            self._leave_build(prefix)
            prefix.state, prefix.was_ready = PrefixState.READY, True
            prefix.waiters, prefix.detached = 0, False
            prefix.build_ns = now_ns - prefix.build_start_ns
        self.changed[prefix.uid] = None

    def fail_build(self, prefix: Prefix, error: TinyLoopError) -> None:
        """The build met a fault, queued or running.  What was READY once can be built again on its next use."""
        self.drop_pages(prefix)
        prefix.state = PrefixState.EVICTED if prefix.was_ready else PrefixState.FAILED
        prefix.error, prefix.detached, prefix.waiters, prefix.wanted_order = error, False, 0, None
        self.changed[prefix.uid] = None
        self.settle(prefix)

    def evict(self, prefix: Prefix) -> None:
        """Pages go, the definition stays."""
        self._evictions[prefix.tenant] += 1
        self.drop_pages(prefix)
        prefix.state = PrefixState.EVICTED
        self.changed[prefix.uid] = None

    def num_evictions(self, tenant: str | None = None) -> int:
        """How often pages went and the name stayed; of one tenant, or of all."""
        return self._evictions.total() if tenant is None else self._evictions[tenant]

    def drop_pages(self, prefix: Prefix) -> None:
        if prefix.sequence is None:
            return
        assert prefix.users == 0, f"prefix {prefix.uid} is in use"
        if prefix.state is PrefixState.BUILDING:
            self._leave_build(prefix)
        self._sequences.close(prefix.sequence)
        del self.in_memory[prefix.uid]
        prefix.sequence, prefix.active, prefix.tokens_built = None, False, 0

    def hold_active_form(self, prefix: Prefix, sequence: Sequence) -> bool:
        """Count the active form; False if it was there or the engine reads the stored form."""
        pages = prefix.recipe.extent.active_pages(self._limits)
        if prefix.active or not pages:
            return False
        self._sequences.pool.hold_active(sequence.id, pages)
        prefix.active = True
        return True

    def drop_active_form(self, prefix: Prefix) -> None:
        assert prefix.active and prefix.sequence is not None and prefix.users == 0
        self._sequences.pool.drop_active(prefix.sequence.id)
        prefix.active = False

    def take_changed(self) -> tuple[str, ...]:
        changed = tuple(self.changed)
        self.changed.clear()
        return changed

    def check(self) -> None:
        """Names, holders and pages agree."""
        for (tenant, name), prefix in self._names.items():
            assert (prefix.tenant, prefix.name) == (tenant, name) and self._by_uid[prefix.uid] is prefix
        for prefix in self:
            prefix.check()
            parent = prefix.recipe.parent
            assert parent is None or (parent.children[prefix.uid] is prefix and parent.uid in self._by_uid)
            if prefix.sequence is not None and prefix.state is PrefixState.READY:
                held = self._sequences.pool.stored(prefix.sequence.id)
                assert held == prefix.recipe.extent.final_pages(self._limits), f"{prefix.uid}: {held} pages held"
        assert self.pinned == {p.uid: p for p in self if p.pinned}
        alike = [prefix for alike in self._by_content.values() for prefix in alike.values()]
        assert all(self._by_content.values()) and {p.uid: p for p in alike} == self._by_uid, "lost by content"
        assert self.in_memory == {p.uid: p for p in self if p.sequence is not None}
        building = {p.uid for p in self if p.state is PrefixState.BUILDING and p.sequence is not None}
        assert building == {p.uid for p in self.building.values()}

    def _remove(self, prefix: Prefix) -> None:
        """The record, and its saved state with the last one of its content."""
        del self._by_uid[prefix.uid]
        alike = self._by_content[prefix.content]
        del alike[prefix.uid]
        if not alike:
            del self._by_content[prefix.content]
            if self.snapshots.has(prefix.state_digest):
                self.snapshots.gone(prefix.state_digest)

    def _tell_lifetime(self, prefix: Prefix) -> None:
        """A name came, went or got another lifetime: so long is its state wanted, and that of what it hangs from."""
        for member in prefix.chain():
            if self.snapshots.has(member.state_digest):
                self.snapshots.retime(member.state_digest, self.state_expiry(member))

    def _pin(self, prefix: Prefix, pinned: bool) -> None:
        prefix.pinned = pinned
        if pinned:
            self.pinned[prefix.uid] = prefix
        else:
            self.pinned.pop(prefix.uid, None)

    def _leave_build(self, prefix: Prefix) -> None:
        assert prefix.sequence is not None
        del self.building[prefix.sequence.id]
        if prefix.recipe.parent is not None:
            use(prefix.recipe.parent, -1)

    def _abandon_build(self, prefix: Prefix) -> None:
        self.drop_pages(prefix)
        prefix.state, prefix.wanted_order = PrefixState.EVICTED, None
        if not prefix.was_ready:
            prefix.state, prefix.handles = PrefixState.FAILED, 0
            self._pin(prefix, False)
            if prefix.name is not None:
                del self._names[prefix.tenant, prefix.name]
                prefix.name = None
                self._tell_lifetime(prefix)
        self.changed[prefix.uid] = None
