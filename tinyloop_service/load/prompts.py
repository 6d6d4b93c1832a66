"""The words of a workload: what prefixes, suffixes and whole requests consist of.

    ids     uniform over the model's vocabulary, without the tokens that begin and end a text
    text    passages of the demo's corpus, about as many tokens long as asked for

In: a workload, a seed, what the model takes.  Out: contents, names and `Ask`s.  A prefix's name is made of its content:
two tests that ask the same share it, and no two contents have one name.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from tinyloop_service import arguments
from tinyloop_service.bench.service import Ask, Content
from tinyloop_service.demo import PREFIX_TEXT, SUFFIXES
from tinyloop_service.load.results import Way
from tinyloop_service.load.schedule import BUILD, PREFIX, SUFFIX, Drawn, Draws, stream
from tinyloop_service.load.workload import Workload

CORPUS = " ".join((PREFIX_TEXT, *SUFFIXES))


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Of a model; what has to be known of it to write prompts."""

    size: int
    special: tuple[int, ...]  # ids that begin or end a text
    corpus_tokens: int = 0  # that the corpus has; 0: not asked for


class Prompts:
    """Everything that one workload says."""

    def __init__(self, workload: Workload, seed: int, vocabulary: Vocabulary) -> None:
        self.workload = workload
        self.draws = Draws(workload, seed)
        self._seed = seed
        self._ids = np.setdiff1d(np.arange(vocabulary.size), vocabulary.special)
        self._words = CORPUS.split()
        self._tokens_per_word = vocabulary.corpus_tokens / len(self._words)
        self._parameters = arguments.parameters(
            temperature=workload.temperature, top_p=0.9 if workload.temperature else 1.0, ignore_eos=True, seed=0
        )
        self.prefix = lru_cache(maxsize=None)(self._prefix)

    def ask(self, drawn: Drawn, way: Way) -> Ask:
        """As a caller of that way sends it."""
        sampling = replace(self._parameters.sampling, seed=drawn.index)
        parameters = replace(self._parameters, max_tokens=drawn.output_len, sampling=sampling)
        suffix = self._content(drawn.suffix_len, SUFFIX, drawn.index)
        if drawn.prefix is None:
            own = self._content(self.workload.prefix_len.middle, PREFIX, drawn.index, 1)
            return Ask(joined(own, suffix), parameters)
        name, prefix = self.prefix(drawn.prefix)
        return Ask(suffix, parameters, name) if way is Way.SHARED else Ask(joined(prefix, suffix), parameters)

    def further_build(self, number: int) -> tuple[str, Content]:
        """Name and content of what is built while requests run."""
        return _named(self._content(self.workload.build_len, BUILD, number))

    def _prefix(self, number: int) -> tuple[str, Content]:
        """Its name and content."""
        return _named(self._content(self.draws.prefix_len(number), PREFIX, number))

    def _content(self, length: int, purpose: int, *index: int) -> Content:
        source = stream(self._seed, purpose, *index)
        if self.workload.content == "ids":
            return tuple(self._ids[source.integers(len(self._ids), size=length)].tolist())
        count = max(int(length > 0), int(length / self._tokens_per_word))
        start = int(source.integers(len(self._words)))
        return "".join(" " + self._words[(start + i) % len(self._words)] for i in range(count))


def joined(prefix: Content, suffix: Content) -> Content:
    """A whole prompt."""
    if isinstance(prefix, str) and isinstance(suffix, str):
        return prefix + suffix
    assert isinstance(prefix, tuple) and isinstance(suffix, tuple)
    return prefix + suffix


def _named(content: Content) -> tuple[str, Content]:
    return f"load-{hashlib.sha256(repr(content).encode()).hexdigest()[:16]}", content
