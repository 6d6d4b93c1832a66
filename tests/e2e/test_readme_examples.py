"""The Python in README and docs/ runs as printed, against a real server; their shell lines name what exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_harness import ROOT, TIMEOUT_S, clean_environment, serving

from tinyloop_service.demo import MODEL_PATH

PRINTED_ADDRESS = "127.0.0.1:50051"
OTHERS = {  # commands that are not this project's
    *("buf", "chmod", "docker", "envoy", "export", "for", "grpcurl", "helm", "kill", "kubectl", "mkdir", "openssl"),
    *("python", "redis-server", "sed", "umask"),
}
PAGES = [ROOT / "README.md", ROOT / "examples/README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str, *pages: Path) -> list[str]:
    texts = [page.read_text(encoding="utf-8") for page in pages]
    return [block for text in texts for block in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)]


EXAMPLES = blocks("python", ROOT / "README.md")


def run(code: str, folder: Path) -> str:
    path = folder / "example.py"
    path.write_text(code, encoding="utf-8")
    command = [sys.executable, "-W", "error", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=clean_environment())
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_there_are_two_examples_and_the_first_is_short() -> None:
    assert len(EXAMPLES) == 2
    assert len(EXAMPLES[0].strip().splitlines()) <= 24


def test_the_client_example(tmp_path: Path) -> None:
    assert PRINTED_ADDRESS in EXAMPLES[0]
    with serving("--model", MODEL_PATH) as server:
        out = run(EXAMPLES[0].replace(PRINTED_ADDRESS, server.address), tmp_path)
    assert len(re.findall(r"^In the beginning God created the heaven and the earth\. And ", out, re.MULTILINE)) == 3


def test_the_streaming_example(tmp_path: Path) -> None:
    [example] = blocks("python", ROOT / "docs/api.md")
    assert PRINTED_ADDRESS in example
    with serving("--model", MODEL_PATH) as server:
        out = run(example.replace(PRINTED_ADDRESS, server.address), tmp_path)
    text, refused = out.rstrip().rsplit("\n", 1)
    assert len(text) > 20 and refused.startswith("refused: ") and "nobody" in refused


def test_the_in_process_example(tmp_path: Path) -> None:
    assert len(run(EXAMPLES[1], tmp_path).strip()) > 20


def test_the_printed_line_makes_a_configuration_of_envoy_for_one_machine(tmp_path: Path) -> None:
    [block] = [each for each in blocks("console", ROOT / "docs/deploying.md") if "sed -E" in each]
    [line] = re.findall(r"^\$ (sed .*?[^\\])$", block, re.DOTALL | re.MULTILINE)
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    subprocess.run(["bash", "-c", line], cwd=tmp_path, check=True, timeout=TIMEOUT_S)
    made = (tmp_path / "envoy.yaml").read_text(encoding="utf-8")
    found = re.findall(r"socket_address: \{address: (\S+), port_value: (\d+)\}", made)
    assert found == [("127.0.0.1", "50051"), *(("127.0.0.1", f"5006{number}") for number in range(3))]
    assert "for i in 0 1 2; do" in block and "--listen 127.0.0.1:5006$i" in block


@pytest.mark.parametrize("block", blocks("console", *PAGES))
def test_shell_examples_name_commands_that_exist(block: str) -> None:
    from tinyloop_service.cli.main import group

    for line in block.replace("\\\n", "").splitlines():
        words = line.removeprefix("$ ").split("#")[0].split()
        if words[:1] == ["tinyloop"]:
            assert words[1] in group.commands
        elif words[0] not in OTHERS:
            assert words[0] == "make"
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
