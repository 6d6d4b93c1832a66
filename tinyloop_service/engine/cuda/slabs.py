"""One memory for two sizes: slabs, each of them one large thing or up to `per_slab` small ones.

In the h modes a slab is as large as a page of K and V.  It holds such an *active* page, or as many *stored* pages as it
has room for.  A stored page's *place* says where: place = slab · per_slab + nth.

    free ──take──► active ──give──► free
    free ──place──► partly, wholly full of stored pages ──free──► free

Stored pages fill the fullest slab that has a hole, so that few slabs are partly full.  When slabs are taken and too few
are free, the emptiest partly full ones are emptied into the holes of the others: these are the *moves*, which whoever
takes must carry out before anything is written to the slabs.  All of them can be carried out at once, for no place is
both left and moved to.  Hence the promise: as long as stored + per_slab · active ≤ per_slab · num_slabs, there is room.

In: how many are wanted, and what is given back.  Out: slabs, places, moves.  Refuses to know what lies in a slab, whose
it is, and about the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

Slab = int
Slabs = NDArray[np.int32]
Place = int


@dataclass(frozen=True, slots=True)
class Move:
    """A stored page's place changes."""

    source: Place
    target: Place


class SlabPool:
    """`num_slabs` slabs, all free."""

    def __init__(self, num_slabs: int, per_slab: int) -> None:
        self.num_slabs, self.per_slab = num_slabs, per_slab
        self._free = np.arange(num_slabs - 1, -1, -1, dtype=np.int32)  # a stack of `num_free`
        self.num_free = num_slabs
        self._is_active = np.zeros(num_slabs, np.bool_)
        self.num_active = self.num_stored = 0
        self._holes = [(1 << per_slab) - 1] * num_slabs  # a bit for every nth that is free; meaningless where active
        self._by_stored: list[dict[Slab, None]] = [{} for _ in range(per_slab + 1)]  # that hold 1 … per_slab pages

    @property
    def num_places_left(self) -> int:
        """Stored pages that there is room for."""
        return self.per_slab * (self.num_slabs - self.num_active) - self.num_stored

    def take(self, count: int) -> tuple[Slabs, list[Move]]:
        """`count` slabs for active pages, and the moves that made them free."""
        assert count * self.per_slab <= self.num_places_left, (
            f"{count} slabs wanted, {self.num_slabs} hold {self.num_active} active and {self.num_stored} stored pages, "
            f"{self.per_slab} in a slab"
        )
        moves = self._compact(count - self.num_free)
        self.num_free -= count
        self.num_active += count
        slabs = self._free[self.num_free : self.num_free + count].copy()
        self._is_active[slabs] = True
        return slabs, moves

    def give(self, slabs: Slabs) -> None:
        """Active pages are gone."""
        assert self._is_active[slabs].all(), "a slab is given back that holds no active page"
        self._is_active[slabs] = False
        self._free[self.num_free : self.num_free + len(slabs)] = slabs
        self.num_free += len(slabs)
        self.num_active -= len(slabs)

    def place(self, count: int) -> list[Place]:
        """Places for `count` stored pages."""
        assert count <= self.num_places_left, f"{count} places wanted, {self.num_places_left} left"
        return self._places(count)

    def free(self, places: Iterable[Place]) -> list[Slab]:
        """Stored pages are gone; the slabs that are free now."""
        return [slab for slab in map(self._leave, places) if self._is_empty(slab)]

    def check(self) -> None:
        """Every slab is in one state, and its holes are those that the state says."""
        free, active = self._free[: self.num_free], self._is_active.nonzero()[0]
        assert len(active) == self.num_active and not self._by_stored[0]
        counted = sorted([*chain.from_iterable(self._by_stored), *free.tolist(), *active.tolist()])
        assert counted == list(range(self.num_slabs)), "a slab is lost, or in two states"
        assert all(map(self._is_empty, free))
        for stored, slabs in enumerate(self._by_stored):
            assert all(self.per_slab - self._holes[slab].bit_count() == stored for slab in slabs)
        assert self.num_stored == sum(stored * len(slabs) for stored, slabs in enumerate(self._by_stored))

    def _places(self, count: int) -> list[Place]:
        places: list[Place] = []
        while len(places) < count:
            places += self._fill(self._take_fullest(), count - len(places))
        return places

    def _take_fullest(self) -> Slab:
        """Of the slabs with a hole, those that are free last of all; it is in no state from here on."""
        partly = next((slabs for slabs in reversed(self._by_stored[:-1]) if slabs), None)
        if partly is not None:
            return partly.popitem()[0]
        self.num_free -= 1
        return int(self._free[self.num_free])

    def _fill(self, slab: Slab, count: int) -> list[Place]:
        """At most `count` of its holes."""
        holes, first = self._holes[slab], slab * self.per_slab
        filled = [nth for nth in range(self.per_slab) if holes >> nth & 1][:count]
        stored = self.per_slab - holes.bit_count()
        self._holes[slab] = holes ^ sum(1 << nth for nth in filled)
        self._by_stored[stored + len(filled)][slab] = None
        self.num_stored += len(filled)
        return [first + nth for nth in filled]

    def _leave(self, place: Place) -> Slab:
        slab, nth = divmod(place, self.per_slab)
        stored = self.per_slab - self._holes[slab].bit_count()
        assert not (self._is_active[slab] or self._holes[slab] >> nth & 1), f"nothing is stored at place {place}"
        self._holes[slab] ^= 1 << nth
        del self._by_stored[stored][slab]
        if stored == 1:
            self._empty(slab)
        else:
            self._by_stored[stored - 1][slab] = None
        self.num_stored -= 1
        return slab

    def _empty(self, slab: Slab) -> None:
        self._free[self.num_free] = slab
        self.num_free += 1

    def _is_empty(self, slab: Slab) -> bool:
        return self._holes[slab].bit_count() == self.per_slab

    def _compact(self, missing: int) -> list[Move]:
        """Empty the `missing` emptiest slabs that hold something; those stay out of the way of what they held."""
        if missing <= 0:
            return []
        emptied = [slab for _, slab in zip(range(missing), self._holding(), strict=False)]
        sources = [place for slab in emptied for place in self._stored_in(slab)]
        for slab in emptied:
            del self._by_stored[self.per_slab - self._holes[slab].bit_count()][slab]
        self.num_stored -= len(sources)
        moves = [Move(source, target) for source, target in zip(sources, self._places(len(sources)), strict=True)]
        for slab in emptied:
            self._holes[slab] = (1 << self.per_slab) - 1
            self._empty(slab)
        return moves

    def _holding(self) -> Iterator[Slab]:
        """Slabs with something stored, the emptiest first."""
        for slabs in self._by_stored[1:]:
            yield from slabs

    def _stored_in(self, slab: Slab) -> Iterator[Place]:
        for nth in range(self.per_slab):
            if not self._holes[slab] >> nth & 1:
                yield slab * self.per_slab + nth
