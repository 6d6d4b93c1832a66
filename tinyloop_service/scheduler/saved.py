"""Saved state of prefixes, by what they are: builds start from it, and what is built is saved for those to come.

    built, worth it ──► wanted ──save, in a plan──► taken ──kept elsewhere──► offered ──► restored in place of a prefill
                            └────── lost: it could not be kept ◄──┘               unwanted ◄── its last prefix is gone

In: digests, prefixes that were built, and state that somebody keeps.  Out: which to save, what to restore.  It refuses
to know what a state is, and where it is kept.
"""

from __future__ import annotations

from typing import Protocol

from tinyloop_service.engine.api import Limits, Plan, Saved, SequenceId
from tinyloop_service.scheduler.prefix import Prefix
from tinyloop_service.types import PrefixState


class Keeper(Protocol):
    """Who keeps states.  Both calls return at once."""

    def keep(self, digest: str, state: object) -> None:
        """Offer it when it is safe."""
        ...

    def drop(self, digest: str) -> None:
        """It will not be asked for again."""
        ...


class SavedStates:
    """Nothing is saved until somebody keeps it."""

    def __init__(self, limits: Limits) -> None:
        self._can_save = bool(limits.snapshot_id)
        self._keeps = False
        self._states: dict[str, object] = {}  # by digest
        self._wanted: dict[str, Prefix] = {}  # by uid: built, to be saved by the next plan
        self._saving: dict[SequenceId, Prefix] = {}  # in plans in flight
        self._kept: set[str] = set()  # digests that were taken; not offered yet
        self._unwanted: list[str] = []  # digests, to be told

    def keep(self) -> None:
        """From now on what is built is saved, if the engine can."""
        self._keeps = self._can_save

    def offer(self, digest: str, state: object) -> None:
        """A prefix of this content may be restored from `state`."""
        self._kept.discard(digest)
        self._states[digest] = state

    def withdraw(self, digest: str) -> None:
        self._states.pop(digest, None)

    def state_for(self, prefix: Prefix) -> object | None:
        """What to restore it from; None: it has to be prefilled."""
        return None if prefix.recipe.extent.window else self._states.get(prefix.state_digest)

    def built(self, prefix: Prefix) -> bool:
        """It is READY.  What has a name and never expires is worth saving; what slides is not saved.  Whether it is."""
        lasts = prefix.name is not None and prefix.expire_time_ns is None and not prefix.recipe.extent.window
        is_wanted = self._keeps and lasts and not self.has(prefix.state_digest)
        if is_wanted:
            self._wanted[prefix.uid] = prefix
        return is_wanted

    def take_wanted(self) -> list[Prefix]:
        """Those to save now; their plan is on its way."""
        wanted = []
        for prefix in self._wanted.values():  # some have ended or gone since
            if prefix.name is not None and prefix.state is PrefixState.READY and prefix.sequence is not None:
                self._saving[prefix.sequence.id] = prefix
                wanted.append(prefix)
        self._wanted.clear()
        return wanted

    def taken(self, saved: Saved) -> str | None:
        """The digest of what a plan has saved; None if its name has ended since."""
        prefix = self._saving.pop(saved.seq, None)
        if prefix is None or prefix.name is None or self.has(prefix.state_digest):
            return None
        self._kept.add(prefix.state_digest)
        return prefix.state_digest

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
        """There is no prefix of this content any more."""
        self._states.pop(digest, None)
        self._kept.discard(digest)
        self._unwanted.append(digest)

    def has(self, digest: str) -> bool:
        """It is saved, or about to be."""
        return digest in self._states or digest in self._kept

    def take_unwanted(self) -> list[str]:
        unwanted = self._unwanted[:]
        self._unwanted.clear()
        return unwanted
