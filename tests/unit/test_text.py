"""Text rules: encoding, incremental decoding, and stops, against a plain restatement of the rules."""

from __future__ import annotations

import codecs
import json
import threading
from functools import cache
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from tinyloop_service.errors import InvalidArgument, ModelFileError
from tinyloop_service.text import OutputFilter, Piece, StopMatcher, TextDecoder, Tokenizer
from tinyloop_service.types import Stops, TokenLogprob

SENTENCES = [
    "In the beginning was the word, and the word was with the beginning.",
    "Ein schöner Tag — naïve café, 10 €, 你好 世界, 👍🏽 and so on.",
    "the the the end END. STOP stop\n\nUser: hello\nAssistant: hello",
]
BOS = 1


@cache
def library() -> tokenizers.Tokenizer:
    result = tokenizers.Tokenizer(models.BPE())
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<eos>", "<bos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    result.train_from_iterator(SENTENCES, trainer)
    return result


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(library().to_str().encode(), BOS)


@cache
def of_bytes() -> dict[bytes, int]:
    return {tokenizer().token_bytes(i): i for i in range(2, tokenizer().vocab_size)}


def ids_of(text: str | bytes) -> list[int]:
    """One token for each byte."""
    data = text.encode() if isinstance(text, str) else text
    return [of_bytes()[bytes([byte])] for byte in data]


def run(output: OutputFilter, ids: list[int], size: int = 1) -> tuple[list[int], str, list[Piece]]:
    """Feed in chunks of `size`, finish; all ids and text shown, and the pieces."""
    pieces = [output.feed(ids[i : i + size]) for i in range(0, len(ids), size)] + [output.finish()]
    return [token for piece in pieces for token in piece.token_ids], "".join(piece.text for piece in pieces), pieces


def filtered(
    ids: list[int], *sequences: list[int], strings: tuple[str, ...] = (), size: int = 1
) -> tuple[list[int], str, bool]:
    output = OutputFilter(Stops(tuple(map(tuple, sequences)), strings), tokenizer(), want_text=True)
    shown, text, _ = run(output, ids, size)
    assert output.num_ids == len(shown)
    return shown, text, output.stopped


# --- the tokenizer


@pytest.mark.parametrize("text", [*SENTENCES, "", " ", "\x00\x7f", "日本語 🏳️‍🌈"])
def test_encode_and_decode(text: str) -> None:
    ids = tokenizer().encode(text, bos=False)
    assert tokenizer().decode(ids) == text
    assert list(ids) == library().encode(text, add_special_tokens=False).ids
    assert tokenizer().encode(text, bos=True) == (BOS, *ids)
    assert Tokenizer(library().to_str().encode()).encode(text, bos=True) == ids


def test_a_long_text_does_not_stop_other_threads() -> None:
    """Else one caller's text would hold up the event loop, and with it every stream and the health service."""
    begun, done = threading.Event(), threading.Event()
    text = "the word " * 100_000

    def encode() -> None:
        begun.set()
        tokenizer().encode(text, bos=False)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    begun.wait()
    assert not done.is_set(), "this thread got no turn before the text was encoded"
    thread.join()


@given(st.lists(st.integers(0, 329), max_size=30))
def test_decode_agrees_with_the_library(ids: list[int]) -> None:
    assert tokenizer().decode(ids) == library().decode(ids, skip_special_tokens=True)


def test_special_and_unknown_ids_have_no_text() -> None:
    assert tokenizer().decode([0, 1, 330, 10**6, -1]) == ""


def test_added_tokens_are_their_own_text() -> None:
    extended = tokenizers.Tokenizer.from_str(library().to_str())
    extended.add_tokens(["<|user → model|>"])
    ours = Tokenizer(extended.to_str().encode())
    assert ours.decode(ours.encode("a<|user → model|>b", bos=False)) == "a<|user → model|>b"


def test_a_truncating_tokenizer_does_not_truncate_prompts() -> None:
    short = tokenizers.Tokenizer.from_str(library().to_str())
    short.enable_truncation(3)
    short.enable_padding(length=50)
    assert Tokenizer(short.to_str().encode()).encode(SENTENCES[0], bos=False) == tokenizer().encode(
        SENTENCES[0], bos=False
    )


def test_sentencepiece_tokens() -> None:
    vocab = {"<unk>": 0, "▁a": 1, "b": 2, "<0xC3>": 3, "<0xA9>": 4, "▁": 5, "<0xZZ>": 6}
    piece = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a")][:0], unk_token="<unk>", byte_fallback=True))
    piece.normalizer = normalizers.Replace(" ", "▁")
    piece.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert Tokenizer(piece.to_str().encode()).decode([1, 2, 3, 4, 5, 6]) == " abé <0xZZ>"


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b"\xff", b"[]"])
def test_bytes_that_are_no_tokenizer(content: bytes) -> None:
    with pytest.raises(ModelFileError, match="tokenizer"):
        Tokenizer(content)


def test_a_decoder_that_cannot_be_streamed_is_refused() -> None:
    parsed = json.loads(library().to_str()) | {"decoder": None}
    with pytest.raises(ModelFileError, match="decoder is none"):
        Tokenizer(json.dumps(parsed).encode())


def test_a_lone_surrogate_is_an_invalid_argument() -> None:
    with pytest.raises(InvalidArgument, match="surrogate"):
        tokenizer().encode("a\ud800", bos=False)


# --- decoding piece by piece


@given(st.lists(st.integers(0, 329), max_size=40), st.data())
def test_decoding_in_pieces_gives_the_same_text(ids: list[int], data: st.DataObject) -> None:
    cuts = sorted({0, len(ids), *data.draw(st.lists(st.integers(0, len(ids))))})
    decoder = TextDecoder(tokenizer())
    text = "".join(decoder.feed(ids[a:b]) for a, b in pairwise(cuts)) + decoder.finish()
    assert text == tokenizer().decode(ids)
    assert decoder.finish() == ""


def test_a_character_is_held_until_it_is_whole() -> None:
    decoder = TextDecoder(tokenizer())
    assert [decoder.feed([token]) for token in ids_of("a👍é")] == ["a", "", "", "", "👍", "", "é"]
    assert decoder.feed(ids_of(b"\xe2\x82")) == "" and decoder.is_torn
    assert decoder.finish() == "\ufffd" and not decoder.is_torn


# --- the matcher


def test_the_matcher_holds_what_might_begin_a_match() -> None:
    matcher = StopMatcher(["aab", "abc"])
    seen = [(matcher.feed(char), matcher.held) for char in "xaaacab"]
    assert seen == [(0, 0), (0, 1), (0, 2), (0, 2), (0, 0), (0, 1), (0, 2)]
    assert matcher.feed("c") == 3


def test_the_longest_of_patterns_that_end_together_counts() -> None:
    matcher = StopMatcher([(3,), (1, 2, 3), (2, 3)])
    assert [matcher.feed(item) for item in (1, 2, 3)] == [0, 0, 3]


def test_an_empty_pattern_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([""])


# --- stops


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_an_id_stop_cuts_before_its_match(size: int) -> None:
    ids = ids_of("one two three")
    assert filtered(ids, ids_of("tw"), size=size) == (ids[:4], "one ", True)
    assert filtered(ids, ids_of("e "), ids_of("two"), size=size) == (ids[:2], "on", True)
    assert filtered(ids, ids_of("one"), size=size) == ([], "", True)
    assert filtered(ids, ids_of("twx"), size=size) == (ids, "one two three", False)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_string_stop_cuts_text_at_the_match_and_ids_before_it(size: int) -> None:
    the = of_bytes()[b" the"]
    ids = [*ids_of("end"), the, *ids_of("re")]
    assert filtered(ids, strings=("her",), size=size) == (ids[:3], "end t", True)
    assert filtered(ids, strings=(" the",), size=size) == (ids[:3], "end", True)
    assert filtered(ids, strings=("d",), size=size) == (ids[:2], "en", True)
    assert filtered(ids, strings=("hers",), size=size) == (ids, "end there", False)


def test_nothing_that_might_begin_a_stop_is_shown_until_decided() -> None:
    output = OutputFilter(Stops(strings=("STOP",)), tokenizer(), want_text=True)
    pieces = [output.feed([token]) for token in ids_of("aSTxSTO")]
    assert [piece.text for piece in pieces] == ["a", "", "", "STx", "", "", ""]
    assert [len(piece.token_ids) for piece in pieces] == [1, 0, 0, 3, 0, 0, 0]
    assert [piece.first_index for piece in pieces] == [0, 1, 1, 1, 4, 4, 4]
    assert output.feed(ids_of("P")) == Piece(first_index=4) and output.stopped


def test_what_was_held_is_released_at_the_end_exactly_once() -> None:
    for stops in (Stops(strings=("STOP",)), Stops(token_sequences=(tuple(ids_of("STOP")),))):
        output = OutputFilter(stops, tokenizer(), want_text=True)
        assert not output.feed(ids_of("STO"))
        assert output.finish() == Piece(tuple(ids_of("STO")), (), "STO", 0)
        assert not output.finish() and not output.feed(ids_of("P")) and not output.stopped
        assert output.num_ids == 3


def test_nothing_follows_a_stop() -> None:
    output = OutputFilter(Stops(strings=("b",)), tokenizer(), want_text=True)
    assert output.feed(ids_of("abc")).text == "a"
    assert not output.feed(ids_of("d")) and not output.finish()


def test_multi_byte_stops_straddling_tokens() -> None:
    ids = ids_of("10 € ja")
    assert filtered(ids, strings=("€",)) == (ids[:3], "10 ", True)
    assert filtered(ids, strings=(" €",)) == (ids[:2], "10", True)
    assert filtered(ids_of("10 ¢"), strings=("€",)) == (ids_of("10 ¢"), "10 ¢", False)


def test_an_id_stop_within_a_character_leaves_a_replacement() -> None:
    ids = ids_of("a€b")
    assert filtered(ids, [ids[2]]) == (ids[:2], "a\ufffd", True)


def test_of_two_stops_that_end_together_the_one_that_leaves_less_counts() -> None:
    ids = ids_of("aé")
    assert filtered(ids, [ids[2]], strings=("é",)) == (ids[:1], "a", True)
    assert filtered(ids, ids, strings=("é",)) == ([], "", True)


def test_a_torn_character_at_the_end_is_shown_as_replacement_once() -> None:
    output = OutputFilter(Stops(), tokenizer(), want_text=True)
    ids = ids_of("a€")[:3]
    shown, text, pieces = run(output, ids)
    assert (shown, text) == (ids, "a\ufffd")
    assert pieces[-1] == Piece((), (), "\ufffd", 3), "text may be flushed with no new id"


def test_matching_starts_with_the_first_generated_token() -> None:
    """A filter sees generated tokens only: a stop half in the prompt is none."""
    assert filtered(ids_of("OP"), strings=("STOP",)) == (ids_of("OP"), "OP", False)


def test_logprobs_stay_with_their_tokens() -> None:
    output = OutputFilter(Stops(strings=("bc",)), tokenizer(), want_text=True)
    logprobs = [TokenLogprob(-float(i)) for i in range(4)]
    assert output.feed(ids_of("ab"), logprobs[:2]).logprobs == (logprobs[0],)
    piece = output.feed(ids_of("dx"), logprobs[2:])
    assert piece.logprobs == tuple(logprobs[1:]) and len(piece.token_ids) == 3


def test_id_stops_work_without_a_tokenizer_and_strings_are_refused() -> None:
    output = OutputFilter(Stops(token_sequences=((5, 6), (7,))), None, want_text=True)
    assert output.feed((4, 5)).token_ids == (4,)
    assert output.feed((5, 6, 8)) == Piece((5,), (), "", 1) and output.stopped
    with pytest.raises(InvalidArgument, match="tokenizer"):
        OutputFilter(Stops(strings=("x",)), None, want_text=False)


def test_nothing_is_detokenised_unless_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(TextDecoder, "feed", lambda *_: pytest.fail("detokenised"))
        for stops in (Stops(), Stops(token_sequences=((400,),))):
            assert OutputFilter(stops, tokenizer(), want_text=False).feed((3, 4)) == Piece((3, 4))
    output = OutputFilter(Stops(strings=("b",)), tokenizer(), want_text=False)
    assert output.feed(ids_of("ab")) == Piece(tuple(ids_of("a"))) and output.stopped


# --- against the rules, restated


def by_the_rules(ids: list[int], stops: Stops) -> tuple[list[int], str, bool]:
    """Ids and text that may be shown of a choice that ends here."""

    def text_of(count: int, *, whole: bool) -> str:
        data = b"".join(map(tokenizer().token_bytes, ids[:count]))
        return codecs.getincrementaldecoder("utf-8")("replace").decode(data, whole)

    for n in range(1, len(ids) + 1):
        cuts: list[tuple[int, str]] = []
        id_cuts = [n - len(s) for s in stops.token_sequences if n >= len(s) and tuple(ids[n - len(s) : n]) == s]
        if id_cuts:
            cuts.append((min(id_cuts), text_of(min(id_cuts), whole=True)))
        before, text = len(text_of(n - 1, whole=False)), text_of(n, whole=False)
        ends = [
            (end, end - len(s))
            for s in stops.strings
            for end in range(before + 1, len(text) + 1)
            if text[:end].endswith(s)
        ]
        if ends:
            match = min(ends)[1]
            cuts.append((sum(len(text_of(i, whole=True)) <= match for i in range(1, n + 1)), text[:match]))
        if cuts:
            count, shown = min(cuts, key=lambda cut: (len(cut[1]), cut[0]))
            return ids[:count], shown, True
    return ids, text_of(len(ids), whole=True), False


ALPHABET = [b"a", b"b", b" ", b"\xc3", b"\xa9", b"\xe2", b"\x82", b"\xac", b"\xf0", b" the", b"ST", b"O", b"P"]
TOKENS = st.sampled_from([1, *(i for i in range(2, 330) if tokenizer().token_bytes(i) in ALPHABET)])
STRINGS = st.sampled_from(["a", "ab", "ba", "é", "€", "a€", " t", "he", "STOP", "aab", "aba", "the b", "é€a"])
STOPS = st.builds(
    Stops,
    st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    st.lists(STRINGS, max_size=3, unique=True).map(tuple),
)


@settings(max_examples=600, deadline=None)
@given(st.lists(TOKENS, max_size=24), STOPS, st.data())
def test_any_grouping_gives_what_the_rules_say(ids: list[int], stops: Stops, data: st.DataObject) -> None:
    cuts = sorted({0, len(ids), *data.draw(st.lists(st.integers(0, len(ids)), max_size=8))})
    output = OutputFilter(stops, tokenizer(), want_text=True)
    pieces = [output.feed(ids[a:b]) for a, b in pairwise(cuts)] + [output.finish()]
    shown = [token for piece in pieces for token in piece.token_ids]
    expected = by_the_rules(ids, stops)
    assert (shown, "".join(piece.text for piece in pieces), output.stopped) == expected
    position = 0
    for piece in pieces:
        assert piece.first_index == position
        position += len(piece.token_ids)
    without_text = OutputFilter(stops, tokenizer(), want_text=False)
    assert run(without_text, ids)[:2] == (expected[0], "")
