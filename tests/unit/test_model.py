"""The in-process API on the fake engine: what it takes, what it returns, and how it ends."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forks import forked

from tinyloop_service import model as model_module
from tinyloop_service.engine.fake import FAKE_LIMITS, FakeEngine, expected_tokens
from tinyloop_service.errors import LoopsMismatch, ModelClosed
from tinyloop_service.loading import LoadedModel
from tinyloop_service.model import Model, PrefixCache
from tinyloop_service.types import FinishReason, Sampling, TokenIds

PROMPT = tuple(range(1, 101))
WAIT_S = 10.0


def expected(prompt: Sequence[int], max_tokens: int) -> TokenIds:
    """What the fake engine gives, greedily."""
    return expected_tokens([(tuple(prompt), 0)], max_tokens, Sampling(), FAKE_LIMITS.default_loops, FAKE_LIMITS)


@pytest.fixture
def gate() -> threading.Event:
    """Steps run while it is set."""
    gate = threading.Event()
    gate.set()
    return gate


@pytest.fixture
def model(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    config = {"default_loops": FAKE_LIMITS.default_loops, "eos_token_ids": [0]}

    def load_model(path: object, settings: object) -> LoadedModel:
        return LoadedModel(FakeEngine(gate=gate), None, config)

    monkeypatch.setattr(model_module, "load_model", load_model)
    with Model("fake.tinyloop") as made:
        yield made


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does; fails after ten seconds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def load(model: Model) -> Any:
    return model._runtime.scheduler.load()


def test_generate_returns_prompt_and_new_ids(model: Model) -> None:
    ids = model.generate(PROMPT, max_tokens=5, ignore_eos=True)
    assert isinstance(ids, list)
    assert tuple(ids[:100]) == PROMPT
    assert tuple(ids[100:]) == expected(PROMPT, 5)


def test_a_prefix_gives_what_one_shot_gives(model: Model) -> None:
    prefix = model.build_prefix_cache(PROMPT[:70])
    warm = model.generate_from_prefix_cache(prefix, 6, suffix=PROMPT[70:], ignore_eos=True)
    assert warm == model.generate(PROMPT, 6, ignore_eos=True)


def test_an_empty_suffix_goes_on_from_the_prefix(model: Model) -> None:
    prefix = model.build_prefix_cache(PROMPT)
    assert model.generate_from_prefix_cache(prefix, 3, ignore_eos=True) == model.generate(PROMPT, 3, ignore_eos=True)


@pytest.mark.parametrize(
    "prompt", [list(PROMPT), np.array(PROMPT, np.int64), np.array(PROMPT, np.uint16), range(1, 101)], ids=repr
)
def test_prompts_are_any_integer_sequence(model: Model, prompt: Any) -> None:
    assert model.generate(prompt, 2, ignore_eos=True) == model.generate(PROMPT, 2, ignore_eos=True)


def test_a_prefix_cache_tells_what_it_is(model: Model) -> None:
    prefix = model.build_prefix_cache(PROMPT, loops=3, cache_window=80)
    assert isinstance(prefix, PrefixCache)
    assert prefix.prompt.dtype == np.int32
    assert tuple(prefix.prompt) == PROMPT
    prefix.prompt[0] = 99
    assert prefix.prompt[0] == 1, "prompt is a copy"
    assert (prefix.loops, prefix.cache_window) == (3, 80)
    assert prefix.num_bytes > 0
    assert prefix.uid


def test_a_collected_prefix_gives_its_pages_back(model: Model) -> None:
    idle = load(model).pages_free
    prefix = model.build_prefix_cache(PROMPT)
    assert load(model).pages_free < idle
    del prefix
    gc.collect()
    eventually(lambda: load(model).pages_free == idle)


def test_complete_says_how_it_ended(model: Model) -> None:
    prefix = model.build_prefix_cache(PROMPT)
    completion = model.complete(prefix=prefix, suffix=[7], max_tokens=4, seed=5, logprobs=2, ignore_eos=True)
    assert len(completion.token_ids) == len(completion.logprobs) == 4
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.seed == 5
    assert (completion.usage.prompt_tokens, completion.usage.cached_tokens) == (101, 100)


def test_choices_differ_and_choice_0_is_the_single_request(model: Model) -> None:
    several = model.complete(PROMPT, n=3, temperature=1.0, seed=9, max_tokens=8, ignore_eos=True)
    alone = model.complete(PROMPT, temperature=1.0, seed=9, max_tokens=8, ignore_eos=True)
    assert several.choices[0].token_ids == alone.token_ids
    assert len({choice.token_ids for choice in several.choices}) == 3


def test_a_batch_answers_in_order(model: Model) -> None:
    prefix = model.build_prefix_cache(PROMPT)
    suffixes = [[n] for n in range(1, 9)]
    batch = model.complete_batch(prefix, suffixes, max_tokens=3, ignore_eos=True)
    assert [c.token_ids for c in batch] == [expected((*PROMPT, *suffix), 3) for suffix in suffixes]
    assert model.complete_batch(prefix, []) == []


def test_a_batch_with_a_bad_suffix_is_refused_whole(model: Model) -> None:
    prefix = model.build_prefix_cache(PROMPT)
    with pytest.raises(ValueError, match=r"suffix\[0\]"):
        model.complete_batch(prefix, [[1], [512]])
    with pytest.raises(RuntimeError, match="2048"):
        model.complete_batch(prefix, [[1], [1] * 3000])
    eventually(lambda: load(model).rows_running == 0)


def test_a_stream_is_the_completion_in_pieces(model: Model) -> None:
    deltas = list(model.stream(PROMPT, max_tokens=6, seed=3, ignore_eos=True))
    assert tuple(token for delta in deltas for token in delta.token_ids) == expected(PROMPT, 6)
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert deltas[-1].usage is not None


def test_a_refused_stream_is_refused_at_once(model: Model) -> None:
    with pytest.raises(ValueError, match="top_p"):
        model.stream(PROMPT, top_p=0.0)
    with pytest.raises(RuntimeError, match="2048"):
        model.stream(PROMPT, max_tokens=10_000)


@pytest.mark.parametrize("leave", ["close", "collect"])
def test_leaving_a_stream_cancels_it(model: Model, leave: str) -> None:
    idle = load(model).pages_free
    stream = model.stream(PROMPT, max_tokens=1900, ignore_eos=True)
    next(stream)
    if leave == "close":
        stream.close()
        assert list(stream) == []
    else:
        del stream
        gc.collect()
    eventually(lambda: load(model).pages_free == idle)


def test_many_threads_are_served_in_the_same_steps(model: Model) -> None:
    prefix = model.build_prefix_cache(PROMPT)
    with ThreadPoolExecutor(16) as pool:
        answers = list(
            pool.map(lambda n: model.generate_from_prefix_cache(prefix, 20, suffix=[n], ignore_eos=True), range(1, 17))
        )
    for n, answer in enumerate(answers, start=1):
        assert tuple(answer[101:]) == expected((*PROMPT, n), 20)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.generate([]), ValueError, "prompt"),
        (lambda m: m.generate([-1]), ValueError, r"prompt\[0\]"),
        (lambda m: m.generate([512]), ValueError, r"prompt\[0\]"),
        (lambda m: m.generate(np.zeros((2, 2), np.int32)), ValueError, "dimension"),
        (lambda m: m.generate("text"), ValueError, "no tokenizer"),
        (lambda m: m.generate([1], 0), ValueError, "max_tokens"),
        (lambda m: m.generate([1], loops=17), ValueError, "loops"),
        (lambda m: m.generate([1], temperature=float("nan")), ValueError, "temperature"),
        (lambda m: m.generate([1], cache_window=-1), ValueError, "cache_window"),
        (lambda m: m.generate([1], stop_sequences=["x"]), ValueError, "stop"),
        (lambda m: m.generate([1] * 2048, 1), RuntimeError, "2048"),
        (lambda m: m.build_prefix_cache([], 1), ValueError, "prompt"),
        (lambda m: m.build_prefix_cache([1], 0), ValueError, "loops"),
        (lambda m: m.complete(), ValueError, "prompt"),
        (lambda m: m.complete([1], suffix=[2]), ValueError, "suffix"),
        (lambda m: m.complete(prefix="name"), ValueError, "prefix"),
        (lambda m: m.complete([1], logprobs=21), ValueError, "logprobs"),
        (lambda m: m.complete([1], n=17), ValueError, "n"),
    ],
)
def test_what_is_refused(model: Model, call: Callable[[Model], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(model)


def test_loops_must_be_the_prefix_s(model: Model) -> None:
    prefix = model.build_prefix_cache(PROMPT, loops=2)
    with pytest.raises(RuntimeError, match=r"loops mismatch.*\b3\b.*\b2\b|loops mismatch.*\b2\b.*\b3\b") as caught:
        model.generate_from_prefix_cache(prefix, loops=3)
    assert isinstance(caught.value, LoopsMismatch)


def test_a_prefix_of_another_model_is_refused(model: Model) -> None:
    prefix = model.build_prefix_cache(PROMPT)
    with Model("other.tinyloop") as other, pytest.raises(ValueError, match="no PrefixCache of this Model"):
        other.generate_from_prefix_cache(prefix)


def test_after_close_every_call_is_refused(model: Model) -> None:
    prefix = model.build_prefix_cache(PROMPT)
    stream = model.stream(PROMPT, max_tokens=1900, ignore_eos=True)
    model.close()
    model.close()
    calls: list[Callable[[], object]] = [
        model.config,
        lambda: model.build_prefix_cache(PROMPT),
        lambda: model.generate(PROMPT),
        lambda: model.generate_from_prefix_cache(prefix),
        lambda: model.complete(PROMPT),
        lambda: model.complete_batch(prefix, [[1]]),
        lambda: model.stream(PROMPT),
        lambda: next(stream),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="model was closed"):
            call()


def test_close_ends_what_runs_with_its_error(gate: threading.Event, model: Model) -> None:
    gate.clear()
    errors: list[BaseException] = []

    def call() -> None:
        try:
            model.generate(PROMPT)
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    eventually(lambda: load(model).rows_running + load(model).requests_waiting == 4)
    closing = threading.Thread(target=model.close)
    closing.start()
    gate.set()
    for thread in (*threads, closing):
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert [str(error)[:16] for error in errors] == ["model was closed"] * 4


def test_a_collected_model_ends_its_thread(model: Model) -> None:
    made = Model(Path("fake.tinyloop"))
    thread = made._runtime._thread
    del made
    gc.collect()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_model_that_its_own_thread_collects_ends_too(model: Model) -> None:
    made = Model(Path("fake.tinyloop"))
    runtime, cycle = made._runtime, [made]
    cycle.append(cycle)  # type: ignore[arg-type]
    del made, cycle
    runtime._loop.call_soon_threadsafe(gc.collect)
    runtime._thread.join(WAIT_S)
    assert not runtime._thread.is_alive()


def test_a_forked_process_is_told_to_make_its_own_and_ends(model: Model) -> None:
    prefix = model.build_prefix_cache(PROMPT)

    def child() -> int:
        with pytest.raises(ModelClosed, match="before this process was forked"):
            model.generate(PROMPT)
        model.close()
        return 5

    assert forked(child) == 5
    assert model.generate_from_prefix_cache(prefix, 3, ignore_eos=True) == model.generate(PROMPT, 3, ignore_eos=True)


def test_handles_that_outlive_their_model_do_no_harm(model: Model) -> None:
    handles = [model.build_prefix_cache(PROMPT), model.stream(PROMPT, max_tokens=1900, ignore_eos=True)]
    model.close()
    handles.clear()
    gc.collect()


def test_config_is_a_copy(model: Model) -> None:
    model.config()["default_loops"] = 99
    assert model.config()["default_loops"] == FAKE_LIMITS.default_loops
