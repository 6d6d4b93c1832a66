"""Saved state of prefixes, by what they are: builds start from it, and what is built is saved for those to come.

    built, worth it ──► wanted ──save, in a plan──► taken ──kept elsewhere──► offered ──► restored in place of a prefill
                            └────── lost: it could not be kept ◄──┘               unwanted ◄── its last prefix is gone,
                                                                                               or its time is over

A state is wanted until the last name ends that needs it: its prefix's own, or one of what hangs from that.

In: digests, prefixes that were built, and state that somebody keeps.  Out: which to save, what to restore.  It refuses
to know what a state is, and where it is kept.
"""

from __future__ import annotations

import heapq
from typing import Protocol

from tinyloop_service.engine.api import Limits, Plan, Saved, SequenceId
from tinyloop_service.scheduler.prefix import Prefix
from tinyloop_service.types import PrefixState

_MOST_ON_THE_WAY = 256 * 2**20  # bytes of states that a keeper is not done with; one more where that is nothing


class Keeper(Protocol):
    """Who keeps states.  All calls return at once; `settled` is what it answers each `keep` with."""

    def keep(self, digest: str, state: object, expire_time_ns: int | None) -> None:
        """Offer it when it is safe.  From `expire_time_ns` on nobody wants it."""
        ...

    def expires(self, digest: str, expire_time_ns: int | None) -> None:
        """Another time."""
        ...

    def drop(self, digest: str) -> None:
        """It will not be asked for again."""
        ...


class SavedStates:
    """Nothing is saved until somebody keeps it."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._keeps = False
        self._states: dict[str, object] = {}  # by digest
        self._wanted: dict[str, Prefix] = {}  # by uid: built, to be saved
        self._saving: dict[SequenceId, Prefix] = {}  # in plans in flight
        self._on_the_way: dict[str, int] = {}  # bytes of what its keeper is not done with, by digest
        self._kept: set[str] = set()  # digests that were taken; not offered yet
        self._unwanted: list[str] = []  # digests, to be told
        self._expiry: dict[str, int] = {}  # by digest, of those that end
        self._expiries: list[tuple[int, str]] = []  # a heap of the same, and of what was before
        self._retimed: dict[str, int | None] = {}  # to be told

    def keep(self) -> None:
        """From now on what is built is saved, if the engine can."""
        self._keeps = bool(self._limits.snapshot_id)

    def offer(self, digest: str, state: object) -> None:
        """A prefix of this content may be restored from `state`."""
        self._kept.discard(digest)
        self._states[digest] = state

    def found(self, digest: str, state: object, expire_time_ns: int | None) -> None:
        """The same, of what was kept in another life."""
        self.offer(digest, state)
        self.set_expiry(digest, expire_time_ns)

    def set_expiry(self, digest: str, expire_time_ns: int | None) -> None:
        """From then on nobody wants it; None: there is no such time.  Its keeper knows."""
        self._expiry.pop(digest, None)
        if expire_time_ns is not None:
            self._expiry[digest] = expire_time_ns
            heapq.heappush(self._expiries, (expire_time_ns, digest))

    def retime(self, digest: str, expire_time_ns: int | None) -> None:
        """The same, where its keeper does not know."""
        if expire_time_ns != self._expiry.get(digest):
            self.set_expiry(digest, expire_time_ns)
            self._retimed[digest] = expire_time_ns

    def expire(self, now_ns: int) -> None:
        """Forget what nobody wants any more."""
        while self._expiries and self._expiries[0][0] <= now_ns:
            time_ns, digest = heapq.heappop(self._expiries)
            if self._expiry.get(digest) == time_ns:
                self.gone(digest)

    @property
    def next_expiry_ns(self) -> int | None:
        return self._expiries[0][0] if self._expiries else None

    def withdraw(self, digest: str) -> None:
        self._states.pop(digest, None)
        self._expiry.pop(digest, None)

    def state_for(self, prefix: Prefix) -> object | None:
        """What to restore it from; None: it has to be prefilled."""
        return self._states.get(prefix.state_digest)

    def built(self, prefix: Prefix) -> bool:
        """It is READY.  What has a name is worth saving, if there is something to save.  Whether it is."""
        is_worth_it = prefix.name is not None and self._size(prefix) > 0
        is_wanted = self._keeps and is_worth_it and not self.has(prefix.state_digest)
        if is_wanted:
            self._wanted[prefix.uid] = prefix
        return is_wanted

    def take_wanted(self) -> list[Prefix]:
        """Those to save now; their plan is on its way.  As many as the keeper has room for."""
        used = sum(self._on_the_way.values()) + sum(map(self._size, self._saving.values()))
        taken = []
        for uid, prefix in list(self._wanted.items()):
            if prefix.name is None or prefix.state is not PrefixState.READY or prefix.sequence is None:
                del self._wanted[uid]  # it has ended or gone since
            elif not used or used + self._size(prefix) <= _MOST_ON_THE_WAY:
                used += self._size(prefix)
                self._saving[prefix.sequence.id] = prefix
                taken.append(self._wanted.pop(uid))
        return taken

    @property
    def is_behind(self) -> bool:
        """Something is to be saved that is not."""
        return bool(self._wanted)

    def taken(self, saved: Saved) -> Prefix | None:
        """What a plan has saved, to be handed to the keeper; None if its name has ended since."""
        prefix = self._saving.pop(saved.seq, None)
        if prefix is None or prefix.name is None or self.has(prefix.state_digest):
            return None
        self._kept.add(prefix.state_digest)
        self._on_the_way[prefix.state_digest] = self._size(prefix)
        return prefix

    def settled(self, digest: str) -> None:
        """Its keeper is done with it, whatever became of it."""
        self._on_the_way.pop(digest, None)

    def lost(self, digest: str) -> None:
        """What was taken could not be kept."""
        self._kept.discard(digest)

    def failed(self, plan: Plan, digests: list[str]) -> None:
        """What the plan was to save is not saved; what it was to restore from, for `digests`, is not trusted again."""
        for seq in plan.save:
            self._saving.pop(seq, None)
        for digest in digests:
            self.withdraw(digest)
            self._unwanted.append(digest)

    def gone(self, digest: str) -> None:
        """There is no prefix of this content any more, or its time is over."""
        self.withdraw(digest)
        self._kept.discard(digest)
        self._unwanted.append(digest)

    def has(self, digest: str) -> bool:
        """It is saved, or about to be."""
        return digest in self._states or digest in self._kept

    @property
    def has_news(self) -> bool:
        """Something for `take_unwanted` or `take_retimed`."""
        return bool(self._unwanted or self._retimed)

    def take_unwanted(self) -> list[str]:
        unwanted = self._unwanted[:]
        self._unwanted.clear()
        return unwanted

    def take_retimed(self) -> list[tuple[str, int | None]]:
        """(digest, time) of those that have got another."""
        retimed = [item for item in self._retimed.items() if self.has(item[0])]
        self._retimed.clear()
        return retimed

    def _size(self, prefix: Prefix) -> int:
        """Bytes of its pages."""
        return prefix.recipe.extent.final_pages(self._limits) * self._limits.page_bytes
