"""What the clients return besides `Completion` and `Delta`: prefixes, handles of prefixes, facts about the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyloop_service.types import CacheMode, PrefixState, TokenIds


@dataclass(frozen=True, slots=True)
class Prefix:
    """A named prefix as the server last described it.  Times are in UTC."""

    id: str
    uid: str  # a name deleted and created again has another
    etag: str  # changes whenever the prefix does
    state: PrefixState
    error: str | None  # why FAILED
    token_count: int  # the parent's included
    loops: int
    cache_window: int  # tokens a position reads; 0: all
    cache_mode: CacheMode
    size_bytes: int  # stored bytes of its own pages; 0 while EVICTED
    shared_bytes: int  # stored bytes of its parents' pages
    content_sha256: str
    parent: str | None  # id
    pinned: bool
    create_time: datetime
    expire_time: datetime | None  # None: never
    last_use_time: datetime | None
    use_count: int
    build_duration: timedelta  # zero until built
    tokens_built: int
    tokens: TokenIds | None = None  # the whole input, where it was asked for


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a server runs, and what it allows."""

    model_id: str
    engine: str
    server_version: str
    replica: str
    default_loops: int
    max_loops: int
    max_seq_len: int
    max_rows: int
    cache_mode: CacheMode
    has_tokenizer: bool
    eos_token_ids: TokenIds
    config: dict[str, Any]  # the model file's


class RemotePrefixCache:
    """A prefix on the server that lives as long as this handle: the client renews it, and deletes it when the handle
    is collected or the client closes.  Made by `build_prefix_cache`; of use only to the client that made it.
    """

    def __init__(self, prefix: Prefix, prompt: TokenIds, drop: Callable[[str], None]) -> None:
        self._prefix = prefix
        self._prompt = prompt
        weakref.finalize(self, drop, prefix.id).atexit = False

    @property
    def id(self) -> str:
        """The name that the client chose for it, a UUID."""
        return self._prefix.id

    @property
    def prompt(self) -> NDArray[np.int32]:
        """A copy of the prefix's token ids, BOS included."""
        return np.array(self._prompt, np.int32)

    @property
    def loops(self) -> int:
        return self._prefix.loops

    @property
    def cache_window(self) -> int:
        """Tokens a position reads, its own included; 0: all."""
        return self._prefix.cache_window

    @property
    def num_bytes(self) -> int:
        """Stored bytes of its pages."""
        return self._prefix.size_bytes

    @property
    def uid(self) -> str:
        return self._prefix.uid

    def __repr__(self) -> str:
        return f"RemotePrefixCache({len(self._prompt)} tokens, loops={self.loops}, uid={self.uid!r})"
