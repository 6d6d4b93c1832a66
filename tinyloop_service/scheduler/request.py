"""One request and its rows: what was asked, what it costs, and where it stands.

In: nothing.  Out: the records that `requests` keeps.  It refuses to change a state: `requests` does.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from enum import Enum

from tinyloop_service.engine.api import Limits
from tinyloop_service.scheduler.prefix import Prefix
from tinyloop_service.scheduler.sequences import Extent, Sequence
from tinyloop_service.types import GenerationRequest, TokenIds


class RequestState(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"


class RowPhase(Enum):
    HELD = "held"  # waits for its trunk
    FEED = "feed"  # prompt tokens to come
    FIRST = "first"  # starts from its parent's kept logits
    DECODE = "decode"
    SPENT = "spent"  # every token it may have is planned
    DONE = "done"


@dataclass(slots=True, eq=False)
class Row:
    """One choice."""

    request: Request
    index: int
    sequence: Sequence
    phase: RowPhase
    num_left: int  # tokens not planned yet
    num_emitted: int = 0  # tokens committed


@dataclass(slots=True, eq=False)
class Request:
    """One Generate call.  `order` is its id and its place in the order of arrival."""

    order: int
    spec: GenerationRequest
    prefix: Prefix | None
    loops: int
    window: int
    arrival_ns: int
    limits: InitVar[Limits]
    state: RequestState = RequestState.QUEUED
    is_let_in: bool = False  # by the quota of its tenant
    trunk: Sequence | None = None
    rows: list[Row] = field(default_factory=list)
    cached_tokens: int = 0  # prompt tokens not computed on its behalf; lowered when a prefix is built for it
    trunk_extent: Extent | None = field(init=False)
    row_extent: Extent = field(init=False)  # of each row; the last sampled token is never stored
    num_pages: int = field(init=False)  # that it can come to hold, active forms included

    def __post_init__(self, limits: Limits) -> None:
        start, prompt_len, has_trunk = self.prefix_len, self.prompt_len, self.has_trunk
        end, row_start = prompt_len + self.spec.max_tokens - 1, prompt_len if has_trunk else start
        self.cached_tokens = start
        self.trunk_extent = Extent(start, prompt_len, self.loops, self.window) if has_trunk else None
        self.row_extent = Extent(row_start, end, self.loops, self.window)
        trunk_pages = self.trunk_extent.most_pages(limits) if self.trunk_extent is not None else 0
        self.num_pages = trunk_pages + self.spec.n * self.row_extent.most_pages(limits)

    @property
    def prefix_len(self) -> int:
        return self.prefix.recipe.extent.end if self.prefix is not None else 0

    @property
    def prompt_len(self) -> int:
        return self.prefix_len + len(self.spec.tokens)

    @property
    def has_trunk(self) -> bool:
        return self.spec.n > 1 and bool(self.spec.tokens)

    @property
    def tokens_asked(self) -> int:
        """Most tokens that are computed for it: those of its own prompt, and all it may generate."""
        return len(self.spec.tokens) + self.spec.n * self.spec.max_tokens

    @property
    def tokens_unused(self) -> int:
        """Of those asked, the ones that no plan had; all of them, if it never started."""
        return sum(row.num_left for row in self.rows) if self.rows else self.tokens_asked

    def prompt(self) -> TokenIds:
        """Every prompt token, where the engine needs them."""
        if self.spec.sampling.repetition_penalty == 1.0:
            return ()
        return (self.prefix.recipe.tokens if self.prefix is not None else ()) + self.spec.tokens

    def stop_tokens(self, eos_token_ids: TokenIds) -> TokenIds:
        """Behind which nothing that is drawn is delivered, whatever came before them."""
        stops = self.spec.stops
        first = () if stops.ignore_eos else eos_token_ids
        return first + tuple(sequence[0] for sequence in stops.token_sequences if len(sequence) == 1)

    def sequences(self) -> list[Sequence]:
        """Those that hold pages now."""
        rows = [row.sequence for row in self.rows if row.phase is not RowPhase.DONE]
        return rows if self.trunk is None else [self.trunk, *rows]


@dataclass(slots=True)
class Counters:
    """Token counts since the start.  hits + misses = prompt tokens of all admitted requests, each counted once."""

    prompt_hits: int = 0
    prompt_misses: int = 0
    generated: int = 0
