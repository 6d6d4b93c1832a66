"""An engine writes with the demo model what the reference writes.

The engine's greedy tokens are put to the reference: each must be its likeliest token too, but for near-ties.  Where two
logits lie closer than what rounding moves, either may win; those places are counted, and printed.

How close that is: logits of the demo model have a spread of 3.  int8 activations move each by a few percent of that,
some 0.1.  fp16 activations round 16 times finer than the coarsest of 255 levels, and most values far finer still: at
most 0.02 for one logit in a hundred thousand, and twice that for the difference of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
from driver import Driver
from engines import Kind, make_engine, weights_of

from tinyloop_service.demo import PREFIX_TEXT
from tinyloop_service.engine.reference import Reference
from tinyloop_service.text import Tokenizer
from tinyloop_service.types import CacheMode, Sampling

PROMPTS, PROMPT_TOKENS = 20, 24


@dataclass(frozen=True)
class Bounds:
    activations: Literal["exact", "int8"]  # of the reference
    new_tokens: int  # of each prompt
    near_tie: float  # of a logit
    most_near_ties: float  # of all tokens


BOUNDS: dict[Kind, Bounds] = {"cpu": Bounds("int8", 32, 0.1, 0.05), "cuda": Bounds("exact", 64, 0.04, 0.02)}


def prompts() -> list[tuple[int, ...]]:
    """Pieces of the demo's passage."""
    tokens = Tokenizer(weights_of("demo").tokenizer or b"").encode(PREFIX_TEXT, bos=False)
    step = (len(tokens) - PROMPT_TOKENS) // PROMPTS
    return [tuple(tokens[i * step : i * step + PROMPT_TOKENS]) for i in range(PROMPTS)]


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_greedy_text_equals_the_reference(kind: Kind) -> None:
    weights, bounds = weights_of("demo"), BOUNDS[kind]
    loops, steps = weights.spec.default_loops, bounds.new_tokens
    driver = Driver(make_engine(kind, weights), loops=loops)
    rows = [driver.request(None, prompt, sampling=Sampling()) for prompt in prompts()]
    driver.decode(rows, steps - 1)
    driver.engine.close()
    reference = Reference(weights, np.float32, cache_mode=CacheMode.FP16, activations=bounds.activations)
    near_ties = []
    for row in rows:
        drawn = [token for token, _ in driver.drawn[row.id]]
        logits = reference.forward([*row.tokens, *drawn[:-1]], reference.new_cache(loops))[len(row.tokens) - 1 :]
        gaps = logits.max(axis=1) - logits[np.arange(steps), drawn]
        near_ties += [(row.id, step, float(gap)) for step, gap in enumerate(gaps) if gap > 0]
    print(f"near-ties (row, step, gap): {near_ties}")
    assert all(gap < bounds.near_tie for *_, gap in near_ties), f"(row, step, gap): {near_ties}"
    assert len(near_ties) <= bounds.most_near_ties * PROMPTS * steps, f"(row, step, gap): {near_ties}"
