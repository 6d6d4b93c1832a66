"""What `sanitize.sh` runs under compute-sanitizer: the cases of one test file that need a GPU, or a part of them.

    python tests/gpu/sanitized_cases.py FILE [I/N]       every N-th case from the I-th on, I from 0

CuPy's memory pool is off, so that every array ends where its allocation ends and a stray access shows.
"""

from __future__ import annotations

import sys

import cupy
import pytest


class Part:
    """Leaves every `of`-th case from `index` on."""

    def __init__(self, index: int, of: int) -> None:
        self._index, self._of = index, of

    @pytest.hookimpl(trylast=True)  # when those that need no GPU are gone
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = items[self._index :: self._of]


def main(file: str, part: str = "0/1") -> int:
    cupy.cuda.set_allocator(None)
    index, of = map(int, part.split("/"))
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "--timeout=0", "-x", file]
    return int(pytest.main(options, plugins=[Part(index, of)]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
