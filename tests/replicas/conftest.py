"""What these tests share with those of the service lies beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "rpc"))
