"""The sampler against the one by the book, its independence of company, and the edges of every parameter."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyloop_service.engine import reference
from tinyloop_service.engine.cpu.sampling import RowSampler, sample
from tinyloop_service.engine.noise import philox, uniform
from tinyloop_service.errors import EngineFault
from tinyloop_service.types import Sampling, TokenLogprob

VOCAB = 1013  # not a multiple of anything that the sampler blocks by


def logits_of(seed: int, rows: int = 1, size: int = VOCAB, spread: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, size)) * spread).astype(np.float32)


def draw(logits: np.ndarray, sampling: Sampling, position: int = 7, prompt: tuple[int, ...] = ()) -> int:
    ids, _ = sample(logits[None], [RowSampler(sampling, logits.size, prompt)], [position])
    return int(ids[0])


# --- noise


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(counter: Any, key: Any, words: Any) -> None:
    assert philox(counter, key) == words


def test_noise_is_uniform_and_depends_on_all_its_arguments() -> None:
    values = [
        uniform(seed, choice, position) for seed in (0, 2**64 - 1) for choice in (0, 15) for position in range(500)
    ]
    assert len(set(values)) == 2000 and min(values) >= 0 and max(values) < 1
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    assert ((counts - 100) ** 2 / 100).sum() < 43.8, "chi-square of 19 degrees of freedom, at one in a thousand"


# --- against the book

SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 50, 300, VOCAB - 1, VOCAB, VOCAB + 1, 10**9]),
    top_p=st.sampled_from([1e-6, 0.3, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.5]),
    logit_bias=st.sampled_from([(), ((3, 5.0), (1012, -100.0)), ((3, 1.0), (3, 2.0))]),
    logprobs=st.sampled_from([0, 1, 20]),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 15),
)


@settings(max_examples=300, deadline=None)
@given(SAMPLINGS, st.integers(0, 2**31), st.sampled_from([0.0, 0.5, 4.0]), st.sampled_from([1, 2, 31, 33, VOCAB]))
def test_it_draws_what_the_reference_draws(sampling: Sampling, position: int, spread: float, size: int) -> None:
    bias = tuple((token % size, value) for token, value in sampling.logit_bias)
    sampling = replace(sampling, logit_bias=bias, logprobs=min(sampling.logprobs, size))
    logits = np.round(logits_of(position % 97, 1, size, spread)[0], 2)  # rounded: ties abound
    prompt = tuple({0, size // 2, size - 1})
    expected, expected_logprob = reference.sample(logits, sampling, set(prompt), position)
    ids, logprobs = sample(logits[None], [RowSampler(sampling, size, prompt)], [position])
    assert int(ids[0]) == expected
    assert (logprobs[0] is None) == (expected_logprob is None)
    if expected_logprob is not None and logprobs[0] is not None:
        assert [token for token, _ in logprobs[0].top] == [token for token, _ in expected_logprob.top]
        values = [logprobs[0].logprob, *(value for _, value in logprobs[0].top)]
        wanted = [expected_logprob.logprob, *(value for _, value in expected_logprob.top)]
        # float32 exponentials in the mass: 2^-23 of it, and so of the logarithm's argument.
        np.testing.assert_allclose(values, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"top_p": 0.9}, {"min_p": 0.01}, {"top_p": 0.9999}, {"min_p": 1e-9}])
def test_a_large_vocabulary_without_top_k(changes: dict[str, float]) -> None:
    """Flat and peaked: both the short head and the whole list come to decide."""
    for spread in (0.1, 1.0, 6.0):
        logits = logits_of(1, 1, 20011, spread)[0]
        for position in range(12):
            sampling = Sampling(temperature=1.0, top_k=0, seed=5, **changes)
            assert draw(logits, sampling, position) == reference.sample(logits, sampling, set(), position)[0]


# --- company


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    kinds = [
        Sampling(),
        Sampling(temperature=0.8, seed=1, logprobs=5),
        Sampling(temperature=1.2, top_k=0, seed=2, logprobs=20),
        Sampling(temperature=1.0, top_k=0, top_p=0.9, seed=3),
        Sampling(repetition_penalty=1.3, seed=4, logprobs=1),
        Sampling(temperature=1.0, top_k=0, min_p=0.05, logit_bias=((5, 4.0),), seed=5),
        Sampling(logprobs=3),
    ]
    size, rng = 5003, np.random.default_rng(0)
    logits = logits_of(3, 33, size)
    samplings = [replace(kinds[i % len(kinds)], choice=i % 16) for i in range(33)]
    positions = rng.integers(0, 4096, 33).tolist()

    def drawn(rows: list[int]) -> list[tuple[int, TokenLogprob | None]]:
        samplers = [RowSampler(samplings[i], size, (1, i)) for i in rows]
        ids, logprobs = sample(logits[rows], samplers, [positions[i] for i in rows])
        return list(zip(ids.tolist(), logprobs, strict=True))

    alone = [drawn([i])[0] for i in range(33)]
    for _ in range(6):
        rows = rng.permutation(33)[: rng.integers(2, 33)].tolist()
        assert drawn(rows) == [alone[i] for i in rows], "a row's draw followed its company"


def test_logits_are_left_as_they_are() -> None:
    logits = logits_of(0, 2)
    before = logits.copy()
    samplers = [
        RowSampler(Sampling(repetition_penalty=2.0, logit_bias=((1, 9.0),), logprobs=2), VOCAB, (4,)),
        RowSampler(Sampling(), VOCAB),
    ]
    sample(logits, samplers, [0, 0])
    np.testing.assert_array_equal(logits, before)


# --- rules


def test_temperature_0_is_argmax_with_the_lowest_id_on_ties() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[77, 500, 900]] = 3
    assert draw(logits, Sampling()) == 77
    assert draw(logits, Sampling(logprobs=1)) == 77
    assert draw(logits, Sampling(repetition_penalty=1.5), prompt=(77,)) == 500
    signed = np.full(VOCAB, -1, np.float32)
    signed[[3, 8]] = -0.0, 0.0
    assert draw(signed, Sampling()) == draw(signed, Sampling(temperature=1.0, top_k=1)) == 3


@pytest.mark.parametrize("seed", range(5))
def test_top_k_1_is_argmax_whatever_top_p(seed: int) -> None:
    logits = logits_of(seed)[0]
    for top_p in (0.95, 1.0, 0.01):
        assert draw(logits, Sampling(temperature=2.0, top_k=1, top_p=top_p, seed=seed)) == int(logits.argmax())


def test_a_tiny_temperature_is_argmax_and_raises_no_warning() -> None:
    logits = logits_of(8)[0]
    for temperature in (1e-6, 1e-45, 5e-324):
        for top_k in (0, 50):
            assert draw(logits, Sampling(temperature=temperature, top_k=top_k)) == int(logits.argmax())


def test_off_values_are_off() -> None:
    logits = logits_of(2)[0]
    base = Sampling(temperature=1.0, top_k=0, seed=3)
    for position in range(50):
        wanted = draw(logits, base, position)
        for top_k in (VOCAB, VOCAB + 1, 10**9):
            assert draw(logits, replace(base, top_k=top_k, top_p=1.0), position) == wanted


def test_the_penalty_counts_a_token_once_and_the_prefix_too() -> None:
    logits = np.full(VOCAB, -5, np.float32)
    logits[[10, 20, 30]] = 4.0, 3.9, -0.1
    sampling = Sampling(repetition_penalty=1.1)
    assert draw(logits, sampling, prompt=(10,)) == 20
    assert draw(logits, sampling, prompt=(10, 10, 10, 20)) == 10, "a token seen three times is penalised once"
    row = RowSampler(sampling, VOCAB, (10, 30))
    np.testing.assert_allclose(row.adjust(logits)[[10, 20, 30]], [4 / 1.1, 3.9, -0.11], rtol=1e-6)


def test_what_is_drawn_is_seen_from_then_on() -> None:
    logits = np.full((1, VOCAB), -5, np.float32)
    logits[0, [10, 20]] = 4.0, 3.9
    row = RowSampler(Sampling(repetition_penalty=1.1), VOCAB)
    drawn = [int(sample(logits, [row], [position])[0][0]) for position in range(3)]
    assert drawn == [10, 20, 10]


def test_logprobs_are_of_the_raw_distribution_and_finite() -> None:
    logits = np.full((1, VOCAB), -3e38, np.float32)
    logits[0, :3] = 3e38, 1, 2
    sampling = Sampling(logprobs=5, logit_bias=((1, 1e30),), temperature=0.5, repetition_penalty=3.0)
    _, (logprob,) = sample(logits, [RowSampler(sampling, VOCAB, (0,))], [0])
    assert logprob is not None and [token for token, _ in logprob.top] == [0, 2, 1, 3, 4]
    assert all(math.isfinite(value) for _, value in logprob.top) and logprob.top[0][1] == 0
    plain, (raw,) = sample(logits_of(1), [RowSampler(Sampling(logprobs=20), VOCAB)], [0])
    warm, (biased,) = sample(
        logits_of(1), [RowSampler(Sampling(logprobs=20, logit_bias=((int(plain[0]), -50.0),)), VOCAB)], [0]
    )
    assert raw is not None and biased is not None and raw.top == biased.top and int(warm[0]) == raw.top[1][0]


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=0)])
def test_logits_that_are_no_numbers_are_a_fault(sampling: Sampling, value: float) -> None:
    logits = logits_of(0, 3)
    logits[1, 400] = value
    with pytest.raises(EngineFault, match="row 1"):
        sample(logits, [RowSampler(sampling, VOCAB) for _ in range(3)], [0, 0, 0])


# --- distribution


@pytest.mark.parametrize("top_k", [0, 5])
def test_draws_follow_the_distribution(top_k: int) -> None:
    logits = np.array([0.0, 2.0, 1.0, -1.0, 0.5, -20.0, 1.5], np.float32)
    order = np.argsort(-logits)[: top_k or 6]  # the last has no expected draws
    weights = np.exp(logits[order].astype(float) / 0.8)
    expected = 4000 * weights / weights.sum()
    rows = [RowSampler(Sampling(temperature=0.8, top_k=top_k, seed=11), 7) for _ in range(4000)]
    ids, _ = sample(np.tile(logits, (4000, 1)), rows, range(4000))
    counts = np.bincount(ids, minlength=7)[order]
    assert counts.sum() == 4000
    assert ((counts - expected) ** 2 / expected).sum() < 20.6, (
        "chi-square of ≤ 5 degrees of freedom, at one in a thousand"
    )


def test_seeds_choices_and_positions_give_different_reproducible_draws() -> None:
    logits = logits_of(0)[0] * 0.2
    base = Sampling(temperature=1.0, seed=0)
    for changed in (replace(base, seed=2**64 - 1), replace(base, choice=1)):
        first, second = ([draw(logits, s, p) for p in range(40)] for s in (base, changed))
        assert first != second and second == [draw(logits, changed, p) for p in range(40)]
        assert len(set(first)) > 5
