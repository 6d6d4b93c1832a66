"""What a page holds of a token, mode by mode: which values, how rounded, in how many bytes.

    mode     stored of a token in one cache layer                            407m: bytes of a page
    fp16     K (after RoPE) and V                                            524 288
    int8     K and V as levels −127 … 127, a scale for each head's vector    266 240
    h-fp16   h, the block's input before its norm                            262 144
    h-int8   h as levels 0 … 255, scale and minimum for every 64 channels    139 264
    h-int4   h as levels 0 … 15, scale and minimum for every 64 channels      73 728

In: float32 values.  Out: the stored arrays (`encode`), and the values that are read in their place (`decode`).  This
is the oracle that every engine's own coding must equal, bit for bit.  Refuses to know where pages lie, and how K and V
are made from h.

int8: value = level · scale.  scale = largest magnitude / 127, rounded to fp16, and levels are taken with the rounded
scale.  An fp16 scale is off by less than one in 256, so a level is at most 127.5 before it is rounded and never
reaches 128; below 2^-17 fp16 is too coarse for that, so there no scale is.

h-int8, h-int4: value = minimum + level · scale, both in fp16.  Levels count from the true minimum, so that one of them
is 0 and the largest is 255 or 15; the whole group then moves with the rounding of its minimum, as fp16 would have
moved it.  Where a group varies less than that rounding (2^-11 of its minimum) or than fp16 can write a scale for,
scale = that much / 255 or 15: finer says nothing.  A constant group is stored as fp16 stores it.

Magnitudes above 65504, fp16's largest number, are stored as 65504, so nothing that is read is infinite (fp16 alone,
as everywhere, rounds them to infinity).  Up to half of that, encode(decode(stored)) is `stored` again.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.engine.api import PAGE_TOKENS
from tinyloop_service.engine.spec import ModelSpec
from tinyloop_service.errors import InvalidArgument
from tinyloop_service.types import CacheMode

Array = NDArray[Any]
Stored = dict[str, Array]  # by the name of a `Field`

H_MODES = frozenset({CacheMode.H_FP16, CacheMode.H_INT8, CacheMode.H_INT4})
GROUP = 64  # channels of h with a scale and a minimum in common
LARGEST = 65504.0  # fp16's
MOST_LEVEL = {CacheMode.INT8: 127.0, CacheMode.H_INT8: 255.0, CacheMode.H_INT4: 15.0}
LEAST_SCALE = 2.0**-17  # int8: fp16 keeps seven bits of it
LEAST_STEP = 2.0**-16  # h-int8: fp16 keeps eight bits of it
RESOLUTION = 2.0**-11  # of fp16, relative


@dataclass(frozen=True, slots=True)
class Field:
    """One array of what is stored; `shape` is of a token in one cache layer."""

    name: str
    dtype: type[np.generic]
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * np.dtype(self.dtype).itemsize


def fields_of(mode: CacheMode, spec: ModelSpec) -> tuple[Field, ...]:
    """What `mode` stores; K/V modes with the axes (K or V, head, …), h modes with one."""
    vectors = (2, spec.n_kv_heads)
    per_group = (spec.d_model // GROUP,)
    scales_and_minima = Field("scales", np.float16, per_group), Field("minima", np.float16, per_group)
    match mode:
        case CacheMode.FP16:
            return (Field("kv", np.float16, (*vectors, spec.head_dim)),)
        case CacheMode.INT8:
            return Field("levels", np.int8, (*vectors, spec.head_dim)), Field("scales", np.float16, (*vectors, 1))
        case CacheMode.H_FP16:
            return (Field("h", np.float16, (spec.d_model,)),)
        case CacheMode.H_INT8:
            return Field("levels", np.uint8, (spec.d_model,)), *scales_and_minima
        case CacheMode.H_INT4:
            return Field("levels", np.uint8, (spec.d_model // 2,)), *scales_and_minima


def page_bytes(mode: CacheMode, spec: ModelSpec) -> int:
    """Bytes of 64 tokens of one cache layer."""
    return PAGE_TOKENS * sum(field.num_bytes for field in fields_of(mode, spec))


def check_mode(mode: CacheMode, spec: ModelSpec) -> None:
    """Raises InvalidArgument where `mode` cannot store this model's state, or saves nothing."""
    if mode not in H_MODES:
        return
    if 2 * spec.kv_dim <= spec.d_model:
        raise InvalidArgument(
            "cache_mode",
            f"{mode.value} given, which stores d_model = {spec.d_model} values of a token; this model's keys and "
            f"values are 2 · n_kv_heads · head_dim = {2 * spec.kv_dim}, so nothing is saved; use int8 or fp16",
        )
    if mode is not CacheMode.H_FP16 and spec.d_model % GROUP:
        raise InvalidArgument(
            "cache_mode",
            f"{mode.value} given, which stores groups of {GROUP} channels; this model's d_model = {spec.d_model} is "
            f"no multiple of {GROUP}; use h-fp16, int8 or fp16",
        )


def encode(mode: CacheMode, x: Array) -> Stored:
    """What is stored of x: K or V [..., head_dim], or h [..., d_model]."""
    if mode is CacheMode.FP16:
        return {"kv": x.astype(np.float16)}
    x = np.clip(x.astype(np.float32), -LARGEST, LARGEST)
    if mode is CacheMode.H_FP16:
        return {"h": x.astype(np.float16)}
    most = np.float32(MOST_LEVEL[mode])
    if mode is CacheMode.INT8:
        scales = np.maximum(np.abs(x).max(axis=-1, keepdims=True) / most, np.float32(LEAST_SCALE)).astype(np.float16)
        return {"levels": np.rint(x / scales.astype(np.float32)).astype(np.int8), "scales": scales}
    return _encode_groups(mode, x.reshape(*x.shape[:-1], -1, GROUP), most)


def _encode_groups(mode: CacheMode, x: Array, most: np.float32) -> Stored:
    """x [..., groups, 64]."""
    true_minima = x.min(axis=-1, keepdims=True)
    minima = true_minima.astype(np.float16)
    span = np.maximum(x.max(axis=-1, keepdims=True) - true_minima, np.abs(minima.astype(np.float32)) * RESOLUTION)
    scales = (np.maximum(span, most * np.float32(LEAST_STEP)) / most).astype(np.float16)
    levels = np.rint((x - true_minima) / scales.astype(np.float32)).astype(np.uint8)
    if mode is CacheMode.H_INT4:  # channels 0 … 31 of a group in the low nibbles, 32 … 63 in the high ones
        levels = levels[..., : GROUP // 2] | levels[..., GROUP // 2 :] << 4
    leading = x.shape[:-2]
    return {"levels": levels.reshape(*leading, -1), "scales": scales[..., 0], "minima": minima[..., 0]}


def decode(mode: CacheMode, stored: Stored) -> NDArray[np.float32]:
    """What is read where `encode` was given x."""
    if mode is CacheMode.FP16:
        return stored["kv"].astype(np.float32)
    if mode is CacheMode.H_FP16:
        return stored["h"].astype(np.float32)
    levels, scales = stored["levels"], stored["scales"].astype(np.float32)
    if mode is CacheMode.INT8:
        return levels.astype(np.float32) * scales
    groups = levels.reshape(*scales.shape, -1)
    if mode is CacheMode.H_INT4:
        groups = np.concatenate([groups & 15, groups >> 4], axis=-1)
    minima = stored["minima"].astype(np.float32)
    values = minima[..., None] + groups.astype(np.float32) * scales[..., None]
    return values.reshape(*scales.shape[:-1], -1)
