"""The burst of integrations/burst, built and run as its README says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from command_harness import ROOT, TIMEOUT_S, Server, clean_environment

TOOLS = ("cmake", "c++", "pkg-config", "protoc", "grpc_cpp_plugin")
BUILD_S = 240


@pytest.fixture(scope="module")
def burst(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        reason = f"{', '.join(missing)} missing; examples/README.md says what C++ needs"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    folder = tmp_path_factory.mktemp("burst")
    for command in (["cmake", "-S", "integrations/burst", "-B", folder], ["cmake", "--build", folder]):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_S)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "burst"


def run(burst: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [burst, *arguments]
    return subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=TIMEOUT_S)


def test_every_stream_has_its_tokens_and_the_time_is_told(burst: Path, open_server: Server) -> None:
    done = run(burst, open_server.address, "STREAMS=4", "TOKENS=8", "ROUNDS=3", "CONNECTIONS=2", "PREFIX=70")
    assert (done.returncode, done.stderr) == (0, "")
    said = re.fullmatch(
        r"4 streams of 8 tokens off a prefix of 70, connections: 2: "
        r"median ([\d.]+) ms \(([\d.]+)-([\d.]+)\) of 3 rounds\n",
        done.stdout,
    )
    assert said and float(said[2]) <= float(said[1]) <= float(said[3])


def test_what_the_server_refuses_is_said_with_status_1_and_wrong_usage_with_2(burst: Path, open_server: Server) -> None:
    refused = run(burst, open_server.address, "PREFIX=100000")
    assert refused.returncode == 1 and "tokens" in refused.stderr
    for wrong in (["STREAMS=0"], ["STREAM=4"], ["4"]):
        done = run(burst, open_server.address, *wrong)
        assert done.returncode == 2 and wrong[0] in done.stderr and "usage: burst HOST:PORT" in done.stderr
