"""The whole evaluation: which rows there are, what they say of known cases, and what is refused before any work."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer
from small_models import BASE, SPECS, TEXT, model, small_report

from tinyloop_service.demo import MODEL_PATH, PREFIX_TEXT
from tinyloop_service.engine.reference import Reference
from tinyloop_service.engine.spec import ModelSpec
from tinyloop_service.engine.weights import ModelWeights, random_model, read_model
from tinyloop_service.errors import InvalidArgument
from tinyloop_service.evaluate import NamedModel, NamedText, Options, evaluate
from tinyloop_service.evaluate.rounding import Rounding
from tinyloop_service.text import Tokenizer
from tinyloop_service.types import CacheMode

ONE_PASS = Options(depths=(1, 3), int8_activations=False, cache_modes=())


def reference_bits(weights: ModelWeights, text: str, window_tokens: int, loops: int) -> float:
    """Bits per byte, spelled out with the reference in float64."""
    assert weights.tokenizer is not None
    ids = Tokenizer(weights.tokenizer).encode(text, bos=False)
    reference, bits = Reference(weights, np.float64), 0.0
    for begin in range(0, len(ids), window_tokens):
        targets = ids[begin : begin + window_tokens]
        logits = reference.forward([weights.spec.bos_token_id, *targets[:-1]], reference.new_cache(loops))  # type: ignore[list-item]
        for row, target in zip(logits, targets, strict=True):
            bits += (np.log(np.exp(row - row.max()).sum()) - (row[target] - row.max())) / math.log(2)
    return bits / len(text.encode())


def test_bits_per_byte_are_those_of_the_reference() -> None:
    report = evaluate([NamedModel("a", model("everything"))], [TEXT], replace(ONE_PASS, window_tokens=50))
    [row] = report.rows
    expected = [reference_bits(model("everything"), TEXT.text, 50, loops) for loops in (1, 3)]
    assert row.quality.bits_per_byte == pytest.approx(expected, rel=1e-5)  # float32 against float64


def test_the_demo_model_predicts_as_the_reference_says() -> None:
    """A trained model, whose bits (1.2 a byte) a wrong forward would not reach: random weights need over 6."""
    weights, text = read_model(MODEL_PATH), PREFIX_TEXT[:400]
    [row] = evaluate([NamedModel("demo", weights)], [NamedText("jonah", text)], replace(ONE_PASS, depths=(8,))).rows
    assert row.quality.bits_per_byte[0] == pytest.approx(reference_bits(weights, text, 1535, 8), abs=1e-4)
    assert row.quality.bits_per_byte[0] < 1.3


def test_rows_are_weights_then_activations_then_caches() -> None:
    caches = {mode: [Rounding(cache=mode)] for mode in CacheMode}
    caches[CacheMode.INT8].append(Rounding(cache=CacheMode.INT8, attention="int8"))
    assert [(row.model, row.is_reference, row.rounding, row.span) for row in small_report().rows] == [
        ("fp16.tinyloop", True, Rounding(), "all"),
        ("fp16.tinyloop", True, Rounding(), "second half"),
        ("int4.tinyloop", False, Rounding(), "all"),
        ("int4.tinyloop", False, Rounding(activations="int8"), "all"),
        *(("fp16.tinyloop", False, rounding, "second half") for rounding in chain(*caches.values())),
    ]
    assert small_report().depths == (1, 2, 4)  # of the default ones, those that a model of 5 loops has
    assert small_report().window_tokens == 64  # its max_seq_len


def test_a_copy_of_the_reference_differs_in_nothing_and_another_model_does() -> None:
    same = NamedModel("b", model("pre"))
    report = evaluate([NamedModel("a", model("pre")), same, NamedModel("c", model("pre", 2))], [TEXT], ONE_PASS)
    _, copy, other = (row.quality for row in report.rows)
    assert copy.agreement == (1, 1) and copy.added_bits == (0, 0) and copy.distance == (0,) * 4
    assert max(other.agreement) < 0.5 and other.distance is not None and min(other.distance) > 0.5


def test_smaller_roundings_are_smaller_errors() -> None:
    distances = {row.rounding: row.quality.distance for row in small_report().over("second half")}
    stored = [Rounding(cache=mode) for mode in (None, CacheMode.FP16, CacheMode.INT8, CacheMode.H_INT4)]
    attended = Rounding(cache=CacheMode.INT8, attention="int8")
    in_order = [distances[rounding][-1] for rounding in (*stored[:3], attended, stored[3])]  # type: ignore[index]
    assert in_order == sorted(in_order) and in_order[0] == 0 and in_order[1] > 0


def test_figures_do_not_depend_on_threads_and_texts_are_scored_each_from_its_beginning() -> None:
    texts = [TEXT, NamedText("other", TEXT.text[40:])]
    options = replace(ONE_PASS, window_tokens=20)
    one, three = (evaluate([NamedModel("a", model("gqa"))], texts, replace(options, threads=n)) for n in (1, 3))
    assert one.rows == three.rows
    alone = [evaluate([NamedModel("a", model("gqa"))], [text], options).rows[0].quality for text in texts]
    assert one.rows[0].quality.num_bytes == sum(quality.num_bytes for quality in alone)
    together = sum(quality.bits_per_byte[0] * quality.num_bytes for quality in alone) / one.rows[0].quality.num_bytes
    assert one.rows[0].quality.bits_per_byte[0] == pytest.approx(together)


def test_progress_counts_every_pass_over_every_window() -> None:
    told: list[tuple[int, int]] = []
    options = replace(ONE_PASS, window_tokens=50, threads=1)
    models = [NamedModel("a", model("pre")), NamedModel("b", model("fp16"))]
    report = evaluate(models, [TEXT], options, lambda done, total: told.append((done, total)))
    assert told == [(done, 2 * report.num_windows) for done in range(1, 2 * report.num_windows + 1)]


def test_what_stops_a_pass_stops_the_evaluation() -> None:
    class Interrupt(Exception):
        pass

    def interrupt(done: int, total: int) -> None:
        raise Interrupt

    with pytest.raises(Interrupt):
        evaluate([NamedModel("a", model("pre"))], [TEXT], ONE_PASS, interrupt)


def test_threads_are_handed_all_of_their_work_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal amid a submit may leave one of the pool's locks held, and then nobody would ever end."""
    submit, submitted = ThreadPoolExecutor.submit, list[Any]()

    def counted(pool: ThreadPoolExecutor, *work: Any) -> Any:
        submitted.append(work)
        return submit(pool, *work)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", counted)
    options = replace(ONE_PASS, window_tokens=50, threads=2)
    assert evaluate([NamedModel("a", model("pre"))], [TEXT], options).num_windows > 2 == len(submitted)


def test_models_of_another_width_are_compared_by_tokens_alone() -> None:
    narrow = random_model(replace(SPECS["pre"], d_model=32), 1, tokenizer=byte_tokenizer())
    report = evaluate([NamedModel("a", model("pre")), NamedModel("b", narrow)], [TEXT], ONE_PASS)
    assert report.rows[1].quality.distance is None
    assert 0 <= report.rows[1].quality.agreement[0] < 1


def test_only_modes_that_can_store_the_state_are_scored_unless_others_are_asked_for() -> None:
    """With one K/V head of four, K and V of a token are half as wide as h."""
    narrow = [NamedModel("a", model("everything"))]
    options = replace(ONE_PASS, int8_activations=False)
    modes = [row.rounding.cache for row in evaluate(narrow, [TEXT], replace(options, cache_modes=None)).rows]
    assert modes == [None, None, CacheMode.FP16, CacheMode.INT8, CacheMode.INT8]
    with pytest.raises(InvalidArgument, match="cache_mode: h-int8 given"):
        evaluate(narrow, [TEXT], replace(options, cache_modes=(CacheMode.H_INT8,)))


def other(spec: ModelSpec = BASE, tokenizer: bytes | None = None) -> NamedModel:
    return NamedModel("b.tinyloop", random_model(spec, 1, tokenizer=tokenizer or byte_tokenizer()))


def other_tokenizer() -> bytes:
    parsed = json.loads(byte_tokenizer())
    vocab = parsed["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    return json.dumps(parsed).encode()


@pytest.mark.parametrize(
    ("second", "options", "message"),
    [
        (NamedModel("b.tinyloop", random_model(BASE, 1)), {}, "models: b.tinyloop has no tokenizer"),
        (other(tokenizer=other_tokenizer()), {}, "models: b.tinyloop has another tokenizer than a.tinyloop"),
        (other(replace(BASE, vocab_size=300)), {}, r"another vocabulary \(300 ids, not 258\)"),
        (other(replace(BASE, bos_token_id=None)), {}, r"another BOS \(None, not 256\)"),
        (other(replace(BASE, max_loops=4)), {"depths": (1, 5)}, "depths: hold 5, expected 1 to 4, .* b.tinyloop"),
        (other(), {"depths": (0,)}, "depths: hold 0, expected 1 to 5"),
        (other(), {"depths": ()}, "depths: hold nothing"),
        (other(), {"window_tokens": 65}, "window_tokens: is 65, expected 2 to 64"),
        (other(), {"window_tokens": 1}, "window_tokens: is 1, expected 2 to 64"),
    ],
)
def test_what_cannot_be_compared_is_refused(second: NamedModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        evaluate([NamedModel("a.tinyloop", model("pre")), second], [TEXT], Options(**options))


def test_a_tokenizer_written_another_way_is_the_same() -> None:
    spaced = json.dumps(json.loads(byte_tokenizer()), indent=1).encode()
    assert spaced != byte_tokenizer()
    evaluate([NamedModel("a", model("pre")), other(tokenizer=spaced)], [TEXT], ONE_PASS)


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    small = random_model(replace(BASE, vocab_size=100, bos_token_id=0, eos_token_ids=()), 1, tokenizer=byte_tokenizer())
    with pytest.raises(InvalidArgument, match=r"its tokenizer gives id \d+, its vocabulary is 100"):
        evaluate([NamedModel("a", small)], [TEXT], ONE_PASS)
