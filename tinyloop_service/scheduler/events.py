"""What the core tells the loop: values only, in the order in which they happened.

Those that are many are tuples: a frozen dataclass takes twice as long to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tinyloop_service.errors import TinyLoopError
from tinyloop_service.types import FinishReason, TokenIds, TokenLogprob


class Admitted(NamedTuple):  # one for each request
    """Its pages are reserved.  `build_*_ns`: when its prefix was built, if that was not before it arrived; else 0."""

    request: int
    cached_tokens: int
    prompt_tokens: int
    queue_ns: int
    build_start_ns: int = 0
    build_end_ns: int = 0


class Sampled(NamedTuple):  # one for each row of each plan
    """New tokens of one choice, EOS cut off; `reason` ends it."""

    request: int
    choice: int
    tokens: TokenIds
    logprobs: tuple[TokenLogprob, ...]
    reason: FinishReason | None
    time_ns: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The whole request ended with an error."""

    request: int
    error: TinyLoopError


@dataclass(frozen=True, slots=True)
class PrefixChanged:
    """Its state, progress or lifetime changed, or it is gone."""

    uid: str


@dataclass(frozen=True, slots=True)
class BuildEnded:
    """A prefix is READY, or its build failed with `error`.  One that nobody wanted any more ends without a word.

    `snapshot`: the digest of the state that it was to be restored from; empty: its tokens were prefilled.
    """

    tenant: str
    name: str | None
    num_tokens: int  # of its own
    build_ns: int  # 0 if it failed
    error: TinyLoopError | None = None
    snapshot: str = ""


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """The state of a prefix, for who keeps it."""

    digest: str  # Prefix.state_digest
    state: object
    expire_time_ns: int | None  # from then on nobody wants it; None: there is no such time


@dataclass(frozen=True, slots=True)
class SnapshotExpires:
    """Names and lifetimes have changed, and with them the time from which on nobody wants this state."""

    digest: str
    expire_time_ns: int | None


@dataclass(frozen=True, slots=True)
class SnapshotUnwanted:
    """No prefix of this content is left, or its state could not be restored."""

    digest: str


Event = SnapshotTaken | SnapshotExpires | SnapshotUnwanted | Admitted | Sampled | Failed | PrefixChanged | BuildEnded
