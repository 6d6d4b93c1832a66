"""Launches of kernels_cu/pages.cu: pages zeroed when taken, poisoned when given back, partly copied for a new row.

pool fp16 [num_pages, 2·G·64·D]: a page is K [G][64][D], then V transposed [G][D][64].
"""

from __future__ import annotations

import numpy as np

from tinyloop_service.kernels.device import Array, Device
from tinyloop_service.kernels.match import match, require

_THREADS, _BATCH, _HALVES, _PAGE_TOKENS = 256, 4, 8, 64
_NAN_PAIR = 0x7E007E00
_MOST_TRIPLES = 65535  # of a launch: they are along y, where a grid is no longer


def clone(device: Device, pool: Array, triples: Array, *, head_dim: int) -> None:
    """Copies the first tokens of pages, in one launch for up to 65535 of them.

    triples int32 [n, 3]: source page, target page, num_tokens.
    Targets are zeros before, and no target is a source.
    """
    sizes = match("clone", {"D": head_dim}, pool=(pool, "float16", "P, E"), triples=(triples, "int32", "n, 3"))
    heads, rest = divmod(sizes["E"], 2 * _PAGE_TOKENS * head_dim)
    require("clone", rest == 0, f"a page is {sizes['E']} halves, expected 2·G·64·{head_dim}")
    require("clone", head_dim % _HALVES == 0, f"head_dim is {head_dim}, expected a multiple of {_HALVES}")
    kernel = device.kernel("pages", "clone")
    for first in range(0, sizes["n"], _MOST_TRIPLES):
        part = triples[first : first + _MOST_TRIPLES]
        device.launch(kernel, (heads, part.shape[0], 1), _THREADS, (pool, part, np.int32(head_dim)))


def zero(device: Device, pool: Array, pages: Array) -> None:
    """Zeros in every page of pages int32 [n]."""
    _fill("zero", device, pool, pages, 0)


def poison(device: Device, pool: Array, pages: Array) -> None:
    """NaN in every page of pages int32 [n]: whoever reads one shows at once."""
    _fill("poison", device, pool, pages, _NAN_PAIR)


def _fill(operation: str, device: Device, pool: Array, pages: Array, pattern: int) -> None:
    sizes = match(operation, pool=(pool, "float16", "P, E"), pages=(pages, "int32", "n"))
    require(operation, sizes["E"] % _HALVES == 0, f"a page is {sizes['E']} halves, expected a multiple of {_HALVES}")
    pieces = sizes["E"] // _HALVES
    grid = (sizes["n"], -(-pieces // (_BATCH * _THREADS)), 1)
    device.launch(device.kernel("pages", "fill"), grid, _THREADS, (pool, pages, np.int32(pieces), np.int32(pattern)))
