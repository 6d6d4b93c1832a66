"""Who takes part in the next plan, and with how much.

In: rows and prompt tokens that are ready to run.  Out: a filled draft.  It refuses to know admission and results.

Builds never stop a stream: while rows decode, prompt tokens get a share of a plan's time (`pace.py`), and every row
that decodes is in every plan.  Few prompt tokens may wait some plans for others (`gathering.py`).  Among prompts the
oldest gets half of what there is and the rest goes to the shortest, so a suffix of ten tokens does not wait behind a
long build, and the long build still moves.
"""

from __future__ import annotations

from collections.abc import Collection

from tinyloop_service.engine.api import Limits
from tinyloop_service.scheduler.draft import Draft
from tinyloop_service.scheduler.gathering import Gathering
from tinyloop_service.scheduler.pace import Pace
from tinyloop_service.scheduler.requests import Requests
from tinyloop_service.scheduler.sequences import Feed, Sequences
from tinyloop_service.settings import SchedulerSettings


def share_out(feeds: Collection[Feed], budget: int) -> list[tuple[Feed, int]]:
    """Tokens for each feed, their sum at most `budget`; feeds that get none are left out."""
    if not feeds or not budget:
        return []
    oldest = min(feeds, key=lambda feed: feed.order)
    left = budget - min(oldest.remaining, -(-budget // 2))
    shares = []
    for feed in sorted((feed for feed in feeds if feed is not oldest), key=lambda feed: (feed.remaining, feed.order)):
        count = min(feed.remaining, left)
        if not count:
            break
        shares.append((feed, count))
        left -= count
    used = sum(count for _, count in shares)
    return [(oldest, min(oldest.remaining, budget - used)), *shares]


def compose(
    draft: Draft,
    sequences: Sequences,
    requests: Requests,
    limits: Limits,
    settings: SchedulerSettings,
    pace: Pace,
    gathering: Gathering,
    is_busy: bool,
) -> None:
    """Fill the draft.  `is_busy`: somebody waits for the next plan, or is likely to.

    Rows that become ready by it decode in the next one; where the engine goes on, in this one if others do: alone they
    would wait for their first token.
    """
    starting, decoding = list(requests.starting.values()), list(requests.decoding.values())
    feeds = list(sequences.feeds.values())
    for row in starting:
        draft.open(row.sequence, requests.drawing(row))
        draft.first(row.sequence)
        requests.started(row)
    num_steps, budget = 1, limits.max_chunk
    if decoding:
        most = limits.busy_steps if is_busy or starting or feeds else limits.max_steps
        num_steps = min(most, settings.steps_per_plan, max(row.num_left for row in decoding))
        if gathering.waits(feeds, len(decoding), num_steps):
            budget = 0
        else:
            budget = pace.take(sum(feed.remaining for feed in feeds), len(decoding), num_steps)
    for feed, count in share_out(feeds, budget):
        last = count == feed.remaining
        draft.feed(feed, count)
        if last:
            sequences.fed(feed)
            requests.fed(feed.sequence.id)
    if decoding:
        if len(requests.decoding) <= limits.goes_on:
            decoding = list(requests.decoding.values())
        draft.decode((row.sequence for row in decoding), num_steps)
        requests.stepped(decoding, num_steps)
