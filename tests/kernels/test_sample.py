"""The sampler on the device against the book and against its twin, its independence of company, and every edge."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from sampling_rows import Batch, Drawn, Row, allowed, draw, draw_one, logits_of, random_row

from tinyloop_service.engine import reference as book
from tinyloop_service.engine.noise import uniform
from tinyloop_service.kernels.device import Device
from tinyloop_service.kernels.match import KernelArgumentError
from tinyloop_service.kernels.references import sample as twin
from tinyloop_service.kernels.sample import ENDED, MAX_STOPS, SamplerTables
from tinyloop_service.types import Sampling

VOCAB = 1013  # one chunk, listed whole; not a multiple of 4
LONG = 5003  # three chunks; only a head of it is listed
LOGPROB_ATOL = 2e-6  # float32 of numbers down to −32 (2^-20), and 2^-23 of the mass


# --- against the book


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("size", [1, 2, 31, 33, VOCAB, LONG, 20011])
def test_it_draws_what_the_book_draws(device: Device, size: int, spread: float) -> None:
    rng = np.random.default_rng([size, int(spread * 10)])
    rows = [random_row(rng, size, spread) for _ in range(48)]
    ambiguous = 0
    for row, drawn in zip(rows, draw(device, *rows), strict=True):
        may = allowed(row)
        assert drawn.token in may, f"{drawn.token} drawn, {may} allowed: {row}"
        ambiguous += len(may) > 1
        expected, logprob = book.sample(row.logits, row.sampling, set(row.prompt), row.position)
        assert expected in may
        if logprob is not None:
            assert drawn.top == tuple(token for token, _ in logprob.top)
            raw = row.logits.astype(np.float64)
            of_drawn = raw[drawn.token] - raw.max() - math.log(np.exp(raw - raw.max()).sum())
            wanted = [of_drawn, *(value for _, value in logprob.top)]
            np.testing.assert_allclose(drawn.logprobs, wanted, rtol=0, atol=LOGPROB_ATOL)
    assert ambiguous <= 4, "the allowance is for near ties of noise and boundary, which are rare"


@pytest.mark.parametrize("spread", [0.1, 3.0])
@pytest.mark.parametrize("size", [VOCAB, LONG, 20011])
def test_it_draws_exactly_what_its_twin_draws(device: Device, size: int, spread: float) -> None:
    rng = np.random.default_rng([size, int(spread * 10), 1])
    rows = [random_row(rng, size, spread) for _ in range(32)]
    for row, drawn in zip(rows, draw(device, *rows), strict=True):
        noise = uniform(row.sampling.seed, row.sampling.choice, row.position)
        token, logprobs, top = twin.sample(row.logits, row.sampling, row.prompt, noise)
        assert drawn.token == token, row
        if row.sampling.logprobs:
            assert drawn.top == tuple(top.tolist())
            np.testing.assert_allclose(drawn.logprobs, logprobs, rtol=0, atol=LOGPROB_ATOL)


@pytest.mark.parametrize("changes", [{}, {"top_p": 0.9}, {"min_p": 0.01}, {"top_p": 0.9999}, {"top_k": 4000}])
@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
def test_head_and_whole_row_both_come_to_decide(device: Device, changes: dict[str, float], spread: float) -> None:
    sampling = replace(Sampling(temperature=1.0, top_k=0, seed=5), **changes)  # type: ignore[arg-type]
    rows = [Row(logits_of(1, 20011, spread), sampling, position) for position in range(8)]
    for row, drawn in zip(rows, draw(device, *rows), strict=True):
        assert drawn.token in allowed(row)


def test_weights_are_good_to_float32() -> None:
    scores = np.concatenate([logits_of(0, 4000, 3.0), np.float32([20, -3e38, -np.inf])])
    for temperature in (0.3, 1.0, 7.0):
        exact = np.exp((scores.astype(np.float64) - 20) / temperature)
        ours = twin.weights(scores, temperature) * 2.0**-44
        # The mantissa's rounding, 2^-24, and the polynomial's last one; then a unit of the fixed point.
        assert np.all(np.abs(ours - exact) <= exact * 1.3e-7 + 2.0**-44)


# --- company


def test_a_row_draws_the_same_alone_and_in_any_batch(device: Device) -> None:
    kinds = [
        Sampling(),
        Sampling(temperature=0.8, seed=1, logprobs=5),
        Sampling(temperature=1.2, top_k=0, seed=2, logprobs=20),
        Sampling(temperature=1.0, top_k=0, top_p=0.9, seed=3),
        Sampling(repetition_penalty=1.3, seed=4, logprobs=1),
        Sampling(temperature=1.0, top_k=0, min_p=0.05, logit_bias=((5, 4.0),), seed=5),
        Sampling(logprobs=3),
    ]
    rng = np.random.default_rng(0)
    rows = [
        Row(logits_of(i, LONG), replace(kinds[i % 7], choice=i % 16), int(rng.integers(4096)), (1, i))
        for i in range(21)
    ]
    alone = [draw(device, row)[0] for row in rows]
    for _ in range(3):
        company = rng.permutation(21)[: rng.integers(2, 21)].tolist()
        slots = rng.permutation(30)[: len(company)].tolist()
        slots[1:1] = [-1, -1]  # padding between them
        batch = Batch(device, [rows[i] for i in company], slots)
        batch.sample()
        assert batch.drawn() == [alone[i] for i in company], "a row's draw followed its company"
        tokens, logprobs = device.download(batch.out_tokens)[0], device.download(batch.out_logprobs)[0]
        assert np.all(tokens[1:3] == -9) and np.all(logprobs[1:3] == -9), "padding rows write nothing"


def test_logits_are_left_as_they_are(device: Device) -> None:
    sampling = Sampling(repetition_penalty=2.0, logit_bias=((1, 9.0),), logprobs=2, temperature=1.0)
    batch = Batch(device, [Row(logits_of(0), sampling, prompt=(4,)), Row(logits_of(1), Sampling())])
    before = device.download(batch.logits)
    batch.sample()
    np.testing.assert_array_equal(device.download(batch.logits), before)


# --- rules


def test_temperature_0_is_argmax_with_the_lowest_id_on_ties(device: Device) -> None:
    logits = np.zeros(LONG, np.float32)
    logits[[77, 500, 4900]] = 3
    assert draw_one(device, logits, Sampling()) == 77
    assert draw_one(device, logits, Sampling(logprobs=1)) == 77
    assert draw_one(device, logits, Sampling(repetition_penalty=1.5), prompt=(77,)) == 500
    signed = np.full(VOCAB, -1, np.float32)
    signed[[3, 8]] = -0.0, 0.0
    assert draw_one(device, signed, Sampling()) == 3
    assert draw_one(device, signed, Sampling(temperature=1.0, top_k=1)) == 3


@pytest.mark.parametrize("size", [VOCAB, LONG])
def test_top_k_1_is_argmax_whatever_top_p(device: Device, size: int) -> None:
    rows = [
        Row(logits_of(seed, size), Sampling(temperature=2.0, top_k=1, top_p=top_p, seed=seed))
        for seed in range(4)
        for top_p in (0.95, 1.0, 0.01)
    ]
    assert [d.token for d in draw(device, *rows)] == [int(row.logits.argmax()) for row in rows]


@pytest.mark.parametrize("size", [VOCAB, LONG])
def test_a_tiny_temperature_is_argmax_and_a_huge_one_is_uniform(device: Device, size: int) -> None:
    logits = logits_of(8, size)
    for temperature in (1e-6, 1e-45, 5e-324):
        for top_k in (0, 50):
            assert draw_one(device, logits, Sampling(temperature=temperature, top_k=top_k)) == int(logits.argmax())
    rows = [Row(logits, Sampling(temperature=1e6, top_k=0), position) for position in range(16)]
    falling = np.argsort(-logits, kind="stable")
    for row, drawn in zip(rows, draw(device, *rows), strict=True):
        assert abs(int(np.flatnonzero(falling == drawn.token)[0]) / size - uniform(0, 0, row.position)) < 2e-3


@pytest.mark.parametrize("size", [4, 1000, 6000])
def test_top_p_of_equals_keeps_exactly_its_share(device: Device, size: int) -> None:
    """The likelier ones have reached 0.5 before element size / 2, so it is out; noise near 1 draws the last kept."""
    logits, sampling = np.zeros(size, np.float32), Sampling(temperature=1.0, top_k=0, top_p=0.5, seed=11)
    noise = [uniform(11, 0, position) for position in range(20000)]
    positions = np.argsort(noise)[-4:].tolist()  # the largest: within 1e-3 of 1
    for position, drawn in zip(positions, draw(device, *(Row(logits, sampling, p) for p in positions)), strict=True):
        assert drawn.token == int(noise[position] * (size // 2)) < size // 2


def test_off_values_are_off(device: Device) -> None:
    base = Sampling(temperature=1.0, top_k=0, seed=3)
    rows = [
        Row(logits_of(2), replace(base, top_k=top_k, top_p=1.0), position)
        for position in range(10)
        for top_k in (0, VOCAB, VOCAB + 1, 10**9)
    ]
    tokens = np.array([d.token for d in draw(device, *rows)]).reshape(10, 4)
    assert np.all(tokens == tokens[:, :1]) and len(set(tokens[:, 0])) > 5


def test_seeds_choices_and_positions_give_different_reproducible_draws(device: Device) -> None:
    logits, base = logits_of(0) * np.float32(0.2), Sampling(temperature=1.0, seed=0)

    def drawn(sampling: Sampling) -> list[Drawn]:
        return draw(device, *(Row(logits, sampling, position) for position in range(20)))

    first = drawn(base)
    for changed in (replace(base, seed=2**64 - 1), replace(base, seed=2**32), replace(base, choice=15)):
        second = drawn(changed)
        assert first != second and second == drawn(changed) and len({d.token for d in second}) > 5


def test_all_but_one_at_minus_infinity(device: Device) -> None:
    for size in (VOCAB, LONG):
        logits = np.full(size, -np.inf, np.float32)
        logits[size - 2] = -4
        samplings = [
            Sampling(),
            Sampling(temperature=1.0, top_k=0),
            Sampling(temperature=1.0, top_p=0.5, min_p=0.1),
            Sampling(temperature=1.0, repetition_penalty=1.5, logprobs=3),
        ]
        drawn = draw(device, *(Row(logits, sampling, prompt=(0,)) for sampling in samplings))
        assert [d.token for d in drawn] == [size - 2] * 4
        assert drawn[3].top == (size - 2, 0, 1) and drawn[3].logprobs[0] == 0
        assert all(math.isfinite(value) for value in drawn[3].logprobs)


def test_bias_decides_and_300_entries_are_read(device: Device) -> None:
    bias = tuple((int(token), 2.0) for token in range(4000, 4300))
    logits = logits_of(3, LONG)
    chosen = 4000 + int(logits[4000:4300].argmax())
    strong = tuple((token, 1e6) for token, _ in bias)
    assert draw_one(device, logits, Sampling(logit_bias=strong)) == chosen
    assert draw_one(device, logits, Sampling(logit_bias=((int(logits.argmax()), -1e6),))) == int(np.argsort(-logits)[1])
    rows = [Row(logits, Sampling(temperature=1.0, top_k=40, logit_bias=bias), position) for position in range(8)]
    for row, drawn in zip(rows, draw(device, *rows), strict=True):
        assert drawn.token in allowed(row)


def test_logprobs_are_of_the_raw_distribution_and_finite(device: Device) -> None:
    logits = np.full(VOCAB, -3e38, np.float32)
    logits[:3] = 3e38, 1, 2
    sampling = Sampling(logprobs=5, logit_bias=((1, 1e30),), temperature=0.5, repetition_penalty=3.0)
    (drawn,) = draw(device, Row(logits, sampling, prompt=(0,)))
    assert drawn.top == (0, 2, 1, 3, 4) and drawn.logprobs[1] == 0
    assert all(math.isfinite(value) for value in drawn.logprobs)
    plain, biased = draw(
        device,
        Row(logits_of(1), Sampling(logprobs=20)),
        Row(logits_of(1), Sampling(logprobs=20, logit_bias=((int(logits_of(1).argmax()), -50.0),))),
    )
    assert plain.top == biased.top and plain.logprobs[1:] == biased.logprobs[1:] and biased.token == plain.top[1]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_k=9)])
def test_the_top_of_a_row_of_equals_is_its_lowest_ids(device: Device, sampling: Sampling) -> None:
    (drawn,) = draw(device, Row(np.zeros(LONG, np.float32), replace(sampling, logprobs=20)))
    assert drawn.top == tuple(range(20))
    np.testing.assert_allclose(drawn.logprobs, -math.log(LONG), rtol=0, atol=LOGPROB_ATOL)


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
def test_logits_that_are_no_numbers_draw_minus_1(device: Device, value: float) -> None:
    samplings = [
        Sampling(logprobs=2),
        Sampling(temperature=1.0),
        Sampling(temperature=1.0, top_k=0, repetition_penalty=1.5, logit_bias=((400, -1e6),), logprobs=1),
    ]
    for sampling in samplings:
        rows = [Row(logits_of(i, LONG), sampling) for i in range(3)]
        wanted = draw(device, *rows)
        rows[1].logits[3000] = value
        batch = Batch(device, rows)
        batch.sample()
        drawn = batch.drawn()
        assert drawn[1].token == -1 and device.download(batch.token)[1] == 0, "a step that follows embeds a real token"
        assert [drawn[0], drawn[2]] == [wanted[0], wanted[2]]
    (drawn_of_nothing,) = draw(device, Row(np.full(VOCAB, -np.inf, np.float32), Sampling(temperature=1.0)))
    assert drawn_of_nothing.token == -1


# --- steps


def test_steps_land_one_after_the_other(device: Device) -> None:
    """Graph replays: nothing changes on the host between them."""
    sampling = Sampling(temperature=1.0, seed=9, logprobs=2)
    batch = Batch(device, [Row(logits_of(0), sampling, 100), Row(logits_of(1), Sampling(), 5)], [1, 0], num_steps=3)
    for _ in range(4):  # one more than there is room for
        batch.sample(advance=True)
    for step in range(3):
        # A decode step stores position 100 + step and draws the token of the next one.
        wanted = draw(device, Row(logits_of(0), sampling, 101 + step), Row(logits_of(1), Sampling()))
        assert batch.drawn(step) == wanted
    assert device.download(batch.length).tolist() == [9, 104]
    last = draw_one(device, logits_of(0), sampling, 104)
    assert device.download(batch.token).tolist() == [int(logits_of(1).argmax()), last]


def test_slots_end_by_themselves(device: Device) -> None:
    """With the token for their last position, or one that stops them, be it the last that is looked for."""
    likeliest, hot = [int(logits_of(seed).argmax()) for seed in range(3)], Sampling(temperature=1.0, logprobs=1)
    others = tuple(token for token in range(20) if token not in likeliest)[: MAX_STOPS - 1]
    rows = [
        Row(logits_of(0), Sampling(), 5, end=7),
        Row(logits_of(1), Sampling(), 5, stop_tokens=(*others, likeliest[1])),
        Row(logits_of(1), Sampling(), 5, stop_tokens=(*others, others[0], likeliest[1])),  # one too many
        Row(logits_of(2), hot, 5, end=9),
    ]
    batch = Batch(device, rows, num_steps=4)
    for _ in range(4):
        batch.sample(advance=True)
    tokens = [[drawn.token for drawn in batch.drawn(step)] for step in range(4)]
    by_row = [list(row) for row in zip(*tokens, strict=True)]
    assert by_row[0][:3] == [likeliest[0], likeliest[0], ENDED]
    assert by_row[1][:2] == [likeliest[1], ENDED]
    assert by_row[2] == [likeliest[1]] * 4
    assert by_row[3] == [draw_one(device, logits_of(2), hot, position) for position in range(6, 10)]
    assert device.download(batch.length).tolist() == [7, 6, 9, 9]
    assert device.download(batch.token).tolist() == [ENDED, ENDED, likeliest[1], ENDED]
    logprobs = device.download(batch.out_logprobs)[:, 3].tolist()
    batch.sample(advance=True)  # the next plan's first step, which nobody has prepared
    batch.base_length = device.upload(np.full(4, 9, np.int32))  # the host's: it does not know what stopped a row
    batch.sample(advance=True)
    assert [drawn.token for drawn in batch.drawn(0)] == [ENDED, ENDED, likeliest[1], ENDED]
    assert device.download(batch.length).tolist() == [7, 6, 11, 9]
    assert device.download(batch.out_logprobs)[:, 3].tolist() == logprobs


def test_a_first_token_may_be_the_last_and_follows_one_that_had_ended(device: Device) -> None:
    likeliest = int(logits_of(0).argmax())
    for row in (
        Row(logits_of(0), Sampling(), 7, end=7),
        Row(logits_of(0), Sampling(), 7, stop_tokens=(likeliest,)),
        Row(logits_of(0), Sampling(), 7, end=8),
    ):
        batch = Batch(device, [row])
        batch.token = device.upload(np.array([ENDED], np.int32))
        batch.sample()
        assert batch.drawn()[0].token == likeliest
        assert device.download(batch.token).tolist() == [likeliest if row.end == 8 else ENDED]


def test_a_first_token_leaves_lengths_alone(device: Device) -> None:
    batch = Batch(device, [Row(logits_of(0), Sampling(), 64)])
    batch.sample()
    assert device.download(batch.length).tolist() == [64]
    assert device.download(batch.token).tolist() == [batch.drawn()[0].token] == [int(logits_of(0).argmax())]


def test_the_penalty_counts_a_token_once_and_what_is_drawn_is_seen(device: Device) -> None:
    logits = np.full(VOCAB, -5, np.float32)
    logits[[10, 20, 30]] = 4.0, 3.9, -0.1
    sampling = Sampling(repetition_penalty=1.1)
    assert draw_one(device, logits, sampling, prompt=(10,)) == 20
    assert draw_one(device, logits, sampling, prompt=(10, 10, 10, 20)) == 10, "seen three times, penalised once"
    batch = Batch(device, [Row(logits, sampling)], num_steps=3)
    for _ in range(3):
        batch.sample(advance=True)
    assert [batch.drawn(step)[0].token for step in range(3)] == [10, 20, 10]


def test_a_flush_leaves_what_other_slots_have_seen(device: Device) -> None:
    logits = np.full(VOCAB, -5, np.float32)
    logits[[10, 20]] = 4.0, 3.9
    sampling = Sampling(repetition_penalty=1.1)
    batch = Batch(device, [Row(logits, sampling) for _ in range(3)], num_steps=2)
    batch.sample(advance=True)
    batch.tables.write(0, sampling, ())
    batch.tables.write(2, sampling, (20,))
    batch.tables.flush()
    batch.tables.flush()  # nothing is left to copy
    batch.sample(advance=True)
    assert [drawn.token for drawn in batch.drawn(1)] == [10, 20, 10]


def test_a_slot_that_nobody_wrote_draws_by_argmax(device: Device) -> None:
    batch = Batch(device, [Row(logits_of(0), Sampling(temperature=1.0, top_k=0, seed=4))], [2])
    batch.tables = SamplerTables(device, 3, VOCAB)
    batch.sample()
    assert batch.drawn()[0].token == int(logits_of(0).argmax())


# --- refusals


def test_what_does_not_fit_is_refused(device: Device) -> None:
    tables = SamplerTables(device, 2, VOCAB, max_rows=1)
    with pytest.raises(ValueError, match="slot is 2, expected 0 to 1"):
        tables.write(2, Sampling(), ())
    with pytest.raises(ValueError, match="301 biases, expected at most 300"):
        tables.write(0, Sampling(logit_bias=tuple((i, 1.0) for i in range(301))), ())
    with pytest.raises(ValueError, match="524288 tokens, expected fewer"):
        SamplerTables(device, 1, 2**19)
    batch = Batch(device, [Row(logits_of(0), Sampling()), Row(logits_of(1), Sampling())])
    batch.tables = tables
    with pytest.raises(ValueError, match="2 rows of 2 slots, expected at most 1 of 2"):
        batch.sample()
    batch.row_slot = device.upload(np.zeros(3, np.int32))
    with pytest.raises(KernelArgumentError, match="row_slot"):
        batch.sample()
