"""A container's limits count, wherever on the way up they are set; without them the machine does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tinyloop_service.engine import cgroup

MACHINE_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))


def belong_to(monkeypatch: pytest.MonkeyPatch, root: Path, membership: str) -> None:
    (root / "membership").write_text(membership)
    monkeypatch.setattr(cgroup, "_MEMBERSHIP", root / "membership")
    monkeypatch.setattr(cgroup, "_HIERARCHY", root)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("200000 100000", 2), ("250000 100000", 2), ("50000 100000", 1), ("3200000 100000", 8)],
)
def test_a_quota_bounds_the_cores(quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    belong_to(monkeypatch, tmp_path, "0::/\n")
    (tmp_path / "cpu.max").write_text(quota + "\n")
    assert cgroup.usable_cores() == cores


def test_the_lowest_limit_on_the_way_up_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    belong_to(monkeypatch, tmp_path, "0::/pods/one\n")
    own = tmp_path / "pods" / "one"
    own.mkdir(parents=True)
    (own / "memory.max").write_text("max\n")
    (own.parent / "memory.max").write_text(f"{64 * 2**20}\n")
    (tmp_path / "memory.max").write_text(f"{128 * 2**20}\n")
    assert cgroup.usable_memory() == 64 * 2**20


@pytest.mark.parametrize("membership", ["", "12:memory:/docker/1f\n", "0::/nowhere\n"])
def test_without_limits_the_machine_counts(membership: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    belong_to(monkeypatch, tmp_path, membership)
    assert (cgroup.usable_cores(), cgroup.usable_memory()) == (8, MACHINE_BYTES)


def test_without_cgroups_the_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "_MEMBERSHIP", tmp_path / "none")
    assert (cgroup.usable_cores(), cgroup.usable_memory()) == (8, MACHINE_BYTES)
