"""Files of saved state: written whole, refused when anything in them is not what it was, the oldest gone at last."""

from __future__ import annotations

import asyncio
import errno
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyloop_service.engine.fake import FAKE_LIMITS, FakeEngine
from tinyloop_service.errors import InvalidArgument, ModelFileError
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.settings import NamesSettings, SchedulerSettings
from tinyloop_service.snapshots import SnapshotFiles, Snapshots, State, Written, start_snapshots
from tinyloop_service.types import CacheMode, PrefixDefinition

DIGEST, OTHER = "ab" * 32, "cd" * 32
STATE: State = {"pages": np.arange(96, dtype=np.uint8).reshape(2, 3, 16), "logits": np.arange(8, dtype=np.uint8)}


def files(folder: Path, max_bytes: int = 10**6, **limits: Any) -> SnapshotFiles:
    return SnapshotFiles(folder, replace(FAKE_LIMITS, **limits), max_bytes)


def path_of(folder: Path, digest: str = DIGEST) -> Path:
    return folder / f"{digest}.safetensors"


def equal(found: State | None, state: State = STATE) -> bool:
    return found is not None and found.keys() == state.keys() and all(np.array_equal(found[k], state[k]) for k in state)


def load(store: SnapshotFiles, now_ns: int = 0) -> dict[str, State]:
    return {digest: found.state for digest, found in store.load(now_ns).items()}


@pytest.fixture
def logs() -> Any:
    with structlog.testing.capture_logs() as found:
        yield found


@pytest.fixture
def written(tmp_path: Path) -> Path:
    found = files(tmp_path).write(DIGEST, STATE)
    assert equal(found.state) and found.pushed_out == ()
    return path_of(tmp_path)


def test_what_was_written_is_read(tmp_path: Path, written: Path) -> None:
    assert equal(load(files(tmp_path))[DIGEST])


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"model_id": "another"}, "model_id"),
        ({"cache_mode": CacheMode.INT8}, "cache_mode"),
        ({"snapshot_id": "cpu 2"}, "snapshot_id"),
    ],
)
def test_what_is_of_something_else_is_refused(
    tmp_path: Path, written: Path, limits: dict[str, Any], said: str, logs: list[dict[str, Any]]
) -> None:
    assert load(files(tmp_path, **limits)) == {}
    assert said in logs[-1]["reason"] and logs[-1]["file"] == written.name
    assert equal(load(files(tmp_path))[DIGEST]), "it is not ours to remove"


def test_another_version_is_refused(tmp_path: Path, written: Path) -> None:
    (length,) = struct.unpack("<Q", written.read_bytes()[:8])
    content = written.read_bytes()
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"]["version"] = "2"
    text = json.dumps(header).encode()
    written.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    with pytest.raises(ModelFileError, match="version is '2', expected '1'"):
        files(tmp_path).read(written)


def test_a_file_under_another_name_is_refused(tmp_path: Path, written: Path) -> None:
    written.rename(path_of(tmp_path, OTHER))
    assert load(files(tmp_path)) == {}


@pytest.mark.parametrize("state", [{"pages": STATE["pages"]}, {**STATE, "more": STATE["logits"]}])
def test_other_parts_are_refused(tmp_path: Path, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinyloop_service.snapshots._data_digest", lambda parts: "same")
    files(tmp_path).write(DIGEST, state)
    with pytest.raises(ModelFileError, match="pages, logits expected"):
        files(tmp_path).read(path_of(tmp_path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("snapshots")
    files(made).write(DIGEST, STATE)
    return made


@pytest.fixture(scope="module")
def whole(folder: Path) -> bytes:
    return path_of(folder).read_bytes()


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_no_change_of_a_file_goes_unnoticed(folder: Path, whole: bytes, data: st.DataObject) -> None:
    """Truncated, lengthened, bytes changed: refused, or the very same state."""
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        match data.draw(st.sampled_from(["cut", "insert", "change"])):
            case "cut":
                del content[at : at + data.draw(st.integers(1, 64))]
            case "insert":
                content[at:at] = data.draw(st.binary(max_size=16))
            case "change" if at < len(content):
                content[at] = data.draw(st.integers(0, 255))
    path_of(folder).unlink()  # another may have it mapped
    path_of(folder).write_bytes(content)
    found = load(files(folder))
    assert found == {} or equal(found[DIGEST])


def test_the_oldest_make_room(tmp_path: Path) -> None:
    digests = [f"{i:02}" * 32 for i in range(4)]
    store = files(tmp_path)
    for digest in digests[:3]:
        store.write(digest, STATE)
    size = path_of(tmp_path, digests[0]).stat().st_size
    assert files(tmp_path, 3 * size).write(digests[3], STATE).pushed_out == (digests[0],)
    assert sorted(load(store)) == digests[1:]


def test_what_is_not_ours_neither_counts_nor_goes(tmp_path: Path) -> None:
    """The directory may be one of model files; and what a killed server had begun to write is ours."""
    (tmp_path / "model.safetensors").write_bytes(bytes(5000))
    (tmp_path / f".{OTHER}.txt").touch()
    path_of(tmp_path, OTHER).mkdir()
    (tmp_path / f".{path_of(tmp_path).name}.abc123").touch()
    store = files(tmp_path, max_bytes=1000)
    assert load(store) == {}
    found = store.write(DIGEST, STATE)
    assert equal(found.state) and found.pushed_out == ()
    store.remove(OTHER)
    left = {"model.safetensors", f".{OTHER}.txt", path_of(tmp_path, OTHER).name, path_of(tmp_path).name}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_a_file_says_when_it_expires_and_is_not_read_from_then_on(tmp_path: Path, logs: list[dict[str, Any]]) -> None:
    store = files(tmp_path)
    store.write(DIGEST, STATE, 500)
    store.write(OTHER, STATE)
    assert store.load(499)[DIGEST].expire_time_ns == 500 and store.load(499)[OTHER].expire_time_ns is None
    for expire_time_ns in (700, None, 600):
        store.retime(DIGEST, expire_time_ns)
        (found,) = (each for digest, each in store.load(0).items() if digest == DIGEST)
        assert equal(found.state) and found.expire_time_ns == expire_time_ns
    assert store.load(600).keys() == {OTHER}
    assert [path.name for path in tmp_path.iterdir()] == [path_of(tmp_path, OTHER).name], "it is gone"
    assert logs[-1]["event"] == "snapshot removed: its prefix has expired"
    store.retime(DIGEST, 900)
    store.retime(OTHER, 900)
    store.remove(OTHER)
    assert not list(tmp_path.iterdir())


async def test_lifetimes_reach_files(tmp_path: Path) -> None:
    scheduler = Scheduler(FakeEngine(), SchedulerSettings())
    await scheduler.start()
    kept = await start_snapshots(scheduler, NamesSettings(snapshot_dir=str(tmp_path)))
    assert kept is not None
    now_ns = scheduler.now_ns()
    ends = [now_ns + hours * 3600 * 10**9 for hours in (1, 2)]
    made = await scheduler.create_prefix(PrefixDefinition((1, 2)), name="p", expire_time_ns=ends[0])
    for expire_time_ns in (ends[1], None, ends[0]):
        scheduler.update_prefix("p", expire_time_ns=expire_time_ns)
    await until(lambda: not scheduler._core.snapshots._on_the_way)
    await scheduler.close()
    await kept.close()
    assert {digest: found.expire_time_ns for digest, found in files(tmp_path).load(now_ns).items()} == {
        made.content_sha256: ends[0]
    }
    assert files(tmp_path).load(ends[0]) == {}


async def test_what_is_dropped_at_once_leaves_no_file(tmp_path: Path) -> None:
    snapshots = Snapshots(files(tmp_path), Scheduler(FakeEngine(), SchedulerSettings()))
    snapshots.keep(DIGEST, STATE, None)
    snapshots.drop(DIGEST)
    await snapshots.close()
    assert load(files(tmp_path)) == {}


def test_what_is_too_large_is_not_kept_and_pushes_nothing_out(tmp_path: Path, written: Path) -> None:
    assert files(tmp_path, max_bytes=100).write(OTHER, STATE) == Written(None)
    assert written.exists()


def test_a_disk_that_refuses_is_no_error_of_anybody_s(tmp_path: Path, logs: list[dict[str, Any]]) -> None:
    store = files(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert store.write(DIGEST, STATE) == Written(None, may_succeed_later=True)
    assert "snapshot not kept" in logs[-1]["event"]
    store.remove(DIGEST)


async def test_what_a_disk_refused_is_written_once_it_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logs: list[dict[str, Any]]
) -> None:
    """All of it, but for what has ended or been built again and kept meanwhile; and no sooner than after a while."""
    folder = tmp_path / "snapshots"
    scheduler = Scheduler(FakeEngine(), SchedulerSettings())
    await scheduler.start()
    kept = await start_snapshots(scheduler, NamesSettings(snapshot_dir=str(folder)))
    assert kept is not None
    folder.rmdir()
    made = [await scheduler.create_prefix(PrefixDefinition((1, i)), name=f"p{i}") for i in range(5)]
    await until(lambda: len(kept._refused) == 5)
    scheduler.delete_prefix("p0")
    assert kept._refused.keys() == {info.content_sha256 for info in made[1:]} and kept._retry is not None
    kept._try_again()  # as the timer does: one is tried, in vain
    await until(lambda: len(logs) == 7 and len(kept._refused) == 4)
    folder.mkdir()
    monkeypatch.setattr("tinyloop_service.snapshots.RETRY_S", 0.0)
    kept._try_again()
    await until(lambda: not kept._refused and len(list(folder.iterdir())) == 4)
    await scheduler.close()
    await kept.close()
    assert load(files(folder)).keys() == {info.content_sha256 for info in made[1:]}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not condition():  # noqa: ASYNC110, none of ours to signal
            await asyncio.sleep(0.005)


def test_what_went_for_a_write_that_then_failed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its state would be offered as long as the server lives, and saved by none after it."""
    store = files(tmp_path, max_bytes=2000)
    store.write(OTHER, STATE)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr("tinyloop_service.snapshots.write_container", full)
    while not (found := store.write(DIGEST, STATE)).pushed_out:
        store = files(tmp_path, store._max_bytes // 2)
    assert found == Written(None, (OTHER,), may_succeed_later=True)


def test_a_directory_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match="cannot be made") as caught:
        files(tmp_path / "file" / "snapshots")
    assert caught.value.field == "snapshot_dir"
