"""Checks what a kernel's wrapper was given, and names the sizes in it.

    match("int4_linear", scales=(scales, "float16", "K/128, N"), x=(x, "float16", "R, K"))

returns {"N": …, "R": …, "K": …} or fails in one sentence:

    int4_linear: scales is (16, 2048), expected (K/128, N) = (32, 2048)

A dimension is a name, a number, `_` for any, or an expression of names (+ - * / and parentheses; division is exact).
A name that stands alone takes its value from where it first does so; expressions are checked once all names are known.
Kernels read plain memory, so every array is C-contiguous.  None stands for an absent array and matches anything.
What matched before is remembered by its shapes, for a pass makes the same hundred calls again and again.
Refuses to know what the kernel does.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinyloop_service.kernels.device import Array

Expected = tuple["Array | None", str, str]  # the array, its dtype, its dimensions
_MOST_REMEMBERED = 1 << 14
_remembered: dict[tuple[object, ...], dict[str, int]] = {}


class KernelArgumentError(ValueError):
    """A wrapper was called with an array that its kernel cannot take.  The message names operation and argument."""


@dataclass(frozen=True, slots=True)
class _Dimension:
    text: str
    name: str | None  # when it is a name alone
    code: CodeType

    def value(self, sizes: Mapping[str, int]) -> float:
        result: float = eval(self.code, {"__builtins__": {}}, dict(sizes))  # text out of our own wrappers
        return result


@functools.cache
def _parse(pattern: str) -> tuple[_Dimension, ...]:
    def parse(text: str) -> _Dimension:
        return _Dimension(text, text if text.isidentifier() else None, compile(text, "<dimension>", "eval"))

    return tuple(parse(text.strip()) for text in pattern.split(",") if text.strip())


def match(operation: str, known: Mapping[str, int] | None = None, /, **arguments: Expected) -> dict[str, int]:
    """The sizes by name, those of `known` included; raises KernelArgumentError."""
    key = (*(known.items() if known else ()), *map(_facts, arguments.values()))
    sizes = _remembered.get(key)
    if sizes is None:
        sizes = _match(operation, known or {}, arguments)
        if len(_remembered) >= _MOST_REMEMBERED:
            _remembered.clear()
        _remembered[key] = sizes
    return dict(sizes)


def _facts(expected: Expected) -> tuple[object, ...] | None:
    """All that a match depends on; what it is called matters to complaints only."""
    array, dtype, pattern = expected
    return None if array is None else (array.shape, array.dtype, array.flags.c_contiguous, dtype, pattern)


def _match(operation: str, known: Mapping[str, int], arguments: Mapping[str, Expected]) -> dict[str, int]:
    sizes = dict(known)
    derived: list[tuple[str, Array, tuple[_Dimension, ...]]] = []
    for name, (array, dtype, pattern) in arguments.items():
        if array is None:
            continue
        dimensions = _parse(pattern)
        _check_kind(operation, name, array, dtype, dimensions, pattern)
        for dimension, size in zip(dimensions, array.shape, strict=True):
            if dimension.name is not None and dimension.name != "_":
                sizes.setdefault(dimension.name, size)
        derived.append((name, array, dimensions))
    for name, array, dimensions in derived:
        _check_sizes(operation, name, array, dimensions, sizes)
    return sizes


def _check_kind(
    operation: str, name: str, array: Array, dtype: str, dimensions: tuple[_Dimension, ...], pattern: str
) -> None:
    if array.dtype.name != dtype:
        raise KernelArgumentError(f"{operation}: {name} is {array.dtype.name}, expected {dtype}")
    if len(array.shape) != len(dimensions):
        raise KernelArgumentError(f"{operation}: {name} is {tuple(array.shape)}, expected ({pattern})")
    if not array.flags.c_contiguous:
        raise KernelArgumentError(f"{operation}: {name} {tuple(array.shape)} is a strided view, expected contiguous")


def _check_sizes(
    operation: str, name: str, array: Array, dimensions: tuple[_Dimension, ...], sizes: Mapping[str, int]
) -> None:
    expected = [size if d.name == "_" else d.value(sizes) for d, size in zip(dimensions, array.shape, strict=True)]
    if any(want != size for want, size in zip(expected, array.shape, strict=True)):
        pattern = ", ".join(d.text for d in dimensions)
        values = ", ".join(f"{want:g}" for want in expected)
        raise KernelArgumentError(f"{operation}: {name} is {tuple(array.shape)}, expected ({pattern}) = ({values})")


def require(operation: str, condition: bool, sentence: str) -> None:
    """What shapes cannot say: `require("embed", D % 8 == 0, f"D is {D}, expected a multiple of 8")`."""
    if not condition:
        raise KernelArgumentError(f"{operation}: {sentence}")
