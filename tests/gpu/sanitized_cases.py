"""What `sanitize.sh` runs under compute-sanitizer: the cases of a test file that need a GPU, or one of them.

    python tests/gpu/sanitized_cases.py FILE[::CASE]

CuPy's memory pool is off, so that every array ends where its allocation ends and a stray access shows.
"""

from __future__ import annotations

import sys

import cupy
import pytest


def main(cases: str) -> int:
    cupy.cuda.set_allocator(None)
    return int(pytest.main(["-q", "-m", "gpu", "-p", "no:cacheprovider", "--timeout=0", "-x", cases]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
