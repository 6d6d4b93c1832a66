"""Which processor this is: what a measurement or a saved state is of."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    """For example "AMD EPYC 9R14"."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
