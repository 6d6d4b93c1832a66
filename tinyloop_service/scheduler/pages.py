"""The page pool: who holds which page, and how many are promised.

In: reservations, takes and releases by owner (a sequence id).  Out: page ids.  It refuses to know what lies in
a page and what an owner is.

Every page of the budget is in exactly one of these places:

    free ──reserve──► reserved by an owner ──take──► held by that owner (has an id)
      ▲                    │      ▲                          │
      ├────release_reserved┘      └──────────recycle─────────┤
      ├──────────────────────────────────────────────release─┘
      └──hold_active──► counted for an owner's active form (no id) ──drop_active──► free

Misuse is a bug of the scheduler, hence the assertions.
"""

from __future__ import annotations

from collections.abc import Iterable

Owner = int


class PagePool:
    """`num_pages` pages with ids 0 … num_pages−1.  `free` counts those that nobody holds or was promised."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.free = num_pages
        self._free_ids = list(range(num_pages - 1, -1, -1))  # a stack: a page given back is the next one taken
        self._held: dict[Owner, set[int]] = {}
        self._reserved: dict[Owner, int] = {}
        self._active: dict[Owner, int] = {}
        self._returned: list[int] = []

    def reserve(self, owner: Owner, count: int) -> None:
        """Promise `count` pages; the caller has seen that they are free."""
        assert 0 <= count <= self.free, f"{count} pages reserved with {self.free} free"
        self.free -= count
        self._reserved[owner] = self._reserved.get(owner, 0) + count

    def release_reserved(self, owner: Owner, count: int) -> None:
        assert 0 <= count <= self._reserved.get(owner, 0), f"owner {owner} has no {count} pages reserved"
        self._reserved[owner] = self._reserved.get(owner, 0) - count
        self.free += count

    def take(self, owner: Owner, count: int) -> tuple[int, ...]:
        """Turn reserved pages into ids."""
        assert 0 <= count <= self._reserved.get(owner, 0), f"owner {owner} takes {count} pages it did not reserve"
        self._reserved[owner] = self._reserved.get(owner, 0) - count
        first = len(self._free_ids) - count
        pages = tuple(reversed(self._free_ids[first:]))
        del self._free_ids[first:]
        self._held.setdefault(owner, set()).update(pages)
        return pages

    def release(self, owner: Owner, pages: Iterable[int]) -> None:
        """Give pages back to everyone."""
        self.free += self._put_back(owner, pages)

    def recycle(self, owner: Owner, pages: Iterable[int]) -> None:
        """Give ids back but keep the promise: the owner may take as many again."""
        self._reserved[owner] = self._reserved.get(owner, 0) + self._put_back(owner, pages)

    def release_owner(self, owner: Owner) -> None:
        """Give back all that an owner holds, reserved or has counted."""
        self.release(owner, tuple(self._held.get(owner, ())))
        self._held.pop(owner, None)
        self.free += self._reserved.pop(owner, 0)
        self.drop_active(owner)

    def hold_active(self, owner: Owner, count: int) -> None:
        """Count an active form against the budget."""
        assert 0 <= count <= self.free, f"an active form of {count} pages with {self.free} free"
        assert owner not in self._active, f"owner {owner} has an active form already"
        self.free -= count
        self._active[owner] = count

    def drop_active(self, owner: Owner) -> None:
        self.free += self._active.pop(owner, 0)

    def held(self, owner: Owner) -> int:
        """Pages with an id."""
        return len(self._held.get(owner, ()))

    def stored(self, owner: Owner) -> int:
        """Pages held or promised, active forms apart."""
        return self.held(owner) + self._reserved.get(owner, 0)

    def reserved(self, owner: Owner) -> int:
        return self._reserved.get(owner, 0)

    def active(self, owner: Owner) -> int:
        return self._active.get(owner, 0)

    @property
    def num_active(self) -> int:
        return sum(self._active.values())

    def take_returned(self) -> tuple[int, ...]:
        """The ids given back since the last call, each once even if it was taken and given back in between."""
        returned = tuple(dict.fromkeys(self._returned))
        self._returned.clear()
        return returned

    def check(self) -> None:
        """free + held = total, by count and by id; one owner per page."""
        promised = sum(self._reserved.values())
        held = [page for pages in self._held.values() for page in pages]
        assert min((0, *self._reserved.values(), *self._active.values())) == 0, "a negative holding"
        assert sorted([*self._free_ids, *held]) == list(range(self.num_pages)), "a page is lost or has two owners"
        total = self.free + len(held) + promised + self.num_active
        assert total == self.num_pages, f"{total} pages accounted for, {self.num_pages} exist"
        assert self.free + promised <= len(self._free_ids), "more pages promised than there are"

    def _put_back(self, owner: Owner, pages: Iterable[int]) -> int:
        held, pages = self._held.get(owner, set()), tuple(pages)
        left = len(held) - len(pages)
        held.difference_update(pages)
        assert len(held) == left, f"some of the pages {pages} are not owner {owner}'s to give back"
        self._free_ids.extend(pages)
        self._returned.extend(pages)
        return len(pages)
