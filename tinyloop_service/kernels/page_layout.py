"""What a pool of pages looks like to the kernels.  A page of 64 tokens of a cache layer is K [G][64][D], then V in
octets, [G][8][D][8 tokens]; the pool's dtype says of what:

    float16   the values
    int8      levels, and after them fp16 scales of K and of V, [G][64] each: value = level · scale

In: a pool.  Out: what `match` is to expect of it.  Refuses to know what is done with pages.
"""

from __future__ import annotations

from tinyloop_service.kernels.device import Array
from tinyloop_service.kernels.match import Expected

PAGE_TOKENS = 64
QUAD_PAGES = 4  # neighbours, from a block that is a multiple of it on, which decode attention folds together
VERSION = 1  # of all that lies in stored pages, of h too: another one where any of it changes, so that saved state goes


def is_int8(pool: Array) -> bool:
    return pool.dtype.name == "int8"


def expected_pool(pool: Array) -> Expected:
    """For the argument `pool` of a kernel that reads or writes either."""
    if is_int8(pool):
        return pool, "int8", f"P, {PAGE_TOKENS}*G*(2*D + 4)"
    return pool, "float16", f"P, 2*G*{PAGE_TOKENS}*D"
