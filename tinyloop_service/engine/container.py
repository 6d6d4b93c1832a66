"""A safetensors file as named arrays over one read-only memory map.

    u64 header length │ header, JSON │ data
    header: {"__metadata__": {str: str}, name: {"dtype", "shape", "data_offsets": [begin, end)}, …}

Reading checks the whole header before any array is made, because the file may be truncated, of another kind or
hostile: every length is bounded by the file's, tensors fill the data without gap or overlap.  Nothing is copied, so
the arrays live as long as the map, and a file must be replaced by renaming, as `write_container` does, never
overwritten in place.  Refuses to know what the tensors mean.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.errors import ModelFileError
from tinyloop_service.files import open_file

_MAX_HEADER_BYTES = 16 << 20  # a large model's header is some 10 KiB
DTYPES: Mapping[str, np.dtype[Any]] = {"F16": np.dtype("<f2"), "U8": np.dtype("u1")}  # all that a .tinyloop file holds


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the data
    end: int


def read_container(
    path: Path, dtypes: Mapping[str, np.dtype[Any]] = DTYPES
) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """(metadata, name → read-only array).  Raises ModelFileError; an OSError only if the file cannot be opened.

    dtypes: what a tensor may be of, by the names of safetensors, and what that is for NumPy.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise ModelFileError(f"{path.name} is {size} bytes long, too short for a model file")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        metadata, entries = _parse(mapped, size, dtypes)
    except ModelFileError as error:
        raise ModelFileError(f"{path.name} is not a whole safetensors file: {error}") from None
    start = size - entries[-1].end if entries else size
    return metadata, {
        entry.name: np.ndarray(entry.shape, entry.dtype, mapped, start + entry.begin) for entry in entries
    }


def _parse(mapped: mmap.mmap, size: int, dtypes: Mapping[str, np.dtype[Any]]) -> tuple[dict[str, str], list[_Entry]]:
    (length,) = struct.unpack("<Q", mapped[:8])
    if length > min(size - 8, _MAX_HEADER_BYTES):
        raise ModelFileError(f"its header claims {length} bytes, the file has {size}")
    try:
        header = json.loads(mapped[8 : 8 + length].decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        raise ModelFileError("its header is not JSON") from None
    if not isinstance(header, dict):
        raise ModelFileError("its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelFileError("its metadata is not text by name")
    entries = sorted((_entry(name, value, dtypes) for name, value in header.items()), key=lambda entry: entry.begin)
    _check_layout(entries, size - 8 - length)
    return metadata, entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _entry(name: str, value: Any, dtypes: Mapping[str, np.dtype[Any]]) -> _Entry:
    label = f"tensor {name[:80]!r}"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ModelFileError(f"{label} is not described by dtype, shape and data_offsets")
    dtype = dtypes.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise ModelFileError(f"{label} is of dtype {repr(value['dtype'])[:20]}, expected {' or '.join(dtypes)}")
    shape, offsets = value["shape"], value["data_offsets"]
    if not _naturals(shape) or 0 in shape or len(shape) > 4 or not _naturals(offsets) or len(offsets) != 2:
        raise ModelFileError(f"{label} has a malformed shape or data_offsets")
    begin, end = offsets
    if end - begin != prod(shape) * dtype.itemsize:
        raise ModelFileError(f"{label} of shape {str(shape)[:80]} does not fill its data_offsets {str(offsets)[:80]}")
    return _Entry(name, dtype, tuple(shape), begin, end)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_layout(entries: list[_Entry], data_bytes: int) -> None:
    """Tensors follow one another from the first byte of the data to its last."""
    position = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != position:
            raise ModelFileError(f"tensor {entry.name[:80]!r} starts at {entry.begin}, expected {position}")
        position = entry.end
    if position != data_bytes:
        raise ModelFileError(f"its tensors take {position} bytes, {data_bytes} are there (is it truncated?)")


def write_container(path: Path, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> None:
    """Readers of `path` see the old file or the whole new one.

    The same contents give the same bytes, unlike those of the safetensors library, which shuffles its metadata.
    """
    with replacing(path) as temporary, temporary.open("wb") as file:
        _write(file, tensors, metadata)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to: flushed to disk and renamed over it, or gone where the block raises."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp made it private
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write(file: BinaryIO, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> None:
    """Tensors of the widest type first, then by name; the data begin at a multiple of 8, so each is aligned."""
    kinds = {dtype: kind for kind, dtype in DTYPES.items()}
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name in names:
        value = tensors[name]
        begin, end = end, end + value.nbytes
        header[name] = {"dtype": kinds[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name in names:
        file.write(np.ascontiguousarray(tensors[name]).data)
