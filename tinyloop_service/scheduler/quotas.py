"""Quotas: what a tenant may take, so that one tenant cannot take what others need.

In: quotas by tenant, who of its requests comes and goes, the time.  Out: refusals at the door, and whether the next
one is let in.  It refuses to know queues, pages and names: callers say how much waits and how many bytes are kept.

    a stock  prefix_bytes, pinned_bytes           beyond it a create or a pin is refused
    a flow   concurrent_requests, tokens_per_s    beyond it the tenant's own requests wait, in order of arrival
    a line   queued_requests                      beyond it they are refused

So a burst takes longer and does not fail; what would wait for long hears so at once, with the time to come back.  Who
waits for a quota of his tenant holds up nobody else (`line`), and his prefix may be evicted meanwhile.

Bytes are those of `size_bytes` when a prefix is READY, for every record there is: evicted prefixes count, so that what
was once created can always be used; deleted ones count until nothing reads them.

Tokens come out of a bucket that fills at `tokens_per_s` and holds `WINDOW_S` of it.  A request takes its own prompt
tokens and n · max_tokens when it is let in, and gives back when it ends what no plan had by then: who is cancelled, or
stops, has cost what the engine was asked to compute, heard or not.  A build takes its own tokens when it is asked for.
Tokens read from a prefix are free, and so is building again what was evicted.  Who is let in needs a balance above
zero, whatever his size, and may leave a debt; so in any T seconds a tenant gets at most (T + WINDOW_S) · tokens_per_s
tokens and what the last one took.  A debt of up to `WINDOW_S`, with those that wait ahead, makes newcomers wait; beyond
it they are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

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


class Waiting(NamedTuple):  # one for each request
    """What of a tenant waits."""

    requests: int = 0  # let in, for room
    builds: int = 0
    kept_back: int = 0  # requests that are not let in yet
    tokens: int = 0  # that those will take


class Quotas:
    """The quotas, and what of the flows is taken.  A request is let in from `enter` to `leave`."""

    def __init__(self) -> None:
        self._quotas: dict[str, Quota] = {}
        self._buckets: dict[str, _Bucket] = {}
        self._let_in: Counter[str] = Counter()

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
            jobs, most = waiting.builds + waiting.kept_back, quota.concurrent_requests
            if most is None:
                jobs += waiting.requests
            # where requests at a time are bounded, those let in are of these, and so are as many as may come in yet
            if jobs >= quota.queued_requests + max(0, (most or 0) - self._let_in[tenant]):
                raise TenantQuotaExceeded(
                    f"queued_requests: {jobs} of yours wait, your quota is {quota.queued_requests}; "
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

    def lets_in(self, tenant: str, now_ns: int) -> bool:
        """Whether the next of its requests may come in now."""
        bucket = self._buckets.get(tenant)
        return self._has_place(tenant) and (bucket is None or bucket.balance(now_ns) > 0)

    def lets_in_at_ns(self, tenant: str, now_ns: int) -> int | None:
        """When it will be, for one that lacks nothing but tokens; None for one that has to wait for others to leave."""
        bucket = self._buckets.get(tenant)
        if bucket is None or not self._has_place(tenant):
            return None
        return now_ns + bucket.positive_after_ns(bucket.balance(now_ns))

    def enter(self, tenant: str, tokens: int, now_ns: int) -> None:
        self._let_in[tenant] += 1
        self.take(tenant, tokens, now_ns)

    def leave(self, tenant: str, unused_tokens: int) -> None:
        self._let_in[tenant] -= 1
        if tenant in self._buckets:
            self._buckets[tenant].give_back(unused_tokens)

    def take(self, tenant: str, tokens: int, now_ns: int) -> None:
        if tenant in self._buckets:
            self._buckets[tenant].take(tokens, now_ns)

    def balance(self, tenant: str, now_ns: int) -> float:
        """Tokens that it has left; below zero is a debt, infinity no quota."""
        return self._buckets[tenant].balance(now_ns) / _NANO if tenant in self._buckets else float("inf")

    def check(self, let_in: Counter[str]) -> None:
        """`let_in`: requests by tenant, counted anew."""
        assert +self._let_in == let_in, f"requests miscounted: {self._let_in}, there are {let_in}"

    def _has_place(self, tenant: str) -> bool:
        most = self.of(tenant).concurrent_requests
        return most is None or self._let_in[tenant] < most
