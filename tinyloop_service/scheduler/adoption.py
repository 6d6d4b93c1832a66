"""Records of names: what to write down of a prefix, and prefixes made of what was written down, here or elsewhere.

In: records, with the time.  Out: prefixes in EVICTED that the next use builds, names that end.  It refuses to know
where records are kept.

    adopt    the core does not know the name     EVICTED, on its ancestors, which are found by uid or made nameless
             it knows it with this uid           lifetime and pin as recorded
             it knows it with another uid        that name ends, then as if it knew none
             its time is over                    the name has expired
    forget   there is no record                  the name ends
"""

from __future__ import annotations

from itertools import pairwise

from tinyloop_service.engine.api import Limits
from tinyloop_service.errors import BudgetExceeded, PrefixDamaged
from tinyloop_service.scheduler.admission import Admission
from tinyloop_service.scheduler.door import check_loops, check_tokens, check_window
from tinyloop_service.scheduler.prefix import Prefix, Recipe, content_digest
from tinyloop_service.scheduler.prefixes import PrefixStore
from tinyloop_service.scheduler.sequences import Extent
from tinyloop_service.types import Ancestor, PrefixInfo, PrefixRecord, PrefixState


class Adoption:
    """What a registry says, applied to the store."""

    def __init__(self, limits: Limits, prefixes: PrefixStore, admission: Admission) -> None:
        self._limits = limits
        self._prefixes = prefixes
        self._admission = admission

    def knows(self, tenant: str, name: str, now_ns: int) -> bool:
        """There is such a name here."""
        self._prefixes.expire(now_ns)
        return self._prefixes.peek(tenant, name) is not None

    def etag_of(self, tenant: str, name: str) -> str | None:
        prefix = self._prefixes.peek(tenant, name)
        return prefix.etag if prefix is not None else None

    def names(self) -> list[tuple[str, str]]:
        """Tenant and name of every one that is known here."""
        return self._prefixes.names()

    def adopt(self, record: PrefixRecord, now_ns: int) -> None:
        """The name is as recorded.  Raises PrefixDamaged for a record that contradicts itself or the model."""
        prefix = self._prefixes.peek(record.tenant, record.name)
        if prefix is not None and prefix.uid != record.uid:
            self._prefixes.end_name(prefix)
            prefix = None
        if record.is_expired(now_ns):
            self._prefixes.expire_name(record.tenant, record.name)
            return
        if prefix is None:
            prefix = self._restore(record, now_ns)
        if prefix.revision != record.revision:
            pinned = record.pinned and self._may_pin(prefix)
            self._prefixes.set_lifetime(prefix, record.expire_time_ns, pinned, record.revision)

    def forget(self, tenant: str, name: str) -> None:
        """The name is gone."""
        prefix = self._prefixes.peek(tenant, name)
        if prefix is not None:
            self._prefixes.end_name(prefix)

    def describe(self, record: PrefixRecord) -> PrefixInfo:
        """A name that need not be known here."""
        return PrefixInfo(
            tenant=record.tenant,
            name=record.name,
            uid=record.uid,
            etag=record.etag,
            state=PrefixState.EVICTED,
            tokens=record.tokens,
            loops=record.loops,
            cache_window=record.cache_window,
            cache_mode=self._limits.cache_mode,
            parent=record.ancestors[-1].name if record.ancestors else None,
            pinned=record.pinned,
            size_bytes=0,
            shared_bytes=0,
            content_sha256=record.content_sha256,
            create_time_ns=record.create_time_ns,
            expire_time_ns=record.expire_time_ns,
            last_use_time_ns=0,
            use_count=0,
            build_ns=0,
            tokens_built=0,
        )

    # ---- helpers

    def _restore(self, record: PrefixRecord, now_ns: int) -> Prefix:
        """Root first, each hung from the one before."""
        extents = self._extents(record)
        digests = self._digests(record, extents)
        parent: Prefix | None = None
        parent_name = None
        for ancestor, extent, digest in zip(record.ancestors, extents, digests, strict=False):
            recipe = Recipe(record.tokens[: extent.end], extent, parent, parent_name, digest)
            parent = self._prefixes.restore(ancestor.uid, record.tenant, None, recipe, record.create_time_ns, now_ns)
            parent_name = ancestor.name
        recipe = Recipe(record.tokens, extents[-1], parent, parent_name, digests[-1])
        return self._prefixes.restore(record.uid, record.tenant, record.name, recipe, record.create_time_ns, now_ns)

    def _extents(self, record: PrefixRecord) -> list[Extent]:
        """Of each ancestor, and of the prefix itself."""
        ends = [*(ancestor.end for ancestor in record.ancestors), len(record.tokens)]
        starts = [0, *ends[:-1]]
        try:
            check_tokens("tokens", record.tokens, self._limits)
            check_loops(record.loops, self._limits)
            check_window(record.cache_window)
        except ValueError as error:
            raise _unfit(record) from error
        if any(start >= end for start, end in zip(starts, ends, strict=True)) or ends[-1] > self._limits.max_seq_len:
            raise _unfit(record)
        return [Extent(start, end, record.loops, record.cache_window) for start, end in zip(starts, ends, strict=True)]

    def _digests(self, record: PrefixRecord, extents: list[Extent]) -> list[str]:
        digests: list[str] = []
        for extent in extents:
            above = digests[-1] if digests else None
            mode = self._limits.cache_mode.value
            digests.append(content_digest(record.tokens[: extent.end], extent, mode, above))
        if digests[-1] != record.content_sha256:
            raise _unfit(record)
        return digests

    def _may_pin(self, prefix: Prefix) -> bool:
        """Where the budget has room.  Elsewhere it had, so the name is served here all the same."""
        try:
            self._admission.check_pin(prefix.tenant, prefix.chain(), [])
        except BudgetExceeded:
            return False
        return True


def record_of(prefix: Prefix) -> PrefixRecord:
    """What it takes to make a named prefix again."""
    assert prefix.name is not None
    chain = prefix.chain()
    ancestors = tuple(
        Ancestor(above.uid, below.recipe.parent_name or "", above.recipe.extent.end) for above, below in pairwise(chain)
    )
    return PrefixRecord(
        tenant=prefix.tenant,
        name=prefix.name,
        uid=prefix.uid,
        revision=prefix.revision,
        tokens=prefix.recipe.tokens,
        loops=prefix.recipe.extent.loops,
        cache_window=prefix.recipe.extent.window,
        ancestors=ancestors,
        content_sha256=prefix.recipe.content_sha256,
        pinned=prefix.pinned,
        create_time_ns=prefix.create_time_ns,
        expire_time_ns=prefix.expire_time_ns,
    )


def _unfit(record: PrefixRecord) -> PrefixDamaged:
    return PrefixDamaged(f"what the registry holds of prefix {record.name!r} does not fit together; use another id")
