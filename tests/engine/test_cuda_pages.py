"""What page ids mean in h modes: in any history of plans, some of which fail before they are launched, every sequence
finds its pages where the device's tables say, and all memory comes back.

The device is a dictionary: what is stored and what is read of a page is its sequence, block and layer, by name.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pytest
from emulation.device import EmulatedDevice
from test_small_cases import PLAIN

from tinyloop_service.engine.api import Block, Clone, Extend, Open
from tinyloop_service.engine.cuda.memory import Arena, Layout
from tinyloop_service.engine.cuda.pages import Changes, SlabPages
from tinyloop_service.engine.cuda.rebuild import Rebuild, RebuildTables
from tinyloop_service.engine.cuda.sequences import Sequence, SequenceTable
from tinyloop_service.engine.cuda.slabs import SlabPool
from tinyloop_service.engine.cuda.staging import Staging
from tinyloop_service.types import CacheMode, Sampling

SLOTS, SLABS, PER_SLAB, LOOPS = 40, 12, 5, 1  # two layers: slabs do not come out even
LAYERS, BLOCKS = PLAIN.cache_layers(LOOPS), 4
PAGE = 64
Failure = Literal["", "planned", "begun"]  # when a plan fails, if it does
Named = tuple[int, int, int]  # sequence, block, layer


@dataclass
class Held:
    """A sequence as whoever plans knows it."""

    id: int
    parent: Held | None
    is_prefix: bool
    length: int
    blocks: list[Block] = field(default_factory=list)
    first_block: int = 0
    active: bool = True

    def chain(self) -> list[Held]:
        return [*(self.parent.chain() if self.parent else ()), self]

    @property
    def pages(self) -> int:
        return len(self.blocks) * LAYERS


class Plans:
    """A walk through everything that a scheduler may plan."""

    def __init__(self, seed: int = 0) -> None:
        self.device = device = EmulatedDevice()
        arena = Arena(device, PLAIN, Layout.of(CacheMode.H_FP16, PLAIN), SLOTS)
        self.table = SequenceTable(SLOTS, PLAIN.cache_layers(PLAIN.max_loops), BLOCKS)
        self.slabs = SlabPool(SLABS, PER_SLAB)
        self.pages = SlabPages(PLAIN, self.table, self.slabs, places_index=arena.places_index)
        self.arena, self.staging, self.pick = arena, Staging(device, 64), random.Random(seed)
        self.stored: dict[int, Named] = {}  # by place
        self.read: dict[int, Named] = {}  # by slab
        self.held: dict[int, Held] = {}
        self.free_ids = list(range(SLABS * PER_SLAB))
        self.closing: list[int] = []
        self.next_id = self.num_moves = self.num_failed = 0

    def step(self) -> None:
        doing = self.pick.choice((*[self.open] * 8, self.close, self.deactivate, self.drop, self.crowd))
        doing()
        self.check()

    # ---- what may be asked for

    @property
    def left(self) -> int:
        """Of the budget, in stored pages."""
        used = sum(held.pages * (held.is_prefix + PER_SLAB * held.active) for held in self.held.values())
        return SLABS * PER_SLAB - used

    def revival(self, chain: list[Held]) -> int:
        return sum(PER_SLAB * held.pages for held in chain if not held.active)

    def leaves(self) -> list[int]:
        parents = {held.parent.id for held in self.held.values() if held.parent}
        return sorted(self.held.keys() - parents)

    def users(self, prefix: Held) -> bool:
        return any(prefix in held.chain() for held in self.held.values() if not held.is_prefix)

    # ---- plans

    def open(self) -> None:
        """Off a prefix, whose chain is made active, or off none; a prefix that is not used is mostly deactivated."""
        parents = [None, None, None, *(held for held in self.held.values() if held.is_prefix)]
        is_prefix, fails = self.pick.random() < 0.7, self.failure(0.2)
        held = self.begin(self.pick.choice(parents), is_prefix, self.pick.choice((9, 64, 130)), fails=fails)
        if held is not None and is_prefix and not fails and self.pick.random() < 0.7:
            self.idle(held)

    def crowd(self) -> None:
        """Memory is full of short prefixes, some go, and what comes has to make room in between."""
        while (held := self.begin(None, True, 9)) is not None:
            self.idle(held)
        for seq in self.leaves():
            if self.pick.random() < 0.6:
                self.forget(self.held[seq])
        self.begin(None, False, 200, fails=self.failure(0.4))

    def failure(self, share: float) -> Failure:
        return self.pick.choice(("planned", "begun")) if self.pick.random() < share else ""

    def idle(self, held: Held) -> None:
        held.active = False
        self.plan([], deactivate=[held.id, 999])

    def begin(self, parent: Held | None, is_prefix: bool, tokens: int, *, fails: Failure = "") -> Held | None:
        """A new sequence, unless there is no room for it."""
        start = parent.length if parent else 0
        end = min(start + tokens, BLOCKS * PAGE)
        chain = parent.chain() if parent else []
        count = -(-end // PAGE) - start // PAGE
        is_full = len(self.held) + len(self.closing) == SLOTS
        if is_full or end == start or self.revival(chain) + count * LAYERS * (is_prefix + PER_SLAB) > self.left:
            return None
        self.next_id += 1
        held = Held(self.next_id, parent, is_prefix, start, first_block=start // PAGE)
        opening = Open(held.id, parent.id if parent else None, start, LOOPS, 0, None if is_prefix else Sampling())
        blocks = tuple(tuple(self.free_ids.pop() for _ in range(LAYERS)) for _ in range(count))
        clones = []
        if parent and start % PAGE:
            clones = [Clone(held.id, parent.blocks[-1], blocks[0], start % PAGE)]
        self.held[held.id] = held
        held.blocks, held.length = list(blocks), end
        idle = [each for each in chain if not each.active]
        self.plan([held], opening, Extend(held.id, blocks), clones, idle, fails)
        return held

    def close(self) -> None:
        """Some; their pages are free at once, and the engine hears of it in the next plan."""
        share = self.pick.random()
        for seq in self.leaves():
            if self.pick.random() < share:
                self.forget(self.held[seq])

    def deactivate(self) -> None:
        idle = [held for held in self.held.values() if held.is_prefix and held.active and not self.users(held)]
        if idle:
            self.idle(self.pick.choice(idle))

    def drop(self) -> None:
        """Its first block slides out of the window."""
        wide = [held for held in self.held.values() if len(held.blocks) > 1]
        if wide:
            held = self.pick.choice(wide)
            self.free_ids += held.blocks.pop(0)
            held.first_block += 1
            self.plan([], drop=[held])

    def forget(self, held: Held) -> None:
        del self.held[held.id]
        self.closing.append(held.id)
        for block in held.blocks:
            self.free_ids += block

    def plan(
        self,
        named: list[Held],
        opening: Open | None = None,
        extension: Extend | None = None,
        clones: list[Clone] | None = None,
        activate: list[Held] | None = None,
        fails: Failure = "",
        deactivate: list[int] | None = None,
        drop: list[Held] | None = None,
    ) -> None:
        """As the Planner, and as the Machine unless it fails in between."""
        self.staging.clear()
        closing, self.closing = self.closing, []
        for seq in closing:
            if (closed := self.table.close(seq)) is not None:
                self.pages.release(closed.blocks)
        for seq in deactivate or []:
            if (sequence := self.table.peek(seq)) is not None:
                self.pages.deactivate(sequence)
        copied = []
        if opening:
            sequence = self.table.open(opening)
            self.pages.open(sequence)
            copied = [(sequence.slot, sequence.parent.slot)] if sequence.parent else []
        extended, _ = self.table.extend([extension] if extension else [])
        activated = [self.table[held.id] for held in activate or []]
        changes = self.pages.change(extended, activated, [], clones or [], self.staging)
        for held in activate or []:
            held.active = True
        for held in named:
            self.table[held.id].length = held.length
        if fails != "planned":
            self.begin_launch(changes)
        if fails:
            self.num_failed += 1
            self.closing = closing  # repeated
            lost = {held.id for held in (*named, *(activate or []))}
            for held in [*self.held.values()][::-1]:  # and what hangs from it
                if any(each.id in lost for each in held.chain()):
                    self.forget(held)
            return
        self.launch(changes, copied)
        for held in named:
            self.fill(self.table[held.id])
        for clone in clones or []:
            assert (self.pages.find(np.array(clone.source)) >= 0).all()
        for held in drop or []:
            self.pages.release(self.table.drop(held.id, held.first_block))

    def begin_launch(self, changes: Changes) -> None:
        self.staging.send()
        for section in changes.stored.moved if changes.stored else ():
            moves = self.staging.there(section).tolist()
            self.num_moves += len(moves)
            moved = [(self.stored[source], target) for source, target, _ in moves if source in self.stored]
            self.stored.update({target: name for name, target in moved})
        self.pages.begun()

    def launch(self, changes: Changes, copied: list[tuple[int, int]]) -> None:
        stored, words, there = changes.stored, self.arena.words, self.staging.there
        for target, source in copied:
            self.arena.table_rows[target] = self.arena.table_rows[source]
        if stored:
            for target, source in there(stored.cleared):
                self.arena.place_rows[target] = self.arena.place_rows[source]
        index, value = changes.written.T
        assert len(set(index.tolist())) == len(index), "a word is written twice"
        words[index] = value
        if stored:
            assert all(tokens in range(1, PAGE) for _, _, tokens in there(stored.cloned).tolist())
            for rebuilt in stored.rebuilt:
                self.rebuild(rebuilt, there(stored.zeroed).tolist())
        self.pages.launched()

    def rebuild(self, rebuilt: Rebuild, zeroed: list[int]) -> None:
        num_pages = rebuilt.shape.num_pages(PLAIN)
        words = self.device.zeros((rebuilt.words.size,), np.int32)
        self.staging.copy_to(words, rebuilt.words)
        tables = RebuildTables.cut(words, num_pages)
        self.arena.words[tables.named[:, 0]] = tables.named[:, 1]
        for (kind, inner), batch in rebuilt.shape.batches(PLAIN, 3):
            assert batch.stop - batch.start <= 3
            for page in range(batch.start, batch.stop):
                seq, block, layer = self.stored[int(tables.places[page])]
                assert (layer, kind, inner) in PLAIN.schedule(LOOPS)
                assert np.array_equal(tables.positions[page], block * PAGE + np.arange(PAGE))
                count = min(PAGE, self.held[seq].length - block * PAGE)
                slot = self.table[seq].slot
                of_layer = slot * self.table.max_layers + layer
                assert tables.slots[page].tolist() == [of_layer] * count + [-1] * (PAGE - count)
                slab = int(self.arena.tables[slot, layer, block])
                self.read[slab] = (seq, block, layer)
                assert (count < PAGE) == (slab in zeroed)

    def fill(self, sequence: Sequence) -> None:
        """What a prompt pass writes, where the device's tables say."""
        for nth in range(len(sequence.blocks)):
            block = sequence.first_block + nth
            for layer in range(LAYERS):
                self.read[int(self.arena.tables[sequence.slot, layer, block])] = (sequence.id, block, layer)
                place = int(self.arena.places[sequence.slot, layer, block])
                assert (place >= 0) == sequence.is_prefix, "h of a request is stored, or that of a prefix is not"
                if place >= 0:
                    self.stored[place] = (sequence.id, block, layer)

    # ---- what must hold

    def check(self) -> None:
        self.slabs.check()
        if self.closing:
            return  # there are lost sequences
        for held in self.held.values():
            slot = self.table[held.id].slot
            if all(each.active for each in held.chain()):
                for each in held.chain():
                    whole = each.length // PAGE if each is not held else each.first_block + len(each.blocks)
                    for block in range(each.first_block, whole):
                        for layer in range(LAYERS):
                            slab = int(self.arena.tables[slot, layer, block])
                            assert self.read[slab] == (each.id, block, layer), f"sequence {held.id} reads another page"
            for block in range(held.first_block, held.first_block + len(held.blocks)):
                for layer in range(LAYERS):
                    place = int(self.arena.places[slot, layer, block])
                    assert (place >= 0) == held.is_prefix
                    assert not held.is_prefix or self.stored[place] == (held.id, block, layer)
        active = sum(held.pages for held in self.held.values() if held.active)
        stored = sum(held.pages for held in self.held.values() if held.is_prefix)
        assert (self.pages.num_active, self.pages.num_stored) == (active, stored), "memory does not come back"


@pytest.mark.parametrize("seed", range(6))
def test_every_page_is_found_in_any_history(seed: int) -> None:
    plans = Plans(seed)
    for _ in range(400):
        plans.step()
    assert plans.num_moves > 9 and plans.num_failed > 9, "the walk says little"
    while plans.held:
        plans.forget(plans.held[plans.leaves()[0]])
    plans.plan([])
    assert (plans.pages.num_active, plans.pages.num_stored, plans.slabs.num_places_left) == (0, 0, SLABS * PER_SLAB)


def test_a_request_has_no_inactive_form() -> None:
    plans = Plans()
    held = Held(1, None, is_prefix=False, length=10, blocks=[tuple(plans.free_ids.pop() for _ in range(LAYERS))])
    plans.held[1] = held
    plans.plan([held], Open(1, None, 0, LOOPS, 0, Sampling()), Extend(1, tuple(held.blocks)))
    with pytest.raises(AssertionError, match="sequence 1 is a request's"):
        plans.pages.deactivate(plans.table[1])


def test_reading_what_is_not_active_is_a_bug_that_says_so() -> None:
    plans = Plans()
    held = Held(1, None, is_prefix=True, length=10, blocks=[tuple(plans.free_ids.pop() for _ in range(LAYERS))])
    plans.held[1] = held
    plans.plan([held], Open(1, None, 0, LOOPS, 0, None), Extend(1, tuple(held.blocks)))
    plans.pages.deactivate(plans.table[1])
    with pytest.raises(AssertionError, match=r"page \d+ is read or copied but not active"):
        plans.pages.find(np.array(held.blocks))
