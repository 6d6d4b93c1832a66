"""Prefixes: protobuf to our types and back, with every check that needs no state.

What a create asks is read into `Creation`, what an update changes into `Change`.  A ttl stays one until the scheduler
is called: it runs from then, by the scheduler's clock.
Page tokens are opaque to callers: the name after which the next page begins.
"""

from __future__ import annotations

import base64
import binascii
import re
import uuid
from dataclasses import dataclass
from typing import Any

from tinyloop_service import arguments
from tinyloop_service.engine.api import Limits
from tinyloop_service.errors import InvalidArgument
from tinyloop_service.pb import input_pb2, prefix_pb2
from tinyloop_service.rpc.convert import COLLECTION, read_input, read_name, write_duration, write_time, write_tokens
from tinyloop_service.types import CacheMode, PrefixInfo, PrefixState, TokenIds

DEFAULT_PAGE, MAX_PAGE = 50, 1000
_MUTABLE = ("expire_time", "ttl", "pinned")
_TOKEN_VERSION = "1:"
_BUILD_FAILED = "the build failed; create the prefix again"
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")

STATES = {
    PrefixState.BUILDING: prefix_pb2.PREFIX_STATE_BUILDING,
    PrefixState.READY: prefix_pb2.PREFIX_STATE_READY,
    PrefixState.EVICTED: prefix_pb2.PREFIX_STATE_EVICTED,
    PrefixState.FAILED: prefix_pb2.PREFIX_STATE_FAILED,
}
CACHE_MODES = {
    CacheMode.FP16: prefix_pb2.CACHE_MODE_FP16,
    CacheMode.INT8: prefix_pb2.CACHE_MODE_INT8,
    CacheMode.H_FP16: prefix_pb2.CACHE_MODE_H_FP16,
    CacheMode.H_INT8: prefix_pb2.CACHE_MODE_H_INT8,
    CacheMode.H_INT4: prefix_pb2.CACHE_MODE_H_INT4,
}


@dataclass(frozen=True, slots=True)
class Expiration:
    """When a prefix ends; with neither, never."""

    ttl_ns: int | None = None
    time_ns: int | None = None

    def at(self, now_ns: int) -> int | None:
        """Nanoseconds since the epoch for what is created or updated now."""
        return self.time_ns if self.ttl_ns is None else now_ns + self.ttl_ns


@dataclass(frozen=True, slots=True)
class Creation:
    """A CreatePrefixRequest, checked; its content may still be text."""

    prefix_id: str | None  # None: the server chooses
    content: str | TokenIds
    loops: int | None
    cache_window: int | None
    parent: str | None
    expiration: Expiration
    pinned: bool
    build_async: bool
    request_id: str  # empty: none
    validate_only: bool


@dataclass(frozen=True, slots=True)
class Change:
    """An UpdatePrefixRequest, checked."""

    name: str
    etag: str | None
    expiration: Expiration | None  # None: as it is
    pinned: bool | None  # None: as it is


def read_creation(message: prefix_pb2.CreatePrefixRequest, limits: Limits, now_ns: int) -> Creation:
    if message.request_id and not _UUID.fullmatch(message.request_id):
        raise InvalidArgument("request_id", f"is {message.request_id[:80]!r}, expected a UUID")
    return Creation(
        prefix_id=arguments.prefix_id(message.prefix_id) if message.prefix_id else None,
        content=read_input(message.input, limits, may_be_empty=False),
        loops=arguments.loops(message.loops if message.HasField("loops") else None, max_loops=limits.max_loops),
        cache_window=arguments.cache_window(message.cache_window if message.HasField("cache_window") else None),
        parent=read_name(message.parent, "parent") if message.parent else None,
        expiration=_read_expiration(message, now_ns),
        pinned=message.pinned,
        build_async=message.build_async,
        request_id=message.request_id.lower(),
        validate_only=message.validate_only,
    )


def new_prefix_id() -> str:
    return str(uuid.uuid4())


def read_change(message: prefix_pb2.UpdatePrefixRequest, now_ns: int) -> Change:
    prefix = message.prefix
    name = read_name(prefix.name, "prefix.name")
    num_paths, most = len(message.update_mask.paths), len(prefix.DESCRIPTOR.fields)
    if num_paths > most:  # before millions are read
        raise InvalidArgument("update_mask", f"has {num_paths} paths, expected at most {most}")
    paths = set(message.update_mask.paths) if message.HasField("update_mask") else _populated(prefix)
    if "*" in paths:
        paths = set(_MUTABLE)
    for path in sorted(paths):
        if path not in _MUTABLE:
            known = path in prefix.DESCRIPTOR.fields_by_name
            what = "cannot be changed" if known else "is no field of Prefix"
            raise InvalidArgument("update_mask", f"{path[:80]!r} {what}; expected {', '.join(_MUTABLE)}")
    return Change(
        name=name,
        etag=prefix.etag or None,
        expiration=_read_expiration(prefix, now_ns) if paths & {"expire_time", "ttl"} else None,
        pinned=prefix.pinned if "pinned" in paths else None,
    )


def read_view(view: int) -> bool:
    """Whether the view is FULL."""
    if view not in prefix_pb2.PrefixView.values():
        raise InvalidArgument("view", f"is {view}, expected PREFIX_VIEW_BASIC or PREFIX_VIEW_FULL")
    return view == prefix_pb2.PREFIX_VIEW_FULL


def read_page_size(size: int) -> int:
    if size < 0:
        raise InvalidArgument("page_size", f"is {size}, expected 0 or more")
    return min(size or DEFAULT_PAGE, MAX_PAGE)


def read_page_token(token: str) -> str:
    """The id after which the page begins; empty: the first page."""
    if not token:
        return ""
    try:
        text = base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        text = ""
    if not text.startswith(_TOKEN_VERSION) or not arguments.PREFIX_ID.fullmatch(text.removeprefix(_TOKEN_VERSION)):
        raise InvalidArgument("page_token", "is none of this server's; send next_page_token as it came, or nothing")
    return text.removeprefix(_TOKEN_VERSION)


def write_page_token(last: str) -> str:
    return base64.urlsafe_b64encode(f"{_TOKEN_VERSION}{last}".encode()).decode()


def write_prefix(info: PrefixInfo, *, full: bool = False) -> prefix_pb2.Prefix:
    """`full`: with the tokens."""
    prefix = prefix_pb2.Prefix(
        name=f"{COLLECTION}{info.name}",
        uid=info.uid,
        etag=info.etag,
        state=STATES[info.state],
        error=_BUILD_FAILED if info.error else "",  # the reason itself may be an engine's own text
        token_count=len(info.tokens),
        loops=info.loops,
        cache_window=info.cache_window,
        cache_mode=CACHE_MODES[info.cache_mode],
        size_bytes=info.size_bytes,
        shared_bytes=info.shared_bytes,
        content_sha256=info.content_sha256,
        parent=f"{COLLECTION}{info.parent}" if info.parent else "",
        pinned=info.pinned,
        create_time=write_time(info.create_time_ns),
        use_count=info.use_count,
        build_duration=write_duration(info.build_ns),
        tokens_built=info.tokens_built,
    )
    if info.last_use_time_ns:
        prefix.last_use_time.FromNanoseconds(info.last_use_time_ns)
    if info.expire_time_ns is not None:
        prefix.expire_time.FromNanoseconds(info.expire_time_ns)
    if full:
        prefix.input.CopyFrom(input_pb2.Input(tokens=write_tokens(info.tokens)))
    return prefix


def _populated(prefix: prefix_pb2.Prefix) -> set[str]:
    """What an update without a mask changes."""
    expiration = prefix.WhichOneof("expiration")
    return {path for path in (expiration, "pinned" if prefix.pinned else None) if path}


def _read_expiration(message: Any, now_ns: int) -> Expiration:
    match message.WhichOneof("expiration"):
        case "ttl":
            nanoseconds = message.ttl.seconds * 10**9 + message.ttl.nanos
            if not 0 < nanoseconds <= arguments.MAX_TTL_NS:
                limit = arguments.MAX_TTL_NS // 10**9
                raise InvalidArgument("ttl", f"is {nanoseconds / 1e9} s, expected above 0 and up to {limit} s")
            return Expiration(ttl_ns=int(nanoseconds))
        case "expire_time":
            moment = message.expire_time.seconds * 10**9 + message.expire_time.nanos
            if not now_ns < moment <= now_ns + arguments.MAX_TTL_NS:
                raise InvalidArgument("expire_time", "is not in the future, or more than ten years away")
            return Expiration(time_ns=int(moment))
        case _:
            return Expiration()
