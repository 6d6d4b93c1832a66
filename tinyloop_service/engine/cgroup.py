"""How much of its machine this process may use: a container's limits, which the machine's own numbers do not show.

In: /proc/self/cgroup and the files of cgroup v2 under /sys/fs/cgroup.  Out: cores and bytes.  A limit binds everything
below it, so the lowest on the way up counts; without cgroup v2 the machine alone does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_HIERARCHY = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Whole cores, at least one: of the processors this process may run on, what the quota leaves."""
    quotas = [int(quota) / int(period) for quota, period in (text.split() for text in _limits("cpu.max"))]
    return max(1, int(min([len(os.sched_getaffinity(0)), *quotas])))


def usable_memory() -> int:
    """Bytes, in use or not."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *map(int, _limits("memory.max"))])


def _limits(name: str) -> Iterator[str]:
    """The contents of such files in this process's group and all above it, where there is a limit."""
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if own is None:
        return
    for group in (_HIERARCHY / own, *(_HIERARCHY / parent for parent in Path(own).parents)):
        try:
            text = (group / name).read_text().strip()
        except OSError:  # the root of a machine has no limits, hence no files
            continue
        if not text.startswith("max"):
            yield text
