"""What examples/README.md prints under "From a shell" runs as printed: grpcurl and buf, on real servers."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from command_harness import ROOT, TIMEOUT_S, Server, clean_environment, serving
from guarded import Guarded

_SECTION = (ROOT / "examples/README.md").read_text(encoding="utf-8").split("## From a shell\n")[1].split("\n## ")[0]
PLAIN, TOKEN, REFLECTION = re.findall(r"```console\n\$ (.*?)```", _SECTION, re.DOTALL)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A directory with what the lines read, where they may write."""
    for name in ("protos", "buf.yaml"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run(line: str, printed: str, address: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """In bash, with the virtual environment active, at the server's address in place of the printed one."""
    environment = clean_environment()
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    command = ["bash", "-c", line.replace(printed, address)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)


def said(done: subprocess.CompletedProcess[str], *words: str, status: int = 0) -> None:
    assert done.returncode == status, done.stdout + done.stderr
    assert not [word for word in words if word not in done.stdout + done.stderr], done.stdout + done.stderr


def lines(block: str) -> Sequence[str]:
    return block.split("\n$ ")


def test_create_stream_and_cancel(open_server: Server, checkout: Path) -> None:
    create, stream, build, cancel = (
        run(line, "127.0.0.1:50051", open_server.address, checkout) for line in lines(PLAIN)
    )
    said(create, '"name": "prefixes/genesis"', '"PREFIX_STATE_READY"', '"tokenCount": 12')
    said(stream, '"cachedTokens": 12', '"completionTokens": 32', '"FINISH_REASON_LENGTH"')
    said(build)
    said(cancel, "DeadlineExceeded", status=64 + 4)  # grpcurl's way to say which code
    assert '"completed"' not in cancel.stdout


def test_a_token_over_tls(guarded: Guarded, checkout: Path) -> None:
    (checkout / "tls.crt").symlink_to(guarded.authority)
    (checkout / "acme.token").symlink_to(guarded.folder / "node.token")
    build = next(line for line in lines(PLAIN) if line.startswith("buf build"))
    show, ask = lines(TOKEN)
    assert guarded.token("node") not in ask
    together = "\n".join([build, show, ask])
    said(run(together, "localhost:50051", guarded.address, checkout), '"hasTokenizer": true')
    said(run(f"{build}\n{ask}", "localhost:50051", guarded.address, checkout), "TINYLOOP_TOKEN", status=1)


def test_reflection(checkout: Path) -> None:
    start, *calls = lines(REFLECTION)
    words = start.split("#")[0].split()
    assert words[:2] == ["tinyloop", "serve"]
    with serving(*words[2:]) as server:
        listed, refused = (run(line, "127.0.0.1:50051", server.address, checkout) for line in calls)
    said(listed, "tinyloop.v1.GenerationService.Generate\n", "tinyloop.v1.GenerationService.GenerateUnary\n")
    said(refused, "NotFound", '"reason":"PREFIX_NOT_FOUND"', '"domain":"tinyloop"', status=64 + 5)
