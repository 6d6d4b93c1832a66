"""The emulator says what a GPU would leave undefined: the kernels of mistakes.cu are wrong on purpose."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from emulation import builder
from emulation.device import EmulatedDevice

Pointers = list[ctypes.c_void_p]


def launch(name: str, *arrays: np.ndarray, shared_bytes: int = 0, reverse: bool = False) -> None:
    kernel = builder.function(builder.load(builder.build(Path(__file__).with_name("mistakes.cu"))), name)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in arrays]
    kernel((1, 1, 1), 64, pointers, shared_bytes=shared_bytes, reverse=reverse)


def test_a_missing_barrier_shows_in_one_of_the_two_orders() -> None:
    forward, reverse = np.zeros(64, np.float32), np.zeros(64, np.float32)
    launch("missing_barrier", forward, shared_bytes=256)
    launch("missing_barrier", reverse, shared_bytes=256, reverse=True)
    assert np.isnan(forward).any() and np.isnan(reverse).any()
    assert not np.array_equal(np.isnan(forward), np.isnan(reverse))


def test_a_copy_that_nobody_waited_for_has_not_landed() -> None:
    out = np.zeros((64, 4), np.float32)
    launch("missing_wait", np.ones((64, 4), np.float32), out, shared_bytes=1024)
    assert np.isnan(out).all()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("divergent_shuffle", "others never reach"),
        ("divergent_barrier", "others never reach"),
        ("shared_overrun", "wrote past its 128 bytes of shared memory"),
    ],
)
def test_divergence_and_overruns_are_errors(name: str, says: str) -> None:
    with pytest.raises(builder.EmulationError, match=says):
        launch(name, np.zeros(64, np.float32), shared_bytes=128)


def test_misaligned_loads_are_errors() -> None:
    with pytest.raises(builder.EmulationError, match="not a multiple of 16"):
        launch("misaligned", np.zeros(2048, np.uint8), np.zeros((64, 4), np.uint32))


def test_an_unknown_kernel_is_named() -> None:
    library = builder.load(builder.build(Path(__file__).with_name("mistakes.cu")))
    with pytest.raises(builder.EmulationError, match=r"no .*void absent"):
        builder.function(library, "absent")


def test_a_thread_may_wait_while_another_captures() -> None:
    device = EmulatedDevice()
    with ThreadPoolExecutor(1) as another:
        device.capture(lambda: another.submit(device.synchronize).result(timeout=60))
    with pytest.raises(RuntimeError, match="may not wait"):
        device.capture(device.synchronize)


def test_who_waits_for_work_that_another_thread_runs_waits_for_its_end() -> None:
    device = EmulatedDevice(deferred=True)
    event = device.event()
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert may_end.wait(60)
        ended.set()

    device.enqueue(work)
    event.record()
    with ThreadPoolExecutor(2) as threads:
        threads.submit(device.synchronize)
        assert begun.wait(60)
        waiter = threads.submit(lambda: (event.synchronize(), ended.is_set())[1])
        may_end.set()
        assert waiter.result(timeout=60)
