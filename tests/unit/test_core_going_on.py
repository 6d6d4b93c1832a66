"""Rows that decode in the plan that draws their first token, where the engine goes on."""

from __future__ import annotations

import dataclasses

import pytest
from scheduler_driver import SMALL, Driver, tokens

from tinyloop_service.types import GenerationRequest


def test_rows_that_begin_beside_others_go_on_in_the_same_plan() -> None:
    """Off a prompt and off kept logits, in as many steps as the others take."""
    driver = Driver(dataclasses.replace(SMALL, goes_on=8))
    driver.create("p", tokens(70))
    driver.run()
    driver.submit(GenerationRequest((1, 2), 30))
    driver.run(until=lambda: bool(driver.plans[-1].decode))
    before = len(driver.plans)
    orders = [driver.submit(GenerationRequest(own, 9, prefix="p")) for own in ((), (3, 4, 5))]
    over = driver.submit(GenerationRequest((5,), 1))
    driver.step()
    plan = driver.plans[before]
    (first,), (second, third) = plan.first, [prefill.seq for prefill in plan.prefill]
    assert plan.num_steps == 1 and plan.decode[1:] == (first, second), f"{third} has all its tokens"
    assert [len(driver.requests[order].got[0]) for order in (*orders, over)] == [2, 2, 1]
    driver.run()
    assert all(watched.is_over for watched in driver.requests.values())


def test_rows_that_would_be_too_many_go_on_in_the_next_plan() -> None:
    driver = Driver(dataclasses.replace(SMALL, goes_on=2))
    for _ in range(3):
        driver.submit(GenerationRequest((1, 2), 30))
        driver.step()
    assert [len(plan.decode) for plan in driver.plans] == [0, 2, 2]


def test_rows_that_begin_alone_are_not_kept_from_their_first_token() -> None:
    driver = Driver(dataclasses.replace(SMALL, goes_on=8))
    driver.submit(GenerationRequest((1, 2), 12))
    driver.run()
    assert [(len(plan.prefill), len(plan.decode)) for plan in driver.plans[:2]] == [(1, 0), (0, 1)]


def test_a_row_whose_first_token_ends_it_goes_nowhere() -> None:
    driver = Driver(dataclasses.replace(SMALL, goes_on=8, eos_token_ids=tuple(range(0, 97, 2))))
    for i in range(12):
        driver.submit(GenerationRequest((1, i), 9))
        driver.step()
    driver.run()  # the driver knows what each should give
    lengths = {len(watched.got[0]) for watched in driver.requests.values()}
    assert all(watched.is_over for watched in driver.requests.values()) and 0 in lengths and len(lengths) > 2


@pytest.mark.parametrize("window", [1, 20, 64, 65])
def test_a_row_with_a_window_has_pages_for_a_chunk_and_steps(window: int) -> None:
    """In one plan, which drops nothing before its end."""
    driver = Driver(dataclasses.replace(SMALL, goes_on=8, max_steps=4, busy_steps=4))
    driver.submit(GenerationRequest((1, 2), 300))
    for _ in range(3):
        driver.step()
    for length in (60, 61, 64, 125, 127, 128):
        driver.submit(GenerationRequest(tokens(length), 6, cache_window=window))
        driver.run(until=lambda: len([1 for each in driver.requests.values() if not each.is_over]) == 1)
    driver.check()
