"""Builds a .cu file as a shared library for the emulator.

In: a source under kernels_cu/ and its -D defines.  Out: a `Library` with one launcher for each
`extern "C" __global__` function, made from the preprocessed source.  Libraries are kept in build/ beside this file
under a digest of everything that goes in.  Needs g++ 12 or newer; refuses nothing a compiler would accept.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
BUILD = HERE / "build"
KERNELS = HERE.parents[1] / "kernels_cu"
HEADERS = (KERNELS / "include", HERE)
COMPILER = os.environ.get("CXX", "g++")
# -O1: kernels compile in half the time of -O2, and run as fast; most of it goes to switching fibers.
# No contraction, as in kernels/build.py.  Sections and symbols stay private: many libraries live in one process.
FLAGS = (
    *("-std=c++20", "-O1", "-fPIC", "-w", "-fvisibility=hidden", "-fno-gnu-unique", "-fno-exceptions"),
    *("-ffp-contract=off", "-DTL_EMULATED"),
    *(("-mavx2", "-mf16c", "-mfma") if platform.machine() in ("x86_64", "AMD64") else ()),
)
KERNEL = re.compile(r'extern\s+"C"\s+__attribute__\(\(used, noinline\)\)\s+void\s+(\w+)\s*\(')
LAUNCHER = """
TL_EXPORTED const char* tl_signature_{name}() {{ return emulator::signature({name}); }}
TL_EXPORTED int tl_launch_{name}(const unsigned* grid, const unsigned* block, size_t shared_bytes, bool reverse,
                                 void** arguments) {{
  return emulator::launch({name}, grid, block, shared_bytes, reverse, arguments);
}}
"""


class EmulationError(RuntimeError):
    """The source does not build, or a launch did something a GPU leaves undefined."""


@dataclass(frozen=True, slots=True)
class Function:
    """One kernel.  `signature` has a letter per parameter: p pointer, i and l 32- and 64-bit integers, f float."""

    name: str
    signature: str
    library: ctypes.CDLL

    def __call__(
        self,
        grid: tuple[int, int, int],
        block: int,
        arguments: list[ctypes.c_void_p | ctypes.c_int32 | ctypes.c_int64 | ctypes.c_float],
        *,
        shared_bytes: int = 0,
        reverse: bool = False,
    ) -> None:
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        launch = getattr(self.library, f"tl_launch_{self.name}")
        sizes = (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(block, 1, 1)
        if launch(*sizes, ctypes.c_size_t(shared_bytes), ctypes.c_bool(reverse), pointers):
            raise EmulationError(f"{self.name}: {self.library.tl_error().decode()}")


@functools.cache
def load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.tl_error.restype = ctypes.c_char_p
    return library


def function(library: ctypes.CDLL, name: str) -> Function:
    try:
        signature = getattr(library, f"tl_signature_{name}")
    except AttributeError:
        raise EmulationError(f'{library._name} has no `extern "C" __global__ void {name}`') from None
    signature.restype = ctypes.c_char_p
    return Function(name, signature().decode(), library)


def build(source: Path, defines: Mapping[str, int] | None = None) -> Path:
    """The shared library of `source`, compiled now or before."""
    options = [f"-D{name}={value}" for name, value in sorted((defines or {}).items())]
    target = BUILD / f"{source.stem}-{_digest(source, options)}.so"
    BUILD.mkdir(exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test processes may want the same file: one of them builds it
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=BUILD) as directory:
                unfinished = _compile(source, options, Path(directory))
                unfinished.replace(target)  # whole or not at all
    return target


def _compile(source: Path, options: list[str], directory: Path) -> Path:
    includes = [f"-I{folder}" for folder in HEADERS]
    text = _run(["-x", "c++", *FLAGS, *options, *includes, "-E", str(source)])
    launchers = "".join(LAUNCHER.format(name=name) for name in dict.fromkeys(KERNEL.findall(text)))
    preprocessed, library = directory / f"{source.stem}.ii", directory / f"{source.stem}.so"
    preprocessed.write_text(
        text + launchers.replace("TL_EXPORTED", 'extern "C" __attribute__((visibility("default")))')
    )
    _run([*FLAGS, "-shared", "-o", str(library), str(preprocessed)])
    return library


def _run(arguments: list[str]) -> str:
    done = subprocess.run([COMPILER, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulationError(f"{COMPILER} {' '.join(arguments)}\n{done.stderr}")
    return done.stdout


def _digest(source: Path, options: list[str]) -> str:
    headers = (p for folder in HEADERS for p in sorted(folder.iterdir()) if p.suffix in (".cuh", ".hpp"))
    digest = hashlib.sha256(" ".join([_compiler_version(), LAUNCHER, *FLAGS, *options]).encode())
    for path in (source, *headers):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


@functools.cache
def _compiler_version() -> str:
    return _run(["--version"]).splitlines()[0]
