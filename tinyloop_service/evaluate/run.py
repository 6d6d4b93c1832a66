"""The whole evaluation: which rows there are, and every window through every one of them.

    rows over all targets         each model's file; each INT4 file again with the CPU engine's int8 activations
    rows over second halves       the reference model's file, with K and V as each cache mode stores them; so the
                                  cache is all that differs; int8 again, attended in int8 as by a GPU that decodes

In: models, texts, `Options`.  Out: a frozen `Report`.  Refuses before any work models that cannot be compared token
by token (another tokenizer, BOS or vocabulary: their bits per byte may be compared, each from a run of its own) and
depths and windows beyond a model's limits.  Refuses to know about files, tables and plots.

Windows go to one thread a core, each with a BLAS of one thread, so that no figure depends on their number.  Memory:
four bytes a weight and model, and per thread the states and logits of two windows.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count

from threadpoolctl import threadpool_limits

from tinyloop_service.engine.cache_modes import check_mode
from tinyloop_service.engine.spec import ModelSpec
from tinyloop_service.engine.tensors import ModelWeights
from tinyloop_service.errors import InvalidArgument
from tinyloop_service.evaluate.rounding import DenseModel, ModelForward, Rounding, Stopped
from tinyloop_service.evaluate.score import Forward, Quality, Sums, measure_quality, score_window, sum_up
from tinyloop_service.evaluate.windows import NamedText, Span, Window, cut_windows
from tinyloop_service.text import Tokenizer
from tinyloop_service.types import CacheMode

DEPTHS = (1, 2, 4, 6, 8, 12)
WINDOW_TOKENS = 1535
MAX_THREADS = 8  # more would fill memory with logits before they saved time

Progress = Callable[[int, int], None]  # done, of so many passes over a window


@dataclass(frozen=True, slots=True)
class NamedModel:
    name: str  # what the report calls it
    weights: ModelWeights


@dataclass(frozen=True, slots=True)
class Options:
    depths: tuple[int, ...] | None = None  # None: those of DEPTHS that every model has
    window_tokens: int | None = None  # None: WINDOW_TOKENS, or the shortest max_seq_len if that is less
    int8_activations: bool = True
    cache_modes: tuple[CacheMode, ...] | None = None  # None: all that can store the reference model's state
    threads: int = field(default_factory=lambda: min(MAX_THREADS, len(os.sched_getaffinity(0))))


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report.  Against itself the reference adds 0 bits, agrees wholly and is at distance 0."""

    model: str
    is_reference: bool
    rounding: Rounding
    span: Span
    quality: Quality


@dataclass(frozen=True, slots=True)
class TextFacts:
    name: str
    num_bytes: int
    num_tokens: int  # predicted ones
    sha256: str


@dataclass(frozen=True, slots=True)
class Report:
    """Rows in order, the reference's first in each span."""

    reference: str
    depths: tuple[int, ...]
    window_tokens: int
    num_windows: int
    texts: tuple[TextFacts, ...]
    models: tuple[NamedModel, ...]
    rows: tuple[Row, ...]

    def over(self, span: Span) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.span == span)


@dataclass(frozen=True, slots=True)
class _Pass:
    """One forward over every window; its scores count for one row a span."""

    model: str
    rounding: Rounding
    forward: Forward
    spans: tuple[Span, ...] = ("all",)


def evaluate(
    models: Sequence[NamedModel],
    texts: Sequence[NamedText],
    options: Options = Options(),
    progress: Progress = lambda done, total: None,
) -> Report:
    """Score every model; the first is the reference.  Raises InvalidArgument, ModelFileError."""
    tokenizer = _shared_tokenizer(models)
    window_tokens = _window_tokens(models, options)
    depths = _depths(models, options)
    modes = _cache_modes(models[0].weights.spec, options)
    cut = [cut_windows(text, tokenizer, window_tokens) for text in texts]
    windows = [window for each in cut for window in each]
    _check_ids(models[0], windows)
    stopped = threading.Event()
    passes = _plan(models, options.int8_activations, modes, stopped)
    sums = _score_all(passes, windows, depths, options.threads, stopped, progress)
    rows = []
    for index, each in enumerate(passes):
        for span in each.spans:
            quality = measure_quality([s[index][span] for s in sums], [s[0][span] for s in sums])
            rows.append(Row(each.model, index == 0, each.rounding, span, quality))
    facts = tuple(_text_facts(text, each) for text, each in zip(texts, cut, strict=True))
    return Report(models[0].name, depths, window_tokens, len(windows), facts, tuple(models), tuple(rows))


def _plan(
    models: Sequence[NamedModel], int8_activations: bool, modes: Sequence[CacheMode], stopped: threading.Event
) -> list[_Pass]:
    """The reference's plain pass first."""
    dense = [DenseModel(model.weights) for model in models]
    passes: list[_Pass] = []

    def add(index: int, rounding: Rounding, *spans: Span) -> None:
        passes.append(_Pass(models[index].name, rounding, ModelForward(dense[index], rounding, stopped), spans))

    for index, model in enumerate(models):
        halves: tuple[Span, ...] = ("second half",) if index == 0 and modes else ()
        add(index, Rounding(), "all", *halves)
        if int8_activations and model.weights.spec.quant is not None:
            add(index, Rounding(activations="int8"), "all")
    for mode in modes:
        add(0, Rounding(cache=mode), "second half")
        if mode is CacheMode.INT8:
            add(0, Rounding(cache=mode, attention="int8"), "second half")
    return passes


WindowSums = list[dict[Span, Sums]]  # one entry a pass


def _score_all(
    passes: Sequence[_Pass],
    windows: Sequence[Window],
    depths: Sequence[int],
    num_threads: int,
    stopped: threading.Event,
    progress: Progress,
) -> list[WindowSums]:
    """Per window.  When interrupted, threads end amid the pass they are in, as its forward is told by `stopped`.

    What a signal raises may come anywhere in this thread, amid the standard library too, where a lock then stays held
    and nobody ends: so it hands each thread all of its work at once, and waits.
    """
    done = count(1)
    waiting = iter(enumerate(windows))  # each is taken by one thread
    taken: list[WindowSums] = [[] for _ in windows]

    def score(window: Window) -> WindowSums:
        sums: WindowSums = []
        reference = None
        for each in passes:
            try:
                scored = score_window(each.forward, window, depths)
            except Stopped:
                break
            reference = reference or scored
            sums.append({span: sum_up(scored, reference, window, span) for span in each.spans})
            progress(next(done), len(windows) * len(passes))
        return sums

    def work(thread: int) -> None:
        try:
            for index, window in waiting:
                if stopped.is_set():
                    break
                taken[index] = score(window)
        except BaseException:
            stopped.set()
            raise

    with threadpool_limits(1), ThreadPoolExecutor(num_threads) as pool:
        try:
            list(pool.map(work, range(num_threads)))
        finally:
            stopped.set()
    return taken


def _shared_tokenizer(models: Sequence[NamedModel]) -> Tokenizer:
    """The one tokenizer of all models."""
    first = models[0]
    for model in models:
        if model.weights.tokenizer is None:
            raise InvalidArgument(
                "models", f"{model.name} has no tokenizer, so no text can be scored with it; expected a file with one"
            )
        if why := _differ(first.weights, model.weights):
            raise InvalidArgument(
                "models",
                f"{model.name} has another {why} than {first.name}, so they cannot be compared token by token; evaluate"
                " each in a run of its own: bits per byte may be compared across tokenizers, agreement may not",
            )
    assert first.weights.tokenizer is not None
    return Tokenizer(first.weights.tokenizer, first.weights.spec.bos_token_id)


def _differ(first: ModelWeights, other: ModelWeights) -> str | None:
    """What keeps two models from reading the same windows."""
    assert first.tokenizer is not None and other.tokenizer is not None
    if first.tokenizer != other.tokenizer and json.loads(first.tokenizer) != json.loads(other.tokenizer):
        return "tokenizer"
    if first.spec.vocab_size != other.spec.vocab_size:
        return f"vocabulary ({other.spec.vocab_size} ids, not {first.spec.vocab_size})"
    if first.spec.bos_token_id != other.spec.bos_token_id:
        return f"BOS ({other.spec.bos_token_id}, not {first.spec.bos_token_id})"
    return None


def _window_tokens(models: Sequence[NamedModel], options: Options) -> int:
    shortest = min(models, key=lambda model: model.weights.spec.max_seq_len)
    most = shortest.weights.spec.max_seq_len
    if options.window_tokens is None:
        return min(WINDOW_TOKENS, most)
    if not 2 <= options.window_tokens <= most:
        raise InvalidArgument(
            "window_tokens",
            f"is {options.window_tokens}, expected 2 to {most}, the longest sequence of {shortest.name}",
        )
    return options.window_tokens


def _depths(models: Sequence[NamedModel], options: Options) -> tuple[int, ...]:
    shallowest = min(models, key=lambda model: model.weights.spec.max_loops)
    most = shallowest.weights.spec.max_loops
    if options.depths is None:
        return tuple(depth for depth in DEPTHS if depth <= most)
    for depth in options.depths:
        if not 1 <= depth <= most:
            raise InvalidArgument("depths", f"hold {depth}, expected 1 to {most}, the max_loops of {shallowest.name}")
    if not options.depths:
        raise InvalidArgument("depths", "hold nothing, expected at least one depth")
    return options.depths


def _cache_modes(spec: ModelSpec, options: Options) -> tuple[CacheMode, ...]:
    if options.cache_modes is None:
        return tuple(mode for mode in CacheMode if _can_store(mode, spec))
    for mode in options.cache_modes:
        check_mode(mode, spec)
    return options.cache_modes


def _can_store(mode: CacheMode, spec: ModelSpec) -> bool:
    try:
        check_mode(mode, spec)
    except InvalidArgument:
        return False
    return True


def _check_ids(model: NamedModel, windows: Sequence[Window]) -> None:
    largest = max(int(window.targets.max()) for window in windows)
    size = model.weights.spec.vocab_size
    if largest >= size:
        raise InvalidArgument("models", f"{model.name}: its tokenizer gives id {largest}, its vocabulary is {size}")


def _text_facts(text: NamedText, windows: Sequence[Window]) -> TextFacts:
    data = text.text.encode()
    num_tokens = sum(len(window.targets) for window in windows)
    return TextFacts(text.name, len(data), num_tokens, hashlib.sha256(data).hexdigest())
