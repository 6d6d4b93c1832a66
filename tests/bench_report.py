"""How the benchmarks of this folder report: a table for people, JSON for scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinyloop_service.bench.machine import versions

__all__ = ["milliseconds", "print_table", "spread", "versions", "write_json"]


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The first column to the left, all others to the right."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    print(f"\n{title}")
    for cells in (columns, *rows):
        first, *others = zip(cells, widths, strict=True)
        print("  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip())


def write_json(path: Path, content: dict[str, Any]) -> None:
    """`content` at `path`, whose folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten: {path}")


def milliseconds(value: float) -> str:
    """Three digits that matter: 14.2, 2.75, 0.184, 1043."""
    return f"{value:.{3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0}f}"


def spread(low_high: Sequence[float]) -> str:
    return "–".join(map(milliseconds, low_high))
