"""How a decode linear is cut into blocks: pure arithmetic over shapes, shared by the wrappers of linear.cu.

In: a product's sizes, the number of rows, what a device offers.  Out: a `Cut`: compile-time parameters, grid, shared
memory, number of partials.  matmul.cuh draws what the numbers mean.  Bits of a row are the same under every cut; only
speed differs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tinyloop_service.kernels.pack import BLOCK_INPUTS, LinearKind

PARTS: dict[LinearKind, int] = {"qkv": 8, "o": 8, "gate_up": 2, "down": 16, "head": 2}  # of K; fixes every sum's order
MOST_ROWS = 256
BLOCK_ROWS = 64  # that one thread block multiplies
WARPS = 8
_KIB = 1024
_MOST_TILES = 3
_MOST_DEPTH = 6
_FOLD_BYTES = 96  # of shared memory for each row that fold_row.cuh works on at a time
_TARGET_BYTES = 16 * BLOCK_ROWS  # of linear_qkv: where each row's K and V go
_RESIDENT_BYTES = 64 * _KIB  # of x in a block up to which it is loaded at once
_SMALL_RING_BYTES = 80 * _KIB  # of weights: leaves the next kernel room to load its own


def num_row_blocks(rows: int) -> int:
    """Thread blocks that share the rows of a batch."""
    return -(-rows // BLOCK_ROWS)


def block_rows(rows: int) -> int:
    """Rows of a thread block: whole tiles of 8, unless it has them all.  The last two may have some in common."""
    num_blocks = num_row_blocks(rows)
    return rows if num_blocks == 1 else -(-rows // (8 * num_blocks)) * 8


@dataclass(frozen=True, slots=True)
class Product:
    """s[R, N] = x[R, K] · weight[N, K]ᵀ."""

    kind: LinearKind
    num_tiles: int  # N / 16
    num_inputs: int  # K
    group: int  # 0: fp16 weights
    rows: int  # R; of a thread block, where `row_blocks` share R
    row_blocks: int = 1

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // 8)

    @property
    def unit_blocks(self) -> int:
        """Blocks of 64 inputs that no part of K separates."""
        return max(1, self.group // BLOCK_INPUTS)

    def most_blocks(self, num_parts: int) -> int:
        """Blocks of 64 inputs of the longest of so many parts of K."""
        return -(-self.num_inputs // (BLOCK_INPUTS * self.unit_blocks * num_parts)) * self.unit_blocks

    @property
    def has_even_parts(self) -> bool:
        return self.num_inputs % (BLOCK_INPUTS * self.unit_blocks * PARTS[self.kind]) == 0

    @property
    def pieces(self) -> int:
        """16-byte pieces that a lane holds of one tile."""
        return 1 if self.group else 4


@dataclass(frozen=True, slots=True)
class Cut:
    """One way to cut a product; the names are those of cut.cuh."""

    tiles: int  # weight tiles of a warp
    warps_m: int  # the other 8 / warps_m share K
    warp_parts: int  # parts of K of a warp
    stage_blocks: int  # blocks of 64 inputs of a stage: 1, or both of a group of 128
    depth: int  # stages of the rings, one of them being read
    resident: bool  # x is loaded at once instead of through a ring
    held: bool = False  # so are all weights (held.cuh); for parts of one length, and one row tile

    def num_partials(self, kind: LinearKind) -> int:
        return PARTS[kind] // (WARPS // self.warps_m * self.warp_parts)

    def grid(self, p: Product) -> tuple[int, int, int]:
        return -(-p.num_tiles // (self.warps_m * self.tiles)), self.num_partials(p.kind), p.row_blocks

    def num_stages(self, p: Product) -> int:
        """Of the longest part."""
        return p.most_blocks(PARTS[p.kind]) // self.stage_blocks

    def shared_bytes(self, p: Product, fold_rows: int = 0) -> int:
        """As take_share in cut.cuh lays it out; the sums of all warps come over it at the end."""
        slots = self.num_stages(p) if self.held else min(self.depth, self.num_stages(p))
        parts = WARPS // self.warps_m * self.warp_parts
        ring_blocks = parts * slots * self.stage_blocks
        x = (p.most_blocks(self.num_partials(p.kind)) if self.resident else ring_blocks) * p.rows * BLOCK_INPUTS * 2
        weights = WARPS * slots * self.warp_parts * self.stage_blocks * self.tiles * p.pieces * 512
        groups = p.most_blocks(PARTS[p.kind]) * BLOCK_INPUTS // p.group if p.group else 0
        scales = WARPS * self.warp_parts * self.tiles * groups * 32
        sums = WARPS * self.tiles * p.row_tiles * 512
        scratch = -(-fold_rows * _FOLD_BYTES // 256) * 256
        angles = p.rows * self.warps_m * self.tiles * 64
        return max(x + weights + scales, sums) + scratch + (_TARGET_BYTES + angles if p.kind == "qkv" else 0)

    def defines(self, p: Product) -> dict[str, int]:
        return {
            "TL_ROW_TILES": p.row_tiles,
            "TL_GROUP": p.group,
            "TL_TILES": self.tiles,
            "TL_WARPS_M": self.warps_m,
            "TL_WARP_PARTS": self.warp_parts,
            "TL_STAGE_BLOCKS": self.stage_blocks,
            "TL_DEPTH": self.depth,
            "TL_RESIDENT": int(self.resident),
            "TL_HELD_BLOCKS": p.most_blocks(PARTS[p.kind]) if self.held else 0,
        }


@functools.cache
def choose_cut(p: Product, *, num_sms: int, limit: int) -> Cut | None:
    """The cut that should be fastest: work spread evenly, then tiles that share activations, then deep rings.

    None: none fits into `limit` bytes of shared memory; fewer rows do.
    """
    full = replace(p, rows=8 * p.row_tiles)  # so that all counts of one row tile share their kernels
    for cut in sorted(_candidates(p), key=lambda cut: _preference(cut, p, num_sms)):
        if cut.shared_bytes(full) <= limit:
            return cut
    return None


def _candidates(p: Product) -> Iterator[Cut]:
    for warps_m, warp_parts in _shapes(p):
        for tiles in range(1, _MOST_TILES + 1):
            whole = Cut(tiles, warps_m, warp_parts, p.unit_blocks, _small_depth(p, tiles * warp_parts), resident=True)
            x_bytes = p.rows * p.num_inputs * 2 // whole.num_partials(p.kind)
            if p.row_tiles == 1 and x_bytes <= _RESIDENT_BYTES:
                yield whole
                if p.has_even_parts and p.group:
                    yield Cut(tiles, warps_m, warp_parts, 1, 2, resident=True, held=True)
            for depth in range(2, _MOST_DEPTH + 1):
                yield Cut(tiles, warps_m, warp_parts, 1, depth, resident=False)


def _shapes(p: Product) -> Iterator[tuple[int, int]]:
    """Warps along M and parts of a warp.  Blocks that see all of K where they must, or x is small."""
    if p.kind in ("gate_up", "head"):
        yield 4, 1
    elif p.kind == "qkv":
        yield 1, 1
    else:
        if p.rows * p.num_inputs * 2 <= _RESIDENT_BYTES:
            yield 1, PARTS[p.kind] // WARPS
        yield 2 if p.row_tiles == 1 else 4, 1


def _small_depth(p: Product, tiles: int) -> int:
    stage_bytes = WARPS * tiles * p.unit_blocks * p.pieces * 512
    return min(max(_SMALL_RING_BYTES // stage_bytes, 3), 9)


def _preference(cut: Cut, p: Product, num_sms: int) -> tuple[int, int, bool, int, bool, int]:
    grid = cut.grid(p)
    waves = -(-math.prod(grid) // num_sms)
    to_avoid = cut.held != (waves == 1)  # a block that holds much leaves no room for the next one's start
    return cut.num_partials(p.kind), waves * cut.tiles, to_avoid, -cut.tiles, not cut.resident, -cut.depth
