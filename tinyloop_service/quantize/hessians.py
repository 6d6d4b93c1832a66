"""Sums of x xᵀ over the inputs of linears, one for each group of linears that read the same.

Products are float32, of a batch of windows at a time; sums over batches and loops are float64.  A product's rounding,
relative to its largest entries 2^-24 times the square root of a few thousand tokens, is far below the damping.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.trajectory import Array, Tap
from tinyloop_service.quantize.arrays import Arrays

Key = tuple[int, str]  # index of a block in its unit, name of an input group


@dataclass(frozen=True, slots=True)
class Hessians:
    """`collector(w)` is the tap that adds what a trajectory's linears read, each product counted w times."""

    arrays: Arrays
    _sums: dict[Key, Array] = field(default_factory=dict)

    def collector(self, weight: float) -> Tap:
        return _Collector(self, weight)

    def add(self, key: Key, inputs: Array, weight: float = 1.0) -> None:
        """inputs: (tokens, in)."""
        product = (inputs.T @ inputs).astype(self.arrays.xp.float64) * weight
        if key in self._sums:
            self._sums[key] += product
        else:
            self._sums[key] = product

    def take(self, key: Key) -> NDArray[np.float64]:
        """(in, in), on the host; gone from here, so that one at a time is held twice."""
        return self.arrays.to_host(self._sums.pop(key))


@dataclass(frozen=True, slots=True)
class _Collector(Tap):
    hessians: Hessians
    weight: float

    def reads(self, index: int, group: str, x: Array) -> Array:
        if self.weight:
            self.hessians.add((index, group), x, self.weight)
        return x
