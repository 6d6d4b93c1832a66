"""CUDA graphs of work that comes again in the same shape, for its launches from Python take as long as the device.

In: a shape, and a function that launches the work of that shape.  Work of one shape differs in what lies in buffers at
fixed places alone.  Out: the same launches, in a graph where the shape is worth one.  Refuses to know what is launched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from tinyloop_service.kernels.device import Device, Graph

Shape = TypeVar("Shape", bound=Hashable)
_MOST_GRAPHS = 128


class Graphs(Generic[Shape]):
    """Of common shapes from the start (`capture`), of others when they come again."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._uses: Counter[Shape] = Counter()
        self._graphs: dict[Shape, Graph] = {}

    def capture(self, shape: Shape, launch: Callable[[], None]) -> None:
        self._graphs[shape] = self._device.capture(launch)

    def run(self, shape: Shape, launch: Callable[[], None]) -> None:
        self._uses[shape] += 1
        if shape not in self._graphs and self._is_worth_a_graph(shape):
            self.capture(shape, launch)
        if shape in self._graphs:
            self._graphs[shape].launch()
        else:
            launch()

    def _is_worth_a_graph(self, shape: Shape) -> bool:
        """It comes again and again; where there are many graphs already, the least used one goes for it."""
        if len(self._graphs) < _MOST_GRAPHS:
            return self._uses[shape] > 1
        rarest = min(self._graphs, key=self._uses.__getitem__)
        if self._uses[shape] <= self._uses[rarest]:
            return False
        del self._graphs[rarest]
        return True
