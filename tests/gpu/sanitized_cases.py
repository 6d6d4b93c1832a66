"""What `sanitize.sh` runs under compute-sanitizer: the engine's small cases, and the kernels'.

CuPy's memory pool is off, so that every array ends where its allocation ends and a stray access shows.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cupy
import pytest

TESTS = Path(__file__).parents[1]


def main() -> int:
    cupy.cuda.set_allocator(None)
    places = (TESTS / "engine" / "test_small_cases.py", TESTS / "kernels")
    return pytest.main(["-q", "-m", "gpu", "-p", "no:cacheprovider", "--timeout=0", "-x", *map(str, places)])


if __name__ == "__main__":
    sys.exit(main())
