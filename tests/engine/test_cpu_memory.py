"""What memory the CPU engine has committed, as the kernel counts it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tinyloop_service.engine.cache_modes import Field
from tinyloop_service.engine.cpu.memory import PagePool, Track
from tinyloop_service.engine.spec import SIZES

SMAPS = Path("/proc/self/smaps_rollup")
pytestmark = pytest.mark.skipif(not SMAPS.exists(), reason="the kernel does not say what is committed")
SPEC = replace(SIZES["tiny"], n_kv_heads=4, head_dim=64)
KB, MB = 1 << 10, 1 << 20


def committed_bytes() -> int:
    lines = SMAPS.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Rss:")) * KB


def test_a_page_that_is_written_commits_no_more_than_itself() -> None:
    """Where huge pages are to be had, NumPy's arrays commit 2 MB, in several milliseconds."""
    field = Field("kv", np.float16, (2, 4, 64))
    pool = PagePool(16 * MB // (field.num_bytes * 64), [field])
    before = committed_bytes()
    for page in range(0, pool.num_pages, pool.num_pages // 8):  # each in 2 MB of its own
        pool.write_run(page, 0, {"kv": np.ones((64, 2, 4, 64), np.float16)})
    assert committed_bytes() - before < 4 * MB


@pytest.mark.parametrize("megabytes", [8, 32])
def test_the_first_tokens_of_a_long_track_commit_no_more_than_themselves(megabytes: int) -> None:
    layers = 8
    split_bytes = 2 * layers * SPEC.n_kv_heads * 64 * SPEC.head_dim * 2
    track = Track(SPEC, layers, 0)
    before = committed_bytes()
    track.grow(megabytes * MB // split_bytes)
    assert track.kv.nbytes == megabytes * MB and not track.kv[:, :, -1].any()
    for layer in range(layers):
        track.write_run(layer, 0, np.ones((16, 2, SPEC.n_kv_heads, SPEC.head_dim), np.float16))
    assert committed_bytes() - before < 3 * MB
