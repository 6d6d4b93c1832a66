"""Which activations can be in columns (kernels_cu/include/columns.cuh): pure arithmetic over shapes.

Rows that several thread blocks share are in columns block by block, so that all blocks must have as many.
"""

from __future__ import annotations

from tinyloop_service.kernels.cut import num_row_blocks
from tinyloop_service.kernels.match import require

_TILE_ROWS, _BLOCK_INPUTS = 8, 64


def fit_columns(rows: int) -> bool:
    """Whether a batch of so many rows can be in columns."""
    return rows % _least_rows(rows) == 0


def require_columns(operation: str, name: str, rows: int, width: int) -> None:
    """Raises KernelArgumentError."""
    fits, least = fit_columns(rows) and width % _BLOCK_INPUTS == 0, (_least_rows(rows), _BLOCK_INPUTS)
    require(operation, fits, f"{name} is {rows, width}, in columns a multiple of {least}")


def _least_rows(rows: int) -> int:
    return _TILE_ROWS * num_row_blocks(rows)
