"""Saved state on disk: what was prefilled once needs no prefill after a restart.

    <snapshot_dir>/<state_digest>[.<time>].safetensors   pages and logits as bytes (U8); metadata:
        format, version                              of this file
        model_id, cache_mode, state_digest           what it is the state of: a content, and a tenant's
        snapshot_id                                  what else its bits depend on: engine, libraries, machine, settings
        data_sha256                                  of pages, then logits

At start every file is checked whole and mapped; what is damaged, foreign or of another version is refused, with a line
in the log, and prefilled as if it were not there.  Files are written beside the event loop, by renaming; the oldest go
when all together pass `snapshot_bytes`, and a file goes with the last name of its content.  Where all of those expire,
the file's name has the time, in ns since the epoch; from then on it is refused and removed.  What a disk has refused is
tried again every minute, one file until one is written, then all.  Only files named by a digest count and go, and at
start what a killed server had begun to write; whatever else is in the directory stays.

In: states as the scheduler takes them.  Out: states that it may restore from.  It refuses to know what is in them.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
RETRY_S = 60.0  # after a write that failed
_PARTS = ("pages", "logits")
_SUFFIX = ".safetensors"
_NAME = re.compile(rf"([0-9a-f]{{64}})(?:\.([0-9]{{1,19}}))?{re.escape(_SUFFIX)}")
_BEGUN = re.compile(rf"\.{_NAME.pattern}\..*")  # as `container.replacing` names what it writes to
_DTYPES: Mapping[str, np.dtype[Any]] = {"U8": np.dtype("u1")}
_log = structlog.get_logger("tinyloop.snapshots")


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a write."""

    state: State | None  # a map of it; None: it is not kept
    pushed_out: tuple[str, ...] = ()  # digests that had to go for it
    may_succeed_later: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    state: State
    expire_time_ns: int | None  # None: never


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

    def load(self, now_ns: int) -> dict[str, Found]:
        """All that can be trusted, by digest."""
        found: dict[str, Found] = {}
        for path in sorted(self._folder.glob("*")):
            try:
                if _BEGUN.fullmatch(path.name):
                    path.unlink()
                if path.suffix != _SUFFIX or not path.is_file():
                    continue
                digest, expire_time_ns = _named(path)
                if expire_time_ns is not None and expire_time_ns <= now_ns:
                    _log.info("snapshot removed: its prefix has expired", file=path.name)
                    path.unlink()
                    continue
                found[digest] = Found(self.read(path), expire_time_ns)
            except (ModelFileError, OSError) as error:
                _log.warning("snapshot refused; its prefix will be prefilled", file=path.name, reason=str(error))
        return found

    def read(self, path: Path) -> State:
        """A map of the file, checked whole.  Raises ModelFileError that says what is wrong with it, OSError."""
        metadata, tensors = read_container(path, _DTYPES)
        for key, expected in {**self._identity, "state_digest": _named(path)[0]}.items():
            if metadata.get(key) != expected:
                raise ModelFileError(f"{key} is {str(metadata.get(key))[:80]!r}, expected {expected!r}")
        if tensors.keys() != set(_PARTS):
            raise ModelFileError(f"{', '.join(_PARTS)} expected, it has {', '.join(sorted(tensors))[:80]}")
        if metadata.get("data_sha256") != _data_digest(tensors):
            raise ModelFileError("its data are not what was written")
        return tensors

    def write(self, digest: str, state: State, expire_time_ns: int | None = None) -> Written:
        """Never raises: a disk that refuses is in the log."""
        num_bytes = sum(part.nbytes for part in state.values())
        if num_bytes > self._max_bytes:
            _log.warning("snapshot not kept: it is larger than snapshot_bytes", digest=digest)
            return Written(None)
        metadata = {**self._identity, "state_digest": digest, "data_sha256": _data_digest(state)}
        pushed_out: list[str] = []
        path = self._path(digest, expire_time_ns)
        try:
            pushed_out.extend(self._make_room(num_bytes))  # those that went stay listed if it raises
            write_container(path, state, metadata)
            return Written(read_container(path, _DTYPES)[1], tuple(pushed_out))
        except (ModelFileError, OSError) as error:
            _log.warning("snapshot not kept; it is tried again", digest=digest, reason=str(error))
            return Written(None, tuple(pushed_out), may_succeed_later=True)

    def retime(self, digest: str, expire_time_ns: int | None) -> None:
        """It expires then; None: never."""
        try:
            for path in self._of(digest):
                path.rename(self._path(digest, expire_time_ns))
        except OSError as error:
            _log.warning("snapshot not renamed", digest=digest, reason=str(error))

    def remove(self, digest: str) -> None:
        try:
            for path in self._of(digest):
                path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("snapshot not removed", digest=digest, reason=str(error))

    def _make_room(self, num_bytes: int) -> Iterator[str]:
        """Remove the oldest, and give their digests as they go."""
        files = sorted((path.stat().st_mtime_ns, path.stat().st_size, path) for path in self._of(""))
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total + num_bytes <= self._max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size
            yield _named(path)[0]

    def _path(self, digest: str, expire_time_ns: int | None) -> Path:
        time = "" if expire_time_ns is None else f".{expire_time_ns}"
        return self._folder / f"{digest}{time}{_SUFFIX}"

    def _of(self, digest: str) -> list[Path]:
        """Files of digests that begin so."""
        found = self._folder.glob(f"{digest}*{_SUFFIX}")
        return [path for path in found if _NAME.fullmatch(path.name) and path.is_file()]


class Snapshots:
    """Keeps what one scheduler saves, from `start` to `close`."""

    def __init__(self, files: SnapshotFiles, scheduler: Scheduler) -> None:
        self._files = files
        self._scheduler = scheduler
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self._writing: set[str] = set()
        self._refused: dict[str, None] = {}  # digests that the disk did not take, oldest first
        self._retry: asyncio.TimerHandle | None = None  # while there are some
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_closed = False

    async def start(self) -> None:
        """Check and map what is there, then keep what comes."""
        loop, now_ns = asyncio.get_running_loop(), self._scheduler.now_ns()
        found = await loop.run_in_executor(self._thread, self._files.load, now_ns)
        for digest, each in found.items():
            self._scheduler.snapshots.found(digest, each.state, each.expire_time_ns)
        self._scheduler.keep_snapshots(self)
        self._scheduler.changed()  # some expire
        _log.info("snapshots are mapped", count=len(found))

    async def close(self) -> None:
        """After the scheduler; what is being written is finished."""
        if self.is_closed:
            return
        await asyncio.gather(*self._tasks)
        await asyncio.get_running_loop().run_in_executor(self._thread, int)  # nothing, behind all that it was asked for
        if self._retry is not None:
            self._retry.cancel()
        self._thread.shutdown()
        self.is_closed = True

    # ---- what the scheduler calls

    def keep(self, digest: str, state: object, expire_time_ns: int | None) -> None:
        """Write it; from then on it may be restored."""
        assert isinstance(state, Mapping)
        self._writing.add(digest)
        loop = asyncio.get_running_loop()
        # now: a `drop` comes behind it
        written = loop.run_in_executor(self._thread, self._files.write, digest, state, expire_time_ns)
        task = loop.create_task(self._keep(digest, written))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def expires(self, digest: str, expire_time_ns: int | None) -> None:
        """Another time."""
        self._thread.submit(self._files.retime, digest, expire_time_ns)

    def drop(self, digest: str) -> None:
        """Nobody wants it any more."""
        self._writing.discard(digest)
        self._refused.pop(digest, None)
        self._thread.submit(self._files.remove, digest)

    # ---- what becomes of it

    async def _keep(self, digest: str, writing: asyncio.Future[Written]) -> None:
        try:
            written = await writing
        finally:
            self._scheduler.snapshots.settled(digest)
        self._apply(digest, written)
        self._scheduler.changed()  # there is room for the next one

    def _apply(self, digest: str, written: Written) -> None:
        states = self._scheduler.snapshots
        for gone in written.pushed_out:
            states.withdraw(gone)
        if digest not in self._writing:  # its last name has ended meanwhile
            return
        self._writing.discard(digest)
        if written.state is not None:
            states.offer(digest, written.state)
            self._try_again(every=True)
        elif written.may_succeed_later:
            self._refused[digest] = None
            self._wait_to_try()

    def _try_again(self, every: bool = False) -> None:
        """Ask for one that was refused, which shows whether the disk takes it now; or for all of them."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        while self._refused:
            digest = next(iter(self._refused))
            del self._refused[digest]
            if self._scheduler.save_again(digest) and not every:
                break
        if self._refused:
            self._wait_to_try()

    def _wait_to_try(self) -> None:
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._try_again)


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


def _named(path: Path) -> tuple[str, int | None]:
    """Digest and time of expiry.  Raises ModelFileError."""
    named = _NAME.fullmatch(path.name)
    if named is None:
        raise ModelFileError("a file named by its digest expected")
    return named[1], int(named[2]) if named[2] else None


def _data_digest(parts: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for name in _PARTS:
        digest.update(np.ascontiguousarray(parts[name]).data)
    return digest.hexdigest()
