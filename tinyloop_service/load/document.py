"""Frozen dataclasses as JSON, and back: strict, by their type hints.

In: a dataclass of numbers, text, enums, tuples, optionals, plain dictionaries and further dataclasses.  Out: text that
begins with the version.  It refuses to guess: a key too many, a key missing or a value of another type is one error
that says where.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from enum import StrEnum
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
_VERSION_KEY = "version"


def write(version: int, value: Any) -> str:
    """One JSON document.  Raises ValueError for a number that JSON does not have."""
    return json.dumps({_VERSION_KEY: version, **asdict(value)}, ensure_ascii=False, allow_nan=False)


def read(version: int, cls: type[T], text: str) -> T:
    """The value that `write` wrote.  Raises ValueError."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{cls.__name__} expected as JSON: {error}") from None
    if not isinstance(raw, dict) or raw.pop(_VERSION_KEY, None) != version:
        raise ValueError(f"{cls.__name__} of version {version} expected; write it again with this release")
    return _dataclass(cls, raw, "")


def _dataclass(cls: type[T], raw: object, path: str) -> T:
    if not isinstance(raw, Mapping):
        raise ValueError(f"{path or cls.__name__}: an object expected, given {_short(raw)}")
    hints, names = get_type_hints(cls), [field.name for field in fields(cls)]  # type: ignore[arg-type]
    if unlike := sorted({*raw} ^ {*names}):
        raise ValueError(f"{path or cls.__name__}: {unlike[0]!r} is {'missing' if unlike[0] in names else 'unknown'}")
    return cls(**{name: _value(hints[name], raw[name], f"{path}.{name}".lstrip(".")) for name in names})


def _value(kind: Any, raw: Any, path: str) -> Any:
    if is_dataclass(kind):
        return _dataclass(kind, raw, path)  # type: ignore[arg-type]
    origin, inner = get_origin(kind), get_args(kind)
    if origin is types.UnionType:
        [some] = [each for each in inner if each is not type(None)]
        return None if raw is None else _value(some, raw, path)
    if origin is tuple and isinstance(raw, list):
        return _tuple(inner, raw, path)
    if origin is dict and isinstance(raw, dict):
        return {key: _value(inner[1], value, f"{path}.{key}") for key, value in raw.items()}
    if isinstance(kind, type) and issubclass(kind, StrEnum) and raw in [each.value for each in kind]:
        return kind(raw)
    if kind is Any or (kind in (str, int, bool) and type(raw) is kind):
        return raw
    if kind is float and type(raw) in (int, float) and abs(raw) <= sys.float_info.max:
        return float(raw)
    raise ValueError(f"{path}: {getattr(kind, '__name__', kind)} expected, given {_short(raw)}")


def _tuple(inner: tuple[Any, ...], raw: list[Any], path: str) -> tuple[Any, ...]:
    kinds = [inner[0]] * len(raw) if inner[-1] is Ellipsis else list(inner)
    if len(kinds) != len(raw):
        raise ValueError(f"{path}: {len(kinds)} values expected, given {len(raw)}")
    return tuple(
        _value(kind, each, f"{path}[{index}]") for index, (kind, each) in enumerate(zip(kinds, raw, strict=True))
    )


def _short(raw: object) -> str:
    shown = repr(raw)
    return shown if len(shown) <= 40 else shown[:37] + "..."
