"""Launches of kernels_cu/pages.cu: pages zeroed when taken, poisoned when given back, partly copied for a new row.

pool float16 [num_pages, 2·G·64·D] or int8 [num_pages, 64·G·(2·D + 4)]; what lies in a page, page_layout.py says.
"""

from __future__ import annotations

import numpy as np

from tinyloop_service.kernels.device import Array, Device
from tinyloop_service.kernels.match import match, require
from tinyloop_service.kernels.page_layout import PAGE_TOKENS, is_int8

_THREADS, _BATCH, _PIECE_BYTES = 256, 4, 16
_POISON = 0x7F7F7F7F  # NaN as halves, and so as scales; 127 as levels
_MOST_TRIPLES = 65535  # of a launch: they are along y, where a grid is no longer


def clone(device: Device, pool: Array, triples: Array, *, head_dim: int) -> None:
    """Copies the first tokens of pages, in one launch for up to 65535 of them.

    triples int32 [n, 3]: source page, target page, num_tokens.
    Targets are zeros before, and no target is a source.
    """
    coded = is_int8(pool)
    sizes = match("clone", pool=_either(pool), triples=(triples, "int32", "n, 3"))
    heads, rest = divmod(sizes["E"], PAGE_TOKENS * (2 * head_dim + (4 if coded else 0)))
    expected = f"64·G·(2·{head_dim} + 4)" if coded else f"2·G·64·{head_dim}"
    require("clone", rest == 0, f"a page is {_length(pool)}, expected {expected}")
    least = _PIECE_BYTES // pool.dtype.itemsize
    require("clone", head_dim % least == 0, f"head_dim is {head_dim}, expected a multiple of {least}")
    kernel = device.kernel("pages", "clone_int8" if coded else "clone")
    for first in range(0, sizes["n"], _MOST_TRIPLES):
        part = triples[first : first + _MOST_TRIPLES]
        device.launch(kernel, (heads, part.shape[0], 1), _THREADS, (pool, part, np.int32(head_dim)))


def zero(device: Device, pool: Array, pages: Array) -> None:
    """Zeros in every page of pages int32 [n]."""
    _fill("zero", device, pool, pages, 0)


def poison(device: Device, pool: Array, pages: Array) -> None:
    """NaN, or NaN for scale, in every page of pages int32 [n]: whoever reads one shows at once."""
    _fill("poison", device, pool, pages, _POISON)


def _fill(operation: str, device: Device, pool: Array, pages: Array, pattern: int) -> None:
    sizes = match(operation, pool=_either(pool), pages=(pages, "int32", "n"))
    pieces, rest = divmod(sizes["E"] * pool.dtype.itemsize, _PIECE_BYTES)
    require(operation, rest == 0, f"a page is {_length(pool)}, expected a multiple of {_PIECE_BYTES} bytes")
    grid = (sizes["n"], -(-pieces // (_BATCH * _THREADS)), 1)
    device.launch(device.kernel("pages", "fill"), grid, _THREADS, (pool, pages, np.int32(pieces), np.int32(pattern)))


def _either(pool: Array) -> tuple[Array, str, str]:
    return pool, "int8" if is_int8(pool) else "float16", "P, E"


def _length(pool: Array) -> str:
    return f"{pool.shape[1]} {'bytes' if is_int8(pool) else 'halves'}"
