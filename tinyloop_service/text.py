"""Between text and tokens: the tokenizer, incremental decoding, and stop sequences.

In: the bytes of a Hugging Face tokenizer.json; sampled ids.  Out: ids of a prompt; the ids and the text that may be
shown, as valid UTF-8.  Decoding joins the bytes of tokens, so the text of a stream is the text of its parts, whatever
came before.  Refuses to know about EOS (the caller feeds what precedes it), lengths, requests and streams.

What one choice has produced, when something is held:

    tokens   shown ─────────────────────┤ held: might begin an id stop, or not wholly before held text ┤
    text     shown ────────────────────────────────┤ held: might begin a stop, or of a held token's id ┤ torn character
"""

from __future__ import annotations

import codecs
import json
import re
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tokenizers

from tinyloop_service.errors import InvalidArgument, ModelFileError
from tinyloop_service.types import Stops, TokenIds, TokenLogprob

_SHORT = 500  # characters, encoded in a quarter of a millisecond
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
_REPLACEMENT = "\ufffd"  # what a character of which bytes are missing is shown as


class Tokenizer:
    """Encoding by the `tokenizers` library, decoding byte by byte.  Safe to share between threads."""

    def __init__(self, tokenizer_json: bytes, bos_token_id: int | None = None) -> None:
        """Raises ModelFileError where the bytes are no tokenizer.json, or of a kind whose tokens are not bytes."""
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
            parsed = json.loads(tokenizer_json)
        except Exception as error:  # the library raises a bare Exception
            said = " ".join(str(error).split())[:200]
            raise ModelFileError(f"the tokenizer in the model file cannot be read: {said}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._bytes = _bytes_by_id(self._tokenizer, set(_types(parsed.get("decoder"))))
        self.bos_token_id = bos_token_id

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self._bytes, default=-1) + 1

    def encode(self, text: str, *, bos: bool) -> TokenIds:
        """Ids of `text`; `bos` puts the model's BOS, if it has one, before them.

        A prefix and a suffix are encoded on their own: the ids of two halves need not be those of the whole.
        Other threads run meanwhile, but for a short text, where giving them the turn would cost more.
        """
        if not text.isascii():
            _check_unicode(text)
        if len(text) <= _SHORT:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        else:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)  # gives the GIL away
        ids = tuple(encoding.ids)
        return (self.bos_token_id, *ids) if bos and self.bos_token_id is not None else ids

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the text; nothing for special tokens and ids that the tokenizer does not have."""
        return self._bytes.get(token, b"")

    def join(self, ids: Sequence[int]) -> bytes:
        """What tokens add to the text."""
        table, end = self._bytes, len(self._bytes)
        return b"".join([table[token] if 0 <= token < end else b"" for token in ids])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bytes that form no character become U+FFFD."""
        return self.join(ids).decode(errors="replace")


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument("text", f"has a lone surrogate at {error.start}, expected valid Unicode") from None


def _types(decoder: Any) -> Iterator[str]:
    """Types of a decoder and of its parts, where it is a sequence of some."""
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for part in decoder.get("decoders", ()):
            yield from _types(part)


def _bytes_by_id(tokenizer: tokenizers.Tokenizer, decoder: set[str]) -> dict[int, bytes]:
    """No larger than the file, whatever ids that names."""
    if "ByteLevel" in decoder:
        to_bytes = _byte_level
    elif decoder & {"Metaspace", "ByteFallback"}:
        to_bytes = _metaspace
    else:
        given = ", ".join(map(repr, sorted(decoder))) or "none"
        raise ModelFileError(f"the tokenizer's decoder is {given}, expected ByteLevel, Metaspace or ByteFallback")
    table = {token_id: to_bytes(token) for token, token_id in tokenizer.get_vocab().items()}
    for token_id, added in tokenizer.get_added_tokens_decoder().items():
        table[token_id] = b"" if added.special else added.content.encode()
    return table


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable Latin-1 stands for itself, the rest for U+0100 and on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


def _byte_level(token: str) -> bytes:
    known = all(char in _ALPHABET for char in token)
    return bytes(_ALPHABET[char] for char in token) if known else token.encode()


def _metaspace(token: str) -> bytes:
    """SentencePiece: ▁ is a space, <0x0A> a byte."""
    if _BYTE.fullmatch(token):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


class TextDecoder:
    """Ids in, as they come; whole characters out."""

    __slots__ = ("_decoder", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = _Utf8Decoder("replace")

    @property
    def is_torn(self) -> bool:
        """Are bytes of an unfinished character held?"""
        return bool(self._decoder.getstate()[0])

    def feed(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(self._tokenizer.join(ids))

    def finish(self) -> str:
        """What is held, as U+FFFD; then empty again."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Follows a stream of items (ids, or characters) against several patterns at once; Knuth, Morris, Pratt."""

    __slots__ = ("_borders", "_matched", "_patterns")

    def __init__(self, patterns: Sequence[Sequence[Hashable]]) -> None:
        if not all(patterns):
            raise ValueError("StopMatcher: a pattern is empty, expected at least one item")
        self._patterns = patterns
        self._borders = [_borders(pattern) for pattern in patterns]
        self._matched = [0] * len(patterns)  # of each pattern, how much the stream ends with

    @property
    def held(self) -> int:
        """Items at the end of the stream that might begin a match."""
        return max(self._matched, default=0)

    def feed(self, item: Hashable) -> int:
        """The length of the longest pattern that ends with this item, 0 if none does.  Not to be fed after that."""
        complete = 0
        for i, pattern in enumerate(self._patterns):
            length = self._matched[i]
            while length and pattern[length] != item:
                length = self._borders[i][length - 1]
            length += pattern[length] == item
            self._matched[i] = length
            if length == len(pattern):
                complete = max(complete, length)
        return complete


def _borders(pattern: Sequence[Hashable]) -> list[int]:
    """For each head of the pattern, the longest shorter head that it also ends with."""
    borders, length = [0], 0
    for item in pattern[1:]:
        while length and pattern[length] != item:
            length = borders[length - 1]
        length += pattern[length] == item
        borders.append(length)
    return borders


_NOTHING_STOPS = StopMatcher(())  # which has no state


class Piece(NamedTuple):  # several for each message: a frozen dataclass takes twice as long to make
    """What may be shown now.  `text` need not be that of `token_ids`: either may lag."""

    token_ids: TokenIds = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # parallel to token_ids, or empty
    text: str = ""
    first_index: int = 0  # of token_ids[0] in the choice's output

    def __bool__(self) -> bool:
        return bool(self.token_ids or self.text)


@dataclass(frozen=True, slots=True)
class _Token:
    """A token that is held.  Positions are in characters of the choice's text."""

    id: int
    logprob: TokenLogprob | None
    begin: int  # length of the text before it
    is_torn_before: bool  # an unfinished character stood there
    end: int  # its bytes are in text[:end], once that is whole


class OutputFilter:
    """Decides what of one choice may be shown.  Feed sampled ids up to EOS or length, then `finish`.

    An id stop cuts ids and text before its match.  A string stop cuts the text before its match, and the ids after the
    last token wholly before it.  Of several stops the one that ends first counts; of those that end with the same
    token, the one that leaves less.  How ids are grouped into feeds makes no difference to what is shown in the end.
    """

    def __init__(self, stops: Stops, tokenizer: Tokenizer | None, *, want_text: bool) -> None:
        """`stops.ignore_eos` is the caller's.  Raises InvalidArgument for a string stop without a tokenizer."""
        if stops.strings and tokenizer is None:
            raise InvalidArgument("stop_sequences", "holds text, but the model file has no tokenizer; give token ids")
        self._want_text = want_text and tokenizer is not None
        self._decoder = TextDecoder(tokenizer) if tokenizer and (self._want_text or stops.strings) else None
        self._ids = StopMatcher(stops.token_sequences) if stops.token_sequences else _NOTHING_STOPS
        self._chars = StopMatcher(stops.strings) if stops.strings else _NOTHING_STOPS
        self.can_stop = bool(stops.token_sequences or stops.strings)  # else ids may as well be fed later, together
        self._waits_for_text = bool(stops.strings)
        self._held: deque[_Token] = deque()
        self._text = ""  # decoded, not shown
        self._text_begin = 0  # characters shown
        self._is_over = False
        self.num_ids = 0  # ids shown; once stopped or finished, the length of the output
        self.stopped = False  # a stop was hit; further ids are ignored

    def feed(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> Piece:
        """logprobs: parallel to ids, or empty."""
        if self._is_over:
            return Piece(first_index=self.num_ids)
        if not self.can_stop:
            return self._piece(tuple(ids), tuple(logprobs), self._decoder.feed(ids) if self._decoder else "")
        for i, token in enumerate(ids):
            cut = self._take(token, logprobs[i] if logprobs else None)
            if cut is not None:
                return self._stop(*cut)
        return self._release()

    def finish(self) -> Piece:
        """EOS or length: everything that was held, once."""
        if self._is_over:
            return Piece(first_index=self.num_ids)
        self._is_over = True
        tail = self._decoder.finish() if self._decoder else ""
        return self._show(len(self._held), self._text + tail) if self.can_stop else self._piece((), (), tail)

    def _take(self, token: int, logprob: TokenLogprob | None) -> tuple[int, str] | None:
        """Hold a token; if a stop ends with it, how many held tokens and what held text stay."""
        begin, is_torn = self._text_begin + len(self._text), bool(self._decoder and self._decoder.is_torn)
        new = self._decoder.feed((token,)) if self._decoder else ""
        self._text += new
        end = begin + len(new) + bool(self._decoder and self._decoder.is_torn)
        self._held.append(_Token(token, logprob, begin, is_torn, end))
        id_match, text_cut = self._ids.feed(token), self._match_text(new, begin)
        if not id_match and text_cut is None:
            return None
        if id_match:
            first = self._held[-id_match]
            if text_cut is None or text_cut >= first.begin + first.is_torn_before:
                kept_text = self._text[: first.begin - self._text_begin]
                return len(self._held) - id_match, kept_text + _REPLACEMENT * first.is_torn_before
        assert text_cut is not None
        return sum(held.end <= text_cut for held in self._held), self._text[: text_cut - self._text_begin]

    def _match_text(self, new: str, begin: int) -> int | None:
        """Where the first string stop that ends in the new characters begins."""
        if self._waits_for_text:
            for position, char in enumerate(new, begin + 1):
                if length := self._chars.feed(char):
                    return position - length
        return None

    def _release(self) -> Piece:
        """Show what no stop can reach any more."""
        safe_text = self._text_begin + len(self._text) - self._chars.held
        num_decided = len(self._held) - self._ids.held
        if self._ids.held:
            safe_text = min(safe_text, self._held[num_decided].begin)
        if self._waits_for_text:  # ends rise, so these are the first ones
            num_decided = sum(self._held[i].end <= safe_text for i in range(num_decided))
        return self._show(num_decided, self._text[: safe_text - self._text_begin])

    def _stop(self, num_tokens: int, text: str) -> Piece:
        self.stopped = self._is_over = True
        return self._show(num_tokens, text)

    def _show(self, num_tokens: int, text: str) -> Piece:
        self._text = self._text[len(text) :]
        self._text_begin += len(text)
        shown = [self._held.popleft() for _ in range(num_tokens)]
        logprobs = tuple(token.logprob for token in shown if token.logprob is not None)
        return self._piece(tuple(token.id for token in shown), logprobs, text)

    def _piece(self, ids: TokenIds, logprobs: tuple[TokenLogprob, ...], text: str) -> Piece:
        first_index, self.num_ids = self.num_ids, self.num_ids + len(ids)
        return Piece(ids, logprobs, text if self._want_text else "", first_index)
