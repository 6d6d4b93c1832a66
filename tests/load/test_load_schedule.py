"""What is asked and when follows from workload, seed and index alone."""

from __future__ import annotations

from collections import Counter
from statistics import fmean
from typing import Any

import pytest

from tinyloop_service.load.schedule import Draws, arrivals_ns, draw_length, stream
from tinyloop_service.load.workload import Length, parse_workload

BASE: dict[str, Any] = {"about": "x", "prefixes": 4, "prefix_len": 100, "suffix_len": [5, 9], "output_len": [10, 20]}


def draws(seed: int = 0, **changes: Any) -> Draws:
    return Draws(parse_workload("test", {**BASE, **changes}), seed)


def test_arrivals_are_a_seed_s_own_and_in_order() -> None:
    times = arrivals_ns(50.0, 10.0, 3)
    assert times == arrivals_ns(50.0, 10.0, 3) != arrivals_ns(50.0, 10.0, 4)
    assert list(times) == sorted(times)
    assert times[0] >= 0 and times[-1] < 10 * 10**9


def test_arrivals_are_a_poisson_process() -> None:
    counts = [len(arrivals_ns(3.0, 8.0, seed)) for seed in range(1000)]
    mean = fmean(counts)
    variance = fmean((count - mean) ** 2 for count in counts)
    assert abs(mean - 24) < 5 * (24 / 1000) ** 0.5, "five standard errors"
    assert 19 < variance < 29, "as large as the mean, five standard errors of which are 5.4"


def test_a_longer_schedule_begins_like_a_shorter_one() -> None:
    short, long = arrivals_ns(10.0, 5.0, 1), arrivals_ns(10.0, 5.2, 1)
    assert long[: len(short)] == short


def test_a_request_is_its_index_s_own() -> None:
    several = [draws().at(index) for index in range(50)]
    assert [draws().at(index) for index in reversed(range(50))] == several[::-1]
    assert several != [draws(seed=1).at(index) for index in range(50)]
    assert {drawn.suffix_len for drawn in several} == {5, 6, 7, 8, 9}
    assert all(10 <= drawn.output_len <= 20 and drawn.hang_up_after is None for drawn in several)


def test_popularity_falls_with_the_rank_to_the_exponent() -> None:
    found = Counter(draws(zipf=1.0).at(index).prefix for index in range(4000))
    total = 1 + 1 / 2 + 1 / 3 + 1 / 4
    for rank in range(4):
        expected = 4000 / total / (rank + 1)
        assert abs(found[rank] - expected) < 5 * expected**0.5, rank


def test_dealt_prefixes_come_exactly_so_often_and_shuffled() -> None:
    dealt = draws(requests_per_prefix=16)
    prefixes = [dealt.at(index).prefix for index in range(128)]
    assert Counter(prefixes[:64]) == Counter(prefixes[64:]) == dict.fromkeys(range(4), 16)
    assert prefixes[:64] != prefixes[64:]
    assert prefixes[:64] != sorted(prefixes[:64], key=lambda prefix: prefix or 0)


def test_shares_are_kept() -> None:
    assert all(draws(cold_share=1.0).at(index).prefix is None for index in range(20))
    hasty = [draws(cancel_rate=0.5).at(index) for index in range(1000)]
    points = [drawn.hang_up_after / drawn.output_len for drawn in hasty if drawn.hang_up_after is not None]
    assert abs(len(points) - 500) < 5 * 250**0.5
    assert all(0 <= point < 1 for point in points)
    assert min(points) < 0.1 and max(points) > 0.9, "at any point of the output, the first included"


@pytest.mark.parametrize("length", [Length(7, 7), Length(0, 3), Length(1, 200, 40.0, 0.8)])
def test_lengths_stay_in_their_bounds(length: Length) -> None:
    found = [draw_length(length, stream(0, 1, index)) for index in range(500)]
    assert min(found) >= length.low and max(found) <= length.high
    if length.median is not None:
        below = sum(each < length.median for each in found)
        assert abs(below - 250) < 5 * 125**0.5 + 25, "half of them, but for what is rounded to it"
    else:
        assert {*found} == {*range(length.low, length.high + 1)}
