"""Model files that are wrong in every way we can think of: one clear ModelFileError each, and bounded memory.

    python tests/fuzz_model_files.py [--inputs 100000] [--seed 0]

Bytes are cut, changed and put in anywhere; headers claim other lengths, dtypes, shapes and places; configs have values
of other types and sizes; tensors are of other shapes, hold other numbers, are missing or too many; tokenizers are
damaged.  A file whose author could have signed it is signed, so that it is not its model_id alone that is refused.
Whatever is read all the same is a model like any other: now and then an engine is made of it.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from byte_tokenizer import byte_tokenizer
from fuzz_rounds import in_rounds, largest_size
from hypothesis import strategies as st
from safetensors.numpy import load_file

from tinyloop_service.engine.spec import SIZES, ModelSpec, Quant
from tinyloop_service.engine.tensors import compute_model_id
from tinyloop_service.engine.weights import random_model, read_model, write_model
from tinyloop_service.errors import InvalidArgument, ModelFileError
from tinyloop_service.loading import load_model
from tinyloop_service.settings import EngineSettings
from tinyloop_service.text import Tokenizer

SPEC = replace(
    SIZES["tiny"], vocab_size=258, d_model=32, n_heads=2, n_kv_heads=1, head_dim=16, d_ff=32, pre_blocks=1,
    post_blocks=1, bos_token_id=257, eos_token_ids=(0,), quant=Quant(4, 32),
)  # fmt: skip
SPECS = (SPEC, replace(SPEC, quant=None, tie_embeddings=True, norm_placement="sandwich", inject="add", loop_norm=True))
DTYPES = {"F16": np.dtype("<f2"), "U8": np.dtype("u1"), "F32": np.dtype("<f4"), "I8": np.dtype("i1")}
ENGINE = EngineSettings(engine="cpu", kv_memory=1 << 20, threads=1)
MOST_GROWTH_BYTES = 1 << 30  # of the process's largest size; a table for the longest sequences takes most of it


Tensors = dict[str, np.ndarray[Any, Any]]


@dataclass
class Draft:
    """A file before it is bytes."""

    metadata: dict[str, Any]
    tensors: Tensors
    sign: bool = True
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)  # by tensor: what its entry says instead
    header: Callable[[bytes], bytes] = bytes
    length: int | None = None  # that the header claims

    def to_bytes(self) -> bytes:
        if self.sign:
            self._sign()
        entries, parts, at = {}, [], 0
        for name, value in self.tensors.items():
            dtype = next((key for key, known in DTYPES.items() if known == value.dtype), "U8")
            entries[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
            entries[name] |= self.entries.get(name, {})
            parts.append(value.tobytes())
            at += value.nbytes
        text = self.header(json.dumps({"__metadata__": self.metadata, **entries}).encode())
        return struct.pack("<Q", len(text) if self.length is None else self.length) + text + b"".join(parts)

    def _sign(self) -> None:
        try:
            spec = ModelSpec.from_json(self.metadata["config"])
        except Exception:  # no spec, nothing to sign
            return
        self.metadata["model_id"] = compute_model_id(spec, self.tensors)


@cache
def _good(number: int) -> tuple[dict[str, str], Tensors]:
    """Metadata and tensors of a model file, as another library reads them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "good"
        write_model(path, random_model(SPECS[number], tokenizer=byte_tokenizer()))
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        return json.loads(data[8 : 8 + length])["__metadata__"], load_file(path)


def good(number: int) -> Draft:
    metadata, tensors = _good(number)
    return Draft(dict(metadata), {name: value.copy() for name, value in tensors.items()})


# ---- what may be wrong

_NUMBERS = st.sampled_from(
    [0, -1, 1, 2, 3, 7, 16, 31, 64, 257, 2**16, 2**24, 2**24 + 1, 2**31, 2**63, 2**64, 10**30, 10**400, 0.0, -0.0, 0.5,
     1e-320, 1e-45, 1e-30, 1e30, 1e39, 1e300, float("inf"), float("nan")]
)  # fmt: skip
_SCALARS = st.none() | st.booleans() | _NUMBERS | st.integers() | st.floats() | st.text(max_size=20)
_JSON = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
_SIZES = st.sampled_from([0, 1, 2, 16, 32, 258, 2**31, 2**62, 2**63, 2**70, -1]) | st.integers()
_Change = Callable[[st.DrawFn, Draft], None]


def _config(draw: st.DrawFn, draft: Draft) -> None:
    """Some values of others' types or sizes, a key too many or too few."""
    config = json.loads(draft.metadata["config"])
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.sampled_from([*config, "new"]))
        match draw(st.sampled_from(["set", "set", "set", "pop", "quant"])):
            case "pop":
                config.pop(key, None)
            case "quant":
                config["quant"] = {"bits": draw(_NUMBERS), "group_size": draw(_NUMBERS)}
            case _:
                config[key] = draw(_SCALARS | _JSON | st.lists(_NUMBERS, max_size=3))
    draft.metadata["config"] = json.dumps(config)


def _text(draw: st.DrawFn, draft: Draft) -> None:
    """Metadata that are no JSON, or no text."""
    key = draw(st.sampled_from([*draft.metadata, "new"]))
    odd = st.sampled_from(["", "{", "[]", "null", "{}" * 3, "[" * 5000, "9" * 5000, '{"a":1,"a":1}', "NaN", "\0"])
    draft.metadata[key] = draw(odd | st.text(max_size=40) | _JSON)


def _entry(draw: st.DrawFn, draft: Draft) -> None:
    """What the header says of a tensor."""
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(sorted(draft.tensors)))
        key = draw(st.sampled_from(["dtype", "shape", "data_offsets", "new"]))
        value = st.lists(_SIZES, max_size=5) | st.sampled_from(["F16", "U8", "F32", "BF16", "f16"]) | _JSON
        draft.entries.setdefault(name, {})[key] = draw(value)


def _tensor(draw: st.DrawFn, draft: Draft) -> None:
    """A tensor of another shape, dtype or content, one more, one less, or under another's name."""
    name = draw(st.sampled_from(sorted(draft.tensors)))
    value = draft.tensors[name]
    match draw(st.sampled_from(["shape", "dtype", "content", "more", "less", "name"])):
        case "shape":
            shapes = [value.shape[::-1], (value.size,), (1, *value.shape), (value.size // 2 or 1,), (), (1,) * 5]
            draft.tensors[name] = np.resize(value, draw(st.sampled_from(shapes)))
        case "dtype":
            draft.tensors[name] = value.astype(draw(st.sampled_from(list(DTYPES.values()))))
        case "content" if value.size:
            number = draw(
                st.sampled_from([0, np.nan, np.inf, -np.inf, 65504, 1]) if value.dtype == "f2" else st.just(7)
            )
            value.reshape(-1)[draw(st.integers(0, value.size - 1))] = number
        case "more":
            draft.tensors[draw(st.text(max_size=30) | st.just("pre.0.attn.q.bias"))] = value
        case "less":
            del draft.tensors[name]
        case "name":
            draft.tensors[draw(st.sampled_from(sorted(draft.tensors)))] = draft.tensors.pop(name)


def _tokenizer(draw: st.DrawFn, draft: Draft) -> None:
    """Bytes changed, a part of other values, ids beyond all bounds."""
    data = bytearray(byte_tokenizer())
    if draw(st.booleans()):
        at = draw(st.integers(0, len(data) - 1))
        data[at : at + draw(st.integers(0, 9))] = draw(st.binary(max_size=9))
    else:
        parsed = json.loads(data)
        part = draw(st.sampled_from([parsed, parsed["model"], parsed["model"]["vocab"]]))
        part[draw(st.sampled_from(sorted(part)) | st.text(max_size=9))] = draw(_NUMBERS | _JSON)
        data = bytearray(json.dumps(parsed).encode())
    draft.tensors["tokenizer"] = np.frombuffer(bytes(data) or b"{", np.uint8).copy()


def _header(draw: st.DrawFn, draft: Draft) -> None:
    """The header's own bytes, and the length that the file claims for it."""
    at, new = draw(st.integers(0, 6000)), draw(st.binary(max_size=6))
    num_gone = draw(st.integers(0, 6))
    draft.header = lambda text: text[: at % len(text)] + new + text[at % len(text) + num_gone :]
    if draw(st.integers(0, 3)) == 3:
        draft.length = draw(st.sampled_from([0, 1, 2**16, 2**24, 2**32, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1))


_CHANGES: tuple[_Change, ...] = (_config, _text, _entry, _tensor, _tokenizer, _header)


class FileBytes(bytes):
    """Of a file; a failing test shows their beginning."""

    def __repr__(self) -> str:
        return f"{len(self)} bytes: {self[:1000]!r}"


@st.composite
def files(draw: st.DrawFn) -> FileBytes:
    draft = good(draw(st.integers(0, len(SPECS) - 1)))
    kind = draw(st.integers(0, len(_CHANGES)))
    if kind < len(_CHANGES):
        draft.sign = draw(st.integers(0, 9)) > 0
        other = draw(st.integers(0, 3 * len(_CHANGES)))  # one time in three
        for change in (change for i, change in enumerate(_CHANGES) if i in (kind, other)):
            change(draw, draft)
        return FileBytes(draft.to_bytes())
    data = bytearray(draft.to_bytes())
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["cut", "end", "insert", "change"])):
            case "cut":
                del data[at : at + draw(st.integers(1, 64))]
            case "end":
                del data[at:]
            case "insert":
                data[at:at] = draw(st.binary(max_size=16))
            case "change" if at < len(data):
                data[at] = draw(st.integers(0, 255))
    return FileBytes(data)


# ---- what must come of it


class FileFuzzer:
    """One file after the other, under one path."""

    def __init__(self, path: Path, engine_every: int) -> None:
        self.path = path
        self.outcomes: Counter[str] = Counter()
        self._engine_every = engine_every
        self._size = largest_size()

    def read(self, data: bytes) -> None:
        """Raises AssertionError for what must not be, and whatever else was raised instead of a ModelFileError."""
        self.path.unlink(missing_ok=True)  # another is mapped
        self.path.write_bytes(data)
        try:
            weights = read_model(self.path)
            if weights.tokenizer is not None:
                Tokenizer(weights.tokenizer, weights.spec.bos_token_id)
        except ModelFileError as error:
            said = str(error)
            assert "\n" not in said and len(said) < 1000, said
            self.outcomes["refused"] += 1
        else:
            self.outcomes["read"] += 1
            if self.outcomes["read"] % self._engine_every == 0:
                self._make_engine()
        if self.outcomes.total() % 50 == 0:
            grown = largest_size() - self._size
            assert grown < MOST_GROWTH_BYTES, f"{grown} bytes of memory for files of {len(data)}"

    def _make_engine(self) -> None:
        try:
            load_model(self.path, ENGINE).engine.close()
            self.outcomes["made an engine of"] += 1
        except InvalidArgument as error:
            assert error.field == "kv_memory", error  # its tokens are larger than this server's memory
            self.outcomes["too large for the server"] += 1


def fuzz(inputs: int, number: int, engine_every: int = 30) -> Counter[str]:
    """What came of `inputs` files.  Raises what hypothesis found, made as small as it can."""
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = FileFuzzer(Path(folder) / "fuzzed.tinyloop", engine_every)
        in_rounds(inputs, number, files(), fuzzer.read)
    return fuzzer.outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    given_ = parser.parse_args()
    began_s, size = time.monotonic(), largest_size()
    outcomes = fuzz(given_.inputs, given_.seed)
    print(f"{outcomes['refused'] + outcomes['read']} files in {time.monotonic() - began_s:.0f} s: {dict(outcomes)}")
    print(f"the largest size of the process grew by {(largest_size() - size) / 2**20:.0f} MiB")


if __name__ == "__main__":
    sys.exit(main())
