"""Products of prompt rows by cuBLAS, of so many rows at a time that a row's bits do not depend on how many there are.

cuBLAS picks another order of summing for few rows than for many.  From some number of rows on it always picks the same
one: every product has a *least* number of rows, and what is missing is computed of whatever lies behind them in the
buffers, and looked at by nobody.  For fewer rows there may be another *way* with the same bits, which is cheaper than
that.  Where such a number is not found, or a large one, rows are multiplied in tiles of one
fixed size.  Numbers and ways are measured when the engine starts (`selfcheck.py`).

In: buffers of a pass, as long as the longest pass.  Out: the product in the first rows, and anything behind them.
Refuses to know what is multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from tinyloop_service.kernels.device import Array, Device

ProductKind = Literal["qkv", "q", "kv", "o", "gate_up", "down"]
ROW_MULTIPLE = 64  # of passes
FIXED_ROWS = 256  # of a tile; buffers are a multiple of it
_MOST_LEAST_ROWS = 512  # more would cost short passes more than tiles cost long ones


class Products:
    """Until told otherwise, a product has as many rows as the pass."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._least: dict[ProductKind, int] = {}
        self._ways: dict[tuple[ProductKind, int], tuple[int, object]] = {}
        self._in_tiles: set[ProductKind] = set()

    def set_least(self, kind: ProductKind, rows: int) -> None:
        self._least[kind] = rows

    def set_way(self, kind: ProductKind, rows: int, given: int, way: object) -> None:
        """Of a pass of `rows`, the product is of `given` rows, in that way of `Device.ways`."""
        self._ways[kind, rows] = given, way

    def set_tiles(self, kind: ProductKind) -> None:
        self._in_tiles.add(kind)

    def multiply(
        self, kind: ProductKind, x: Array, weight: Array, out: Array, rows: int, *, accumulate: bool = False
    ) -> None:
        """out [:rows] (+)= x [:rows] · weightᵀ, and rows behind them.

        x fp16 [max_rows, K], weight fp16 [N, K], out fp16 or fp32 [max_rows, N]; max_rows a multiple of FIXED_ROWS.
        """
        if kind not in self._in_tiles:
            given, way = self._ways.get((kind, rows), (max(rows, self._least.get(kind, 0)), None))
            self._device.gemm(x[:given], weight, out[:given], accumulate=accumulate, way=way)
            return
        for first in range(0, rows, FIXED_ROWS):
            tile = slice(first, first + FIXED_ROWS)
            self._device.gemm(x[tile], weight, out[tile], accumulate=accumulate)


def least_rows(bits: Mapping[int, Sequence[bytes]]) -> int | None:
    """From which number of rows on a row has the same bits in all larger numbers, and wherever it stands.

    bits: of one row's product by number of rows, at several places.  None: there is no such number, or a large one.
    """
    counts = sorted(bits, reverse=True)
    expected, least = bits[counts[0]][0], None
    for count in counts:
        if any(found != expected for found in bits[count]):
            break
        least = count
    return least if least is not None and least <= _MOST_LEAST_ROWS else None
