"""The registry in a file, for one server at a time: what it has answered is on the disk.

Every call runs on one thread of its own, off the event loop.  The journal is written ahead and synchronised at each
commit (WAL, synchronous=FULL).  The file is locked while it is open: a second server is refused rather than left to
serve names that the first has deleted; a killed server's lock ends with it.  A file that was removed or replaced under
the server is a registry that is away: what SQLite goes on writing then is in no directory, and lost at the end.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import structlog

from tinyloop_service.errors import InvalidArgument, RegistryUnavailable
from tinyloop_service.registry.api import Changes, Realm
from tinyloop_service.registry.record import decode, decode_all, encode
from tinyloop_service.types import PrefixRecord

T = TypeVar("T")
_APPLICATION = 0x54_4C_4E_4D  # "TLNM", in the file's header
_VERSION = 1
_LOCK_WAIT_S = 5.0  # for a server that is about to end
_SETUP = (
    "PRAGMA locking_mode=EXCLUSIVE",
    "PRAGMA journal_mode=WAL",
    "PRAGMA synchronous=FULL",
    f"PRAGMA application_id={_APPLICATION}",
    f"PRAGMA user_version={_VERSION}",
    """CREATE TABLE IF NOT EXISTS names (
        realm TEXT NOT NULL, tenant TEXT NOT NULL, name TEXT NOT NULL, etag TEXT NOT NULL,
        expire_time_ns INTEGER, record TEXT NOT NULL, PRIMARY KEY (realm, tenant, name)) STRICT""",
)
_log = structlog.get_logger("tinyloop.registry")


class SqliteRegistry:
    """One open file.  Make it with `open`."""

    is_shared = False

    def __init__(self, path: Path, realm: Realm) -> None:
        self._path = path
        self._realm = str(realm)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="registry")
        self._database: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None  # device and number of the one that is open
        self._is_closed = False

    @classmethod
    async def open(cls, path: Path, realm: Realm) -> Self:
        """Raises InvalidArgument that says why the file cannot be had."""
        registry = cls(path, realm)
        try:
            await asyncio.get_running_loop().run_in_executor(registry._thread, registry._open)
        except (sqlite3.Error, OSError) as error:
            await registry.close()
            reason = _reason(error) if path.parent.is_dir() else f"there is no directory {path.parent}; make it first"
            raise InvalidArgument("registry", f"{path} cannot be opened: {reason}") from None
        except BaseException:
            await registry.close()
            raise
        return registry

    async def read(self, tenant: str, name: str) -> PrefixRecord | None:
        found = await self._run(lambda database: self._find(database, "record", tenant, name))
        return decode(found) if found is not None else None

    async def write(self, record: PrefixRecord, *, replaces: str | None) -> bool:
        row = (self._realm, record.tenant, record.name, record.etag, record.expire_time_ns, encode(record))

        def change(database: sqlite3.Connection) -> bool:
            if self._find(database, "etag", record.tenant, record.name) != replaces:
                return False
            database.execute("INSERT OR REPLACE INTO names VALUES (?, ?, ?, ?, ?, ?)", row)
            return True

        return await self._run(change)

    async def remove(self, tenant: str, name: str, *, etag: str) -> bool:
        where = "DELETE FROM names WHERE realm = ? AND tenant = ? AND name = ? AND etag = ?"
        return await self._run(lambda db: db.execute(where, (self._realm, tenant, name, etag)).rowcount == 1)

    async def page(self, tenant: str, *, after: str, limit: int) -> list[PrefixRecord]:
        select = "SELECT record FROM names WHERE realm = ? AND tenant = ? AND name > ? ORDER BY name LIMIT ?"
        rows = await self._run(lambda db: db.execute(select, (self._realm, tenant, after, limit)).fetchall())
        return decode_all(text for (text,) in rows)

    async def changes(self, since: int | None) -> Changes:
        return Changes(0, {})

    async def wait(self, limit_s: float) -> None:
        raise AssertionError("nobody else changes it: there is nothing to wait for")

    async def purge(self, before_ns: int) -> None:
        await self._run(lambda db: db.execute("DELETE FROM names WHERE expire_time_ns <= ?", (before_ns,)))

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    # ---- on the thread

    def _open(self) -> None:
        database = self._database = sqlite3.connect(self._path, timeout=_LOCK_WAIT_S, isolation_level=None)
        (application,) = database.execute("PRAGMA application_id").fetchone()
        (version,) = database.execute("PRAGMA user_version").fetchone()
        (num_tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if num_tables and (application, version) != (_APPLICATION, _VERSION):
            what = f"of version {version}, {_VERSION} expected" if application == _APPLICATION else "of something else"
            raise InvalidArgument("registry", f"{self._path} is a database {what}; name another file")
        for statement in _SETUP:
            database.execute(statement)
        with _transaction(database):  # takes the lock
            self._file = self._file_at_path()

    def _file_at_path(self) -> tuple[int, int]:
        """Raises OSError."""
        found = self._path.stat()
        return found.st_dev, found.st_ino

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()

    def _find(self, database: sqlite3.Connection, column: str, tenant: str, name: str) -> Any:
        select = f"SELECT {column} FROM names WHERE realm = ? AND tenant = ? AND name = ?"
        row = database.execute(select, (self._realm, tenant, name)).fetchone()
        return row[0] if row is not None else None

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """`work` in a transaction of its own: whole or not at all."""

        def run() -> T:
            assert self._database is not None
            if self._file_at_path() != self._file:
                raise FileNotFoundError(f"another file is at {self._path}; start the server again to use that one")
            with _transaction(self._database):
                return work(self._database)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, run)
        except (sqlite3.Error, OSError) as error:
            _log.error("the registry failed", path=str(self._path), error=_reason(error))
            raise RegistryUnavailable("the server's registry of names cannot be used just now; try again") from error


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def _reason(error: Exception) -> str:
    if "locked" in str(error):
        return "another server has it open; replicas share names through redis://"
    return str(error)
