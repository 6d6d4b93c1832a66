"""int8 pages in NumPy: where a page keeps levels and scales, and how they come of values, as in int8_pages.cuh."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.kernels.page_layout import PAGE_TOKENS

Array = NDArray[Any]
_OCTETS = PAGE_TOKENS // 8
_LARGEST, _MOST_LEVEL, _LEAST_SCALE = (np.float32(x) for x in (65504, 127, 2.0**-17))


class Int8Page(NamedTuple):
    """Views of one page."""

    keys: Array  # int8 [G, 64, D]
    octets: Array  # int8 [G, 8, D, 8]: of V, 8 tokens of a dim side by side
    key_scales: Array  # float16 [G, 64]
    value_scales: Array  # float16 [G, 64]

    @property
    def values(self) -> Array:
        """Transposed V, int8 [G, D, 64]; a copy."""
        return self.octets.transpose(0, 2, 1, 3).reshape(len(self.octets), -1, PAGE_TOKENS)

    def put_values(self, values: Array) -> None:
        """Transposed V of all tokens, [G, D, 64]."""
        self.octets[...] = values.reshape(*values.shape[:2], _OCTETS, 8).transpose(0, 2, 1, 3)


def int8_page(page: Array, num_kv_heads: int) -> Int8Page:
    """page int8 [64·G·(2·D + 4)]."""
    num_scales = 2 * num_kv_heads * PAGE_TOKENS
    levels, scales = page[: -2 * num_scales], page[-2 * num_scales :].view(np.float16)
    keys, values = levels.reshape(2, num_kv_heads, -1)
    return Int8Page(
        keys.reshape(num_kv_heads, PAGE_TOKENS, -1),
        values.reshape(num_kv_heads, _OCTETS, -1, 8),
        *scales.reshape(2, num_kv_heads, PAGE_TOKENS),
    )


def encode(x: Array) -> tuple[Array, Array]:
    """x float [..., D] → levels int8 [..., D], scales float16 [...].  NaN gives a NaN for scale, and any levels."""
    x = np.clip(x.astype(np.float32), -_LARGEST, _LARGEST)
    scales = np.maximum(np.abs(x).max(axis=-1) / _MOST_LEVEL, _LEAST_SCALE).astype(np.float16)
    levels = np.rint(x / scales.astype(np.float32)[..., None])
    return np.nan_to_num(levels, nan=0).astype(np.int8), scales


def put(page: Int8Page, place: int, keys: Array, values: Array) -> None:
    """K and V [G, D] of a token."""
    page.keys[:, place], page.key_scales[:, place] = encode(keys)
    page.octets[:, place // 8, :, place % 8], page.value_scales[:, place] = encode(values)
