"""Figures against values worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from load_records import MS, START_NS, job, moment, sent, turn

from tinyloop_service.load import measures
from tinyloop_service.load.driver import Build, Driven, Failure
from tinyloop_service.load.measures import Turn
from tinyloop_service.load.results import Distribution, Driving, Phase, Slo
from tinyloop_service.load.watch import seconds
from tinyloop_service.types import Load

FULL = Failure("UNAVAILABLE", "QUEUE_FULL", "the queue is full")
GONE = Failure("NOT_FOUND", "PREFIX_EXPIRED", "it has expired")


def phase(*turns: Turn, slo: Slo | None = None, expected: tuple[str, ...] = (), own_loop: bool = True) -> Phase:
    return measures.phase(turns, Driving.OPEN, 2.0, slo, expected, own_loop)


def near(value: float) -> object:
    """As near as a histogram of three digits is."""
    return pytest.approx(value, rel=2e-3)


def test_tokens_of_one_message_share_the_gap_before_it() -> None:
    arrivals = [(0, 1), (30, 3), (40, 1)]
    assert list(measures.gaps(arrivals)) == [30, 10]
    assert list(measures.spread_gaps(arrivals)) == [10, 10, 10, 10]
    assert measures.tpot_ns(arrivals) == 10


def test_tokens_that_came_with_the_first_had_no_gap() -> None:
    assert list(measures.spread_gaps([(5, 3), (25, 2)])) == [0, 0, 10, 10]
    assert list(measures.spread_gaps([])) == []
    assert measures.tpot_ns([(5, 3)]) == 0
    assert measures.tpot_ns([(5, 1)]) is None
    assert measures.tpot_ns([]) is None


def test_a_distribution_of_known_values() -> None:
    found = measures.distribution(value * MS for value in range(1, 101))
    assert found is not None
    assert (found.count, found.mean, found.max) == (100, 50.5, 100.0)
    assert [found.p50, found.p90, found.p95, found.p99] == [near(50), near(90), near(95), near(99)]
    values, shares = zip(*found.cdf, strict=True)
    assert list(values) == sorted(values) and list(shares) == sorted(shares)
    assert found.cdf[-1] == (100.0, 1.0)
    assert dict(zip(shares, values, strict=True))[0.5] == found.p50


def test_no_percentile_is_above_the_largest_value() -> None:
    found = measures.distribution([123_456_789])
    assert found is not None
    assert found.p50 == found.p99 == found.max == 123.457
    assert measures.distribution([]) is None


def test_latencies_count_from_the_intended_start() -> None:
    """Two requests, due at 1.0 and 2.0 s; the second was sent 0.5 s late."""
    found = phase(
        turn(
            [
                sent(1000, (1100, 1), (1120, 2), queue=7),
                sent(2000, (2800, 1), (2900, 1), start=2500, queue=9),
            ],
            late_ms=0.1,
        )
    )
    assert found.counts.offered == found.counts.completed == 2
    times = measures.latencies([sent(2000, (2800, 1), (2900, 1), start=2500, queue=9)])
    assert times.ttft is not None and times.ttft.max == 800.0
    assert times.e2e is not None and times.e2e.max == 900.0
    assert times.queue is not None and times.queue.max == 9.0
    assert times.itl is not None and times.gap is not None and times.tpot is not None
    assert (times.itl.max, times.gap.max, times.tpot.max) == (100.0, 100.0, 100.0)
    assert found.lag.send is not None and found.lag.send.max == 500.0


def test_the_warm_up_is_cut_and_rates_are_by_arrival() -> None:
    """Measured from 1 to 5 s: 4 tokens of the first arrive there, 2 of the second; the second ends behind the end."""
    early = sent(500, (900, 1), (1100, 3), (1200, 1))
    late = sent(4500, (4800, 2), (5200, 3))
    found = phase(turn([early, late]))
    assert found.counts.offered == 1, "the first was due in the warm-up"
    assert found.throughput.tokens_per_s == (4 + 2) / 4
    assert found.throughput.requests_per_s == 1 / 4, "the first, which ended in the measured time"
    assert found.throughput.prompt_tokens_per_s == 100 / 4
    assert found.latencies is not None and found.latencies.ttft is not None
    assert found.latencies.ttft.count == 1 and found.latencies.ttft.max == 300.0


def test_in_a_closed_loop_requests_count_by_their_end() -> None:
    closed = job(is_open=False)
    found = phase(turn([sent(0, (500, 1), (900, 1)), sent(100, (900, 1), (1100, 1))], of=closed))
    assert found.counts.offered == 1, "the first ended in the warm-up"


def test_who_never_ended_counts_with_what_it_had_waited() -> None:
    stuck, cut = sent(1000, end=6000), sent(1000, (1500, 1), end=6000)
    found = phase(turn([stuck, cut]))
    assert (found.counts.unfinished, found.counts.completed) == (2, 0)
    assert found.latencies is not None
    assert found.latencies.ttft is not None and found.latencies.ttft.max == 5000.0
    assert found.latencies.e2e is not None and found.latencies.e2e.count == 2


def test_who_hung_up_has_a_ttft_and_no_end() -> None:
    found = phase(turn([sent(1000, (1100, 1), (1150, 1), hung_up=True)]))
    assert found.counts.cancelled == 1
    assert found.latencies is not None and found.latencies.e2e is None
    assert found.latencies.ttft is not None and found.latencies.itl is not None
    assert found.cached_token_rate is None, "no request was completed"


def test_errors_by_code_and_reason_the_most_frequent_first() -> None:
    failed = [sent(1000, failure=GONE), sent(1100, failure=FULL), sent(1200, failure=FULL), sent(10, failure=GONE)]
    base = turn(failed)
    driven = replace(base.driven[0], builds=[Build(9, moment(0), moment(5), FULL)])
    found = phase(replace(base, driven=(driven,)), expected=("PREFIX_EXPIRED",))
    assert [(e.code, e.reason, e.count, e.expected) for e in found.errors] == [
        ("UNAVAILABLE", "QUEUE_FULL", 3, False),
        ("NOT_FOUND", "PREFIX_EXPIRED", 1, True),
    ]
    assert found.errors[0].example == "the queue is full"
    assert (found.counts.failed, found.counts.completed) == (3, 0)
    assert found.latencies is not None and found.latencies.ttft is None
    assert found.builds is None, "none succeeded"


def test_goodput_is_what_kept_every_bound() -> None:
    """TTFT 100 and TPOT 20; TTFT 100 and TPOT 50; TTFT 300 and TPOT 20; one cancelled; one failed."""
    requests = [
        sent(1000, (1100, 1), (1120, 1)),
        sent(1000, (1100, 1), (1150, 1)),
        sent(1000, (1300, 1), (1320, 1)),
        sent(1000, (1100, 1), hung_up=True),
        sent(1000, failure=FULL),
    ]
    found = phase(turn(requests), slo=Slo(ttft_ms=200, itl_ms=30)).throughput
    assert (found.goodput_per_s, found.goodput_share) == (1 / 4, 1 / 4)
    assert phase(turn(requests), slo=Slo(ttft_ms=200)).throughput.goodput_share == 2 / 4
    assert phase(turn(requests), slo=Slo(e2e_ms=125)).throughput.goodput_share == 1 / 4
    assert phase(turn(requests)).throughput.goodput_share is None


def test_goodput_is_never_more_than_what_was_completed() -> None:
    """Due in the measured time, ended behind it: it kept the SLO, and is no part of the rates."""
    late = sent(4900, (5000, 1), (5020, 1))
    found = phase(turn([late]), slo=Slo(ttft_ms=200)).throughput
    assert (found.requests_per_s, found.goodput_per_s, found.goodput_share) == (0.0, 0.0, 1.0)


def test_cached_tokens_are_a_share_of_all_prompt_tokens() -> None:
    found = phase(turn([sent(1000, (1100, 1), cached=90), sent(1000, (1100, 1), cached=0)]))
    assert found.cached_token_rate == 0.45


def test_turns_add_up() -> None:
    one, other = turn([sent(1000, (1100, 2))]), turn([sent(2000, (2100, 2)), sent(3000, (3100, 4))])
    found = phase(one, replace(other, pages_after=7))
    assert found.measured_s == 8.0
    assert found.counts.offered == 3
    assert found.throughput.tokens_per_s == 8 / 8
    assert (found.pages_before, found.pages_after) == (0, 7)


def test_builds_are_those_that_succeeded() -> None:
    made = [Build(100, moment(0), moment(40), None), Build(50, moment(0), moment(20), None), Build(9, 0, 9, FULL)]
    found = measures.builds(made)
    assert found is not None
    assert (found.count, found.tokens, found.mean_ms, found.max_ms) == (2, 150, 30.0, 40.0)


def steady(ms: float) -> Distribution:
    found = measures.distribution([ms * MS] * 10)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("late_ms", "measured_ms", "is_late"),
    [(4.9, 1.0, False), (5.1, 1.0, True), (19.0, 100.0, False), (21.0, 100.0, True)],
)
def test_the_harness_says_when_it_was_too_late(late_ms: float, measured_ms: float, is_late: bool) -> None:
    taken = measures.latencies([sent(0, (measured_ms, 1), (2 * measured_ms, 1))])
    assert (measures.bottleneck(steady(late_ms), None, 0.0, taken) is not None) is is_late
    assert (measures.bottleneck(None, steady(late_ms), 0.0, taken) is not None) is is_late


def test_a_harness_that_was_the_bottleneck_reports_neither_latencies_nor_goodput_and_all_else() -> None:
    requests = [sent(1000, (1100, 1), (1120, 1))]
    for slow in (turn(requests, busy=0.97), turn(requests, late_ms=80)):
        found = phase(slow, slo=Slo(ttft_ms=200))
        assert found.lag.bottleneck is not None and "--processes" in found.lag.bottleneck
        assert found.latencies is None
        assert found.throughput.goodput_per_s is None and found.throughput.goodput_share is None
        assert found.throughput.tokens_per_s == 2 / 4
        assert found.counts.completed == 1
    shared_loop = phase(turn(requests, busy=0.97, late_ms=80), slo=Slo(ttft_ms=200), own_loop=False)
    assert shared_loop.throughput.goodput_share == 1.0
    assert shared_loop.latencies is not None, "what is late there may be the scheduler, which is measured"
    assert shared_loop.lag.loop is not None and shared_loop.lag.loop.p50 == near(80)


def test_nothing_measured_is_no_verdict() -> None:
    found = phase(Turn(job(), (Driven(loop_late_ns=[10**9]),), (), 0, 0))
    assert found.lag.bottleneck is None
    assert found.counts.offered == 0


def test_a_server_that_was_started_again_counts_from_nothing() -> None:
    idle = Load(0, 0, 10, 10, 0, 0, 0, 1, 0, 0, 0, accepting=True)
    counts = enumerate((900, 1000, 40))
    samples = [(START_NS + at * 10**9, replace(idle, generated_tokens=count)) for at, count in counts]
    assert [second.tokens_per_s for second in seconds(samples, START_NS)] == [100.0, 40.0]
