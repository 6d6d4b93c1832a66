"""Where and with what a figure was measured: processor, cores, GPUs, versions."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from tinyloop_service.engine.processor import processor_name


def describe_machine() -> str:
    """For example "AMD EPYC 9R14, 2 cores", or "…, 16 cores, NVIDIA H200 with driver 580.159.04"."""
    return ", ".join([f"{processor_name()}, {len(os.sched_getaffinity(0))} cores", *_gpus()])


def versions() -> dict[str, str]:
    """Of what figures depend on, as far as it is installed."""
    found = {"python": platform.python_version()}
    for name in (
        "tinyloop-service", "cupy-cuda13x", "cupy-cuda12x", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cublas",
        "onnxruntime", "numpy", "grpcio", "hdrhistogram",
    ):  # fmt: skip
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _gpus() -> list[str]:
    """As nvidia-smi names them; none where there is no such program."""
    query = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.replace(", ", " with driver ") for line in answer.splitlines() if line]
