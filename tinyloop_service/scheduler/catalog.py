"""The catalog of prefixes as callers see it: create, get, list, update, delete, handles, waiters.

In: definitions and names, with the time.  Out: snapshots, uids, refusals.  It refuses to know plans; a build that is
asked for goes into the queue of `admission`.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from enum import Enum

from tinyloop_service.engine.api import Limits
from tinyloop_service.errors import PrefixExists, PrefixExpired, PrefixNotFound, TinyLoopError
from tinyloop_service.scheduler.admission import Admission
from tinyloop_service.scheduler.adoption import record_of
from tinyloop_service.scheduler.door import make_recipe
from tinyloop_service.scheduler.prefix import Prefix, Recipe
from tinyloop_service.scheduler.prefixes import PrefixStore
from tinyloop_service.scheduler.quotas import Quotas
from tinyloop_service.types import PrefixDefinition, PrefixInfo, PrefixRecord, PrefixState


class Unchanged(Enum):
    """An update's field that stays as it is."""

    UNCHANGED = "unchanged"


UNCHANGED = Unchanged.UNCHANGED


class Catalog:
    """What callers can do with prefixes, short of reading them."""

    def __init__(self, limits: Limits, prefixes: PrefixStore, admission: Admission, quotas: Quotas) -> None:
        self._limits = limits
        self._prefixes = prefixes
        self._admission = admission
        self._quotas = quotas

    def preview(
        self,
        definition: PrefixDefinition,
        tenant: str,
        name: str | None,
        expire_time_ns: int | None,
        pinned: bool,
        now_ns: int,
    ) -> PrefixInfo:
        """What `create` would answer, or its refusal."""
        existing, recipe = self._check_create(definition, tenant, name, expire_time_ns, pinned, now_ns)
        if existing is not None:
            return self._prefixes.info(existing)
        return self._prefixes.info(Prefix("", tenant, name, recipe, now_ns, now_ns, pinned, expire_time_ns))

    def propose(
        self,
        definition: PrefixDefinition,
        *,
        tenant: str,
        name: str,
        expire_time_ns: int | None,
        pinned: bool,
        now_ns: int,
    ) -> PrefixRecord:
        """What there will be to remember of a named prefix when it is created, or the refusal of `create`."""
        self._admission.check_open()
        prefix, recipe = self._check_create(definition, tenant, name, expire_time_ns, pinned, now_ns)
        if prefix is None:
            prefix = Prefix(self._prefixes.new_uid(), tenant, name, recipe, now_ns, now_ns, revision=0)
        record = record_of(prefix)
        return replace(record, revision=record.next_revision(now_ns), expire_time_ns=expire_time_ns, pinned=pinned)

    def create(
        self,
        definition: PrefixDefinition,
        *,
        tenant: str,
        name: str | None,
        expire_time_ns: int | None,
        pinned: bool,
        wait: bool,
        detached: bool,
        now_ns: int,
        record: PrefixRecord | None = None,
    ) -> str:
        """The uid of the prefix, new or already there.  With `wait` the caller counts as a waiter of its build and
        says so with `leave` when it goes away before the build ends.  `record`: what was proposed for it, if it is
        written down somewhere; a new prefix has its uid."""
        self._admission.check_open()
        prefix, recipe = self._check_create(definition, tenant, name, expire_time_ns, pinned, now_ns)
        needs_build = _needs_build(prefix)
        if prefix is None:
            self._replace_failed(tenant, name)
            prefix = self._prefixes.add(tenant, name, recipe, now_ns, record.uid if record is not None else None)
            self._quotas.take(tenant, len(definition.tokens), now_ns)
        if record is not None:
            prefix.create_time_ns = record.create_time_ns
        revision = record.revision if record is not None else None
        self._prefixes.set_lifetime(prefix, expire_time_ns, pinned, revision)
        if needs_build:
            self._prefixes.ask_build(prefix)
            self._admission.add(self._admission.take_order(), prefix, now_ns)
        if prefix.state is PrefixState.BUILDING:
            prefix.waiters += wait
            prefix.detached = prefix.detached or detached or not wait
        return prefix.uid

    def leave(self, uid: str) -> None:
        """A waiter of a build goes away; the last one ends it."""
        prefix = self._prefixes.peek_uid(uid)
        if prefix is not None and prefix.waiters:
            prefix.waiters -= 1
            self._prefixes.settle(prefix)

    def release(self, uid: str) -> None:
        """The handle of a nameless prefix is gone."""
        prefix = self._prefixes.peek_uid(uid)
        if prefix is not None and prefix.name is None and prefix.handles:
            self._prefixes.end_name(prefix)

    def get(self, tenant: str, name: str, now_ns: int) -> PrefixInfo:
        return self._prefixes.info(self._look_up(tenant, name, now_ns))

    def named(self, tenant: str, now_ns: int, after: str = "", limit: int | None = None) -> list[PrefixInfo]:
        """A tenant's named prefixes, by name, the first `limit` of those beyond `after`."""
        self._prefixes.expire(now_ns)
        return [self._prefixes.info(prefix) for prefix in self._prefixes.named(tenant, after, limit)]

    def peek(self, uid: str) -> PrefixInfo | None:
        prefix = self._prefixes.peek_uid(uid)
        return self._prefixes.info(prefix) if prefix is not None else None

    def outcome(self, uid: str) -> PrefixInfo | TinyLoopError | None:
        """For who waits for a build: the prefix, or why it is not to be had; None while it goes on."""
        prefix = self._prefixes.peek_uid(uid)
        if prefix is not None and prefix.state is PrefixState.READY:
            return self._prefixes.info(prefix)
        if prefix is not None and prefix.state is PrefixState.BUILDING and prefix.waiters:
            return None
        if prefix is not None and prefix.error is not None:
            return copy.copy(prefix.error)
        return PrefixNotFound("the prefix was deleted or expired while it was built")

    def update(
        self,
        tenant: str,
        name: str,
        expire_time_ns: int | Unchanged | None,
        pinned: bool | Unchanged,
        etag: str | None,
        now_ns: int,
    ) -> PrefixInfo:
        self.check_update(tenant, name, expire_time_ns, pinned, etag, now_ns)
        prefix = self._look_up(tenant, name, now_ns)
        expiry = prefix.expire_time_ns if isinstance(expire_time_ns, Unchanged) else expire_time_ns
        pin = prefix.pinned if isinstance(pinned, Unchanged) else pinned
        self._prefixes.set_lifetime(prefix, expiry, pin)
        return self._prefixes.info(prefix)

    def check_update(
        self,
        tenant: str,
        name: str,
        expire_time_ns: int | Unchanged | None,
        pinned: bool | Unchanged,
        etag: str | None,
        now_ns: int,
    ) -> None:
        """Refuse what `update` would refuse."""
        prefix = self._look_up(tenant, name, now_ns)
        self._prefixes.check_etag(prefix, etag)
        if not isinstance(expire_time_ns, Unchanged):
            _check_expiry(expire_time_ns, now_ns)
        if pinned is True and not prefix.pinned:
            self._admission.check_pin(tenant, prefix.chain(), [])

    def delete(self, tenant: str, name: str, etag: str | None, now_ns: int) -> None:
        """The name ends at once."""
        self._prefixes.end_name(self.check_delete(tenant, name, etag, now_ns))

    def check_delete(self, tenant: str, name: str, etag: str | None, now_ns: int) -> Prefix:
        """Refuse what `delete` would refuse."""
        prefix = self._look_up(tenant, name, now_ns)
        self._prefixes.check_etag(prefix, etag)
        return prefix

    # ---- helpers

    def _look_up(self, tenant: str, name: str, now_ns: int) -> Prefix:
        self._prefixes.expire(now_ns)
        return self._prefixes.look_up(tenant, name)

    def _check_create(
        self,
        definition: PrefixDefinition,
        tenant: str,
        name: str | None,
        expire_time_ns: int | None,
        pinned: bool,
        now_ns: int,
    ) -> tuple[Prefix | None, Recipe]:
        """The prefix that is there already, or None; and what was asked for."""
        self._prefixes.expire(now_ns)
        _check_expiry(expire_time_ns, now_ns)
        parent = self._prefixes.look_up(tenant, definition.parent) if definition.parent is not None else None
        recipe = make_recipe(definition, parent, self._limits)
        existing = self._prefixes.peek(tenant, name) if name is not None else None
        if existing is not None and existing.state is PrefixState.FAILED:
            existing = None
        if existing is not None and existing.recipe.content_sha256 != recipe.content_sha256:
            raise PrefixExists(f"prefix {name!r} exists with other content; delete it first, or choose another id")
        if parent is not None:
            parent.check_built()
        ancestors = parent.chain() if parent is not None else []
        if existing is None:
            self._admission.check_possible(tenant, ancestors, [recipe.extent], 0)
            self._admission.check_kept(tenant, recipe.extent)
        elif existing.state is PrefixState.EVICTED:  # pins may have grown since it was built
            self._admission.check_possible(tenant, existing.chain(), [], 0)
        if pinned and not (existing is not None and existing.pinned):
            known = existing.chain() if existing is not None else ancestors
            self._admission.check_pin(tenant, known, [] if existing is not None else [recipe.extent])
        if _needs_build(existing):
            self._admission.check_queue(tenant, now_ns)
        return existing, recipe

    def _replace_failed(self, tenant: str, name: str | None) -> None:
        failed = self._prefixes.peek(tenant, name) if name is not None else None
        if failed is not None:
            self._prefixes.end_name(failed)


def _needs_build(existing: Prefix | None) -> bool:
    return existing is None or existing.state is PrefixState.EVICTED


def _check_expiry(expire_time_ns: int | None, now_ns: int) -> None:
    """It lay in the future when it was asked for; a busy server may come to it too late."""
    if expire_time_ns is not None and expire_time_ns <= now_ns:
        raise PrefixExpired("the time of this prefix ran out before the server came to it; give it more")
