"""Before anything else is imported: the threads of the test process.  And: is there a GPU for tests that need one?

ONNX Runtime's pool keeps its threads spinning for a while after a run.  NumPy's own pool would fight with it for the
cores, and the NumPy reference of the engine tests take ten times as long; so NumPy gets one thread.  The engine gets
two, which it would not take by itself for models as small as the tests', but one where two test processes run side by
side; that bits do not depend on threads has a test of its own.
"""

import functools
import os
from collections.abc import Iterator

import pytest
from redis_server import RedisServer, running_redis

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from tinyloop_service.engine.cpu.runtime import use_threads
from tinyloop_service.kernels.availability import open_cupy_device
from tinyloop_service.kernels.unavailable import DeviceUnavailable

use_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


@functools.cache
def why_no_gpu() -> str:
    """Empty: there is one."""
    try:
        open_cupy_device().close()
    except DeviceUnavailable as error:
        return str(error)
    return ""


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One Redis for all tests that leave it running; what it holds is apart by realm, or by database."""
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture: `-m gpu` on a machine without a GPU skips, and says why."""
    if item.get_closest_marker("gpu") and why_no_gpu():
        pytest.skip(f"no GPU: {why_no_gpu()}")
