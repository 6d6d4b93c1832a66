"""The quotas by themselves: the bucket of tokens, who may start, what changes with new quotas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyloop_service.errors import TenantQuotaExceeded
from tinyloop_service.scheduler.quotas import WINDOW_S, Quotas, Round, Waiting
from tinyloop_service.types import Quota

SECOND = 10**9


def refusal(call: object) -> TenantQuotaExceeded:
    with pytest.raises(TenantQuotaExceeded) as caught:
        call()  # type: ignore[operator]
    return caught.value


def test_a_bucket_holds_ten_seconds_and_fills_at_its_rate() -> None:
    quotas = Quotas()
    quotas.set({"a": Quota(tokens_per_s=100)}, 0)
    quotas.start("a", 1000 + 400, 0)  # all of it, and a debt of four seconds
    assert not Round(quotas, 4 * SECOND).may_start("a", 1)
    assert Round(quotas, 4 * SECOND + 1).may_start("a", 1)
    quotas.end("a", 1400)
    for now_s, expected in ((0, 1000), (5, 1000), (10**6, 1000)):
        assert quotas.free("a", now_s * SECOND).balance == expected * SECOND, "no more than it holds"


def test_who_waits_for_tokens_says_when_to_look_again() -> None:
    quotas = Quotas()
    quotas.set({"a": Quota(tokens_per_s=7), "b": Quota(tokens_per_s=7), "c": Quota(concurrent_requests=1)}, 0)
    quotas.start("a", 100, 0)
    quotas.start("b", 90, 0)
    quotas.start("c", 90, 0)
    turns = Round(quotas, 0)
    assert [turns.may_start(tenant, 1) for tenant in "aabbcd"] == [False, False, False, False, False, True]
    assert turns.next_ns == 20 * SECOND // 7 + 1, "b's, for time alone helps c nothing"
    assert not Round(quotas, turns.next_ns - 1).may_start("b", 1)
    assert Round(quotas, turns.next_ns).may_start("b", 1)


def test_a_newcomer_waits_up_to_ten_seconds_and_is_refused_beyond() -> None:
    quotas = Quotas()
    quotas.set({"a": Quota(tokens_per_s=100)}, 0)
    quotas.start("a", 1000, 0)
    quotas.check_line("a", Waiting(3, 999), 0)
    error = refusal(lambda: quotas.check_line("a", Waiting(3, 1500), 0))
    assert error.subject == "tokens_per_s" and error.retry_after_s == pytest.approx(15.0)
    assert "100 tokens/s" in str(error) and "15.0 s" in str(error)
    quotas.check_line("a", Waiting(3, 1500), 5 * SECOND)
    quotas.check_line("b", Waiting(3, 10**9), 0)


def test_new_quotas_keep_debts_and_what_runs() -> None:
    quotas = Quotas()
    quotas.set({"a": Quota(tokens_per_s=100, concurrent_requests=1)}, 0)
    quotas.start("a", 1500, 0)
    quotas.set({"a": Quota(tokens_per_s=10, concurrent_requests=2)}, 0)
    free = quotas.free("a", 0)
    assert (free.requests, free.balance) == (1, -500 * SECOND)
    quotas.set({}, 0)
    assert Round(quotas, 0).may_start("a", 10**9)
    quotas.end("a", 10)
    quotas.check({})
    quotas.set({"a": Quota(tokens_per_s=10)}, 0)
    assert quotas.free("a", 0).balance == 100 * SECOND, "who had no bucket gets a full one"


@given(
    rate=st.integers(1, 50),
    arrivals=st.lists(st.tuples(st.integers(0, 3 * SECOND), st.integers(1, 400), st.integers(0, 100)), max_size=40),
)
def test_over_any_time_no_more_starts_than_the_rate_allows(rate: int, arrivals: list[tuple[int, int, int]]) -> None:
    """Every start within T seconds of an earlier one, the last of them left out, fits into (T + window) · rate."""
    quotas = Quotas()
    quotas.set({"a": Quota(tokens_per_s=rate)}, 0)
    now_ns, starts = 0, []
    for pause_ns, cost, unused in arrivals:
        now_ns += pause_ns
        if Round(quotas, now_ns).may_start("a", cost):
            quotas.start("a", cost, now_ns)
            quotas.end("a", min(unused, cost))
            starts.append((now_ns, cost - min(unused, cost)))
    for first in range(len(starts)):
        for last in range(first, len(starts)):
            within_ns = starts[last][0] - starts[first][0]
            used = sum(cost for _, cost in starts[first:last])
            assert used * SECOND < (within_ns + WINDOW_S * SECOND) * rate
