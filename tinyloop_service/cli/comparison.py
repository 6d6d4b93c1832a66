"""Measured as callers see it: the same requests with a shared prefix and without one.

    SHARED     one create, then all requests at once        NO_CACHE   each with its own prefill, one after the other

In: a client of a running server, and texts or ids.  Out: one `Outcome`.  Request i has seed i, so both ways must give
the same tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tinyloop_service.arguments import Prompt
from tinyloop_service.bench import predicted_speedup
from tinyloop_service.client import AsyncClient
from tinyloop_service.types import TokenIds

PREFIX_ID = "demo"
SAMPLING: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9}

ShowPiece = Callable[[int, str], None]  # request, new text
Count = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """One request; milliseconds from sending."""

    tokens: TokenIds
    ttft_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True)
class Run:
    """All requests of one way."""

    answers: tuple[Answer, ...]
    total_ms: float  # from the first thing sent, a create included, to the last token

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.total_ms * 1e3

    @property
    def ttft_ms(self) -> float:
        """Median of first token − sending."""
        return median(answer.ttft_ms for answer in self.answers)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Both ways, measured in one run."""

    prefix_tokens: int
    prefix_bytes: int
    loops: int
    build_ms: float  # of the prefix, as the caller of create saw it
    shared: Run
    no_cache: Run

    @property
    def speedup(self) -> float:
        return self.no_cache.total_ms / self.shared.total_ms

    @property
    def predicted(self) -> float:
        """P: the build of the prefix.  D: what a lone request needs after its first token."""
        decode = median(answer.total_ms - answer.ttft_ms for answer in self.no_cache.answers)
        return predicted_speedup(self.build_ms, decode, len(self.no_cache.answers))

    @property
    def num_alike(self) -> int:
        """Requests that gave the same tokens both ways."""
        pairs = zip(self.shared.answers, self.no_cache.answers, strict=True)
        return sum(one.tokens == other.tokens for one, other in pairs)

    def as_dict(self) -> dict[str, Any]:
        """For scripts; milliseconds."""
        ways = {"shared": self.shared, "no_cache": self.no_cache}
        return {
            "requests": len(self.shared.answers),
            "prefix_tokens": self.prefix_tokens,
            "prefix_bytes": self.prefix_bytes,
            "loops": self.loops,
            "build_ms": round(self.build_ms, 3),
            "ttft_ms": {name: round(run.ttft_ms, 3) for name, run in ways.items()},
            "total_ms": {name: round(run.total_ms, 3) for name, run in ways.items()},
            "tokens_per_s": {name: round(run.tokens_per_s, 1) for name, run in ways.items()},
            "speedup": round(self.speedup, 3),
            "predicted_speedup": round(self.predicted, 3),
            "same_tokens": self.num_alike == len(self.shared.answers),
        }


async def run_shared(
    client: AsyncClient,
    prefix: Prompt,
    suffixes: Sequence[Prompt],
    max_tokens: int,
    show: ShowPiece,
    sampling: Mapping[str, Any] = SAMPLING,
) -> tuple[Run, float, int]:
    """The run, the milliseconds of its create, and the prefix's bytes.  The prefix stays, under PREFIX_ID."""
    began = time.perf_counter()
    built = await client.create_prefix(PREFIX_ID, prefix)
    build_ms = _since(began)
    answers = await asyncio.gather(
        *(
            _ask(client, index, max_tokens, show, sampling, prefix=PREFIX_ID, suffix=suffix)
            for index, suffix in enumerate(suffixes)
        )
    )
    return Run(tuple(answers), _since(began)), build_ms, built.size_bytes


async def run_no_cache(
    client: AsyncClient,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    count: Count,
    sampling: Mapping[str, Any] = SAMPLING,
) -> Run:
    """One request after the other, as token ids: prefix and suffix tokenised separately, as in the other run."""
    answers: list[Answer] = []
    began = time.perf_counter()
    for index, prompt in enumerate(prompts):
        answers.append(await _ask(client, index, max_tokens, lambda request, text: None, sampling, prompt=prompt))
        count(index + 1)
    return Run(tuple(answers), _since(began))


async def _ask(
    client: AsyncClient, index: int, max_tokens: int, show: ShowPiece, sampling: Mapping[str, Any], **start: Any
) -> Answer:
    """Stream one request; its seed is its index."""
    began = time.perf_counter()
    ttft_ms = 0.0
    tokens: list[int] = []
    async for delta in client.stream(**start, max_tokens=max_tokens, seed=index, **sampling):
        if delta.token_ids and not tokens:
            ttft_ms = _since(began)
        tokens.extend(delta.token_ids)
        show(index, delta.text)
    return Answer(tuple(tokens), ttft_ms, _since(began))


def _since(began: float) -> float:
    return (time.perf_counter() - began) * 1e3
