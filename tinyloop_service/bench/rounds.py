"""The same requests with a shared prefix and without one, timed as their callers see them.

    SHARED     one create, then all requests at once        NO_CACHE   each with its own prefill, one after the other

In: a service, and requests.  Out: one `Run` each.  Every measurement times a request here, by `follow`: rounds, load
tests and `tinyloop demo`, in process and through gRPC.  Times are of the monotonic clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from tinyloop_service.arguments import Parameters
from tinyloop_service.bench.service import Ask, Content, Service
from tinyloop_service.bench.workload import predicted_speedup
from tinyloop_service.types import Completed, Delta, Started, TokenIds

ShowPiece = Callable[[int, str], None]  # request, new text
Count = Callable[[int], None]


@dataclass(slots=True)
class Timeline:
    """What came of one request, and when; nanoseconds."""

    sent_ns: int = 0
    started: Started | None = None
    arrivals: list[tuple[int, int]] = field(default_factory=list)  # when, number of tokens; only with any
    token_ids: list[int] = field(default_factory=list)
    completed: Completed | None = None
    end_ns: int = 0  # of whatever kind


async def follow(
    service: Service, ask: Ask, timeline: Timeline, show: Callable[[str], None] | None = None, most: int | None = None
) -> None:
    """Send `ask`, and fill `timeline` with its one choice; after `most` tokens hang up, after none once it is admitted.

    Raises what the service raises; `timeline` then has what came before.
    """
    timeline.sent_ns = time.monotonic_ns()
    try:
        async with service.ask(ask) as pieces:
            async for outputs in pieces:
                now_ns = time.monotonic_ns()
                for output in outputs:
                    match output:
                        case Delta():
                            if output.token_ids:
                                timeline.arrivals.append((now_ns, len(output.token_ids)))
                                timeline.token_ids.extend(output.token_ids)
                            if show is not None:
                                show(output.text)
                        case Started():
                            timeline.started = output
                        case Completed():
                            timeline.completed = output
                if most is not None and len(timeline.token_ids) >= most:
                    return
    finally:
        timeline.end_ns = time.monotonic_ns()


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
    build_ms: float = 0.0  # of the prefix, as the caller of create saw it; 0: there was none
    prefix_bytes: int = 0

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

    @property
    def decode_ms(self) -> float:
        """Median of what a request needs after its first token."""
        return median(answer.total_ms - answer.ttft_ms for answer in self.answers)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Both ways, measured in one run."""

    prefix_tokens: int
    loops: int
    shared: Run
    no_cache: Run

    @property
    def speedup(self) -> float:
        return self.no_cache.total_ms / self.shared.total_ms

    @property
    def predicted(self) -> float:
        """P: the build of the prefix.  D: what a lone request needs after its first token."""
        return predicted_speedup(self.shared.build_ms, self.no_cache.decode_ms, len(self.no_cache.answers))

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
            "prefix_bytes": self.shared.prefix_bytes,
            "loops": self.loops,
            "build_ms": round(self.shared.build_ms, 3),
            "ttft_ms": {name: round(run.ttft_ms, 3) for name, run in ways.items()},
            "total_ms": {name: round(run.total_ms, 3) for name, run in ways.items()},
            "tokens_per_s": {name: round(run.tokens_per_s, 1) for name, run in ways.items()},
            "speedup": round(self.speedup, 3),
            "predicted_speedup": round(self.predicted, 3),
            "same_tokens": self.num_alike == len(self.shared.answers),
        }


async def run_shared(
    service: Service,
    name: str,
    prefix: Content,
    suffixes: Sequence[Content],
    parameters: Parameters,
    show: ShowPiece | None = None,
) -> Run:
    """The prefix stays, under `name`.  `show`: wants every piece of text."""
    asks = _asks(suffixes, parameters, name, want_text=show is not None)
    began = time.monotonic_ns()
    prefix_bytes = await service.create_prefix(name, prefix, loops=parameters.loops)
    build_ms = _since(began)
    answers = await asyncio.gather(*(_answer(service, ask, index, show) for index, ask in enumerate(asks)))
    return Run(tuple(answers), _since(began), build_ms, prefix_bytes)


async def run_no_cache(
    service: Service, prompts: Sequence[Content], parameters: Parameters, count: Count | None = None
) -> Run:
    """One request after the other.  To be compared with `run_shared`, which tokenises in two pieces, give ids."""
    answers: list[Answer] = []
    asks = _asks(prompts, parameters)
    began = time.monotonic_ns()
    for index, ask in enumerate(asks):
        answers.append(await _answer(service, ask, index, None))
        if count is not None:
            count(index + 1)
    return Run(tuple(answers), _since(began))


def _asks(
    contents: Sequence[Content], parameters: Parameters, prefix: str | None = None, *, want_text: bool = False
) -> list[Ask]:
    """The seed of each is its index: so both ways must give the same tokens."""
    seeds = (replace(parameters.sampling, seed=index) for index in range(len(contents)))
    seeded = (replace(parameters, sampling=sampling) for sampling in seeds)
    return [Ask(content, each, prefix, want_text) for content, each in zip(contents, seeded, strict=True)]


async def _answer(service: Service, ask: Ask, index: int, show: ShowPiece | None) -> Answer:
    timeline = Timeline()
    await follow(service, ask, timeline, None if show is None else lambda text: show(index, text))
    first_ns = timeline.arrivals[0][0] if timeline.arrivals else timeline.end_ns
    return Answer(
        tuple(timeline.token_ids),
        (first_ns - timeline.sent_ns) / 1e6,
        (timeline.end_ns - timeline.sent_ns) / 1e6,
    )


def _since(began_ns: int) -> float:
    return (time.monotonic_ns() - began_ns) / 1e6
