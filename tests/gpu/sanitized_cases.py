"""What `sanitize.sh` runs under compute-sanitizer: the cases of one test file that need a GPU.

CuPy's memory pool is off, so that every array ends where its allocation ends and a stray access shows.
"""

from __future__ import annotations

import sys

import cupy
import pytest


def main(file: str) -> int:
    cupy.cuda.set_allocator(None)
    return int(pytest.main(["-q", "-m", "gpu", "-p", "no:cacheprovider", "--timeout=0", "-x", file]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
