"""The promise of the CPU engine, as far as it is about what only that engine has.

Blocks of own splits, levels of accuracy, threads; cache modes are in `test_cpu_modes.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from driver import Driver
from engines import engine_of
from test_bits import SMALL, TOKENS, check_own_splits

from tinyloop_service.engine.cpu import decoding


@pytest.mark.parametrize(("window", "splits"), [(0, 1), (100, 2)])
def test_own_splits_are_put_away_in_blocks(monkeypatch: pytest.MonkeyPatch, window: int, splits: int) -> None:
    monkeypatch.setattr(decoding, "BLOCK_SPLITS", splits)
    check_own_splits(Driver(engine_of(SMALL)), window)


@pytest.mark.parametrize("accuracy_level", [0, 1])
def test_float_activations_keep_the_promise(accuracy_level: int) -> None:
    driver = Driver(engine_of(SMALL, accuracy_level=accuracy_level))
    prefix = driver.prefix(TOKENS[:70])
    alone = driver.alone(prefix, TOKENS[70:72], 4)
    rows = [driver.request(prefix, TOKENS[70 : 72 + i]) for i in range(5)]
    driver.decode(rows, 4)
    assert driver.drawn[rows[0].id] == alone == driver.alone(None, TOKENS[:72], 4, chunk=9)


ON_SO_MANY_THREADS = """
import sys
from tinyloop_service.engine.cpu.runtime import use_threads
assert use_threads(int(sys.argv[1])) == int(sys.argv[1])
import test_cpu_bits
test_cpu_bits.print_bits()
"""


def print_bits() -> None:
    driver = Driver(engine_of(SMALL))
    prefix = driver.prefix(TOKENS[:200])
    rows = [driver.request(prefix, TOKENS[200 : 201 + 9 * i]) for i in range(8)]
    driver.decode(rows, 5)
    print(driver.engine.read_kv(prefix.id).tobytes().hex(), [driver.drawn[row.id] for row in rows])


def test_threads_change_nothing() -> None:
    """A process has one pool; so two processes.  The prompt's products are large enough to be shared out."""
    folder = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{folder.parent}"}
    printed = [
        subprocess.run(
            [sys.executable, "-c", ON_SO_MANY_THREADS, threads],
            capture_output=True, text=True, timeout=60, check=True, env=environment,
        ).stdout
        for threads in ("1", "2")
    ]  # fmt: skip
    assert printed[0] and printed[0] == printed[1]
