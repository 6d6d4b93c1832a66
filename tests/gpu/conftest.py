"""The helpers of the engine's and the kernels' tests are these tests' too."""

import sys
from pathlib import Path

for folder in ("engine", "kernels"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
