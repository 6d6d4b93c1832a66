"""What a soak asks for, and what each request gives alone: recipes, drawn once from a seed and used again and again.

    Definition   a prefix: its name stands for this content and no other, however often it ends and is made again
    Recipe       a request on a definition, or on none, with every parameter fixed, the seed included
    Answer       what a recipe gives, in whole or in part, with the bits of every number

`solo` computes a recipe by itself, in this process, with a prefix of its own and nobody beside it.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tinyloop_service import Model, PrefixCache
from tinyloop_service.pb import generation_pb2 as g
from tinyloop_service.pb import input_pb2

TEXT = Path(__file__).parents[1] / "tinyloop_service" / "demo" / "prefix.txt"
LENGTHS = (1, 19, 63, 64, 65, 118, 200, 256, 330)  # of definitions; pages have 64 tokens
STOPS: tuple[str | tuple[int, ...], ...] = (".", " and", ", and", "\n", " the")


@dataclass(frozen=True, slots=True)
class Definition:
    name: str
    own: tuple[int, ...]  # tokens beyond the parent's
    loops: int
    window: int
    parent: Definition | None

    @property
    def tokens(self) -> tuple[int, ...]:
        return (self.parent.tokens if self.parent is not None else ()) + self.own

    def chain(self) -> list[Definition]:
        """From the root down to this one."""
        return [*(self.parent.chain() if self.parent is not None else ()), self]


@dataclass(frozen=True)
class Recipe:
    definition: Definition | None
    tokens: tuple[int, ...]  # the suffix, or without a definition the prompt
    parameters: dict[str, Any] = field(hash=False)  # as `Model.complete` takes them

    @cached_property
    def request(self) -> g.GenerateRequest:
        given = dict(self.parameters)
        stops = [_stop(stop) for stop in given.pop("stop_sequences")]
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "logit_bias")
        sampling = g.Sampling(**{name: given.pop(name) for name in names})
        request = g.GenerateRequest(input=tokens(self.tokens), sampling=sampling, stop_sequences=stops, **given)
        if self.definition is not None:
            request.prefix = f"prefixes/{self.definition.name}"
        return request


def tokens(ids: Sequence[int]) -> input_pb2.Input:
    return input_pb2.Input(tokens=input_pb2.Tokens(ids=ids))


def _stop(stop: str | tuple[int, ...]) -> g.StopSequence:
    return g.StopSequence(text=stop) if isinstance(stop, str) else g.StopSequence(tokens=input_pb2.Tokens(ids=stop))


@dataclass
class Piece:
    """One choice, as far as it has come."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[bytes, ...] = ()  # the bits, token by token
    finish_reason: int = g.FINISH_REASON_UNSPECIFIED

    def add(self, token_ids: Iterable[int], text: str, logprobs: Iterable[Any]) -> None:
        self.token_ids += tuple(token_ids)
        self.text += text
        self.logprobs += tuple(map(_bits, logprobs))

    def begins(self, whole: Piece) -> bool:
        """`whole` may go on from this."""
        ends_alike = self.finish_reason in (g.FINISH_REASON_UNSPECIFIED, whole.finish_reason)
        ids, logprobs = whole.token_ids[: len(self.token_ids)], whole.logprobs[: len(self.logprobs)]
        same = (self.token_ids, self.logprobs) == (ids, logprobs) and whole.text.startswith(self.text)
        return same and ends_alike and (not self.finish_reason or self == whole)


@dataclass
class Answer:
    """All choices of a request."""

    pieces: list[Piece]

    @classmethod
    def empty(cls, recipe: Recipe) -> Answer:
        return cls([Piece() for _ in range(recipe.parameters["n"])])

    @property
    def is_whole(self) -> bool:
        return all(piece.finish_reason for piece in self.pieces)

    def read(self, message: g.GenerateResponse) -> None:
        for part in (message, *message.further):
            if part.WhichOneof("output") == "delta":
                self.pieces[part.delta.choice].add(part.delta.token_ids, part.delta.text, part.delta.logprobs)
            elif part.WhichOneof("output") == "completed":
                self.pieces[part.completed.choice].finish_reason = part.completed.finish_reason

    @classmethod
    def of(cls, completion: g.Completion) -> Answer:
        answer = cls([])
        for choice in completion.choices:
            piece = Piece(finish_reason=choice.finish_reason)
            piece.add(choice.token_ids, choice.text, choice.logprobs)
            answer.pieces.append(piece)
        return answer

    def begins(self, whole: Answer) -> bool:
        return all(piece.begins(other) for piece, other in zip(self.pieces, whole.pieces, strict=True))

    def __hash__(self) -> int:
        return hash(tuple((piece.token_ids, piece.logprobs, piece.finish_reason) for piece in self.pieces))


def _bits(logprob: Any) -> bytes:
    """Of a TokenLogprob, ours or of the wire."""
    top = [(t.token_id, t.logprob) if hasattr(t, "token_id") else t for t in logprob.top]
    return struct.pack(f"<d{'id' * len(top)}", logprob.logprob, *(value for pair in top for value in pair))


def solo(model: Model, recipe: Recipe, built: dict[Definition, PrefixCache]) -> Answer:
    """What it gives alone.  `built`: definitions that have been, each as a prefix without parents."""
    definition = recipe.definition
    if definition is not None and definition not in built:
        built[definition] = model.build_prefix_cache(definition.tokens, definition.loops, definition.window)
    prompt = {"prompt": recipe.tokens} if definition is None else {"prefix": built[definition], "suffix": recipe.tokens}
    completion = model.complete(**prompt, **recipe.parameters)
    answer = Answer([])
    for choice in completion.choices:
        piece = Piece(finish_reason=getattr(g, f"FINISH_REASON_{choice.finish_reason.name}"))
        piece.add(choice.token_ids, choice.text, choice.logprobs)
        answer.pieces.append(piece)
    return answer


# ---- drawn from a seed


def draw_definitions(rng: random.Random, text: Sequence[int], count: int) -> list[Definition]:
    """text: token ids to cut contents from.  A third of them are children, some of children."""
    made: list[Definition] = []
    for i in range(count):
        parents = [d for d in made if len(d.tokens) < 400 and len(d.chain()) < 3]
        parent = rng.choice(parents) if parents and rng.random() < 0.35 else None
        own = _cut(rng, text, rng.choice(LENGTHS))
        if parent is None:
            made.append(Definition(f"d{i}", own, rng.choice([8, 8, 8, 4, 2]), rng.choice([0, 0, 0, 64, 100]), None))
        else:
            made.append(Definition(f"d{i}", own, parent.loops, parent.window, parent))
    return made


def draw_recipes(rng: random.Random, text: Sequence[int], definitions: list[Definition], count: int) -> list[Recipe]:
    """Popular definitions have more of them."""
    recipes = []
    weights = [1 / (1 + i) for i in range(len(definitions))]
    for _ in range(count):
        definition = rng.choices(definitions, weights)[0] if rng.random() < 0.85 else None
        suffix = _cut(rng, text, rng.choice([1, 2, 5, 30, 64] if definition is None else [0, 1, 2, 5, 30, 64]))
        recipes.append(Recipe(definition, suffix, _draw_parameters(rng, definition)))
    return recipes


def _draw_parameters(rng: random.Random, definition: Definition | None) -> dict[str, Any]:
    window = rng.choice([0, 0, 0, 40]) if definition is not None else rng.choice([0, 0, 64])
    is_greedy = rng.random() < 0.4
    return {
        "max_tokens": rng.choice([1, 4, 12, 24, 40]),
        "cache_window": window,
        "temperature": 0.0 if is_greedy else rng.choice([0.5, 1.0, 1.3]),
        "top_k": rng.choice([0, 0, 5, 50]),
        "top_p": rng.choice([1.0, 1.0, 0.9]),
        "min_p": rng.choice([0.0, 0.0, 0.05]),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.2]),
        "logit_bias": rng.choice([{}, {}, {rng.randrange(4096): 3.0}]),
        "stop_sequences": rng.choice([(), (), (rng.choice(STOPS),), (rng.choice(STOPS), (rng.randrange(4096),))]),
        "ignore_eos": rng.random() < 0.5,
        "seed": rng.randrange(2**64),
        "n": rng.choice([1, 1, 1, 1, 2, 3]),
        "logprobs": rng.choice([1, 1, 3, 5]),
    }


def _cut(rng: random.Random, text: Sequence[int], length: int) -> tuple[int, ...]:
    at = rng.randrange(len(text) - length)
    return tuple(text[at : at + length])
