"""Compiles kernels_cu/*.cu: NVRTC makes a cubin for one architecture, and a directory keeps it.

In: the stem of a source, its -D defines, an architecture such as "sm_90".  Out: the path of a cubin.  Needs no GPU and
no driver, only the NVRTC library.  A cubin's name holds a digest of all that goes in (the source, the headers, the
options), so a changed header is another cubin; the directory's name holds NVRTC's version.  `precompiled` is a
directory of such cubins to look in first.  Refuses to load or launch anything.

    <cache>/nvrtc-13.0/linear-sm_90a-3f2a….cubin
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinyloop_service.errors import EngineFault
from tinyloop_service.kernels.unavailable import INSTALL

PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel the sources lie inside the package, in a checkout beside it.
KERNELS = next(p for p in (PACKAGE / "kernels_cu", PACKAGE.parent / "kernels_cu") if p.is_dir())
OPTIONS = (
    "--std=c++20",
    "--device-as-default-execution-space",
    "--fmad=false",  # a·b + c is fused only where a kernel says so: bits do not depend on the variant compiled
    "--generate-line-info",  # for profilers and sanitizers; the code stays the same
)
OWN_FEATURES = {"sm_90": "sm_90a"}  # architectures whose own instructions kernels may use


class KernelBuildError(EngineFault):
    """A kernel did not compile, or there is no compiler.  The message holds the compiler's log."""


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tinyloop" / "kernels"


class KernelBuilder:
    """Cubins for one architecture.  Threads may share it."""

    def __init__(
        self, arch: str, *, sources: Path = KERNELS, cache: Path | None = None, precompiled: Path | None = None
    ) -> None:
        self._arch = OWN_FEATURES.get(arch, arch)
        self._sources = sources
        self._cache = cache or default_cache()
        self._precompiled = precompiled

    @property
    def digest(self) -> str:
        """Of all sources and headers, and of what the compiler is told."""
        folders = (self._sources, *_headers(self._sources))
        paths = sorted({path for folder in folders for path in folder.glob("*.cu*")}, key=lambda path: path.name)
        digest = hashlib.sha256("\0".join(OPTIONS).encode())
        for path in paths:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()[:20]

    def cubin(self, stem: str, defines: Mapping[str, int]) -> Path:
        """The compiled form of sources/<stem>.cu, from one of the directories or made now."""
        return self.find(stem, defines) or _keep(self._cached(stem, defines), self.compile(stem, defines))

    def find(self, stem: str, defines: Mapping[str, int]) -> Path | None:
        """The same where it is there already."""
        if self._precompiled is not None:
            path = self._precompiled / self._name(stem, defines)
            if path.is_file():
                return path
        path = self._cached(stem, defines)
        return path if path.is_file() else None

    def _cached(self, stem: str, defines: Mapping[str, int]) -> Path:
        return self._cache / f"nvrtc-{'.'.join(map(str, nvrtc_version()))}" / self._name(stem, defines)

    def compile(self, stem: str, defines: Mapping[str, int]) -> bytes:
        """The cubin itself, made now."""
        source = (self._sources / f"{stem}.cu").read_bytes()
        return compile_cubin(source, f"{stem}.cu", options_for(_known(self._arch), defines, self._sources))

    def _name(self, stem: str, defines: Mapping[str, int]) -> str:
        """Paths are left out of the digest: a cubin made on one machine is found on another."""
        headers = {path.name: path for folder in _headers(self._sources) for path in sorted(folder.glob("*.cuh"))}
        digest = hashlib.sha256("\0".join([*OPTIONS, *_defines(defines)]).encode())
        for path in (self._sources / f"{stem}.cu", *headers.values()):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return f"{stem}-{self._arch}-{digest.hexdigest()[:20]}.cubin"


def options_for(arch: str, defines: Mapping[str, int], sources: Path = KERNELS) -> list[str]:
    """All that NVRTC is told."""
    includes = [f"--include-path={folder}" for folder in _headers(sources)]
    return [f"--gpu-architecture={arch}", *OPTIONS, *includes, *_defines(defines)]


def compile_cubin(source: bytes, name: str, options: list[str]) -> bytes:
    """NVRTC on one source.  Warnings are dropped, errors raised with their log."""
    nvrtc = _nvrtc()
    program = _checked(nvrtc.nvrtcCreateProgram(source, name.encode(), 0, [], []))
    try:
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if status:
            log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
            nvrtc.nvrtcGetProgramLog(program, log)
            text = log.rstrip(bytes(1)).decode()
            raise KernelBuildError(f"{name} does not compile with {' '.join(options)}:\n{text}")
        cubin = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _known(arch: str) -> str:
    """`arch`, or where the compiler is too old for it, the newest one before it whose code runs on it."""
    generation, minor = divmod(int(arch.removeprefix("sm_").rstrip("a")), 10)
    numbers = _checked(_nvrtc().nvrtcGetSupportedArchs())
    older = [n for n in numbers if n // 10 == generation and n % 10 <= minor]
    if not older:
        version = ".".join(map(str, nvrtc_version()))
        raise KernelBuildError(f"NVRTC {version} does not compile for {arch}: a newer one is needed")
    return arch if max(older) % 10 == minor else f"sm_{max(older)}"


def _headers(sources: Path) -> list[Path]:
    return list(dict.fromkeys((sources / "include", KERNELS / "include")))


def _defines(defines: Mapping[str, int]) -> list[str]:
    return [f"-D{name}={value}" for name, value in sorted(defines.items())]


def _keep(path: Path, cubin: bytes) -> Path:
    """Written to path, or to a temporary directory where that cannot be; the path of the file."""
    try:
        _write(path, cubin)
        return path
    except OSError:
        elsewhere = Path(tempfile.mkdtemp(prefix="tinyloop-kernels-")) / path.name
        _write(elsewhere, cubin)
        return elsewhere


def _write(path: Path, cubin: bytes) -> None:
    """Whole or not at all: servers that start together may write the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(cubin)
    Path(unfinished).replace(path)


@functools.cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as error:  # a missing package or library; each version raises its own class
        raise KernelBuildError(
            f"kernels cannot be compiled, NVRTC is not there ({type(error).__name__}): {INSTALL}"
        ) from error
    return nvrtc


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """Raises KernelBuildError where there is no NVRTC."""
    status, major, minor = _nvrtc().nvrtcVersion()
    _checked((status,))
    return major, minor


def _checked(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if status:
        raise KernelBuildError(f"NVRTC answered {status.name}")
    return values[0] if values else None
