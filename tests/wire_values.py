"""Requests as hypothesis draws them: plausible values by the name of a field, hostile ones by its type, damaged bytes.

A drawn message goes deep into the server when its values are plausible, and is refused at the door when one is hostile;
both happen about as often.  It refuses to know what a server answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from tinyloop_service.pb import generation_pb2, model_pb2, prefix_pb2

Strategy = st.SearchStrategy[Any]
IDS = tuple("abcd")
NUM_TOKENS = 512  # the vocabulary that plausible ids are of
_KEYS = tuple(f"{i:08x}-0000-4000-8000-000000000000" for i in range(4))
_TEXTS = ("", "\0", "é", "a" * 64, "prefixes/", "prefixes/A", "prefixes/" + "a" * 64, "../a", "*", "ttl", "name", "1:")
_ALPHABET = st.characters(exclude_categories=["Cs"])


def _integers(bits: int, signed: bool) -> Strategy:
    least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    edges = [n for n in (0, 1, -1, 2, 16, 17, 63, 64, 65, 511, 512, 2048, 2**31 - 1, -(2**31)) if least <= n <= most]
    return st.sampled_from([*edges, least, most]) | st.integers(least, most)


_HOSTILE: Mapping[int, Strategy] = {
    Field.TYPE_INT32: _integers(32, signed=True),
    Field.TYPE_INT64: _integers(64, signed=True),
    Field.TYPE_UINT64: _integers(64, signed=False),
    Field.TYPE_ENUM: _integers(32, signed=True),
    Field.TYPE_DOUBLE: st.sampled_from([float("nan"), float("inf"), -float("inf"), -0.0, 1.0001, -1.0, 1e308, 5e-324])
    | st.floats(),
    Field.TYPE_BOOL: st.booleans(),
    Field.TYPE_STRING: st.sampled_from(_TEXTS) | st.text(_ALPHABET, max_size=80),
}
_NAME = st.sampled_from([f"prefixes/{name}" for name in IDS])
_PLAUSIBLE: Mapping[str, Strategy] = {
    "name": _NAME,
    "prefix": _NAME,
    "parent": _NAME,
    "prefix_id": st.sampled_from(IDS),
    "request_id": st.sampled_from(_KEYS),
    "text": st.text(_ALPHABET, min_size=1, max_size=12),
    "loops": st.integers(1, 3),
    "cache_window": st.sampled_from([0, 1, 64, 65]),
    "max_tokens": st.integers(1, 24),
    "temperature": st.sampled_from([0.0, 1e-6, 0.7, 2.0]),
    "top_k": st.sampled_from([0, 1, 5, NUM_TOKENS, 10**9]),
    "top_p": st.sampled_from([1.0, 0.9, 1e-9]),
    "min_p": st.sampled_from([0.0, 0.1, 1.0]),
    "repetition_penalty": st.sampled_from([1.0, 0.5, 1.3]),
    "n": st.integers(1, 4),
    "logprobs": st.integers(0, 20),
    "view": st.integers(0, 2),
    "page_size": st.integers(0, 3),
    "seconds": st.sampled_from([0, 1, 3600]),
    "nanos": st.sampled_from([0, 1, 10**6]),
    "paths": st.lists(st.sampled_from(["ttl", "pinned", "expire_time", "*"]), max_size=2),
    "stop_token_ids": st.lists(st.integers(0, NUM_TOKENS - 1), max_size=3),
}
# What a request makes no sense without, what it rarely has, and what is set by chance alone would end most of them.
_ALWAYS = {"name", "input", "stop", "generation", "ids", "tinyloop.v1.UpdatePrefixRequest.prefix"}
_SELDOM = {"parent", "request_id", "etag", "page_token", "loops", "cache_window", "create_if_missing", "validate_only"}
_NEVER = {"etag", "page_token", "expire_time"}  # in a message that is to be plausible


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC: where it is called, and what it takes."""

    path: str
    request: type[Message]
    is_stream: bool


def _methods() -> tuple[Method, ...]:
    return tuple(
        Method(f"/{service.full_name}/{method.name}", GetMessageClass(method.input_type), method.server_streaming)
        for file in (prefix_pb2, generation_pb2, model_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    )


METHODS = _methods()  # every RPC that there is


@st.composite
def messages(draw: st.DrawFn, cls: type[Message], hostile: int) -> Message:
    """`hostile`: how many of ten values are."""
    message = cls()
    for oneof in cls.DESCRIPTOR.oneofs:  # an optional field is one of its own
        field, is_hostile = draw(st.sampled_from(list(oneof.fields))), _chance(draw, hostile)
        if oneof.name in _ALWAYS or _is_there(draw, field, is_hostile):
            _set(draw, message, field, hostile, is_hostile)
    for field in cls.DESCRIPTOR.fields:
        is_hostile = _chance(draw, hostile)
        if field.containing_oneof is None and _is_there(draw, field, is_hostile):
            _set(draw, message, field, hostile, is_hostile)
    return message


def _is_there(draw: st.DrawFn, field: Any, is_hostile: bool) -> bool:
    if is_hostile or field.name in _ALWAYS or field.full_name in _ALWAYS:
        return True
    if field.name in _NEVER:
        return False
    return _chance(draw, 1 if field.name in _SELDOM else 5)


def _chance(draw: st.DrawFn, tenths: int) -> bool:
    """In so many cases of ten.  Hypothesis draws zeros more often than the rest, and they shrink to them: no chance."""
    return draw(st.integers(0, 9)) >= 10 - tenths


def _set(draw: st.DrawFn, message: Message, field: Any, hostile: int, is_hostile: bool) -> None:
    value: Any
    is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
    if field.name == "ids":
        message.ids.extend(draw(_token_ids(is_hostile)))  # type: ignore[attr-defined]
    elif is_map:  # token ids to addends
        keys = _HOSTILE[Field.TYPE_INT32] if is_hostile else st.integers(0, NUM_TOKENS - 1)
        values = _HOSTILE[Field.TYPE_DOUBLE] if is_hostile else st.sampled_from([-100.0, 0.0, 5.0])
        getattr(message, field.name).update(draw(st.dictionaries(keys, values, max_size=3)))
    elif field.message_type is not None and field.is_repeated:
        inner = messages(GetMessageClass(field.message_type), hostile)
        getattr(message, field.name).extend(draw(st.lists(inner, max_size=3)))
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(draw(messages(GetMessageClass(field.message_type), hostile)))
    elif field.is_repeated:
        value = st.lists(_HOSTILE[field.type], max_size=4)
        getattr(message, field.name).extend(draw(value if is_hostile else _PLAUSIBLE.get(field.name, value)))
    else:
        value = _HOSTILE[field.type]
        setattr(message, field.name, draw(value if is_hostile else _PLAUSIBLE.get(field.name, value)))


def _token_ids(is_hostile: bool) -> Strategy:
    known = st.integers(1, NUM_TOKENS - 1)
    if not is_hostile:
        return st.lists(known, min_size=1, max_size=12) | st.integers(60, 200).map(lambda n: [*range(1, n + 1)])
    rarely = st.integers(0, 10**6).map(lambda i: [1] * 1_000_000 if i % 997 == 0 else [1] * (i % 2100))
    return st.lists(known | _HOSTILE[Field.TYPE_INT32], max_size=6) | rarely


@st.composite
def requests(draw: st.DrawFn, method: Method) -> bytes:
    """The bytes of a request, one in ten damaged or with what no message of ours has."""
    data = draw(messages(method.request, draw(st.sampled_from([0, 0, 0, 1, 3])))).SerializeToString()
    if not _chance(draw, 1):
        return data
    at = draw(st.integers(0, min(len(data), 200)))
    match draw(st.sampled_from(["unknown field", "no UTF-8", "cut", "insert", "change"])):
        case "unknown field":
            return data + b"\xfa\x3f\x03abc"  # number 1023, a string
        case "no UTF-8":
            return data + bytes([draw(st.integers(1, 15)) << 3 | 2]) + b"\x02\xff\xfe"
        case "cut":
            return data[:at]
        case "insert":
            return data[:at] + draw(st.binary(min_size=1, max_size=8)) + data[at:]
        case _:
            return data[:at] + draw(st.binary(min_size=1, max_size=1)) + data[at + 1 :]
