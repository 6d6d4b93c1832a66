"""What a lost device looks like to the scheduler: DeviceLost, which drains the server, and no hanging."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.gpu
def test_every_further_step_says_so() -> None:
    script = Path(__file__).with_name("lost_device.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split() == ["DeviceLost", "DeviceLost"], done.stderr
