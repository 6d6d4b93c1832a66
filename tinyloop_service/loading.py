"""A model file, and the engine that is made of it: the one place that chooses an engine.

In: a path, settings.  Out: an engine that has checked itself, a tokenizer.  CuPy and ONNX Runtime load only where they
compute.  It refuses to know servers.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyloop_service.engine.api import Engine
from tinyloop_service.engine.cgroup import usable_memory
from tinyloop_service.engine.tensors import with_fp16_blocks
from tinyloop_service.engine.weights import ModelWeights, read_model
from tinyloop_service.errors import InvalidArgument
from tinyloop_service.settings import EngineKind, EngineSettings
from tinyloop_service.text import Tokenizer

if TYPE_CHECKING:
    from tinyloop_service.kernels.device import Device

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What a server needs of a model file, its engine made."""

    engine: Engine
    tokenizer: Tokenizer | None
    config: Mapping[str, Any]


def build_engine(
    model: ModelWeights | str | Path, settings: EngineSettings, *, progress: Progress | None = None
) -> Engine:
    """The engine that `settings` asks for; takes seconds.  `progress` hears what it does.

    Raises ModelFileError, OSError for the file; InvalidArgument for settings that cannot be kept here.
    """
    weights = model if isinstance(model, ModelWeights) else read_model(model)
    if settings.experimental_fp16_body:
        weights = with_fp16_blocks(weights)
    say = progress or (lambda _: None)
    if settings.engine == EngineKind.CPU:
        say("engine: cpu, as asked for")
        return _cpu_engine(weights, settings, say)
    from tinyloop_service.engine.cuda import DeviceUnavailable, open_device  # CuPy loads only if there is a chance

    try:
        device = open_device(weights.spec, Path(folder) if (folder := settings.precompiled_kernels) else None)
    except DeviceUnavailable as error:
        if settings.engine == EngineKind.CUDA:
            raise InvalidArgument("engine", f"cuda given, but {error}") from None
        say(f"engine: cpu, because {error.reason}")
        return _cpu_engine(weights, settings, say)
    why = "as asked for" if settings.engine == EngineKind.CUDA else "which is there and fits the model"
    say(f"engine: cuda on {device.name}, {why}")
    return _cuda_engine(weights, settings, device, say)


def _cuda_engine(weights: ModelWeights, settings: EngineSettings, device: Device, progress: Progress) -> Engine:
    from tinyloop_service.engine.cuda import CudaEngine

    try:
        return CudaEngine(
            weights,
            device=device,
            kv_memory=settings.kv_memory,
            cache_mode=settings.cache_mode,
            debug=settings.debug,
            progress=progress,
        )
    except BaseException:
        device.close()  # or its compilers would finish all that they were asked for before this process may end
        raise


def _cpu_engine(weights: ModelWeights, settings: EngineSettings, progress: Progress) -> Engine:
    from tinyloop_service.engine.cpu import CpuEngine  # ONNX Runtime loads only where it computes

    return CpuEngine(
        weights,
        kv_memory=settings.kv_memory or default_kv_memory(),
        cache_mode=settings.cache_mode,
        threads=settings.threads,
        accuracy_level=settings.accuracy_level,
        debug=settings.debug,
        progress=progress,
    )


def default_kv_memory() -> int:
    """Bytes for the CPU engine: a quarter of the memory that may be used, at most 2 GiB."""
    return min(usable_memory() // 4, 2 * 2**30)


def load_model(path: str | Path, settings: EngineSettings, *, progress: Progress | None = None) -> LoadedModel:
    """Read the file and build its engine; raises what `build_engine` raises."""
    with _device_waking(settings):
        weights = read_model(path)
    tokenizer = Tokenizer(weights.tokenizer, weights.spec.bos_token_id) if weights.tokenizer else None
    engine = build_engine(weights, settings, progress=progress)
    return LoadedModel(engine, tokenizer, json.loads(weights.spec.to_json()))


@contextmanager
def _device_waking(settings: EngineSettings) -> Iterator[None]:
    """A GPU that may be used takes as long to be there as a model takes to be read; both at once."""
    if settings.engine == EngineKind.CPU:
        yield
        return
    from tinyloop_service.engine.cuda import wake_driver

    waking = threading.Thread(target=wake_driver, name="tinyloop-wake-driver")
    waking.start()
    try:
        yield
    finally:
        waking.join()
