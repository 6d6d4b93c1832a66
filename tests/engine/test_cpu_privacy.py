"""ONNX Runtime keeps to itself: it makes no identity for reports, and so has nothing to report with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import numpy as np
from tinyloop_service.engine.cpu.runtime import F32, GraphBuilder, use_threads
use_threads(1)
graph = GraphBuilder()
x = graph.input("x", F32, (1,))
graph.output("y", graph.op("Add", x, x), F32, (1,))
y = np.zeros(1, np.float32)
graph.build().run({"x": np.ones(1, np.float32)}, {"y": y})
assert y[0] == 2
"""


def test_no_reports_are_prepared(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ORT_", "XDG_"))}
    environment |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*")), "ONNX Runtime's reports leave a device id and a queue in the cache"
