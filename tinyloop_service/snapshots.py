"""Saved state on disk: what was prefilled once needs no prefill after a restart.

    <snapshot_dir>/<content_sha256>.safetensors      pages and logits as bytes (U8); metadata:
        format, version                              of this file
        model_id, cache_mode, content_sha256         what it is the state of
        snapshot_id                                  what else its bits depend on: engine, libraries, machine, settings
        data_sha256                                  of pages, then logits

At start every file is checked whole and mapped; what is damaged, foreign or of another version is refused, with a line
in the log, and prefilled as if it were not there.  Files are written beside the event loop, by renaming; the oldest go
when all together pass `snapshot_bytes`, and a file goes with the last name of its content.  Only files named by a
digest count and go, and at start what a killed server had begun to write; whatever else is in the directory stays.

In: states as the scheduler takes them.  Out: states that it may restore from.  It refuses to know what is in them.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from tinyloop_service.engine.api import Limits
from tinyloop_service.engine.container import read_container, write_container
from tinyloop_service.errors import InvalidArgument, ModelFileError
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.settings import NamesSettings

State = Mapping[str, NDArray[np.uint8]]
FORMAT, VERSION = "tinyloop-snapshot", "1"
_PARTS = ("pages", "logits")
_SUFFIX = ".safetensors"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_BEGUN = re.compile(rf"\.[0-9a-f]{{64}}{re.escape(_SUFFIX)}\..*")  # as `container.replacing` names what it writes to
_DTYPES: Mapping[str, np.dtype[Any]] = {"U8": np.dtype("u1")}
_log = structlog.get_logger("tinyloop.snapshots")


class SnapshotFiles:
    """The files of one directory.  Every call blocks; one thread at a time."""

    def __init__(self, folder: Path, limits: Limits, max_bytes: int) -> None:
        """Raises InvalidArgument where the directory cannot be made."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._identity = {
            "format": FORMAT,
            "version": VERSION,
            "model_id": limits.model_id,
            "cache_mode": limits.cache_mode.value,
            "snapshot_id": limits.snapshot_id,
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument("snapshot_dir", f"{folder} cannot be made: {error.strerror}") from None

    def load(self) -> dict[str, State]:
        """All that can be trusted, by digest."""
        found: dict[str, State] = {}
        for path in sorted(self._folder.glob("*")):
            try:
                if _BEGUN.fullmatch(path.name):
                    path.unlink()
                if path.suffix != _SUFFIX or not path.is_file():
                    continue
                found[path.stem] = self.read(path)
            except (ModelFileError, OSError) as error:
                _log.warning("snapshot refused; its prefix will be prefilled", file=path.name, reason=str(error))
        return found

    def read(self, path: Path) -> State:
        """A map of the file, checked whole.  Raises ModelFileError that says what is wrong with it, OSError."""
        metadata, tensors = read_container(path, _DTYPES)
        for key, expected in {**self._identity, "content_sha256": path.stem}.items():
            if metadata.get(key) != expected:
                raise ModelFileError(f"{key} is {str(metadata.get(key))[:80]!r}, expected {expected!r}")
        if not _DIGEST.fullmatch(path.stem) or tensors.keys() != set(_PARTS):
            raise ModelFileError(f"{', '.join(_PARTS)} expected in a file named by its digest")
        if metadata.get("data_sha256") != _data_digest(tensors):
            raise ModelFileError("its data are not what was written")
        return tensors

    def write(self, digest: str, state: State) -> tuple[State | None, list[str]]:
        """A map of what was written, None where it was not; and the digests that had to go for it."""
        path = self._path(digest)
        metadata = {**self._identity, "content_sha256": digest, "data_sha256": _data_digest(state)}
        try:
            pushed_out = self._make_room(sum(part.nbytes for part in state.values()))
            if pushed_out is None:
                _log.warning("snapshot not kept: it is larger than snapshot_bytes", digest=digest)
                return None, []
            write_container(path, state, metadata)
            return read_container(path, _DTYPES)[1], pushed_out
        except (ModelFileError, OSError) as error:
            _log.warning("snapshot not kept", digest=digest, reason=str(error))
            return None, []

    def remove(self, digest: str) -> None:
        try:
            self._path(digest).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("snapshot not removed", digest=digest, reason=str(error))

    def _make_room(self, num_bytes: int) -> list[str] | None:
        """Remove the oldest; their digests.  None: it will never fit."""
        if num_bytes > self._max_bytes:
            return None
        ours = [path for path in self._folder.glob("*" + _SUFFIX) if _DIGEST.fullmatch(path.stem) and path.is_file()]
        files = sorted((path.stat().st_mtime_ns, path.stat().st_size, path) for path in ours)
        total, gone = sum(size for _, size, _ in files), []
        for _, size, path in files:
            if total + num_bytes <= self._max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size
            gone.append(path.stem)
        return gone

    def _path(self, digest: str) -> Path:
        return self._folder / f"{digest}{_SUFFIX}"


class Snapshots:
    """Keeps what one scheduler saves, from `start` to `close`."""

    def __init__(self, files: SnapshotFiles, scheduler: Scheduler) -> None:
        self._files = files
        self._scheduler = scheduler
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self._writing: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Check and map what is there, then keep what comes."""
        found = await asyncio.get_running_loop().run_in_executor(self._thread, self._files.load)
        for digest, state in found.items():
            self._scheduler.snapshots.offer(digest, state)
        self._scheduler.keep_snapshots(self)
        _log.info("snapshots are mapped", count=len(found))

    async def close(self) -> None:
        """After the scheduler; what is being written is finished."""
        await asyncio.gather(*self._tasks)
        self._thread.shutdown()

    # ---- what the scheduler calls

    def keep(self, digest: str, state: object) -> None:
        """Write it; from then on it may be restored."""
        assert isinstance(state, Mapping)
        self._writing.add(digest)
        loop = asyncio.get_running_loop()
        written = loop.run_in_executor(self._thread, self._files.write, digest, state)  # now: a `drop` comes behind it
        task = loop.create_task(self._keep(digest, written))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def drop(self, digest: str) -> None:
        """Nobody wants it any more."""
        self._writing.discard(digest)
        self._thread.submit(self._files.remove, digest)

    async def _keep(self, digest: str, written: asyncio.Future[tuple[State | None, list[str]]]) -> None:
        kept, pushed_out = await written
        for gone in pushed_out:
            self._scheduler.snapshots.withdraw(gone)
        if kept is not None and digest in self._writing:  # else its last name has ended meanwhile
            self._scheduler.snapshots.offer(digest, kept)
        self._writing.discard(digest)


async def start_snapshots(scheduler: Scheduler, settings: NamesSettings) -> Snapshots | None:
    """What `settings` ask for, started; None for nothing.  Raises InvalidArgument where the directory cannot be."""
    if settings.snapshot_dir is None:
        return None
    if not scheduler.limits.snapshot_id:
        _log.warning("no snapshots: this engine cannot save state", engine=scheduler.engine_name)
        return None
    files = SnapshotFiles(Path(settings.snapshot_dir), scheduler.limits, settings.snapshot_bytes)
    snapshots = Snapshots(files, scheduler)
    await snapshots.start()
    return snapshots


def _data_digest(parts: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for name in _PARTS:
        digest.update(np.ascontiguousarray(parts[name]).data)
    return digest.hexdigest()
