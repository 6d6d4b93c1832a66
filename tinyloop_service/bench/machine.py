"""Where a figure was measured: processor, cores, GPUs."""

from __future__ import annotations

import os
import subprocess

from tinyloop_service.engine.processor import processor_name


def describe_machine() -> str:
    """For example "AMD EPYC 9R14, 2 cores", or "…, 16 cores, NVIDIA H200 with driver 580.159.04"."""
    return ", ".join([f"{processor_name()}, {len(os.sched_getaffinity(0))} cores", *_gpus()])


def _gpus() -> list[str]:
    """As nvidia-smi names them; none where there is no such program."""
    query = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.replace(", ", " with driver ") for line in answer.splitlines() if line]
