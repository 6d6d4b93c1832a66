"""Whether a few prompt tokens had better wait for others, so that one pass serves both.

An engine's pass over prompt tokens costs hardly less for few than for its least_chunk, and every row that decodes in
the same plan stands still for it.  Where requests come one after the other, a pass in every plan takes much of the
time.  To let those that are there wait for a plan costs each of them its time, and saves a pass if more come meanwhile:

    wait while   what they have waited, and will by one plan more   ≤   P(somebody comes) · rows · pass

In: plans that ran, and how long each took; sequences with prompt tokens to be fed.  Out: yes or no.  It refuses to know
clocks, and how many tokens a plan may have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from math import exp
from statistics import median

from tinyloop_service.engine.api import Plan
from tinyloop_service.scheduler.pace import Pace, moves_state
from tinyloop_service.scheduler.sequences import Feed

_NUM_PASSES = 5  # costs that are kept
_MOST_PLANS = 2  # that anybody waits
_OLD = 7 / 8  # of the rate of newcomers, how much a plan leaves of what was known before


class Gathering:
    """`learn` from every plan that ran; `waits` once for every one that is made while rows decode."""

    def __init__(self, pace: Pace) -> None:
        self._least, self._pace = pace.least, pace  # as many as any plan may carry
        self._passes_ns: deque[float] = deque(maxlen=_NUM_PASSES)
        self._newest = 0  # of the sequences that were seen
        self._rate = 0.0  # of newcomers a plan, of late
        self._waited_ns = 0.0  # by all that wait
        self._num_plans = 0  # that they wait

    def learn(self, plan: Plan, took_ns: int) -> None:
        """A plan has ended, that long after it began or the one before it ended."""
        if plan.decode and 0 < plan.num_prompt_tokens <= self._least and not moves_state(plan):
            steps_ns = plan.num_steps * self._pace.step_ns(len(plan.decode))
            self._passes_ns.append(max(0.0, took_ns - steps_ns))

    def waits(self, feeds: Collection[Feed], num_rows: int, num_steps: int) -> bool:
        """`feeds`: all that there are."""
        saved_ns = (1 - exp(-self._rate)) * num_rows * median(self._passes_ns or [0.0])  # in all likelihood
        self._count_new(feeds)
        waited_ns = self._waited_ns + len(feeds) * num_steps * self._pace.step_ns(num_rows)
        may_wait = self._num_plans < _MOST_PLANS and sum(feed.remaining for feed in feeds) < self._least
        if feeds and may_wait and 0 < saved_ns >= waited_ns:
            self._waited_ns = waited_ns
            self._num_plans += 1
            return True
        self._waited_ns, self._num_plans = 0.0, 0
        return False

    def _count_new(self, feeds: Collection[Feed]) -> None:
        num_new = sum(feed.sequence.id > self._newest for feed in feeds)
        self._newest = max((feed.sequence.id for feed in feeds), default=self._newest)
        self._rate = _OLD * self._rate + (1 - _OLD) * num_new
