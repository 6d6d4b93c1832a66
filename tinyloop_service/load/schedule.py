"""What is asked and when, drawn ahead from a seed: a workload, a seed and an index give the same request everywhere.

    open loop     `arrivals_ns`: a Poisson process, computed before the first request leaves
    requests      `Draws.at(index)`: prefix, lengths, and after how many tokens its caller hangs up

Every index is drawn by itself, so that processes share a schedule without talking, and both ways ask the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from tinyloop_service.load.workload import Length, Workload

ARRIVALS, REQUEST, DEAL, PREFIX_LEN, PREFIX, SUFFIX, BUILD = range(7)  # what a stream of random numbers is for


def stream(seed: int, purpose: int, *index: int) -> np.random.Generator:
    """The random numbers for one thing."""
    return np.random.default_rng((seed, purpose, *index))


def arrivals_ns(rate: float, seconds: float, seed: int) -> tuple[int, ...]:
    """When requests are due, from 0 to `seconds`: gaps are exponential with mean 1 / rate."""
    end_ns, times = seconds * 1e9, [0.0]
    source = stream(seed, ARRIVALS)
    while times[-1] < end_ns:
        gaps = source.exponential(1e9 / rate, size=max(16, int(rate * seconds) // 4))
        times = [*times[:-1], *accumulate(gaps.tolist(), initial=times[-1])]
    return tuple(int(time) for time in times[1:] if time < end_ns)


def draw_length(length: Length, source: np.random.Generator) -> int:
    if length.median is not None:
        drawn = round(length.median * float(np.exp(length.sigma * source.standard_normal())))
        return min(max(drawn, length.low), length.high)
    return int(source.integers(length.low, length.high, endpoint=True))


@dataclass(frozen=True, slots=True)
class Drawn:
    """One request of a workload; lengths in tokens."""

    index: int
    prefix: int | None  # which; None: one of its own, not kept
    suffix_len: int
    output_len: int
    hang_up_after: int | None  # tokens; 0: once it is admitted; None: its caller reads to the end


class Draws:
    """Requests by their index."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self._workload = workload
        self._seed = seed
        weights = np.arange(1, workload.prefixes + 1, dtype=float) ** -workload.zipf
        self._popularity = np.cumsum(weights / weights.sum())
        self._dealt: tuple[int, np.ndarray[tuple[int], np.dtype[np.int64]]] | None = None

    def at(self, index: int) -> Drawn:
        workload, source = self._workload, stream(self._seed, REQUEST, index)
        cold, choice, hangs_up, point = source.random(4).tolist()
        output_len = draw_length(workload.output_len, source)
        return Drawn(
            index=index,
            prefix=None if cold < workload.cold_share else self._prefix(index, choice),
            suffix_len=draw_length(workload.suffix_len, source),
            output_len=output_len,
            hang_up_after=int(point * output_len) if hangs_up < workload.cancel_rate else None,
        )

    def prefix_len(self, prefix: int) -> int:
        return draw_length(self._workload.prefix_len, stream(self._seed, PREFIX_LEN, prefix))

    def _prefix(self, index: int, choice: float) -> int:
        if self._workload.requests_per_prefix is None:
            return min(int(np.searchsorted(self._popularity, choice, side="right")), self._workload.prefixes - 1)
        deal, place = divmod(index, self._workload.prefixes * self._workload.requests_per_prefix)
        if self._dealt is None or self._dealt[0] != deal:
            cards = np.repeat(np.arange(self._workload.prefixes), self._workload.requests_per_prefix)
            self._dealt = deal, stream(self._seed, DEAL, deal).permutation(cards)
        return int(self._dealt[1][place])
