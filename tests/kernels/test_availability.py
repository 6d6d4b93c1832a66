"""Without a GPU there is one exception, and its sentence names what is missing and the way out."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from cuda.pathfinder import DynamicLibNotFoundError

from tinyloop_service.kernels import availability, cublas
from tinyloop_service.kernels.availability import open_cupy_device
from tinyloop_service.kernels.build import KernelBuildError
from tinyloop_service.kernels.unavailable import DeviceUnavailable


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""


def fake_cupy(*, devices: int | None = 1, capability: tuple[int, int] = (9, 0)) -> ModuleType:
    def count() -> int:
        if devices is None:
            raise CUDARuntimeError("cudaErrorInsufficientDriver")
        return devices

    def properties(ordinal: int) -> dict[str, object]:
        return {"name": b"NVIDIA Test", "major": capability[0], "minor": capability[1]}

    cupy = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        runtime=SimpleNamespace(getDeviceCount=count, getDeviceProperties=properties, CUDARuntimeError=CUDARuntimeError)
    )
    return cupy


@pytest.mark.parametrize(
    ("cupy", "says"),
    [
        (None, r"CuPy is not installed, .*pip install 'tinyloop-service\[cuda13\]'"),
        (fake_cupy(devices=None), r"no CUDA device, or no driver for it \(cudaErrorInsufficientDriver\)"),
        (fake_cupy(devices=0), r"no CUDA device 0 \(CUDA finds 0\)"),
        (fake_cupy(capability=(7, 5)), r"NVIDIA Test has compute capability 7\.5, at least 8\.0 is needed"),
    ],
)
def test_why_not(monkeypatch: pytest.MonkeyPatch, cupy: ModuleType | None, says: str) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(DeviceUnavailable, match=says):
        open_cupy_device()


def test_without_cuda_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    for name in ("cupy_device", "launching"):
        monkeypatch.delitem(sys.modules, f"tinyloop_service.kernels.{name}", raising=False)
    with pytest.raises(DeviceUnavailable, match="cuda-bindings are not installed"):
        open_cupy_device()


@pytest.mark.parametrize("precompiled", [None, Path("/kernels")])
def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, precompiled: Path | None) -> None:
    """It may be missing where kernels are brought along."""

    def refuse() -> None:
        raise KernelBuildError("kernels cannot be compiled, NVRTC is not there")

    opened: list[Path | None] = []
    module = ModuleType("cupy_device")
    module.CupyDevice = lambda _, **given: opened.append(given["precompiled"])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    monkeypatch.setitem(sys.modules, "tinyloop_service.kernels.cupy_device", module)
    monkeypatch.setattr(availability, "nvrtc_version", refuse)
    if precompiled is None:
        with pytest.raises(DeviceUnavailable, match="NVRTC is not there"):
            open_cupy_device()
    else:
        open_cupy_device(precompiled=precompiled)
    assert opened == ([] if precompiled is None else [precompiled])


@pytest.mark.parametrize("error", [DynamicLibNotFoundError("libcublas.so.13"), OSError("cannot open shared object")])
def test_without_cublas(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(name: str) -> None:
        raise error

    monkeypatch.setattr(cublas, "load_nvidia_dynamic_lib", refuse)
    with pytest.raises(DeviceUnavailable, match=r"cuBLAS is not installed .*pip install 'tinyloop-service\[cuda13\]'"):
        cublas.find_library()
