"""How a decode linear of many rows is cut for linear_wide.cu: pure arithmetic over shapes, as in cut.py.

In: a product's sizes, the number of SMs and the shared memory of an sm_90 device.  Out: a `WideCut`, or None where the
kernels of linear.cu do: up to 8 rows, small matrices, activations that do not fit.  wide.cuh draws what the numbers
mean.  Bits of a row are those of linear.cu under every cut.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tinyloop_service.kernels.cut import PARTS, Product
from tinyloop_service.kernels.pack import BLOCK_INPUTS, TILE_ROWS, LinearKind

LEAST_ROWS = 9
_LEAST_WEIGHTS = 1 << 20  # below, blocks of 64 outputs are too few to be worth it
_WARPGROUP_TILES = 4
_MOST_WARPGROUPS = 4
_MOST_DEPTH = 4  # of a ring that holds a whole slice; of others 3: more only keep the first activations waiting
_MOST_X_AT_ONCE = 16  # loads of activations of a thread under way
_TARGET_BYTES = 16  # of linear_qkv: where a row goes
_ANGLE_BYTES = 64  # of linear_qkv: of a row and tile
# Parts of K of a warpgroup, blocks of a cluster.  All but "o" and "down" need all of K in one cluster.
_SHAPES: dict[LinearKind, tuple[int, int]] = {
    "qkv": (2, 4),
    "o": (1, 2),
    "gate_up": (1, 2),
    "down": (1, 2),
    "head": (1, 2),
}


@dataclass(frozen=True, slots=True)
class WideCut:
    """One way to cut a product; the names are those of wide.cuh."""

    warpgroups: int
    parts: int
    cluster: int
    depth: int
    grid_outputs: int  # blocks along the outputs; each goes over them in as many rounds as it takes

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups

    def num_partials(self, kind: LinearKind) -> int:
        return PARTS[kind] // (self.parts * self.cluster)

    def grid(self, p: Product) -> tuple[int, int, int]:
        return self.grid_outputs, PARTS[p.kind] // self.parts, p.row_blocks

    def shared_bytes(self, p: Product, *, columns: bool = False) -> int:
        """As take_share in wide_feed.cuh lays it out."""
        own_tiles, warps = -(-p.row_tiles // self.cluster), 4 * self.warpgroups
        blocks = p.most_blocks(PARTS[p.kind] // self.parts)
        arrivals = (self.warpgroups + blocks // p.unit_blocks + 1) // 2 * 16
        x = blocks * 8 * (p.row_tiles * 128 + (0 if columns else 16))
        receive = (self.cluster - 1) * own_tiles * self.threads * 16
        groups = p.unit_blocks * BLOCK_INPUTS // p.group if p.group else 0
        stage = self.threads * (p.unit_blocks * p.pieces * 16 + groups * 4)
        look_ups = own_tiles * 8 * (_TARGET_BYTES + warps * _ANGLE_BYTES) if p.kind == "qkv" else 0
        return arrivals + x + receive + self.depth * stage + look_ups

    def defines(self, p: Product, *, columns: bool = False) -> dict[str, int]:
        blocks = p.most_blocks(PARTS[p.kind] // self.parts)  # of rows, a warp loads one of them of four at a time
        loads = -(-p.row_tiles * 2 * blocks // (4 * self.warpgroups))
        return {
            "TL_ROW_TILES": p.row_tiles,
            "TL_GROUP": p.group,
            "TL_WARPGROUPS": self.warpgroups,
            "TL_PARTS": self.parts,
            "TL_CLUSTER": self.cluster,
            "TL_DEPTH": self.depth,
            "TL_COLUMNS": int(columns),
            "TL_X_AT_ONCE": 1 if columns else min(_MOST_X_AT_ONCE, loads),
        }


@functools.cache
def choose_wide_cut(p: Product, *, num_sms: int, limit: int) -> WideCut | None:
    """The cut with the least work for the busiest SM, then the most warpgroups and the deepest ring."""
    if p.rows < LEAST_ROWS or p.num_tiles * TILE_ROWS * p.num_inputs < _LEAST_WEIGHTS:
        return None
    full = replace(p, rows=8 * p.row_tiles)
    fitting = (cut for cut in _candidates(p, num_sms) if cut.shared_bytes(full) <= limit)
    return min(fitting, key=lambda cut: _preference(cut, p, num_sms), default=None)


def _candidates(p: Product, num_sms: int) -> Iterator[WideCut]:
    parts, cluster = _SHAPES[p.kind]
    slices = PARTS[p.kind] // parts
    units = p.most_blocks(slices) // p.unit_blocks
    depths = range(2, max(2, units if units <= _MOST_DEPTH else _MOST_DEPTH - 1) + 1)
    at_once = _usable(num_sms, cluster) // slices
    for warpgroups in range(1, _MOST_WARPGROUPS + 1):
        blocks = -(-p.num_tiles // (_WARPGROUP_TILES * warpgroups))
        grids = {min(blocks, max(1, most)) for most in (at_once, at_once // p.row_blocks)}
        for grid_outputs in [blocks] if p.kind == "qkv" else sorted(grids):  # whose epilogue knows one round
            yield from (WideCut(warpgroups, parts, cluster, depth, grid_outputs) for depth in depths)


def _usable(num_sms: int, cluster: int) -> int:
    """SMs that clusters can fill: they do not reach across the chip's larger parts, which leaves some over."""
    return num_sms // cluster * cluster if cluster <= 2 else num_sms * 10 // 11 // cluster * cluster


def _preference(cut: WideCut, p: Product, num_sms: int) -> tuple[int, int, int]:
    grid = cut.grid(p)
    waves = -(-math.prod(grid) // max(1, _usable(num_sms, cut.cluster)))
    rounds = -(-p.num_tiles // (_WARPGROUP_TILES * cut.warpgroups * cut.grid_outputs))
    work = waves * (rounds * cut.warpgroups + 1)  # each wave has a start of its own
    return work, -cut.warpgroups, -cut.depth
