"""What the fake engine samples: a hash of every token that is visible.

    entry(p) = mix(sum of the visible entries before p, token(p), p, loops)        visible: positions > p − window
    sampled  = draw(entry, seed and choice unless greedy, the set of penalised tokens)

`expected_tokens` is the oracle of tests: the same from the prompt alone, without pages, plans and prefixes.
"""

from __future__ import annotations

from collections.abc import Iterable

from tinyloop_service.engine.api import Limits
from tinyloop_service.types import Sampling, TokenIds, TokenLogprob

MASK = (1 << 61) - 1
NO_TOKENS: frozenset[int] = frozenset()


def mix(total: int, token: int, position: int, loops: int) -> int:
    value = (total * 0x9E3779B97F4A7C1 + token * 0x2545F4914F6CDD1D + position * 0x5851F42D + loops) & MASK
    return value ^ (value >> 29)


def draw(entry: int, sampling: Sampling, seen: frozenset[int], vocab_size: int) -> int:
    """The token after an entry; noise unless greedy, and what was seen under repetition penalty."""
    if sampling.temperature:
        entry ^= sampling.seed * 31 + sampling.choice + 1
    if seen:
        entry += sum(seen)
    return (entry * 0x94D049BB133111EB & MASK) % vocab_size


def draw_logprob(entry: int, token: int, count: int, vocab_size: int) -> TokenLogprob:
    top = tuple(((entry + i) % vocab_size, -0.1 * (i + 1)) for i in range(count))
    return TokenLogprob(-((entry ^ token) % 1000) / 1000, top)


def expected_tokens(
    segments: Iterable[tuple[TokenIds, int]], max_tokens: int, sampling: Sampling, loops: int, limits: Limits
) -> TokenIds:
    """What a request alone would get: prompt segments with their windows, the last window for what is generated."""
    entries: list[int] = []
    tokens: list[int] = []
    window = 0
    for segment, window in segments:
        for token in segment:
            _append(entries, token, window, loops)
        tokens += segment
    penalised = sampling.repetition_penalty != 1.0
    sampled: list[int] = []
    while True:
        sampled.append(draw(entries[-1], sampling, frozenset(tokens) if penalised else NO_TOKENS, limits.vocab_size))
        if len(sampled) == max_tokens:
            return tuple(sampled)
        tokens.append(sampled[-1])
        _append(entries, sampled[-1], window, loops)


def _append(entries: list[int], token: int, window: int, loops: int) -> None:
    start = max(0, len(entries) - window + 1) if window else 0
    entries.append(mix(sum(entries[start:]) & MASK, token, len(entries), loops))
