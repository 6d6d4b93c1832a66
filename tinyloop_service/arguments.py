"""What a caller may write, checked once for every way in: `Model`, the clients and the server.

In: Python values as a user wrote them, or as `rpc/convert.py` read them off the wire.  Out: the frozen values of
`types.py`.  Every refusal is InvalidArgument and names the field.
This file refuses to know what depends on a server's state: names, loops of a prefix, memory.
What depends on the model (vocabulary, depth) is checked where `vocab_size` or `max_loops` is given; a remote client
leaves that to the server.  Standard library only: arrays are read through `ndim` and `tolist`.
"""

from __future__ import annotations

import math
import operator
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from tinyloop_service.errors import InvalidArgument
from tinyloop_service.types import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    GenerationRequest,
    Sampling,
    Stops,
    TokenIds,
)

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
UINT64_MAX = 2**64 - 1
MAX_BIAS = 1e6  # addend to a logit, either sign
MIN_PENALTY, MAX_PENALTY = 1e-3, 1e3
MAX_TEMPERATURE = 1e6
_TEMPERATURES = f"0 to {MAX_TEMPERATURE:.0f}"
_PENALTIES = f"{MIN_PENALTY} to {MAX_PENALTY}"
_BIASES = f"a finite number from {-MAX_BIAS:.0f} to {MAX_BIAS:.0f}"
MAX_STOPS = 64  # stop sequences of one request
MAX_STOP_LEN = 1024  # ids or characters of one stop sequence
MAX_TTL_NS = 10 * 365 * 86_400 * 10**9  # ten years

_TEXTS = (str, bytes)
_NO_NUMBERS = (bool, *_TEXTS)  # although `float` takes them
_NO_SEQUENCES = (*_TEXTS, Mapping, set, frozenset)  # although they can be iterated
PREFIX_ID = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?")


class Array(Protocol):
    """Anything like a one-dimensional NumPy array or a torch tensor on the CPU."""

    @property
    def ndim(self) -> int: ...

    def tolist(self) -> list[int]: ...


Tokens = Sequence[int] | Array
Prompt = str | Tokens
Stop = str | Tokens


@dataclass(frozen=True, slots=True)
class Parameters:
    """How to generate: everything of a request but its prompt and its prefix."""

    max_tokens: int
    loops: int | None  # None: the prefix's, else the model's default
    cache_window: int | None  # None or 0: the prefix's; else narrows it
    sampling: Sampling
    stops: Stops
    n: int

    def request(
        self,
        tokens: TokenIds,
        *,
        tenant: str = "",
        prefix: str | None = None,
        prefix_uid: str | None = None,
        want_text: bool,
    ) -> GenerationRequest:
        """All of a request: `tokens` from its prefix, or as its whole prompt."""
        return GenerationRequest(
            tokens=tokens,
            max_tokens=self.max_tokens,
            tenant=tenant,
            prefix=prefix,
            prefix_uid=prefix_uid,
            loops=self.loops,
            cache_window=self.cache_window,
            sampling=self.sampling,
            stops=self.stops,
            n=self.n,
            want_text=want_text,
        )


def integer(value: object, field: str, low: int, high: int) -> int:
    """`value` as an int in low…high; booleans and floats are refused."""
    if isinstance(value, bool):
        raise InvalidArgument(field, f"is {value}, expected an integer")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgument(field, f"is {_short(value)}, expected an integer") from None
    if not low <= number <= high:
        raise InvalidArgument(field, f"is {_short(number)}, expected {low} to {high}")
    return number


def number(value: object, field: str, expected: str, low: float, high: float, *, above: bool = False) -> float:
    """`value` as a finite float in low…high (`above`: low itself is refused)."""
    if isinstance(value, _NO_NUMBERS):
        raise InvalidArgument(field, f"is {_short(value)}, expected {expected}")
    try:
        result = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument(field, f"is {_short(value)}, expected {expected}") from None
    if not (math.isfinite(result) and low <= result <= high) or (above and result == low):
        raise InvalidArgument(field, f"is {result!r}, expected {expected}")
    return result


def token_ids(value: object, field: str, *, vocab_size: int | None = None) -> TokenIds:
    """A one-dimensional sequence or array of ids 0 … vocab_size−1, copied.  May be empty."""
    ndim = getattr(value, "ndim", 1)
    if ndim != 1:
        raise InvalidArgument(field, f"has {ndim} dimensions, expected one")
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, _NO_SEQUENCES) or not isinstance(value, Iterable):
        raise InvalidArgument(field, f"is {_short(value)}, expected a sequence of token ids")
    items = list(value)
    plain = all(type(item) is int for item in items)
    ids = tuple(items) if plain else tuple(_index(item, f"{field}[{i}]") for i, item in enumerate(items))
    check_ids(ids, field, vocab_size=vocab_size)
    return ids


def check_ids(ids: Sequence[int], field: str, *, vocab_size: int | None = None) -> None:
    """Refuse the first id outside 0 … vocab_size−1 (without a vocabulary: outside int32)."""
    top = INT32_MAX if vocab_size is None else vocab_size - 1
    if ids and (min(ids) < 0 or max(ids) > top):
        at = next(i for i, token in enumerate(ids) if not 0 <= token <= top)
        raise InvalidArgument(f"{field}[{at}]", f"is {ids[at]}, expected a token id 0 to {top}")


def prompt(value: object, field: str = "prompt", *, vocab_size: int | None = None) -> str | TokenIds:
    """Text or ids, at least one."""
    result = suffix(value, field, vocab_size=vocab_size)
    if not result:
        raise InvalidArgument(field, "is empty, expected at least one token")
    return result


def suffix(value: object, field: str = "suffix", *, vocab_size: int | None = None) -> str | TokenIds:
    """Text or ids; may be empty."""
    return text(value, field) if isinstance(value, str) else token_ids(value, field, vocab_size=vocab_size)


def flag(value: object, field: str) -> bool:
    """True or False, and nothing that merely counts as one."""
    if not isinstance(value, bool):
        raise InvalidArgument(field, f"is {_short(value)}, expected True or False")
    return value


def text(value: object, field: str) -> str:
    """Text that UTF-8 can carry."""
    if not isinstance(value, str):
        raise InvalidArgument(field, f"is {_short(value)}, expected text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(field, "holds a lone surrogate, expected text that UTF-8 can encode") from None
    return value


def prefix_id(value: object, field: str = "prefix_id") -> str:
    """A bare prefix id, as in `prefixes/{id}`."""
    if not isinstance(value, str) or not PREFIX_ID.fullmatch(value):
        raise InvalidArgument(
            field, f"is {_short(value)}, expected 1 to 63 of a-z 0-9 . _ - that begin and end with a letter or digit"
        )
    return value


def ttl_ns(value: object, field: str = "ttl") -> int | None:
    """Seconds or a timedelta, above zero and up to ten years; None: never expires."""
    if value is None:
        return None
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    limit = MAX_TTL_NS / 1e9
    return round(number(seconds, field, f"seconds above 0, up to {limit:.0f}", 0.0, limit, above=True) * 1e9)


def loops(value: object, field: str = "loops", *, max_loops: int | None = None) -> int | None:
    return None if value is None else integer(value, field, 1, max_loops or INT32_MAX)


def cache_window(value: object, field: str = "cache_window") -> int | None:
    return None if value is None else integer(value, field, 0, INT32_MAX)


def seed(value: object, field: str = "seed") -> int:
    """Any uint64; None: a random one."""
    return secrets.randbits(64) if value is None else integer(value, field, 0, UINT64_MAX)


def stops(
    stop_sequences: object = (),
    stop_token_ids: object = (),
    ignore_eos: bool = False,
    *,
    vocab_size: int | None = None,
) -> Stops:
    """Stops from a list whose items are strings or id sequences, and single ids in short form."""
    field = "stop_sequences"
    is_scalar = isinstance(stop_sequences, _TEXTS) or getattr(stop_sequences, "ndim", 1) == 0
    if is_scalar or not isinstance(stop_sequences, Iterable):
        raise InvalidArgument(field, f"is {_short(stop_sequences)}, expected a list of strings or id sequences")
    strings: list[str] = []
    sequences: list[TokenIds] = []
    for i, item in enumerate(stop_sequences):
        at = f"{field}[{i}]"
        if isinstance(item, int):
            raise InvalidArgument(at, f"is the number {item}, expected a string or id sequence; or use stop_token_ids")
        stop = prompt(item, at, vocab_size=vocab_size)
        check_stop_len(len(stop), at)
        strings.append(stop) if isinstance(stop, str) else sequences.append(stop)
    singles = token_ids(stop_token_ids, "stop_token_ids", vocab_size=vocab_size)
    check_num_stops(len(strings) + len(sequences) + len(singles))
    return Stops((*sequences, *((token,) for token in singles)), tuple(strings), flag(ignore_eos, "ignore_eos"))


def check_num_stops(total: int) -> None:
    """Sequences and single ids of one request together."""
    if total > MAX_STOPS:
        raise InvalidArgument("stop_sequences", f"{total} stops are given, expected at most {MAX_STOPS}")


def check_stop_len(length: int, field: str) -> None:
    if length > MAX_STOP_LEN:
        raise InvalidArgument(field, f"has {length} elements, expected at most {MAX_STOP_LEN}")


def sampling(
    temperature: object = 0.0,
    top_k: object = 50,
    top_p: object = 1.0,
    min_p: object = 0.0,
    repetition_penalty: object = 1.0,
    logit_bias: Mapping[int, float] | None = None,
    logprobs: object = 0,
    seed_value: object = None,
    *,
    vocab_size: int | None = None,
) -> Sampling:
    """Sampling within its bounds; without a seed one is drawn."""
    return Sampling(
        temperature=number(temperature, "temperature", _TEMPERATURES, 0.0, MAX_TEMPERATURE),
        top_k=integer(top_k, "top_k", 0, INT32_MAX),
        top_p=number(top_p, "top_p", "above 0, up to 1", 0.0, 1.0, above=True),
        min_p=number(min_p, "min_p", "0 to 1", 0.0, 1.0),
        repetition_penalty=number(repetition_penalty, "repetition_penalty", _PENALTIES, MIN_PENALTY, MAX_PENALTY),
        logit_bias=() if logit_bias is None else _logit_bias(logit_bias, "logit_bias", vocab_size),
        logprobs=integer(logprobs, "logprobs", 0, MAX_LOGPROBS),
        seed=seed(seed_value),
    )


def parameters(
    max_tokens: object = 32,
    loops: object = None,
    temperature: object = 0.0,
    top_k: object = 50,
    top_p: object = 1.0,
    cache_window: object = None,
    repetition_penalty: object = 1.0,
    stop_sequences: object = (),
    *,
    seed: object = None,
    min_p: object = 0.0,
    ignore_eos: bool = False,
    stop_token_ids: object = (),
    logit_bias: Mapping[int, float] | None = None,
    logprobs: object = 0,
    n: object = 1,
    vocab_size: int | None = None,
    max_loops: int | None = None,
) -> Parameters:
    """The keyword arguments that every generating method of `Model` and the clients shares, in its order."""
    return Parameters(
        max_tokens=integer(max_tokens, "max_tokens", 1, INT64_MAX),
        loops=_loops(loops, max_loops=max_loops),
        cache_window=_cache_window(cache_window),
        sampling=sampling(
            temperature, top_k, top_p, min_p, repetition_penalty, logit_bias, logprobs, seed, vocab_size=vocab_size
        ),
        stops=stops(stop_sequences, stop_token_ids, ignore_eos, vocab_size=vocab_size),
        n=integer(n, "n", 1, MAX_CHOICES),
    )


_loops, _cache_window = loops, cache_window  # `parameters` has arguments of the same names


def _logit_bias(bias: object, field: str, vocab_size: int | None) -> tuple[tuple[int, float], ...]:
    if not isinstance(bias, Mapping):
        raise InvalidArgument(field, f"is {_short(bias)}, expected a mapping from token id to addend")
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidArgument(field, f"has {len(bias)} entries, expected at most {MAX_LOGIT_BIAS}")
    top = INT32_MAX if vocab_size is None else vocab_size - 1
    entries: list[tuple[int, float]] = []
    for token, addend in bias.items():
        at = f"{field}[{_short(token)}]"
        entries.append((integer(token, at, 0, top), number(addend, at, _BIASES, -MAX_BIAS, MAX_BIAS)))
    return tuple(sorted(entries))


def _index(item: object, field: str) -> int:
    if isinstance(item, bool):
        raise InvalidArgument(field, f"is {item}, expected a token id")
    try:
        return operator.index(item)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgument(field, f"is {_short(item)}, expected a token id") from None


def _short(value: object) -> str:
    """repr, cut: a message never carries a whole prompt."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return "a huge integer"
    shown = repr(value) if isinstance(value, str | bytes | int | float | None) else type(value).__name__
    return shown if len(shown) <= 80 else f"{shown[:77]}…"
