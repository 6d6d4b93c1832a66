"""What is shipped: the wheel holds model, contract, kernels and licence, and works where nothing else is."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from command_harness import ROOT

MAX_MODEL_BYTES = 8 * 2**20


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [built] = folder.glob("*.whl")
    return built


def test_it_holds_what_a_user_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    for name in ("demo/demo.tinyloop", "demo/MODEL_CARD.md", "demo/prefix.txt"):
        assert sizes[f"tinyloop_service/{name}"] > 0
    assert sizes["tinyloop_service/demo/demo.tinyloop"] <= MAX_MODEL_BYTES
    assert "tinyloop_service/py.typed" in sizes, "which says to type checkers that it is typed"
    for proto in (ROOT / "protos/tinyloop/v1").glob("*.proto"):
        assert f"tinyloop_service/protos/tinyloop/v1/{proto.name}" in sizes
    for source in (ROOT / "kernels_cu").rglob("*.cu*"):
        assert f"tinyloop_service/{source.relative_to(ROOT)}" in sizes
    assert any(name.endswith("licenses/LICENSE") for name in sizes)


def test_it_holds_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert all(name.startswith(("tinyloop_service/", "tinyloop_service-")) for name in names)
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name]


def test_it_imports_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import tinyloop_service; from tinyloop_service.cli import main; from tinyloop_service.demo import MODEL_PATH\n"
        "from tinyloop_service.kernels.build import KernelBuilder; KernelBuilder('sm_80').compile('tables', {})\n"
        "print(tinyloop_service.__file__, flush=True); main(['inspect', str(MODEL_PATH)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path)), "it was not the wheel that was imported"
