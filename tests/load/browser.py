"""A real browser without a window: what it makes of a page, and what it complains of.

Where it is missing a test is skipped, but never in CI.  `make ops-tools` installs it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_LIMIT_S = 60.0


@dataclass(frozen=True)
class Opened:
    """`dom` after scripts have run; `complaints` are the console's, refused loads included."""

    dom: str
    complaints: tuple[str, ...]


def open_page(path: Path, profile: Path, width: int = 1280) -> Opened:
    """profile: a folder of the test's own."""
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    said = ("--enable-logging=stderr", "--dump-dom", f"--window-size={width},800", f"--user-data-dir={profile}")
    done = subprocess.run(
        (_binary(), *options, *said, path.as_uri()), capture_output=True, text=True, timeout=_LIMIT_S, check=True
    )
    return Opened(done.stdout, tuple(re.findall(r":CONSOLE[:(].*", done.stderr)))


def _binary() -> str:
    """Skips the test that asks where there is none; fails it in CI."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        assert os.environ.get("CI", "").lower() not in ("1", "true"), "chromium is missing; run `make ops-tools`"
        pytest.skip("chromium is missing; `make ops-tools` installs it (as root, on Debian)")
    return found
