"""Pages in NumPy: where one keeps K and V, and how int8 levels and scales come of values, as in int8_pages.cuh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.kernels.page_layout import PAGE_TOKENS

Array = NDArray[Any]
_OCTETS = PAGE_TOKENS // 8
_LARGEST, _MOST_LEVEL, _LEAST_SCALE = (np.float32(x) for x in (65504, 127, 2.0**-17))


@dataclass(frozen=True, slots=True)
class PageViews:
    """Views of one page: halves, or levels."""

    keys: Array  # [G, 64, D]
    octets: Array  # [G, 8, D, 8]: of V, 8 tokens of a dim side by side

    @property
    def values(self) -> Array:
        """Transposed V, [G, D, 64]; a copy."""
        return self.octets.transpose(0, 2, 1, 3).reshape(len(self.octets), -1, PAGE_TOKENS)

    def put_values(self, values: Array) -> None:
        """Transposed V of all tokens, [G, D, 64]."""
        self.octets[...] = values.reshape(*values.shape[:2], _OCTETS, 8).transpose(0, 2, 1, 3)

    def put(self, place: int, keys: Array, values: Array) -> None:
        """K and V [G, D] of a token."""
        self.keys[:, place] = keys
        self.octets[:, place // 8, :, place % 8] = values

    def copy(self, source: PageViews, num_tokens: int) -> None:
        """The first tokens of another page."""
        values = self.values
        values[:, :, :num_tokens] = source.values[:, :, :num_tokens]
        self.put_values(values)
        self.keys[:, :num_tokens] = source.keys[:, :num_tokens]


@dataclass(frozen=True, slots=True)
class Int8Page(PageViews):
    key_scales: Array  # float16 [G, 64]
    value_scales: Array  # float16 [G, 64]

    def put(self, place: int, keys: Array, values: Array) -> None:
        """K and V [G, D] of a token, to be coded."""
        key_levels, self.key_scales[:, place] = encode(keys)
        value_levels, self.value_scales[:, place] = encode(values)
        PageViews.put(self, place, key_levels, value_levels)

    def copy(self, source: PageViews, num_tokens: int) -> None:
        assert isinstance(source, Int8Page)
        PageViews.copy(self, source, num_tokens)
        self.key_scales[:, :num_tokens] = source.key_scales[:, :num_tokens]
        self.value_scales[:, :num_tokens] = source.value_scales[:, :num_tokens]


def page_views(page: Array, num_kv_heads: int) -> PageViews:
    """page float16 [2·G·64·D], or int8 [64·G·(2·D + 4)], which is an `Int8Page`."""
    if page.dtype == np.int8:
        return int8_page(page, num_kv_heads)
    return PageViews(*_keys_and_octets(page, num_kv_heads))


def int8_page(page: Array, num_kv_heads: int) -> Int8Page:
    """page int8 [64·G·(2·D + 4)]."""
    num_scales = 2 * num_kv_heads * PAGE_TOKENS
    levels, scales = page[: -2 * num_scales], page[-2 * num_scales :].view(np.float16)
    return Int8Page(*_keys_and_octets(levels, num_kv_heads), *scales.reshape(2, num_kv_heads, PAGE_TOKENS))


def _keys_and_octets(page: Array, num_kv_heads: int) -> tuple[Array, Array]:
    keys, values = page.reshape(2, num_kv_heads, -1)
    return keys.reshape(num_kv_heads, PAGE_TOKENS, -1), values.reshape(num_kv_heads, _OCTETS, -1, 8)


def encode(x: Array) -> tuple[Array, Array]:
    """x float [..., D] → levels int8 [..., D], scales float16 [...].  NaN gives a NaN for scale, and any levels."""
    x = np.clip(x.astype(np.float32), -_LARGEST, _LARGEST)
    scales = np.maximum(np.abs(x).max(axis=-1) / _MOST_LEVEL, _LEAST_SCALE).astype(np.float16)
    levels = np.rint(x / scales.astype(np.float32)[..., None])
    return np.nan_to_num(levels, nan=0).astype(np.int8), scales
