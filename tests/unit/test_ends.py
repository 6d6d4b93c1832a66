"""Requests that end in every way, in company: each gets what it would get if every token were looked at on its own."""

from __future__ import annotations

import asyncio
import dataclasses
from random import Random

import pytest
from byte_tokenizer import byte_tokenizer
from loop_harness import WIDE, collect, is_settled, until
from scheduler_driver import tokens

from tinyloop_service.engine.api import Limits, Open
from tinyloop_service.engine.fake import FakeEngine, expected_tokens
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.settings import SchedulerSettings
from tinyloop_service.text import OutputFilter, Tokenizer
from tinyloop_service.types import (
    Completed,
    Delta,
    FinishReason,
    GenerationRequest,
    Output,
    PrefixDefinition,
    Sampling,
    Stops,
    TokenIds,
)

TOKENIZER = Tokenizer(byte_tokenizer())
WINDOWS = {"wide": 0, "narrow": 10}  # of prefixes, by name
PROMPTS = {"wide": tokens(65, 1), "narrow": tokens(100, 2)}
End = tuple[TokenIds, str, int, FinishReason]  # ids, text, how many logprobs, reason


class Engine(FakeEngine):
    """One that looks for the first few stop tokens alone, or for none."""

    def __init__(self, limits: Limits, num_stops: int) -> None:
        super().__init__(limits, strict=True)
        self._num_stops = num_stops

    def _open(self, opened: Open) -> None:
        super()._open(opened._replace(stop_tokens=opened.stop_tokens[: self._num_stops]))


def some_request(random: Random) -> GenerationRequest:
    """Without stops."""
    prefix = random.choice([None, *WINDOWS])
    return GenerationRequest(
        tokens(random.choice([0, 1, 10, 64] if prefix else [1, 10, 64]), random.randrange(5)),
        random.choice([1, 2, 3, 8, 9, 40]),
        prefix=prefix,
        cache_window=None if prefix else random.choice([None, 7]),
        n=random.choice([1, 1, 1, 3]),
        sampling=Sampling(
            temperature=random.choice([0.0, 1.0]),
            seed=random.randrange(100),
            logprobs=random.choice([0, 2]),
            repetition_penalty=random.choice([1.0, 1.2]),
        ),
    )


def drawn_by(spec: GenerationRequest, limits: Limits) -> list[TokenIds]:
    """By each choice alone, if nothing stopped it."""
    before = [(PROMPTS[spec.prefix], WINDOWS[spec.prefix])] if spec.prefix else []
    window = WINDOWS[spec.prefix] if spec.prefix else spec.cache_window or 0
    choices = [dataclasses.replace(spec.sampling, choice=choice) for choice in range(spec.n)]
    return [expected_tokens([*before, (spec.tokens, window)], spec.max_tokens, each, 1, limits) for each in choices]


def some_stops(random: Random, drawn: list[TokenIds]) -> Stops:
    """Most of them met: single ids, ids that begin with the same one, text."""
    sequences: list[TokenIds] = []
    strings: list[str] = []
    for _ in range(random.choice([0, 1, 2, 20])):
        ids = random.choice(drawn)
        at = random.randrange(len(ids))
        sequences.append(ids[at : at + random.choice([1, 1, 2, 3])])
        sequences.append((sequences[-1][0], random.randrange(97)))
    if random.random() < 0.3:
        text = TOKENIZER.decode(random.choice(drawn)[-2:]).replace("\ufffd", "")
        strings += [text] if text else []
    return Stops(tuple(sequences), tuple(strings), random.random() < 0.4)


def wanted(spec: GenerationRequest, drawn: TokenIds, eos: TokenIds) -> End:
    output, reason = OutputFilter(spec.stops, TOKENIZER, want_text=True), FinishReason.LENGTH
    pieces = []
    for token in drawn:
        if token in eos and not spec.stops.ignore_eos:
            reason = FinishReason.EOS
            break
        pieces.append(output.feed((token,)))
        if output.stopped:
            reason = FinishReason.STOP
            break
    pieces.append(output.finish())
    ids = tuple(token for piece in pieces for token in piece.token_ids)
    return ids, "".join(piece.text for piece in pieces), len(ids) if spec.sampling.logprobs else 0, reason


def got(messages: list[tuple[Output, ...]], choice: int) -> End:
    outputs = [output for message in messages for output in message]
    deltas = [o for o in outputs if isinstance(o, Delta) and o.choice == choice]
    (completed,) = [o for o in outputs if isinstance(o, Completed) and o.choice == choice]
    ids = tuple(token for delta in deltas for token in delta.token_ids)
    assert completed.usage.completion_tokens == len(ids)
    num_logprobs = sum(len(delta.logprobs) for delta in deltas)
    return ids, "".join(delta.text for delta in deltas), num_logprobs, completed.finish_reason


@pytest.mark.parametrize("num_stops", [0, 1, 15, 100])
@pytest.mark.parametrize("seed", range(6))
async def test_every_end_is_the_one_that_came_first(seed: int, num_stops: int) -> None:
    random = Random(seed)
    eos = tuple(random.sample(range(97), random.choice([0, 2, 10])))
    limits = dataclasses.replace(WIDE, eos_token_ids=eos, max_rows=random.choice([3, 8, 64]), max_steps=8)
    settings = SchedulerSettings(plans_in_flight=random.choice([1, 2]))
    scheduler = Scheduler(Engine(limits, num_stops), settings, tokenizer=TOKENIZER)
    await scheduler.start()
    try:
        for name, prompt in PROMPTS.items():
            await scheduler.create_prefix(PrefixDefinition(prompt, cache_window=WINDOWS[name] or None), name=name)
        specs = [some_request(random) for _ in range(30)]
        drawn = [drawn_by(spec, limits) for spec in specs]
        specs = [
            dataclasses.replace(spec, stops=some_stops(random, ids)) for spec, ids in zip(specs, drawn, strict=True)
        ]

        async def run(spec: GenerationRequest, pauses: int) -> list[tuple[Output, ...]]:
            for _ in range(pauses):
                await asyncio.sleep(0)
            return await collect(scheduler.generate(spec))

        async with asyncio.timeout(20):
            answers = await asyncio.gather(*(run(spec, random.randrange(40)) for spec in specs))
            await until(lambda: is_settled(scheduler))
        for spec, ids, messages in zip(specs, drawn, answers, strict=True):
            for choice in range(spec.n):
                assert got(messages, choice) == wanted(spec, ids[choice], eos), (spec, choice)
        assert scheduler.fault is None
    finally:
        await scheduler.close()
