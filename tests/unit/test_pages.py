"""The page pool: every page in one place, always."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyloop_service.scheduler.pages import PagePool


def test_a_page_goes_from_free_to_reserved_to_held_and_back() -> None:
    pool = PagePool(10)
    pool.reserve(1, 6)
    assert pool.free == 4 and pool.stored(1) == 6 and pool.held(1) == 0
    pages = pool.take(1, 4)
    assert len(set(pages)) == 4 and pool.held(1) == 4 and pool.reserved(1) == 2
    pool.recycle(1, pages[:1])
    assert pool.free == 4 and pool.reserved(1) == 3
    pool.release(1, pages[1:2])
    assert pool.free == 5
    pool.hold_active(2, 5)
    assert pool.free == 0 and pool.num_active == 5
    pool.check()
    pool.release_owner(1)
    pool.drop_active(2)
    assert pool.free == 10
    pool.check()


def test_released_ids_are_reported_once() -> None:
    pool = PagePool(4)
    pool.reserve(1, 2)
    first = pool.take(1, 2)
    pool.recycle(1, first)
    again = pool.take(1, 2)
    pool.release_owner(1)
    assert set(again) == set(first)
    assert sorted(pool.take_returned()) == sorted(first)
    assert pool.take_returned() == ()


def test_misuse_is_a_bug() -> None:
    pool = PagePool(4)
    with pytest.raises(AssertionError):
        pool.reserve(1, 5)
    with pytest.raises(AssertionError):
        pool.take(1, 1)
    pool.reserve(1, 1)
    (page,) = pool.take(1, 1)
    with pytest.raises(AssertionError):
        pool.release(2, [page])
    with pytest.raises(AssertionError):
        pool.hold_active(3, 4)


@given(st.lists(st.tuples(st.sampled_from("rtxcadR"), st.integers(1, 3), st.integers(0, 5)), max_size=60))
def test_free_and_held_make_the_total(calls: list[tuple[str, int, int]]) -> None:
    pool = PagePool(12)
    held: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for call, owner, count in calls:
        if call == "r" and count <= pool.free:
            pool.reserve(owner, count)
        elif call == "t" and count <= pool.reserved(owner):
            held[owner] += pool.take(owner, count)
        elif call in "xc":
            pages, held[owner] = held[owner][:count], held[owner][count:]
            (pool.release if call == "x" else pool.recycle)(owner, pages)
        elif call == "a" and 0 < count <= pool.free and not pool.active(owner):
            pool.hold_active(owner, count)
        elif call == "d":
            pool.drop_active(owner)
        elif call == "R":
            pool.release_owner(owner)
            held[owner] = []
        pool.check()
    everything = [page for pages in held.values() for page in pages]
    assert len(everything) == len(set(everything))
