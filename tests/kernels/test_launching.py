"""How arguments are laid out for the driver; the launch itself needs a GPU, this does not."""

from __future__ import annotations

import ctypes
import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tinyloop_service.errors import DeviceLost, EngineFault
from tinyloop_service.kernels.cuda_errors import cuda_errors, error_of_code


class FakeArray:
    """All of a cupy.ndarray that a launch looks at."""

    def __init__(self, address: int) -> None:
        self.data = SimpleNamespace(ptr=address)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Any:
    cupy = ModuleType("cupy")
    cupy.ndarray = FakeArray  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.delitem(sys.modules, "tinyloop_service.kernels.launching", raising=False)
    launching = importlib.import_module("tinyloop_service.kernels.launching")
    yield launching.Launcher(0)
    sys.modules.pop("tinyloop_service.kernels.launching", None)  # it holds the fake


def argument(launcher: Any, position: int, kind: type) -> Any:
    """What a kernel would read as its parameter: through the array of pointers."""
    pointers = (ctypes.c_uint64 * 8).from_address(launcher._params)
    return kind.from_address(pointers[position]).value


def test_every_kind_of_argument(launcher: Any) -> None:
    args = (FakeArray(2**47 + 16), np.int32(-5), None, np.float32(0.1), np.int64(-(2**40)))
    for _ in range(2):  # made, then found
        launcher._lay_out("kernel", args)
    assert argument(launcher, 0, ctypes.c_uint64) == 2**47 + 16
    assert argument(launcher, 1, ctypes.c_int32) == -5
    assert argument(launcher, 2, ctypes.c_uint64) == 0
    assert argument(launcher, 3, ctypes.c_float) == np.float32(0.1)
    assert argument(launcher, 4, ctypes.c_int64) == -(2**40)


@pytest.mark.parametrize("wrong", [1, 0.5, np.float64(1), np.zeros(2, np.float32)])
def test_anything_else_is_refused(launcher: Any, wrong: object) -> None:
    with pytest.raises(TypeError, match=f"kernel: argument 1 is {type(wrong).__name__}, expected an array, None"):
        launcher._lay_out("kernel", (None, wrong))


def test_a_kernel_without_arguments(launcher: Any) -> None:
    launcher._lay_out("kernel", ())


def test_a_dependent_launch_asks_for_it(launcher: Any) -> None:
    (attribute,) = launcher._dependent.attrs
    assert attribute.value.programmaticStreamSerializationAllowed == 1
    assert launcher._dependent.numAttrs == 1


def test_errors_that_end_the_device_and_those_that_do_not() -> None:
    assert isinstance(error_of_code(700, "launch of x"), DeviceLost)
    assert "CUDA_ERROR_ILLEGAL_ADDRESS (launch of x)" in str(error_of_code(700, "launch of x"))
    assert type(error_of_code(1, "launch of x")) is EngineFault
    assert type(error_of_code(123456, "launch of x")) is EngineFault


def test_what_cupy_raises_becomes_ours() -> None:
    class CUDARuntimeError(RuntimeError):
        status = 719

    with pytest.raises(DeviceLost, match="waiting"), cuda_errors("waiting"):
        raise CUDARuntimeError("cudaErrorLaunchFailure")
    with pytest.raises(EngineFault, match="allocating: out of memory"), cuda_errors("allocating"):
        raise MemoryError("out of memory")
    with pytest.raises(RuntimeError, match="not CUDA's"), cuda_errors("allocating"):
        raise RuntimeError("not CUDA's")
