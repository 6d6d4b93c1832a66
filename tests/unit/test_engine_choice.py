"""Which engine a server gets, and what is said about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tinyloop_service.engine import cuda
from tinyloop_service.engine.cuda import DeviceUnavailable
from tinyloop_service.engine.spec import SIZES
from tinyloop_service.engine.tensors import Fp16Linear, Int4Linear, with_fp16_blocks
from tinyloop_service.engine.weights import ModelWeights, random_model, write_model
from tinyloop_service.errors import EngineFault, InvalidArgument
from tinyloop_service.loading import build_engine, load_model
from tinyloop_service.settings import EngineSettings, Settings
from tinyloop_service.types import CacheMode

SPEC = replace(SIZES["tiny"], d_model=128, head_dim=64, n_heads=2, n_kv_heads=2, d_ff=128, max_seq_len=128)
SETTINGS = EngineSettings(kv_memory=4 << 20, threads=2)


@pytest.fixture(scope="module")
def weights() -> ModelWeights:
    return random_model(SPEC)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise DeviceUnavailable("there is no CUDA device", "(error 100): buy one")

    monkeypatch.setattr(cuda, "open_device", refuse)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, and an engine that is what it was made with."""
    monkeypatch.setattr(cuda, "open_device", lambda *_: SimpleNamespace(name="GPU of the test"))
    monkeypatch.setattr(cuda, "CudaEngine", lambda weights, **given: SimpleNamespace(weights=weights, given=given))


def test_auto_takes_the_cpu_where_there_is_no_gpu(weights: ModelWeights, no_gpu: None) -> None:
    said: list[str] = []
    assert build_engine(weights, SETTINGS, progress=said.append).name == "cpu"
    assert said[0] == "engine: cpu, because there is no CUDA device"


def test_cuda_without_a_gpu_is_one_sentence(weights: ModelWeights, no_gpu: None) -> None:
    with pytest.raises(InvalidArgument) as caught:
        build_engine(weights, replace(SETTINGS, engine="cuda"))
    assert str(caught.value) == "engine: cuda given, but there is no CUDA device (error 100): buy one"


@pytest.mark.parametrize(("kind", "why"), [("auto", "which is there and fits the model"), ("cuda", "as asked for")])
def test_a_gpu_is_taken(weights: ModelWeights, gpu: None, kind: str, why: str) -> None:
    said: list[str] = []
    engine: Any = build_engine(weights, replace(SETTINGS, engine=kind, debug=True), progress=said.append)
    assert said == [f"engine: cuda on GPU of the test, {why}"]
    assert engine.weights is weights and engine.given["kv_memory"] == SETTINGS.kv_memory and engine.given["debug"]


def test_the_cache_mode_reaches_the_gpu(weights: ModelWeights, gpu: None) -> None:
    settings = Settings.from_environment({"TINYLOOP_ENGINE": "cuda", "TINYLOOP_CACHE_MODE": "int8"}).engine
    engine: Any = build_engine(weights, settings)
    assert engine.given["cache_mode"] is CacheMode.INT8


def test_a_gpu_whose_engine_cannot_be_made_is_let_go(weights: ModelWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    device = SimpleNamespace(name="GPU of the test", close=lambda: closed.append(True))
    monkeypatch.setattr(cuda, "open_device", lambda *_: device)

    def fail(*_: object, **__: object) -> None:
        raise EngineFault("self-check: …")

    monkeypatch.setattr(cuda, "CudaEngine", fail)
    with pytest.raises(EngineFault, match="self-check"):
        build_engine(weights, SETTINGS)
    assert closed == [True]


def test_a_model_that_the_kernels_cannot_run_is_the_reason_before_any_gpu(weights: ModelWeights) -> None:
    said: list[str] = []
    narrow = random_model(replace(SPEC, head_dim=32, n_heads=4, n_kv_heads=4))
    assert build_engine(narrow, SETTINGS, progress=said.append).name == "cpu"
    assert said[0] == "engine: cpu, because the model's head_dim is 32; the CUDA kernels have 64 and 128"


def test_the_cpu_is_taken_where_it_is_asked_for(weights: ModelWeights, gpu: None) -> None:
    said: list[str] = []
    assert build_engine(weights, replace(SETTINGS, engine="cpu"), progress=said.append).name == "cpu"
    assert said[0] == "engine: cpu, as asked for"


def test_fp16_blocks_for_every_engine(weights: ModelWeights, gpu: None) -> None:
    engine: Any = build_engine(weights, replace(SETTINGS, engine="auto", experimental_fp16_body=True))
    given: ModelWeights = engine.weights
    assert isinstance(given.loop[0].down, Fp16Linear) and isinstance(given.pre[1].q, Fp16Linear)
    assert isinstance(given.head, Int4Linear) and given.model_id == weights.model_id
    assert np.array_equal(given.loop[0].up.weight, weights.loop[0].up.dequantize().astype(np.float16))
    assert with_fp16_blocks(given).loop[0].up is given.loop[0].up
    assert build_engine(weights, replace(SETTINGS, engine="cpu", experimental_fp16_body=True)).name == "cpu"


def test_precompiled_kernels_reach_the_device(
    weights: ModelWeights, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(cuda, "open_device", lambda _, folder: asked.append(folder) or SimpleNamespace(name="GPU"))
    build_engine(weights, replace(SETTINGS, precompiled_kernels="/kernels"))
    build_engine(weights, SETTINGS)
    assert asked == [Path("/kernels"), None]


@pytest.mark.parametrize(("engine", "wakes"), [("auto", 1), ("cuda", 1), ("cpu", 0)])
def test_the_driver_wakes_while_the_model_is_read(
    weights: ModelWeights, gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, wakes: int
) -> None:
    woken: list[bool] = []
    monkeypatch.setattr(cuda, "wake_driver", lambda: woken.append(True))
    write_model(tmp_path / "a.tinyloop", weights)
    load_model(tmp_path / "a.tinyloop", replace(SETTINGS, engine=engine))
    assert len(woken) == wakes
