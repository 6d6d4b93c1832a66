"""A workload: which prompts are alike, how long everything is, and what callers do, as a small TOML file.

    about = "What it stands for"        content = "ids"             # or "text": passages of the demo's corpus
    prefixes = 4                        zipf = 1.0                  # popularity ~ 1 / rank**zipf; 0: all alike
    prefix_len = 1024                   suffix_len = [16, 64]       # tokens: fixed, or uniform, both ends included
    output_len = {median = 32, sigma = 0.7, most = 128}             # or log-normal, cut at `most`
    requests_per_prefix = 16            # dealt out exactly, shuffled, again and again; in place of drawing by zipf
    temperature = 0.7                   cold_share = 0.1            # of requests with a prefix of their own, not kept
    cancel_rate = 0.5                   # of requests whose caller hangs up at a uniformly drawn point of the output
    ttl_s = 2.0                         # prefixes expire so long after they were made; who finds one gone remakes it
    builds = 1                          build_len = 4096            # further prefixes, built while the requests run
    expected_errors = ["QUEUE_FULL"]    # reasons that belong to it

Everything but `about`, `prefixes` and the three lengths may be left out.  In: a file, or the name of one that ships in
`workloads/`.  Out: a frozen `Workload`; a wrong key or value is one error that names it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from tinyloop_service.errors import InvalidArgument

FOLDER = Path(__file__).with_name("workloads")
MOST = 10**7  # of any number


@dataclass(frozen=True, slots=True)
class Length:
    """In tokens, from `low` to `high`: uniform, or log-normal around `median`."""

    low: int
    high: int
    median: float | None = None
    sigma: float = 0.0

    @property
    def middle(self) -> int:
        """What a typical one is."""
        return round(self.median) if self.median is not None else (self.low + self.high) // 2

    def scaled(self, factor: float) -> Length:
        """At least one token stays of one that has any."""
        low, high = (min(length, max(1, int(length * factor))) for length in (self.low, self.high))
        median = None if self.median is None else max(1.0, self.median * factor)
        return replace(self, low=low, high=high, median=median)

    def as_data(self) -> Any:
        """As a file has it."""
        if self.median is not None:
            return {"median": self.median, "sigma": self.sigma, "most": self.high}
        return self.low if self.low == self.high else [self.low, self.high]


@dataclass(frozen=True, slots=True)
class Workload:
    """See above; `name` is the file's."""

    name: str
    about: str
    prefixes: int
    prefix_len: Length
    suffix_len: Length
    output_len: Length
    content: str = "ids"
    zipf: float = 0.0
    requests_per_prefix: int | None = None
    temperature: float = 0.0
    cold_share: float = 0.0
    cancel_rate: float = 0.0
    ttl_s: float | None = None
    builds: int = 0
    build_len: int = 0
    expected_errors: tuple[str, ...] = field(default=())

    @property
    def most_tokens(self) -> int:
        """Of one request, prompt and output."""
        return self.prefix_len.high + self.suffix_len.high + self.output_len.high

    def scaled(self, max_seq_len: int) -> Workload:
        """With lengths cut by one factor where the longest request exceeds what the model takes.

        Lengths of text are about so many tokens: a tenth is left for what it may be more.
        """
        room = max_seq_len if self.content == "ids" else max_seq_len * 9 // 10
        factor = min(1.0, room / self.most_tokens)
        lengths = (self.prefix_len, self.suffix_len, self.output_len)
        prefix, suffix, output = (length.scaled(factor) if factor < 1 else length for length in lengths)
        build_len = min(self.build_len, max_seq_len - 1)
        return replace(self, prefix_len=prefix, suffix_len=suffix, output_len=output, build_len=build_len)

    def as_data(self) -> dict[str, Any]:
        """As its file has it; what is left out there is left out here."""
        data: dict[str, Any] = {"name": self.name}
        for each in fields(self)[1:]:
            value = getattr(self, each.name)
            if value != each.default:
                data[each.name] = value.as_data() if isinstance(value, Length) else value
        return data | ({"expected_errors": list(self.expected_errors)} if self.expected_errors else {})


def shipped() -> tuple[str, ...]:
    """Names of the workloads that come with TinyLoop."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def read_workload(name_or_path: str, changes: Mapping[str, Any] | None = None) -> Workload:
    """The file of that name or path; `changes` replace its keys.  Raises InvalidArgument, OSError."""
    path = FOLDER / f"{name_or_path}.toml" if name_or_path in shipped() else Path(name_or_path)
    if not path.exists():
        names = ", ".join(shipped())
        raise InvalidArgument("workload", f"{name_or_path!r} is neither a file nor one of {names}")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument("workload", f"{path} is no TOML: {error}") from None
    try:
        return parse_workload(path.stem, {**data, **(changes or {})})
    except InvalidArgument as error:
        raise InvalidArgument(error.field, f"{error.description} (workload {path.stem})") from None


def parse_workload(name: str, data: Mapping[str, Any]) -> Workload:
    """Raises InvalidArgument that names the key."""
    if unknown := sorted(data.keys() - _READERS.keys()):
        raise InvalidArgument(unknown[0], f"is no key of a workload; they are {', '.join(_READERS)}")
    if missing := [key for key in _REQUIRED if key not in data]:
        raise InvalidArgument(missing[0], "is missing")
    workload = Workload(name=name, **{key: _READERS[key](key, value) for key, value in data.items()})
    _check_together(workload)
    return workload


def _check_together(workload: Workload) -> None:
    if workload.requests_per_prefix is not None and workload.zipf:
        raise InvalidArgument("requests_per_prefix", "deals prefixes out, zipf draws them; leave one out")
    if workload.prefixes * (workload.requests_per_prefix or 1) > MOST:
        raise InvalidArgument("requests_per_prefix", f"times prefixes is more than {MOST}")
    if (workload.builds == 0) != (workload.build_len == 0):
        raise InvalidArgument("builds", "and build_len go together; give both, or neither")


def _text(key: str, value: Any) -> str:
    return value if isinstance(value, str) and value else _refuse(key, value, "text")


def _choice(key: str, value: Any) -> str:
    return str(value) if value in ("ids", "text") else _refuse(key, value, "ids or text")


def _integer(low: int) -> Callable[[str, Any], int]:
    def read(key: str, value: Any) -> int:
        fits = isinstance(value, int) and not isinstance(value, bool) and low <= value <= MOST
        return int(value) if fits else _refuse(key, value, f"an integer of at least {low}")

    return read


def _number(low: float, high: float, expected: str, *, above: bool = False) -> Callable[[str, Any], float]:
    def read(key: str, value: Any) -> float:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        return float(value) if fits and not (above and value == low) else _refuse(key, value, expected)

    return read


def _length(low: int) -> Callable[[str, Any], Length]:
    expected = f"tokens, at least {low}: a number, [least, most], or {{median, sigma, most}}"

    def read(key: str, value: Any) -> Length:
        match value:
            case int() if low <= value <= MOST and not isinstance(value, bool):
                return Length(value, value)
            case [int(least), int(most)] if low <= least <= most <= MOST and bool not in map(type, value):
                return Length(least, most)
            case {"median": int() | float() as median, "sigma": int() | float() as sigma, "most": int(most)} if (
                len(value) == 3 and max(low, 1) <= median <= most <= MOST and 0 < sigma <= 3
            ):
                return Length(low, most, float(median), float(sigma))
        return _refuse(key, value, expected)

    return read


def _reasons(key: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return tuple(value)
    return _refuse(key, value, "a list of reasons, as in docs/api.md's table of errors")


def _refuse(key: str, value: Any, expected: str) -> NoReturn:
    raise InvalidArgument(key, f"is {value!r}, expected {expected}")


_SHARE = _number(0, 1, "a share, 0 to 1")
_READERS: dict[str, Callable[[str, Any], Any]] = {
    "about": _text,
    "prefixes": _integer(1),
    "prefix_len": _length(1),
    "suffix_len": _length(0),
    "output_len": _length(1),
    "content": _choice,
    "zipf": _number(0, 10, "an exponent, 0 to 10"),
    "requests_per_prefix": _integer(1),
    "temperature": _number(0, 100, "0 to 100"),
    "cold_share": _SHARE,
    "cancel_rate": _SHARE,
    "ttl_s": _number(0, MOST, "seconds above 0", above=True),
    "builds": _integer(1),
    "build_len": _integer(1),
    "expected_errors": _reasons,
}
_REQUIRED = ("about", "prefixes", "prefix_len", "suffix_len", "output_len")
