"""Writes tinyloop_service/pb from protos/: `python protos/generate.py` (or `make protos`).

The generator is pinned and lives in a temporary virtual environment, so that the output is the same wherever it is
made, and old enough that its output runs with every supported grpcio and protobuf (newer generators refuse older, and
in time newer, libraries).  Imports between the generated files are rewritten to tinyloop_service.pb.  Needs CPython
3.11 or 3.12, for which the pinned generator has wheels, and access to a package index.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

GENERATOR = ("grpcio-tools==1.62.3", "setuptools<81")
ROOT = Path(__file__).resolve().parent
TARGET = ROOT.parent / "tinyloop_service" / "pb"
PACKAGE_DOC = '"""Generated from protos/ by protos/generate.py; do not edit."""\n'


def generate(python: Path, out: Path) -> None:
    """Run protoc over every file of the package."""
    protos = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tinyloop/v1/*.proto"))
    outputs = [f"--{kind}={out}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    subprocess.run([python, "-m", "grpc_tools.protoc", "-I.", *outputs, *protos], cwd=ROOT, check=True)


def install(generated: Path) -> None:
    """Replace the files of the package by the generated ones, imports rewritten."""
    for old in TARGET.glob("*_pb2*"):
        old.unlink()
    TARGET.mkdir(exist_ok=True)
    for path in sorted((generated / "tinyloop" / "v1").iterdir()):
        text = re.sub(r"from tinyloop\.v1 import", "from tinyloop_service.pb import", path.read_text())
        if path.name.endswith("_pb2_grpc.py") and "class " not in text:
            continue  # a file without services
        (TARGET / path.name).write_text(text)
    (TARGET / "__init__.py").write_text(PACKAGE_DOC)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        venv.create(place / "venv", with_pip=True)
        python = place / "venv" / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", *GENERATOR], check=True)
        (place / "out").mkdir()
        generate(python, place / "out")
        install(place / "out")
    print(f"wrote {TARGET}", file=sys.stderr)


if __name__ == "__main__":
    main()
