"""The words of a workload: the twin says the same, names follow from contents, special tokens stay out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tinyloop_service.load.prompts import CORPUS, Prompts, Vocabulary
from tinyloop_service.load.results import Way
from tinyloop_service.load.workload import parse_workload

BASE: dict[str, Any] = {"about": "x", "prefixes": 3, "prefix_len": [90, 110], "suffix_len": 7, "output_len": 5}
VOCABULARY = Vocabulary(size=40, special=(0, 17), corpus_tokens=2 * len(CORPUS.split()))


def prompts(seed: int = 0, **changes: Any) -> Prompts:
    return Prompts(parse_workload("test", {**BASE, **changes}), seed, VOCABULARY)


@pytest.mark.parametrize("content", ["ids", "text"])
def test_the_twin_asks_the_same_in_one_piece(content: str) -> None:
    made = prompts(content=content)
    for index in range(10):
        drawn = made.draws.at(index)
        shared, alone = made.ask(drawn, Way.SHARED), made.ask(drawn, Way.NO_SHARE)
        assert drawn.prefix is not None
        name, prefix = made.prefix(drawn.prefix)
        assert (shared.prefix, alone.prefix) == (name, None)
        assert alone.content == prefix + shared.content  # type: ignore[operator]
        assert shared.parameters == alone.parameters
        assert shared.parameters.stops.ignore_eos and shared.parameters.max_tokens == 5
        assert shared.parameters.sampling.seed == index


def test_ids_are_uniform_without_the_special_ones() -> None:
    made = prompts(prefix_len=4000)
    _, ids = made.prefix(0)
    assert len(ids) == 4000
    assert {*ids} == {*range(40)} - {0, 17}
    counts = [ids.count(token) for token in {*ids}]  # type: ignore[arg-type]
    assert max(abs(count - 4000 / 38) for count in counts) < 5 * (4000 / 38) ** 0.5


def test_prefixes_differ_and_their_names_are_their_contents() -> None:
    made = prompts()
    names, contents = zip(*(made.prefix(number) for number in range(3)), strict=True)
    assert len({*names}) == len({*contents}) == 3
    assert prompts().prefix(1) == made.prefix(1)
    assert prompts(seed=5).prefix(1)[0] != made.prefix(1)[0]
    assert prompts(prefix_len=90).prefix(1)[0] != made.prefix(1)[0]
    assert [len(content) for content in contents] == [made.draws.prefix_len(number) for number in range(3)]


def test_a_cold_request_has_a_prefix_of_its_own_either_way() -> None:
    made = prompts(cold_share=1.0, prefix_len=100)
    asks = [made.ask(made.draws.at(index), Way.SHARED) for index in range(3)]
    assert [len(ask.content) for ask in asks] == [107] * 3
    assert len({ask.content for ask in asks}) == 3
    assert all(ask.prefix is None for ask in asks)
    assert asks[0] == made.ask(made.draws.at(0), Way.NO_SHARE)


def test_text_is_about_as_long_as_asked() -> None:
    made = prompts(content="text", prefix_len=100)
    _, text = made.prefix(0)
    assert isinstance(text, str)
    assert len(text.split()) == 50, "two tokens a word, as this vocabulary has it"
    assert all(word in CORPUS for word in text.split())
    nothing = made.ask(replace(made.draws.at(0), suffix_len=0), Way.SHARED)
    assert nothing.content == ""


def test_a_further_build_is_as_long_as_asked_and_no_prefix_of_the_others() -> None:
    made = prompts(builds=2, build_len=500)
    names = [made.further_build(number)[0] for number in range(2)]
    assert [len(made.further_build(number)[1]) for number in range(2)] == [500, 500]
    assert len({*names, *(made.prefix(number)[0] for number in range(3))}) == 5
