"""Hypothesis for as many inputs as one likes: in rounds, because it remembers every draw of a round."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

T = TypeVar("T")
_ROUND = 500


def in_rounds(inputs: int, number: int, strategy: SearchStrategy[T], check: Callable[[T], None]) -> None:
    """`check` with so many, the same ones for the same `number`.  Raises what it raised for the smallest that does."""
    for first in range(0, inputs, _ROUND):
        _round(min(_ROUND, inputs - first), number * 10**6 + first, strategy, check)


def _round(inputs: int, number: int, strategy: SearchStrategy[T], check: Callable[[T], None]) -> None:
    @seed(number)
    @settings(
        max_examples=inputs,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(strategy)
    def example(drawn: T) -> None:
        check(drawn)

    example()


def largest_size() -> int:
    """Bytes that this process has had in memory at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
