"""The generated package says what protos/ says; a forgotten `make protos` fails here.

Descriptors are compared, not text: they are the same whichever generator wrote the files.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path.stem for path in (ROOT / "protos/tinyloop/v1").glob("*.proto"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, descriptor_pb2.FileDescriptorProto]:
    """What buf makes of protos/, by file name."""
    buf = Path(sys.executable).with_name("buf")
    command = str(buf) if buf.exists() else shutil.which("buf")
    assert command, "buf is part of the development tools: make test installs it"
    image = tmp_path_factory.mktemp("buf") / "image.binpb"
    subprocess.run([command, "build", "--as-file-descriptor-set", "--output", image], cwd=ROOT, check=True)
    files = descriptor_pb2.FileDescriptorSet.FromString(image.read_bytes()).file
    return {Path(file.name).stem: file for file in files if file.name.startswith("tinyloop/")}


def canonical(file: descriptor_pb2.FileDescriptorProto) -> descriptor_pb2.FileDescriptorProto:
    """Without comments and JSON names, which a generator may leave out."""
    file.ClearField("source_code_info")
    pending = list(file.message_type)
    while pending:
        message = pending.pop()
        pending.extend(message.nested_type)
        for field in message.field:
            field.ClearField("json_name")
    return file


@pytest.mark.parametrize("name", SOURCES)
def test_generated_code_is_current(name: str, compiled: dict[str, descriptor_pb2.FileDescriptorProto]) -> None:
    module = importlib.import_module(f"tinyloop_service.pb.{name}_pb2")
    generated = descriptor_pb2.FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
    assert canonical(generated) == canonical(compiled[name]), f"protos/{name}.proto changed: run `make protos`"


@pytest.mark.parametrize("name", SOURCES)
def test_every_service_has_its_stub_and_servicer(
    name: str, compiled: dict[str, descriptor_pb2.FileDescriptorProto]
) -> None:
    for service in compiled[name].service:
        module = importlib.import_module(f"tinyloop_service.pb.{name}_pb2_grpc")
        servicer = getattr(module, f"{service.name}Servicer")
        assert {method.name for method in service.method} <= set(vars(servicer))
        assert hasattr(module, f"{service.name}Stub")
