"""The engine's pace: how many prompt tokens a plan may carry beside rows that decode.

In: plans that ran, and how long each took.  Out: a number of prompt tokens.  It refuses to know clocks, and who waits.

Who decodes gets nothing before a plan ends.  With k decode steps of s, and n prompt tokens of d each, a plan takes
k·s + n·d, of which prompt tokens may take `share`; so beside them streams slow down by 1 / (1 − share) and no more:

    n = share / (1 − share) · k·s / d      never below the engine's least_chunk, nor above half its max_chunk

s is known from plans that only decode; d from those that did both and had at least least_chunk prompt tokens, for fewer
cost nearly as much.  Of the last few values the least is s (fewer rows than were seen: in proportion), and the median
is d: both follow a machine that others use too, but not the one plan during which it stood still, or compiled, and
where in doubt streams are spared.  What is not known yet is taken for dear: least_chunk.

While only plans are run that do both, s cannot be seen, so that now and then one of them has no prompt tokens.
"""

from __future__ import annotations

from collections import deque
from statistics import median_high

from tinyloop_service.engine.api import Limits, Plan

_NUM_STEPS = 3  # values that are kept
_NUM_CHUNKS = 5
_LOOK_EVERY = 8  # plans that do both, after which one only decodes
_CREDIBLE = 0.75  # of their share of a plan's time, prompt tokens took at least: a step thought too dear hides them


class Pace:
    """`learn` from every plan that ran; `take` for every one that does both."""

    def __init__(self, limits: Limits, share: float) -> None:
        self._most = max(1, limits.max_chunk // 2)
        self.least = min(limits.least_chunk, self._most)  # prompt tokens that any plan may carry
        self._share = share
        self._steps: deque[tuple[int, float]] = deque(maxlen=_NUM_STEPS)  # rows, nanoseconds
        self._tokens_ns: deque[float] = deque(maxlen=_NUM_CHUNKS)
        self._num_both = 0  # plans since one only decoded

    def take(self, num_wanted: int, num_rows: int, num_steps: int) -> int:
        """Of so many prompt tokens that are ready, those for a plan in which so many rows take so many steps."""
        most = self._affordable(num_rows, num_steps)
        if num_wanted <= most:
            return num_wanted
        self._num_both = (self._num_both + 1) % _LOOK_EVERY
        return most if self._num_both else 0

    def learn(self, plan: Plan, took_ns: int) -> None:
        """A plan has ended, that long after it began or the one before it ended."""
        num_rows, num_tokens = len(plan.decode), plan.num_prompt_tokens
        if not num_rows or moves_state(plan):
            return
        if not num_tokens:
            self._steps.append((num_rows, took_ns / plan.num_steps))
        elif num_tokens >= self.least:
            steps_ns = plan.num_steps * self.step_ns(num_rows)
            tokens_ns = max(took_ns - steps_ns, _CREDIBLE * self._share * took_ns, 1.0)
            self._tokens_ns.append(tokens_ns / num_tokens)

    def _affordable(self, num_rows: int, num_steps: int) -> int:
        if not self._tokens_ns:
            return self.least
        budget_ns = num_steps * self.step_ns(num_rows) * self._share / (1.0 - self._share)
        return max(self.least, min(self._most, int(budget_ns / median_high(self._tokens_ns))))

    def step_ns(self, num_rows: int) -> float:
        """Of a decode step: at least so much, as far as it is known."""
        return min((took_ns * min(1.0, num_rows / rows) for rows, took_ns in self._steps), default=0.0)


def moves_state(plan: Plan) -> bool:
    """It copied, or made an active form, which tells nothing of tokens; that of a prefix it opens costs nothing."""
    made = plan.activate and not {*plan.activate} <= {opened.seq for opened in plan.open}
    return bool(plan.save or plan.restore or made)
