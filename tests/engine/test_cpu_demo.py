"""The demo model on the CPU engine writes what the reference writes, both with activations rounded to int8.

The engine's greedy tokens are put to the reference: each must be its likeliest token too, but for near-ties.  Where two
logits lie closer than what rounding moves (see `test_cpu_reference.py`: a few percent of their spread, which is some
0.1 here), either may win; those places are counted, and named when there are too many.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from cpu_driver import Driver

from tinyloop_service.demo import MODEL_PATH
from tinyloop_service.engine.cpu import CpuEngine
from tinyloop_service.engine.reference import Reference
from tinyloop_service.engine.weights import ModelWeights, read_model
from tinyloop_service.text import Tokenizer
from tinyloop_service.types import Sampling

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 20, 24, 32
NEAR_TIE = 0.1  # of a logit
MOST_NEAR_TIES = 0.05  # of all tokens


@cache
def demo() -> ModelWeights:
    return read_model(MODEL_PATH)


def prompts() -> list[tuple[int, ...]]:
    tokenizer = Tokenizer(demo().tokenizer or b"", demo().spec.bos_token_id)
    text = (MODEL_PATH.parent / "prefix.txt").read_text()
    tokens = tokenizer.encode(text, bos=False)
    step = (len(tokens) - PROMPT_TOKENS) // PROMPTS
    return [tuple(tokens[i * step : i * step + PROMPT_TOKENS]) for i in range(PROMPTS)]


def test_greedy_text_equals_the_reference() -> None:
    driver = Driver(CpuEngine(demo(), kv_memory=128 << 20, threads=2))
    reference, loops = Reference(demo(), np.float32, kv="fp16", activations="int8"), demo().spec.default_loops
    rows = [driver.request(None, prompt, sampling=Sampling(), loops=loops) for prompt in prompts()]
    driver.decode(rows, NEW_TOKENS - 1)
    near_ties = []
    for row in rows:
        drawn = [token for token, _ in driver.drawn[row.id]]
        logits = reference.forward([*row.tokens, *drawn[:-1]], reference.new_cache(loops, 0))[len(row.tokens) - 1 :]
        gaps = logits.max(axis=1) - logits[np.arange(NEW_TOKENS), drawn]
        near_ties += [(row.id, step, float(gap)) for step, gap in enumerate(gaps) if gap > 0]
    assert all(gap < NEAR_TIE for *_, gap in near_ties), f"(row, step, gap): {near_ties}"
    assert len(near_ties) <= MOST_NEAR_TIES * PROMPTS * NEW_TOKENS, f"(row, step, gap): {near_ties}"
    print(f"near-ties (row, step, gap): {near_ties}")
