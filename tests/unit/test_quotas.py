"""The quotas by themselves: the bucket of tokens, who is let in, what changes with new quotas."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyloop_service.errors import TenantQuotaExceeded
from tinyloop_service.scheduler.quotas import WINDOW_S, Quotas, Waiting
from tinyloop_service.types import Quota

SECOND = 10**9


def refusal(call: object) -> TenantQuotaExceeded:
    with pytest.raises(TenantQuotaExceeded) as caught:
        call()  # type: ignore[operator]
    return caught.value


def test_a_bucket_holds_ten_seconds_and_fills_at_its_rate() -> None:
    quotas = Quotas()
    quotas.set({"a": Quota(tokens_per_s=100)}, 0)
    quotas.enter("a", 1000 + 400, 0)  # all of it, and a debt of four seconds
    assert quotas.lets_in_at_ns("a", 0) == 4 * SECOND + 1
    assert not quotas.lets_in("a", 4 * SECOND)
    assert quotas.lets_in("a", 4 * SECOND + 1)
    quotas.leave("a", 1400)
    for now_s, expected in ((0, 1000), (5, 1000), (10**6, 1000)):
        assert quotas.balance("a", now_s * SECOND) == expected, "no more than it holds"


def test_who_waits_for_tokens_says_when_to_look_again() -> None:
    quotas = Quotas()
    both = Quota(tokens_per_s=7, concurrent_requests=1)
    quotas.set({"a": Quota(tokens_per_s=7), "b": both, "c": Quota(concurrent_requests=1)}, 0)
    for tenant in "abc":
        quotas.enter(tenant, 90, 0)
    assert [quotas.lets_in(tenant, 0) for tenant in "abcd"] == [False, False, False, True]
    assert [quotas.lets_in_at_ns(tenant, 0) for tenant in "abc"] == [20 * SECOND // 7 + 1, None, None]
    quotas.leave("b", 0)
    assert quotas.lets_in_at_ns("b", 0) == quotas.lets_in_at_ns("a", 0), "tokens are all that it lacks now"


def test_a_newcomer_waits_up_to_ten_seconds_and_is_refused_beyond() -> None:
    quotas = Quotas()
    quotas.set({"a": Quota(tokens_per_s=100)}, 0)
    quotas.enter("a", 1000, 0)
    quotas.check_line("a", Waiting(tokens=999), 0)
    error = refusal(lambda: quotas.check_line("a", Waiting(tokens=1500), 0))
    assert error.subject == "tokens_per_s" and error.retry_after_s == pytest.approx(15.0)
    assert "100 tokens/s" in str(error) and "15.0 s" in str(error)
    quotas.check_line("a", Waiting(tokens=1500), 5 * SECOND)
    quotas.check_line("b", Waiting(tokens=10**9), 0)


def test_the_line_takes_what_may_come_in_and_what_may_wait() -> None:
    quotas = Quotas()
    quotas.set({"a": Quota(concurrent_requests=2, queued_requests=3), "b": Quota(queued_requests=3)}, 0)
    for waiting in (Waiting(kept_back=4), Waiting(builds=4), Waiting(builds=1, kept_back=3), Waiting(requests=9)):
        quotas.check_line("a", waiting, 0)
    refusal(lambda: quotas.check_line("a", Waiting(builds=2, kept_back=3), 0))
    quotas.enter("a", 1, 0)
    quotas.check_line("a", Waiting(kept_back=3), 0)
    assert refusal(lambda: quotas.check_line("a", Waiting(kept_back=4), 0)).subject == "queued_requests"
    quotas.check_line("b", Waiting(requests=2), 0)
    refusal(lambda: quotas.check_line("b", Waiting(requests=2, builds=1), 0))


def test_new_quotas_keep_debts_and_who_is_let_in() -> None:
    quotas = Quotas()
    quotas.set({"a": Quota(tokens_per_s=100, concurrent_requests=1)}, 0)
    quotas.enter("a", 1500, 0)
    quotas.set({"a": Quota(tokens_per_s=10, concurrent_requests=2)}, 0)
    assert quotas.balance("a", 0) == -500 and not quotas.lets_in("a", 50 * SECOND)
    assert quotas.lets_in("a", 50 * SECOND + 1)
    quotas.enter("a", 1, 51 * SECOND)
    assert not quotas.lets_in("a", 99 * SECOND)
    quotas.set({}, 0)
    assert quotas.lets_in("a", 0)
    quotas.leave("a", 10)
    quotas.leave("a", 10)
    quotas.check(Counter())
    quotas.set({"a": Quota(tokens_per_s=10)}, 0)
    assert quotas.balance("a", 0) == 100, "who had no bucket gets a full one"


@given(
    rate=st.integers(1, 50),
    arrivals=st.lists(st.tuples(st.integers(0, 3 * SECOND), st.integers(1, 400), st.integers(0, 100)), max_size=40),
)
def test_over_any_time_no_more_is_let_in_than_the_rate_allows(rate: int, arrivals: list[tuple[int, int, int]]) -> None:
    """All within T seconds, the last one left out, fit into (T + window) · rate."""
    quotas = Quotas()
    quotas.set({"a": Quota(tokens_per_s=rate)}, 0)
    now_ns, starts = 0, []
    for pause_ns, cost, unused in arrivals:
        now_ns += pause_ns
        if quotas.lets_in("a", now_ns):
            quotas.enter("a", cost, now_ns)
            quotas.leave("a", min(unused, cost))
            starts.append((now_ns, cost - min(unused, cost)))
    for first in range(len(starts)):
        for last in range(first, len(starts)):
            within_ns = starts[last][0] - starts[first][0]
            used = sum(cost for _, cost in starts[first:last])
            assert used * SECOND < (within_ns + WINDOW_S * SECOND) * rate
