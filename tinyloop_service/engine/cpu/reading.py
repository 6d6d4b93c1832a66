"""What attention reads of a stored page: fp16 K and V, the bits that were there when its tokens were computed.

    K/V modes   decoded
    h modes     computed by the block's `keys_values`, the kernel of prefill and decode, a page's 64 tokens at a time

64 rows are a multiple of whatever `selfcheck.row_multiple` finds, so a row has the bits it had among others.

In: a page's fields, which block it is of, and its place.  Out: K and V in arrays of the caller.  Refuses to know who
owns a page.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tinyloop_service.engine.api import PAGE_TOKENS
from tinyloop_service.engine.cache_modes import Stored
from tinyloop_service.engine.cpu.coding import Coding
from tinyloop_service.engine.cpu.layers import BlockKernels
from tinyloop_service.engine.cpu.runtime import F16, Array, GraphBuilder, Kernel
from tinyloop_service.engine.spec import BlockKind, ModelSpec

Blocks = Mapping[tuple[BlockKind, int], BlockKernels]


class PageReader:
    """For one model and cache mode."""

    def __init__(self, spec: ModelSpec, coding: Coding, blocks: Blocks) -> None:
        self._spec, self._blocks = spec, blocks
        self._decoder = None if coding.stores_h else decoder(coding, spec)
        self._kv = np.empty((PAGE_TOKENS, 2, spec.n_kv_heads, spec.head_dim), np.float16)

    def read(self, page: Stored, kind: BlockKind, index: int, first: int, keys: Array, values: Array) -> None:
        """K and V of a page of that block, whose first token is at position `first`, into [G, 64, D] each."""
        if self._decoder is not None:
            for part, out in enumerate((keys, values)):
                self._decoder.run({name: field[part] for name, field in page.items()}, {"read": out})
            return
        kernel = self._blocks[kind, index].keys_values
        assert kernel is not None
        # Beyond the longest sequence a page is empty, and the tables of RoPE end.
        positions = np.minimum(np.arange(first, first + PAGE_TOKENS), self._spec.max_seq_len - 1)[None]
        kernel.run({**page, "positions": positions}, {"read": self._kv})
        keys[:], values[:] = self._kv.transpose(1, 2, 0, 3)


def decoder(coding: Coding, spec: ModelSpec) -> Kernel:
    """K or V of a page as stored, [G, 64, …] → read, fp16 [G, 64, D]."""
    g = GraphBuilder()
    read = coding.read(g, coding.inputs(g, "heads", "tokens"))
    g.output("read", read, F16, ["heads", "tokens", spec.head_dim])
    return g.build()
