"""Five seconds of `tests/soak.py`, and that it sees what it is there to see."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
from soak import check_answers, soak
from soak_load import Ledger
from soak_report import Result, write_report
from soak_watch import Memory, Probe, Slope
from soak_work import Answer, Recipe

from tinyloop_service.pb import generation_pb2 as g


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("soak")
    return asyncio.run(soak(folder, 5 / 60, 0, workers=8, num_definitions=8, num_recipes=20, kv_mib=40, last_tokens=60))


def test_answers_pages_and_statuses_are_right(result: Result) -> None:
    assert not result.ledger.wrong
    result.num_compared, result.num_wrong_answers = check_answers(result.ledger)
    assert result.ledger.num_whole and result.ledger.num_parts and not result.num_wrong_answers
    assert result.last_load.prefix_evictions, "memory is short"
    assert result.probes and all(probe.is_serving for probe in result.probes)
    assert "| **wrong answers** | **0** |" in write_report(result, "command", "commit")


def test_an_answer_of_other_bits_is_wrong_and_so_is_its_beginning(result: Result) -> None:
    recipe, answers = next((r, a) for r, a in result.ledger.whole.items() if next(iter(a)).pieces[0].token_ids)
    right = next(iter(answers)).pieces[0]
    changed = replace(right, logprobs=(right.logprobs[0][:-1] + b"!", *right.logprobs[1:]))
    others = [replace(piece) for piece in next(iter(answers)).pieces[1:]]
    ledger = Ledger()
    ledger.whole[recipe] = Counter({Answer([changed, *others]): 2})
    unfinished = [replace(piece, finish_reason=g.FINISH_REASON_UNSPECIFIED) for piece in (changed, *others)]
    ledger.parts[recipe] = Counter({Answer.empty(recipe): 7, Answer(unfinished): 1})
    assert check_answers(ledger) == (1, 3)
    assert not Answer([replace(right, text=right.text + "x"), *others]).begins(Answer([right, *others]))


def test_requests_say_the_same_on_the_wire_and_in_process(result: Result) -> None:
    recipe = max(result.ledger.whole, key=lambda r: len(r.parameters["stop_sequences"]))
    assert isinstance(recipe, Recipe) and recipe.request.max_tokens == recipe.parameters["max_tokens"]
    assert len(recipe.request.stop_sequences) == len(recipe.parameters["stop_sequences"])
    assert recipe.request.sampling.temperature == recipe.parameters["temperature"]


def test_a_slope_is_found_with_its_uncertainty() -> None:
    rng, seconds = random.Random(0), [float(s) for s in range(0, 600, 4)]
    still = Slope.through(seconds, [200 + rng.gauss(0, 2) for _ in seconds])
    grows = Slope.through(seconds, [200 + s * 60 / 3600 + rng.gauss(0, 2) for s in seconds])
    assert -15 < still.low < 0 < still.high < 15 and 45 < grows.low < 60 < grows.high < 75
    bursts = Slope.through(seconds, [200 + rng.gauss(0, 2) + 90 * (s > 590) for s in seconds])
    assert bursts.low < 0 < bursts.high, "what comes at the end and goes is no growth"
    drifts = list(itertools.accumulate(rng.gauss(0, 2) for _ in seconds))
    assert Slope.through(seconds, drifts).high - Slope.through(seconds, drifts).low > 3 * (still.high - still.low)


def test_what_is_too_late_or_grows_does_not_hold(result: Result) -> None:
    sound = replace(result, num_wrong_answers=0, probes=[Probe(0.0, 1.0, 49.0, 1.0, 0.0, True)])
    sound.memory = [Memory(float(s), 200.0, 20, 12) for s in range(100)]
    assert sound.holds
    assert not replace(sound, num_wrong_answers=1).holds and not replace(sound, num_wrong_answers=None).holds
    assert not replace(sound, memory=[replace(m, resident_mib=m.at_s) for m in sound.memory]).holds
    for late, holds in (((1.0, 60.0, 1.0, 0.0), False), ((1.0, 60.0, 30.0, 0.0), True), ((1.0, 60.0, 1.0, 15.0), True)):
        assert replace(sound, probes=[Probe(0.0, *late, True)]).holds is holds
