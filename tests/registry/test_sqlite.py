"""The registry in a file: what is on the disk is what was answered, and one process has it."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from records import TENANT, record

from tinyloop_service.errors import InvalidArgument, PrefixDamaged, RegistryUnavailable
from tinyloop_service.registry import Realm, open_registry, sqlite
from tinyloop_service.registry.record import encode

REALM = Realm("a-model", "fp16")


def url_of(path: Path) -> str:
    return f"sqlite:///{path}"


async def test_names_outlive_the_process(tmp_path: Path) -> None:
    url = url_of(tmp_path / "names.db")
    first = await open_registry(url, REALM)
    await first.write(record(), replaces=None)
    await first.close()
    second = await open_registry(url, REALM)
    assert await second.read(TENANT, "genesis") == record()
    await second.close()


async def test_a_second_server_is_refused_while_the_first_has_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "_LOCK_WAIT_S", 0.05)
    url = url_of(tmp_path / "names.db")
    first = await open_registry(url, REALM)
    with pytest.raises(InvalidArgument, match="another server has it open"):
        await open_registry(url, REALM)
    await first.close()
    await (await open_registry(url, REALM)).close()


async def test_a_path_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"cannot be opened: there is no directory .*missing"):
        await open_registry(url_of(tmp_path / "missing" / "names.db"), REALM)


@pytest.mark.parametrize("content", [b"", b"no database at all, but longer than a header is" * 10])
async def test_a_foreign_file_is_refused_unless_it_is_empty(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "names.db"
    path.write_bytes(content)
    if not content:
        await (await open_registry(url_of(path), REALM)).close()
        return
    with pytest.raises(InvalidArgument, match="cannot be opened"):
        await open_registry(url_of(path), REALM)
    assert path.read_bytes() == content


async def test_somebody_else_s_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "bookmarks.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE bookmarks (url TEXT)")
    database.close()
    before = path.read_bytes()
    with pytest.raises(InvalidArgument, match="of something else"):
        await open_registry(url_of(path), REALM)
    assert path.read_bytes() == before


async def test_a_later_version_s_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "names.db"
    await (await open_registry(url_of(path), REALM)).close()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version=2")
    database.close()
    with pytest.raises(InvalidArgument, match="of version 2, 1 expected"):
        await open_registry(url_of(path), REALM)


async def test_a_record_of_a_later_version_is_damaged_to_us_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "names.db"
    registry = await open_registry(url_of(path), REALM)
    await registry.write(record(), replaces=None)
    await registry.close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE names SET record = replace(record, '\"version\":1', '\"version\":2')")
    database.close()
    registry = await open_registry(url_of(path), REALM)
    with pytest.raises(PrefixDamaged, match="cannot be read"):
        await registry.read(TENANT, "genesis")
    assert await registry.page(TENANT, after="", limit=10) == [], "one that cannot be read hides no others"
    assert not await registry.write(record("genesis"), replaces=None)
    await registry.close()


async def test_a_record_of_anything_else_is_damaged(tmp_path: Path) -> None:
    registry = await sqlite.SqliteRegistry.open(tmp_path / "names.db", REALM)
    await registry.write(record(), replaces=None)
    whole = json.loads(encode(record()))
    wrong = {"uid": 5, "revision": "1", "tokens": ["a"], "loops": "8", "pinned": 1, "expire_time_ns": "soon"}
    wrong |= {"tenant": None, "cache_window": 1.0, "ancestors": [{"uid": "u", "name": "n", "end": True}]}
    changed = [json.dumps(whole | {field: value}) for field, value in wrong.items()]
    for text in ("[" * 100_000, "9" * 10_000, '"a text"', "no JSON", *changed):
        await registry._run(lambda db, text=text: db.execute("UPDATE names SET record = ?", (text,)))
        with pytest.raises(PrefixDamaged, match="cannot be read"):
            await registry.read(TENANT, "genesis")
        assert await registry.page(TENANT, after="", limit=10) == []
    await registry.close()


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_file_that_is_gone_takes_no_changes(tmp_path: Path, is_replaced: bool) -> None:
    """They would be answered, and be in no directory."""
    path, aside = tmp_path / "names.db", tmp_path / "aside.db"
    registry = await open_registry(url_of(path), REALM)
    await registry.write(record(), replaces=None)
    path.rename(aside)
    if is_replaced:
        path.touch()
    with pytest.raises(RegistryUnavailable):
        await registry.write(record("new"), replaces=None)
    aside.rename(path)
    assert await registry.read(TENANT, "new") is None
    assert await registry.write(record("new"), replaces=None)
    await registry.close()


async def test_a_full_disk_is_unavailable_and_changes_nothing(tmp_path: Path) -> None:
    registry = await sqlite.SqliteRegistry.open(tmp_path / "names.db", REALM)
    await registry.write(record(), replaces=None)
    assert registry._database is not None
    await registry._run(lambda db: db.execute("PRAGMA max_page_count=1"))  # SQLite's own way to be full
    huge = record("huge", tokens=tuple(range(100_000)))
    with pytest.raises(RegistryUnavailable):
        await registry.write(huge, replaces=None)
    assert await registry.read(TENANT, "huge") is None
    assert await registry.read(TENANT, "genesis") == record()
    await registry.close()
