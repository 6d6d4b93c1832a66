"""Before NumPy is first imported: one thread for its matrix products.

ONNX Runtime's pool keeps its threads spinning for a while after a run.  NumPy's own pool would fight with it for the
cores, and the NumPy reference of the engine tests take ten times as long.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
