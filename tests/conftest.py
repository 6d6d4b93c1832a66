"""Before anything else is imported: the threads of the test process.

ONNX Runtime's pool keeps its threads spinning for a while after a run.  NumPy's own pool would fight with it for the
cores, and the NumPy reference of the engine tests take ten times as long; so NumPy gets one thread.  The engine gets
two, which it would not take by itself for models as small as the tests': bits must not depend on threads either.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from tinyloop_service.engine.cpu.runtime import use_threads

use_threads(2)
