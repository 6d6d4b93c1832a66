"""Writes the tables of helm/tinyloop/README.md from values.yaml: one row a value, from the comments above it.

    # == Title          opens a section
    # -- Text           describes the key that comes next; further comment lines go on with it

A value without a description is an error.  `python helm/readme.py` writes, `--check` only compares (status 1: stale).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "tinyloop"
README = CHART / "README.md"
BEGIN, END = "<!-- values: made by helm/readme.py -->", "<!-- end of values -->"
_KEY = re.compile(r"( *)([A-Za-z_]\w*):")

Row = tuple[str, str, str]  # section, path, description


def described(source: str) -> Iterator[Row]:
    """Every value of values.yaml that has a description, in order."""
    section, comment, path = "", [], []
    for line in source.splitlines():
        if line.startswith("# == "):
            section, comment = line.removeprefix("# == "), []
        elif line.lstrip().startswith("# -- "):
            comment = [line.lstrip().removeprefix("# -- ")]
        elif line.lstrip().startswith("#"):
            comment = [*comment, line.lstrip("# ")] if comment else []
        elif found := _KEY.match(line):
            path = [*path[: len(found[1]) // 2], found[2]]
            if comment:
                yield section, ".".join(path), " ".join(comment)
            comment = []


def leaves(values: dict[str, Any], described_paths: set[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Paths and defaults; a described mapping is one value."""
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and path not in described_paths:
            yield from leaves(value, described_paths, f"{path}.")
        else:
            yield path, value


def tables(source: str) -> str:
    """Raises ValueError that names what has no description."""
    rows = {path: (section, text) for section, path, text in described(source)}
    defaults = dict(leaves(yaml.safe_load(source), set(rows)))
    if missing := defaults.keys() ^ rows.keys():
        raise ValueError(f"values.yaml: no description, or one of no value: {', '.join(sorted(missing))}")
    lines, current = [], ""
    for path, default in defaults.items():
        section, text = rows[path]
        if section != current:
            lines += ["", f"### {section}", "", "| value | default | what it sets |", "|---|---|---|"]
            current = section
        lines.append(f"| `{path}` | `{json.dumps(default)}` | {text.replace('|', chr(92) + '|')} |")
    return "\n".join([*lines, ""])


def renewed(readme: str, source: str) -> str:
    """The README with the tables that `source` asks for."""
    head, _, rest = readme.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{tables(source)}\n{END}{tail}"


def main() -> int:
    readme = README.read_text(encoding="utf-8")
    new = renewed(readme, (CHART / "values.yaml").read_text(encoding="utf-8"))
    if "--check" in sys.argv:
        return int(new != readme)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
