"""Quotas: what a tenant may take, so that one tenant cannot take what others need.

In: quotas by tenant, starts and ends of its requests, the time.  Out: refusals at the door, and who of those that wait
has to wait on.  It refuses to know queues, pages and names: callers say how much waits and how many bytes are kept.

    a stock  prefix_bytes, pinned_bytes           beyond it a create or a pin is refused
    a flow   concurrent_requests, tokens_per_s    beyond it the tenant's own requests wait, in order of arrival
    a line   queued_requests                      beyond it they are refused

So a burst takes longer and does not fail; what would wait for long hears so at once, with the time to come back.  Who
waits for a quota of its tenant holds up nobody else: others pass, and its prefix may be evicted meanwhile.

Bytes are those of `size_bytes` when a prefix is READY, for every record there is: evicted prefixes count, so that what
was once created can always be used; deleted ones count until nothing reads them.

Tokens come out of a bucket that fills at `tokens_per_s` and holds `WINDOW_S` of it.  A request takes its own prompt
tokens and n · max_tokens when it starts, and gives back what it did not generate when it ends; a build takes its own
tokens when it is asked for.  Tokens read from a prefix are free, and so is building again what was evicted.  Who starts
needs a balance above zero, whatever its size, and may leave a debt; so in any T seconds a tenant starts at most
(T + WINDOW_S) · tokens_per_s tokens and what the last one took.  A debt of up to `WINDOW_S`, with those that wait
ahead, makes newcomers wait; beyond it they are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tinyloop_service.errors import TenantQuotaExceeded
from tinyloop_service.types import Quota

WINDOW_S = 10
_NANO = 10**9
_NO_QUOTA = Quota()


@dataclass(slots=True)
class _Bucket:
    """Counts billionths of a token, as a rate in tokens/s gives them by the nanosecond; below zero is a debt."""

    rate: int
    level: int
    at_ns: int

    @property
    def capacity(self) -> int:
        return self.rate * WINDOW_S * _NANO

    def balance(self, now_ns: int) -> int:
        return min(self.capacity, self.level + self.rate * max(0, now_ns - self.at_ns))

    def take(self, tokens: int, now_ns: int) -> None:
        self.level, self.at_ns = self.balance(now_ns) - tokens * _NANO, now_ns

    def give_back(self, tokens: int) -> None:
        self.level = min(self.capacity, self.level + tokens * _NANO)

    def positive_after_ns(self, balance: int) -> int:
        """How long a balance that is not above zero takes to get there."""
        return -balance // self.rate + 1


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a tenant has in the queue."""

    jobs: int  # requests and builds
    tokens: int  # that its requests will take


class Quotas:
    """The quotas, and what of the flows is taken."""

    def __init__(self) -> None:
        self._quotas: dict[str, Quota] = {}
        self._buckets: dict[str, _Bucket] = {}
        self._running: dict[str, int] = {}  # requests, of tenants that have any

    def set(self, quotas: Mapping[str, Quota], now_ns: int) -> None:
        """Replace all quotas.  What runs goes on; a new bucket is full, an old one keeps its debt."""
        self._quotas = dict(quotas)
        old, self._buckets = self._buckets, {}
        for tenant, quota in quotas.items():
            if quota.tokens_per_s is None:
                continue
            bucket = _Bucket(quota.tokens_per_s, 0, now_ns)
            bucket.level = min(bucket.capacity, old[tenant].balance(now_ns)) if tenant in old else bucket.capacity
            self._buckets[tenant] = bucket

    def of(self, tenant: str) -> Quota:
        return self._quotas.get(tenant, _NO_QUOTA)

    @property
    def limits_flow(self) -> bool:
        """Whether any request may have to wait for its tenant's quota."""
        return bool(self._buckets) or any(quota.concurrent_requests is not None for quota in self._quotas.values())

    # ---- the door

    def check_bytes(self, tenant: str, name: str, kept: int, more: int) -> None:
        """Raise TenantQuotaExceeded if `more` bytes beside `kept` ones pass the quota `name`."""
        limit: int | None = getattr(self.of(tenant), name)
        if limit is not None and kept + more > limit:
            way_out = "unpin or delete a prefix" if name == "pinned_bytes" else "delete a prefix"
            raise TenantQuotaExceeded(
                f"{name}: {kept} bytes are taken, {more} more were asked for, your quota is {limit}; {way_out}",
                quota=name,
            )

    def check_line(self, tenant: str, waiting: Waiting, now_ns: int) -> None:
        """Raise TenantQuotaExceeded if one more request or build may not wait behind those that do."""
        quota = self.of(tenant)
        if quota.queued_requests is not None:
            starting = max(0, (quota.concurrent_requests or 0) - self._running.get(tenant, 0))
            if waiting.jobs >= quota.queued_requests + starting:
                raise TenantQuotaExceeded(
                    f"queued_requests: {waiting.jobs} of yours wait, your quota is {quota.queued_requests}; "
                    "send it when one of them has ended",
                    quota="queued_requests",
                )
        bucket = self._buckets.get(tenant)
        if bucket is None:
            return
        balance = bucket.balance(now_ns) - waiting.tokens * _NANO
        if balance < -bucket.capacity:
            wait_s = bucket.positive_after_ns(balance) / _NANO
            raise TenantQuotaExceeded(
                f"tokens_per_s: your quota of {bucket.rate} tokens/s is used up for {wait_s:.1f} s to come; "
                "send it again then",
                quota="tokens_per_s",
                retry_after_s=wait_s,
            )

    # ---- flows

    def start(self, tenant: str, tokens: int, now_ns: int) -> None:
        """A request starts."""
        self._running[tenant] = self._running.get(tenant, 0) + 1
        self.take(tenant, tokens, now_ns)

    def end(self, tenant: str, unused_tokens: int) -> None:
        """A request that was started has ended."""
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        if tenant in self._buckets:
            self._buckets[tenant].give_back(unused_tokens)

    def take(self, tenant: str, tokens: int, now_ns: int) -> None:
        if tenant in self._buckets:
            self._buckets[tenant].take(tokens, now_ns)

    def free(self, tenant: str, now_ns: int) -> _Free:
        """What is left of its flows."""
        most, bucket = self.of(tenant).concurrent_requests, self._buckets.get(tenant)
        return _Free(
            requests=None if most is None else most - self._running.get(tenant, 0),
            bucket=bucket,
            balance=bucket.balance(now_ns) if bucket is not None else 0,
        )

    def check(self, running: Mapping[str, int]) -> None:
        """`running`: requests by tenant, counted anew."""
        assert self._running == running, f"running requests miscounted: {self._running}, there are {running}"


@dataclass(slots=True)
class _Free:
    requests: int | None
    bucket: _Bucket | None
    balance: int

    @property
    def lacks_requests(self) -> bool:
        return self.requests is not None and self.requests <= 0

    @property
    def lacks_tokens(self) -> bool:
        return self.bucket is not None and self.balance <= 0

    def claim(self, tokens: int) -> None:
        if self.requests is not None:
            self.requests -= 1
        self.balance -= tokens * _NANO


class Round:
    """One walk through the queue, oldest first.  Who may start claims its share, whether it finds room or not: so a
    tenant's requests start in order of arrival, and none is passed for ever."""

    def __init__(self, quotas: Quotas, now_ns: int) -> None:
        self._quotas = quotas
        self._now_ns = now_ns
        self._free: dict[str, _Free] = {}
        self._limits_flow = quotas.limits_flow
        self.next_ns: int | None = None  # when the first of those that lack nothing but tokens will have them

    def may_start(self, tenant: str, tokens: int) -> bool:
        """Whether the next of a tenant's waiting requests, which will take `tokens`, may start now."""
        if not self._limits_flow:
            return True
        if tenant not in self._free:
            self._free[tenant] = self._quotas.free(tenant, self._now_ns)
        free = self._free[tenant]
        if free.lacks_requests:
            return False
        if free.lacks_tokens:
            assert free.bucket is not None
            at_ns = self._now_ns + free.bucket.positive_after_ns(free.balance)
            self.next_ns = at_ns if self.next_ns is None else min(self.next_ns, at_ns)
            return False
        free.claim(tokens)
        return True
