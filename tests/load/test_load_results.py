"""A result and its JSON are one and the same, and what is no result is refused with its place."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from load_example import PATH, example

from tinyloop_service.load.results import Result


def test_the_example_file_is_what_its_code_makes() -> None:
    assert PATH.read_text(encoding="utf-8") == example().to_json() + "\n", "python tests/load/load_example.py"


def test_a_result_comes_back_as_it_was() -> None:
    again = Result.from_json(example().to_json())
    assert again == example()
    assert again.to_json() == example().to_json()


def set_at(raw: Any, path: tuple[Any, ...], value: Any) -> None:
    for step in path[:-1]:
        raw = raw[step]
    raw[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("version",), 99, "version 1 expected"),
        (("phases", 1, "load"), "fast", r"phases\[1\].load: float expected, given 'fast'"),
        (("phases", 0, "way"), "both", r"phases\[0\].way: Way expected, given 'both'"),
        (("phases", 0, "counts", "offered"), True, r"phases\[0\].counts.offered: int expected, given True"),
        (("phases", 0, "lag", "loop", "cdf", 2), [1.0], r"lag.loop.cdf\[2\]: 2 values expected, given 1"),
        (("metadata", "colour"), "red", "metadata: 'colour' is unknown"),
        (("metadata", "versions", "python"), 3, "metadata.versions.python: str expected, given 3"),
        (("economy",), [], r"economy: an object expected, given \[\]"),
        (("phases", 0, "load"), 10**400, "load: float expected"),
        (("phases", 0, "load"), float("nan"), "load: float expected"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_what_does_not_belong_there_is_named(path: tuple[Any, ...], value: Any, said: str) -> None:
    raw = json.loads(example().to_json())
    set_at(raw, path, value)
    with pytest.raises(ValueError, match=said):
        Result.from_json(json.dumps(raw))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"version": 1}', "null", "[" * 100_000],
    ids=lambda text: text[:8],
)
def test_what_is_no_result_is_one_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|missing"):
        Result.from_json(text)


def test_a_number_that_json_lacks_is_never_written() -> None:
    first, *others = example().phases
    with pytest.raises(ValueError, match="JSON compliant"):
        replace(example(), phases=(replace(first, load=float("inf")), *others)).to_json()
