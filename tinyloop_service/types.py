"""The values that cross layers: frozen, plain, standard library only.

Token ids are tuples of int.  Times are nanoseconds: `*_time_ns` since the Unix epoch, `*_ns` durations.
What a request's messages are made of are named tuples, which take half the time of a frozen dataclass to make.
What is validated where: `rpc/convert.py` and `model.py` check what a caller wrote (types, bounds, text);
the scheduler checks what depends on the server's state (names, loops, memory).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

TokenIds = tuple[int, ...]

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_CHOICES = 16


class CacheMode(StrEnum):
    """How a token's state is stored in a page."""

    FP16 = "fp16"
    INT8 = "int8"
    H_FP16 = "h-fp16"
    H_INT8 = "h-int8"
    H_INT4 = "h-int4"


class PrefixState(StrEnum):
    BUILDING = "building"  # prefill is queued or runs
    READY = "ready"  # pages in memory
    EVICTED = "evicted"  # name and definition only; the next use builds it again
    FAILED = "failed"  # the build failed; the next create replaces it


class FinishReason(StrEnum):
    STOP = "stop"  # a stop sequence of the request
    EOS = "eos"  # the model ended the text
    LENGTH = "length"  # max_tokens


@dataclass(frozen=True, slots=True)
class Sampling:
    """Order: repetition penalty and bias → temperature → top_k → top_p → min_p.

    temperature 0 is argmax, lowest id on ties.  top_k 0 and top_p 1.0 are off.  Noise is a function of
    (seed, choice, position) alone, so a seeded request gives the same tokens in any company.
    """

    temperature: float = 0.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = 0  # 0 none, else the sampled token's and the top k of the raw distribution
    seed: int = 0  # any uint64
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Stops:
    """Matching starts with the first generated token; the match itself is never emitted."""

    token_sequences: tuple[TokenIds, ...] = ()
    strings: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class PrefixDefinition:
    """What a prefix is; two definitions with equal content build the same pages."""

    tokens: TokenIds  # with a parent: the further tokens only
    loops: int | None = None  # None: the parent's, else the model's default
    cache_window: int | None = None  # tokens a position reads, its own included; 0 all; None: the parent's, else 0
    parent: str | None = None  # id of a prefix of the same tenant


@dataclass(frozen=True, slots=True)
class PrefixInfo:
    """A snapshot of one prefix."""

    tenant: str
    name: str | None  # None: held by a handle only
    uid: str
    etag: str
    state: PrefixState
    tokens: TokenIds  # the whole input, the parent's included
    loops: int
    cache_window: int
    cache_mode: CacheMode
    parent: str | None
    pinned: bool
    size_bytes: int  # stored bytes of its own pages (0 while EVICTED)
    shared_bytes: int  # stored bytes of its parents' pages that it reads
    content_sha256: str
    create_time_ns: int
    expire_time_ns: int | None
    last_use_time_ns: int
    use_count: int
    build_ns: int  # 0 until built
    tokens_built: int  # progress while BUILDING
    error: str | None = None  # why FAILED
    build_start_ns: int = 0  # of the last build


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A prefix that another one hangs from: the first `end` of its tokens, at its loops and window."""

    uid: str
    name: str  # when the child was made; it may have ended since
    end: int


@dataclass(frozen=True, slots=True)
class PrefixRecord:
    """What a registry keeps of a named prefix: all that it takes to build it again, in any process, and no state."""

    tenant: str
    name: str
    uid: str
    revision: int
    tokens: TokenIds  # the whole input, the ancestors' included
    loops: int
    cache_window: int
    ancestors: tuple[Ancestor, ...]  # the root first, the parent last
    content_sha256: str
    pinned: bool
    create_time_ns: int
    expire_time_ns: int | None

    @property
    def etag(self) -> str:
        return f"{self.uid}-{self.revision}"

    def next_revision(self, now_ns: int) -> int:
        """Of a change to it.  The time: a registry that lost its last changes must not see their etags again."""
        return max(self.revision + 1, now_ns)

    def is_expired(self, now_ns: int) -> bool:
        return self.expire_time_ns is not None and self.expire_time_ns <= now_ns


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One Generate call, validated and tokenised."""

    tokens: TokenIds  # the suffix when a prefix is named, else the whole prompt
    max_tokens: int = 32
    tenant: str = ""
    prefix: str | None = None  # id of a named prefix
    prefix_uid: str | None = None  # or the uid of a handle's prefix
    loops: int | None = None  # None: the prefix's, else the model's default
    cache_window: int | None = None  # None or 0: the prefix's; else narrows it
    sampling: Sampling = Sampling()
    stops: Stops = Stops()
    n: int = 1
    want_text: bool = True  # False: ids only, nothing is detokenised unless a string stop needs it


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    logprob: float  # of the sampled token, raw distribution
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int  # prefix and suffix
    cached_tokens: int  # of them, read from a prefix; 0 on a miss
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    queue_ns: int  # arrival → admission
    ttft_ns: int  # arrival → first token
    total_ns: int  # arrival → completion


class Started(NamedTuple):
    """Admitted: the pages are reserved."""

    cached_tokens: int
    prompt_tokens: int
    queue_ns: int
    seed: int


class Delta(NamedTuple):
    """New output of one choice; may flush text with no new id."""

    choice: int
    token_ids: TokenIds
    text: str
    logprobs: tuple[TokenLogprob, ...]
    first_index: int  # index of token_ids[0] in the choice's output


class Completed(NamedTuple):
    choice: int
    finish_reason: FinishReason
    usage: Usage
    timings: Timings


Output = Started | Delta | Completed


@dataclass(frozen=True, slots=True)
class Quota:
    """What one tenant may take; None: no bound.  What each means to the tenant: scheduler/quotas.py."""

    prefix_bytes: int | None = None  # stored bytes of its prefixes, evicted ones included
    pinned_bytes: int | None = None  # of them, those of pinned ones and of what these hang from
    concurrent_requests: int | None = None  # that run at a time, at least 1
    queued_requests: int | None = None  # requests and builds that wait
    tokens_per_s: int | None = None  # prompt tokens of its own and generated ones, at least 1


@dataclass(frozen=True, slots=True)
class Load:
    """What the server is doing now, for GetLoad."""

    rows_running: int
    requests_waiting: int
    pages_total: int
    pages_free: int
    pages_prefixes: int
    pages_requests: int
    pages_active: int  # held by active forms
    page_bytes: int
    prefixes_ready: int
    prefixes_building: int
    prefixes_evicted: int
    accepting: bool
    prefixes_failed: int = 0
    requests_running: int = 0
    # since the start
    prefix_evictions: int = 0
    prompt_tokens: int = 0  # of all admitted requests, each counted once
    cached_tokens: int = 0  # of them, not computed on the request's behalf
    generated_tokens: int = 0
