"""The programs of examples/, started by the lines that examples/README.md prints.

Where one is not built, or is older than its source, its test is skipped; in CI it fails.  `make examples` builds them.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from command_harness import ROOT, clean_environment

README = (ROOT / "examples/README.md").read_text(encoding="utf-8")
PROMPT = "In the beginning God created the heaven and the earth."
SUFFIX = " And God said,"


@dataclass(frozen=True, slots=True)
class Program:
    """One row of README's table."""

    packages: str
    build: str
    run: str

    @property
    def language(self) -> str:
        return self.build.split()[-1]

    @property
    def prefix(self) -> str:
        return f"example-{self.language}"

    def start(self, target: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """As a user does, in a shell, with the address behind the printed line."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = ["bash", "-c", f"exec {self.run} {target}"]
        return subprocess.Popen(
            command, cwd=ROOT, env=clean_environment() | dict(environment), text=True, encoding="utf-8", **pipes
        )

    async def start_async(self, target: str) -> asyncio.subprocess.Process:
        """The same; its output is bytes, its errors are the test's own."""
        command = ("bash", "-c", f"exec {self.run} {target}")
        return await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, env=clean_environment(), stdout=asyncio.subprocess.PIPE
        )

    @functools.cache  # noqa: B019 - there are four of them
    def is_built(self) -> bool:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        question = ["make", "--question", "-C", "examples", self.language]
        return subprocess.run(question, cwd=ROOT, env=environment, capture_output=True).returncode == 0

    def needs_building(self) -> None:
        """Skips the test that asks if it does; fails it in CI."""
        if self.is_built():
            return
        reason = f"the example in {self.language} is not built; `make examples` builds it, or says what it takes"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)


PROGRAMS = [Program(*row) for row in re.findall(r"^\| [^|`]+ \| `([^`]+)` \| `([^`]+)` \| `([^`]+)` \|$", README, re.M)]
