"""Slabs: whatever is taken and given back, there is room while the count says so, and nothing is lost in a move."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tinyloop_service.engine.cuda.slabs import Move, SlabPool


class Slabs(RuleBasedStateMachine):
    """Against a memory of bytes: what is stored is written to its place, and must be found there after every move."""

    @initialize(num_slabs=st.integers(0, 12), per_slab=st.integers(1, 7))
    def begin(self, num_slabs: int, per_slab: int) -> None:
        self.pool = SlabPool(num_slabs, per_slab)
        self.memory: dict[int, int] = {}  # by place
        self.stored: dict[int, int] = {}  # name → place
        self.active: list[int] = []
        self.next_name = 0

    @property
    def left(self) -> int:
        pool = self.pool
        return pool.per_slab * (pool.num_slabs - len(self.active)) - len(self.stored)

    @rule(data=st.data())
    def place(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.left))
        for place in self.pool.place(count):
            self.stored[self.next_name] = place
            self.memory[place] = self.next_name
            self.next_name += 1

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.stored)), unique=True)) if self.stored else []
        places = [self.stored.pop(name) for name in names]
        freed = self.pool.free(places)
        holding = {place // self.pool.per_slab for place in self.stored.values()}
        assert sorted(freed) == sorted({place // self.pool.per_slab for place in places} - holding)

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.left // self.pool.per_slab))
        slabs, moves = self.pool.take(count)
        assert len(set(slabs)) == count
        self.carry_out(moves)
        self.active += slabs.tolist()
        for slab in slabs:  # whoever has it writes to all of it
            for place in range(slab * self.pool.per_slab, (slab + 1) * self.pool.per_slab):
                self.memory[place] = -1

    def carry_out(self, moves: list[Move]) -> None:
        """All at once; only what moves and nothing that stays is written over."""
        assert not {move.source for move in moves} & {move.target for move in moves}
        taken = set(self.stored.values())
        names = {place: name for name, place in self.stored.items()}
        for move in moves:
            assert move.source in taken and move.target not in taken
            self.memory[move.target] = self.memory[move.source]
            self.stored[names[move.source]] = move.target

    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        slabs = data.draw(st.lists(st.sampled_from(self.active), unique=True)) if self.active else []
        self.active = [slab for slab in self.active if slab not in slabs]
        self.pool.give(np.array(slabs, np.int32))

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        per_slab = self.pool.per_slab
        assert len(set(self.stored.values())) == len(self.stored) == self.pool.num_stored
        assert not {place // per_slab for place in self.stored.values()} & set(self.active)
        assert all(self.memory[place] == name for name, place in self.stored.items())
        assert self.pool.num_places_left == self.left


Slabs.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestSlabs = Slabs.TestCase


def test_few_slabs_are_partly_full() -> None:
    """What is stored goes into the fullest slab with a hole, so whole slabs stay free as long as they can."""
    pool = SlabPool(4, 3)
    places = pool.place(7)
    assert [place // 3 for place in places].count(places[0] // 3) == 3
    pool.free([places[1], places[6]])
    assert pool.place(1) == [places[1]], "not a new slab"
    slabs, moves = pool.take(2)
    assert len(slabs) == 2 and moves == []


def test_the_emptiest_slabs_are_emptied() -> None:
    pool = SlabPool(3, 3)
    places = pool.place(9)
    kept = [places[0], places[3], places[4], places[6], places[7]]
    pool.free(sorted(set(places) - set(kept)))
    slabs, moves = pool.take(1)
    assert slabs == [places[0] // 3] and [move.source for move in moves] == [places[0]]


def test_more_than_there_is_room_for_is_a_bug_that_says_so() -> None:
    pool = SlabPool(3, 2)
    pool.place(3)
    with pytest.raises(AssertionError, match="2 slabs wanted, 3 hold 0 active and 3 stored pages, 2 in a slab"):
        pool.take(2)
    active, _ = pool.take(1)
    with pytest.raises(AssertionError, match="2 places wanted, 1 left"):
        pool.place(2)
    (slab,) = active.tolist()
    with pytest.raises(AssertionError, match="nothing is stored at place"):
        pool.free([2 * slab])
    pool.give(active)
    with pytest.raises(AssertionError, match="a slab is given back that holds no active page"):
        pool.give(active)
