"""One prefix: what it is made of, the state it is in, and who holds it.

In: nothing.  Out: the record that `prefixes` keeps, and snapshots of it for callers.  It refuses to change a state:
`prefixes` does, and `requests` and `admission` count themselves in and out.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from tinyloop_service.engine.api import Limits
from tinyloop_service.errors import PrefixNotFound, TinyLoopError
from tinyloop_service.scheduler.sequences import Extent, Sequence
from tinyloop_service.types import PrefixInfo, PrefixState, TokenIds


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a prefix is made of, with every default filled in."""

    tokens: TokenIds  # the whole input, the parent's included
    extent: Extent
    parent: Prefix | None
    parent_name: str | None
    content_sha256: str


@dataclass(slots=True, eq=False)
class Prefix:
    """One record.  Its state is `prefixes`' to change; the counts of holders are changed by those who hold it."""

    uid: str
    tenant: str
    name: str | None
    recipe: Recipe
    create_time_ns: int
    last_use_time_ns: int
    pinned: bool = False
    expire_time_ns: int | None = None
    revision: int = 1
    use_count: int = 0
    state: PrefixState = PrefixState.BUILDING
    error: TinyLoopError | None = None
    build_ns: int = 0
    build_start_ns: int = 0
    tokens_built: int = 0
    was_ready: bool = False
    sequence: Sequence | None = None
    active: bool = False
    # who holds it
    handles: int = 0
    waiters: int = 0  # creates that await its build
    detached: bool = False  # the build goes on by itself
    requests: int = 0  # queued or running
    queued: dict[int, None] = field(default_factory=dict)  # arrival orders of queued requests, oldest first
    kept_back: set[int] = field(default_factory=set)  # of them, those that wait for a quota of their tenant
    wanted_order: int | None = None  # arrival order of a create that waits for admission
    children: dict[str, Prefix] = field(default_factory=dict)  # by uid
    users: int = 0  # running requests and running builds that read it

    def check_built(self) -> None:
        """Raise what its build failed with, for who wants to use it."""
        if self.state is PrefixState.FAILED:
            error = self.error or PrefixNotFound("nobody waited for it")
            raise type(error)(f"prefix {self.name or self.uid!r} could not be built: {error}; create it again")

    def built_since(self, time_ns: int) -> tuple[int, int]:
        """When its last build started and ended, if it ended later than `time_ns`; else 0, 0."""
        end_ns = self.build_start_ns + self.build_ns
        return (self.build_start_ns, end_ns) if end_ns > time_ns else (0, 0)

    def chain(self) -> list[Prefix]:
        """From the root down to this one."""
        chain = [self]
        while (parent := chain[-1].recipe.parent) is not None:
            chain.append(parent)
        return chain[::-1]

    @property
    def etag(self) -> str:
        return f"{self.uid}-{self.revision}"

    @property
    def state_digest(self) -> str:
        """What saved state of it goes by.  Each tenant has its own: how long a build takes must not tell a tenant that
        somebody else has built the same."""
        content = self.recipe.content_sha256
        return hashlib.sha256(f"{self.tenant}\0{content}".encode()).hexdigest() if self.tenant else content

    @property
    def content(self) -> tuple[str, str]:
        """A tenant's prefixes of one content have their state in common."""
        return self.tenant, self.recipe.content_sha256

    @property
    def is_held(self) -> bool:
        return bool(self.name is not None or self.handles or self.waiters or self.requests or self.children)

    def is_wanted(self) -> bool:
        """Somebody waits for its pages."""
        if self.waiters or self.detached or self.queued:
            return True
        return any(child.is_wanted() for child in self.children.values())

    def lasts_until(self) -> int | None:
        """When the last name of it, and of what hangs from it, ends; None: never.  0: there is none."""
        ends = [0 if self.name is None else self.expire_time_ns]
        ends += [child.lasts_until() for child in self.children.values()]
        return latest(ends)

    def oldest_demand(self) -> float:
        """Arrival order of the oldest who could go on with it or with something below it; infinity for nobody."""
        own = next((order for order in self.queued if order not in self.kept_back), self.wanted_order)
        if own is not None and self.wanted_order is not None:
            own = min(own, self.wanted_order)
        orders = [child.oldest_demand() for child in self.children.values()]
        return min(orders, default=float("inf")) if own is None else min([own, *orders])

    def check(self) -> None:
        """State, holders and pages agree."""
        has_pages, parent = self.sequence is not None, self.recipe.parent
        assert self.is_held, f"prefix {self.uid} is held by nobody"
        assert has_pages or self.state is not PrefixState.READY, f"{self.uid}: READY without pages"
        assert not has_pages or self.state in (PrefixState.READY, PrefixState.BUILDING)
        assert self.state is not PrefixState.BUILDING or self.is_wanted(), f"{self.uid}: an unwanted build"
        assert len(self.queued) <= self.requests and self.kept_back <= self.queued.keys()
        assert parent is None or not has_pages or parent.sequence is not None, "a child outlives its parent's pages"


def use(prefix: Prefix, change: int) -> None:
    """Somebody who reads it, and so all that it hangs from, starts (+1) or ends (−1)."""
    for member in prefix.chain():
        member.users += change
        assert member.users >= 0


def latest(ends: Iterable[int | None]) -> int | None:
    """Of times, of which None is never."""
    last = 0
    for end in ends:
        if end is None:
            return None
        last = max(last, end)
    return last


def content_digest(tokens: TokenIds, extent: Extent, mode: str, parent_digest: str | None) -> str:
    """SHA-256 over what a prefix is: depth, window, mode, its parent's digest, every token as eight bytes."""
    digest = hashlib.sha256(f"{extent.loops}/{extent.window}/{mode}/{parent_digest or '-'}/".encode())
    digest.update(array("q", tokens).tobytes())
    return digest.hexdigest()


def snapshot(prefix: Prefix, limits: Limits) -> PrefixInfo:
    extent = prefix.recipe.extent
    pages = [len(p.sequence.blocks) * p.sequence.num_layers if p.sequence is not None else 0 for p in prefix.chain()]
    return PrefixInfo(
        tenant=prefix.tenant,
        name=prefix.name,
        uid=prefix.uid,
        etag=prefix.etag,
        state=prefix.state,
        tokens=prefix.recipe.tokens,
        loops=extent.loops,
        cache_window=extent.window,
        cache_mode=limits.cache_mode,
        parent=prefix.recipe.parent_name,
        pinned=prefix.pinned,
        size_bytes=pages[-1] * limits.page_bytes,
        shared_bytes=sum(pages[:-1]) * limits.page_bytes,
        content_sha256=prefix.recipe.content_sha256,
        create_time_ns=prefix.create_time_ns,
        expire_time_ns=prefix.expire_time_ns,
        last_use_time_ns=prefix.last_use_time_ns,
        use_count=prefix.use_count,
        build_ns=prefix.build_ns,
        tokens_built=prefix.tokens_built,
        error=str(prefix.error) if prefix.error is not None else None,
        build_start_ns=prefix.build_start_ns,
    )
