"""Cases small enough for emulation; together they reach every kernel and every switch of a spec.  What a sanitizer is
led through, tests/gpu/test_every_launch.py, launches no less.

Requests off two prefixes and off none, with and without a suffix, with windows, sampled in every way, decode while
another prompt is built in the same plans; each must get what it gets alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from driver import Driver, Held
from engines import make_engine, weights_of

from tinyloop_service.engine.api import MAX_STOP_TOKENS
from tinyloop_service.engine.spec import ModelSpec, Quant
from tinyloop_service.types import CacheMode, Sampling

PLAIN = ModelSpec(
    vocab_size=96, d_model=64, n_heads=1, n_kv_heads=1, head_dim=64, d_ff=128, pre_blocks=1, loop_blocks=1,
    post_blocks=0, default_loops=2, max_loops=4, max_seq_len=256, quant=Quant(4, 64),
)  # fmt: skip
SWITCHED = ModelSpec(
    vocab_size=100, d_model=128, n_heads=2, n_kv_heads=1, head_dim=128, d_ff=64, pre_blocks=1, loop_blocks=1,
    post_blocks=1, default_loops=2, max_loops=4, max_seq_len=256, rope_pairing="interleaved", norm_placement="sandwich",
    loop_norm=True, inject="add", tie_embeddings=True,
)  # fmt: skip
SPECS = {"int4": PLAIN, "fp16, every switch": SWITCHED}
TOKENS = tuple(np.random.default_rng(5).integers(0, 96, 200).tolist())
GREEDY = Sampling(logprobs=2)
HOT = Sampling(temperature=0.8, top_k=30, top_p=0.9, min_p=0.01, repetition_penalty=1.2, logit_bias=((3, 1.5),), seed=9)


def cases(kind: str, *modes: CacheMode, **marks: Any) -> list[Any]:
    return [
        pytest.param((kind, name, mode), id=f"{kind}-{name}-{mode.value}", **marks) for name in SPECS for mode in modes
    ]


CASES = [
    *cases("cpu", CacheMode.FP16),
    *cases("emulated", CacheMode.FP16),  # in other modes: test_cuda_modes.py
    *cases("cuda", *CacheMode, marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module", params=CASES)
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    kind, name, mode = request.param
    options: dict[str, Any] = {"kv_memory": 16 << 20, "cache_mode": mode, "row_counts": (1, 8)}
    driver = Driver(make_engine(kind, weights_of(SPECS[name]), **options))
    yield driver
    driver.engine.close()


def test_company_and_a_build_change_nothing(driver: Driver) -> None:
    full, windowed = driver.prefix(TOKENS[:70], chunk=40), driver.prefix(TOKENS[:64], window=33)

    def ask(parent: Held | None, suffix: int, sampling: Sampling, window: int = 0) -> dict[str, object]:
        return {"parent": parent, "tokens": TOKENS[80 : 80 + suffix], "sampling": sampling, "window": window}

    asked = [ask(full, 0, GREEDY), ask(full, 3, HOT), ask(windowed, 1, GREEDY, 33), ask(None, 5, HOT)]
    alone = [driver.alone(steps=3, **each) for each in asked]  # type: ignore[arg-type]
    if driver.engine.limits.has_active_form:
        driver.step(deactivate=(full.id, windowed.id))
        driver.step(activate=(windowed.id, full.id))
    rows = [driver.request(**each) for each in asked]  # type: ignore[arg-type]
    build = driver.open(full, prompt=TOKENS[100:110])
    for size, steps in ((7, 2), (3, 1)):
        chunk = driver.chunk(build, size)
        for held in rows:
            driver.room(held, held.length + steps)
            held.length += steps
        driver.step(prefill=(chunk,), decode=tuple(held.id for held in rows), num_steps=steps)
    for held, expected in zip(rows, alone, strict=True):
        assert driver.drawn[held.id] == expected
    whole = driver.prefix((*TOKENS[:70], *TOKENS[100:110]))
    own = whole.length - 64  # a child's pages begin with the one in which its parent ends
    assert np.array_equal(driver.engine.read_kv(build.id), driver.engine.read_kv(whole.id)[:, :, :, -own:])
    assert np.array_equal(driver.engine.read_logits(build.id), driver.engine.read_logits(whole.id))
    driver.close(*rows, build, whole, full, windowed)


def test_requests_end_by_themselves(driver: Driver) -> None:
    """With their last token or one that stops them, in the middle of a plan, the first one too; the others go on."""
    prefix = driver.prefix(TOKENS[:70])
    free = {size: driver.alone(prefix, TOKENS[80 : 80 + size], 9, sampling=HOT) for size in (0, 3)}
    ids = {size: [token for token, _ in drawn] for size, drawn in free.items()}
    unlike = len(set(range(96)) - set(ids[0]) - set(ids[3])) >= 2
    assert unlike, "what is drawn leaves no token that stops nobody"
    never = tuple(set(range(96)) - set(ids[0]) - set(ids[3]))[:2]

    def length_until(size: int, token: int) -> int:
        return ids[size].index(token) + 1

    wanted = {  # suffix, max_tokens, stop tokens: how many tokens come
        (0, 7, ()): 7,  # in its second plan
        (3, 5, never): 5,  # with the last step of its first plan
        (3, 1, ()): 1,
        (0, None, (never[0], ids[0][2])): length_until(0, ids[0][2]),
        (3, 8, (*never[:1] * (MAX_STOP_TOKENS - 1), ids[3][5])): length_until(3, ids[3][5]),
        (0, 8, (ids[0][0],)): 1,
        (0, None, never): 9,
    }
    rows = [
        driver.request(prefix, TOKENS[80 : 80 + size], sampling=HOT, max_tokens=most, stop_tokens=stops)
        for size, most, stops in wanted
    ]
    driver.decode(rows, 8, at_once=4)
    for held, (size, most, stops) in zip(rows, wanted, strict=True):
        assert driver.drawn[held.id] == free[size][: wanted[size, most, stops]], (size, most, stops)
    *over, last = rows
    assert driver.step(decode=tuple(held.id for held in over), num_steps=2).rows == ()
    driver.close(*over)
    again = driver.request(prefix, sampling=HOT)  # where one was that had ended
    driver.decode([again, last], 3, at_once=3)
    assert driver.drawn[again.id] == free[0][:4]
    driver.close(again, last, prefix)
