"""Settings: a few frozen objects with their defaults, each refused when it makes no sense.

Nobody else reads the environment: `Settings.from_environment(os.environ)` takes every field from the variable
TINYLOOP_<FIELD>, for example TINYLOOP_KV_MEMORY=2GiB; three switches may say the cache mode in place of its variable.
Times are nanoseconds (`_ns`) or seconds (`_s`), sizes are bytes, shares are fractions of one.
"""

from __future__ import annotations

import ipaddress
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Self, Union, get_args, get_origin, get_type_hints

from tinyloop_service.errors import InvalidArgument
from tinyloop_service.types import CacheMode

MOST_PREFIXES = 2048  # in memory, of any engine: what the CUDA engine has tables for
MOST_THREADS = 1024  # more than machines have cores
_PREFIX = "TINYLOOP_"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_CACHE_MODE = "TINYLOOP_CACHE_MODE"
_KV_INT8, _KV_H_MODE, _KV_INT4 = _CACHE_SWITCHES = ("TINYLOOP_KV_INT8", "TINYLOOP_KV_H_MODE", "TINYLOOP_KV_INT4")
_MODES_OF_SWITCHES = {  # which of them are on → the mode they mean; other sets contradict themselves
    frozenset({_KV_INT8}): CacheMode.INT8,
    frozenset({_KV_H_MODE}): CacheMode.H_FP16,
    frozenset({_KV_H_MODE, _KV_INT8}): CacheMode.H_INT8,
    frozenset({_KV_H_MODE, _KV_INT4}): CacheMode.H_INT4,
}
_TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
MOST_OF_GRPC = 2**31 - 1  # bytes, and milliseconds, of its options


def _require(condition: bool, field: str, message: str, *others: str) -> None:
    """`others`: further fields that the message names."""
    if not condition:
        raise InvalidArgument(field, message, *others)


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """How the scheduler shares one engine among many callers."""

    max_queue: int = 1024  # requests and builds that may wait; beyond it QueueFull
    max_prefixes: int = MOST_PREFIXES  # with pages in memory; beyond it the least recently used are evicted
    pin_fraction: float = 0.5  # of the pages that pinned prefixes and their parents may take
    prefill_share: float = 0.5  # of a plan's time that prompt tokens may take while rows decode
    steps_per_plan: int = 8  # decode steps in one plan while nothing waits, at most the engine's max_steps
    plans_in_flight: int = 2  # the one that runs and those queued behind it, so that the device never waits
    stream_interval_ns: int = 10_000_000  # between two pieces of a stream; tokens that come sooner leave together
    aging_ns: int = 500_000_000  # who waits longer for room is not overtaken any more
    max_overtaken: int = 8  # waiting requests without room that a plan looks past for one that fits

    def __post_init__(self) -> None:
        _require(self.max_queue >= 1, "max_queue", f"{self.max_queue} given, at least 1 expected")
        most = MOST_PREFIXES
        _require(1 <= self.max_prefixes <= most, "max_prefixes", f"{self.max_prefixes} given, 1 to {most} expected")
        _require(0.0 <= self.pin_fraction <= 1.0, "pin_fraction", f"{self.pin_fraction} given, 0 to 1 expected")
        _require(
            0.0 < self.prefill_share < 1.0, "prefill_share", f"{self.prefill_share} given, above 0, below 1 expected"
        )
        _require(self.steps_per_plan >= 1, "steps_per_plan", f"{self.steps_per_plan} given, at least 1 expected")
        _require(1 <= self.plans_in_flight <= 2, "plans_in_flight", f"{self.plans_in_flight} given, 1 or 2 expected")
        interval_ns = self.stream_interval_ns
        _require(interval_ns >= 0, "stream_interval_ns", f"{interval_ns} given, at least 0 expected")
        _require(self.aging_ns >= 0, "aging_ns", f"{self.aging_ns} given, at least 0 expected")
        _require(self.max_overtaken >= 0, "max_overtaken", f"{self.max_overtaken} given, at least 0 expected")


class EngineKind(StrEnum):
    AUTO = "auto"  # CUDA where this machine and the model allow it, else the CPU
    CPU = "cpu"
    CUDA = "cuda"


class LogFormat(StrEnum):
    JSON = "json"  # one object a line
    CONSOLE = "console"  # for people


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What computes, and with how much."""

    engine: str = EngineKind.AUTO
    kv_memory: int | None = None  # bytes for state; None: what a GPU has free, else a quarter of memory up to 2 GiB
    cache_mode: CacheMode = CacheMode.FP16  # how the state of a token is stored
    threads: int | None = None  # of the CPU engine; None: one per core, one for a small model
    accuracy_level: int = 4  # of INT4 products on the CPU: 0 float32 activations, 4 int8 activations
    experimental_fp16_body: bool = False  # INT4 weights of the blocks are made fp16 at load
    precompiled_kernels: str | None = None  # directory of compiled CUDA kernels to look in before compiling
    debug: bool = False  # poison pages that are given back, check invariants

    def __post_init__(self) -> None:
        kinds = ", ".join(EngineKind)
        _require(self.engine in list(EngineKind), "engine", f"{self.engine!r} given, one of {kinds} expected")
        _require(self.kv_memory is None or self.kv_memory > 0, "kv_memory", f"{self.kv_memory} given, bytes expected")
        threads, most = self.threads, MOST_THREADS
        _require(threads is None or 1 <= threads <= most, "threads", f"{threads} given, 1 to {most} expected")
        _require(self.accuracy_level in (0, 4), "accuracy_level", f"{self.accuracy_level} given, 0 or 4 expected")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where the server listens and how it ends.  Addresses are HOST:PORT, [IPv6]:PORT or unix:PATH; port 0: any."""

    model: str | None = None  # path of the .tinyloop file; None: the demo model
    listen: str = "127.0.0.1:50051"
    health_listen: str | None = "127.0.0.1:50052"  # None: no health port
    grpc_processes: int | None = None  # that speak gRPC in front of this one; None: 4 beside a GPU with 8 cores, or 0
    tokens_file: str | None = None  # who may call (rpc/tokens.py), read again when it changes; None: everybody
    tls_cert: str | None = (
        None  # PEM file of the server's certificate and chain, read again when it changes; None: plaintext
    )
    tls_key: str | None = None  # PEM file of its key
    tls_client_ca: str | None = None  # PEM file of who signs clients' certificates; None: clients need none
    insecure_any_address: bool = False  # allow addresses beyond loopback although nobody is authenticated
    reflection: bool = False  # let clients list the methods
    replica: str | None = None  # name of this server in responses; None: the host's
    drain_pause_s: float = 0.0  # from "not ready" to refusing, for load balancers to notice
    drain_grace_s: float = 30.0  # for running requests to finish
    max_connection_age_s: float | None = None  # clients reconnect after it, and so see new replicas; None: never
    max_request_bytes: int = 16 * 2**20
    log_level: LogLevel = LogLevel.INFO
    log_format: LogFormat = LogFormat.CONSOLE
    metrics_listen: str | None = None  # where Prometheus reads, by HTTP; None: nowhere
    otlp_endpoint: str | None = None  # where traces go, http(s)://HOST:PORT of an OTLP/gRPC receiver; None: nowhere
    trace_share: float = 1.0  # of the calls whose caller does not say whether to trace them
    slow_request_s: float | None = 30.0  # a call that takes longer is logged as a warning, with its phases

    def __post_init__(self) -> None:
        for name in ("listen", "health_listen", "metrics_listen"):
            address = getattr(self, name)
            if address is not None:
                self._check_address(name, address)
        fronts = self.grpc_processes or 0
        _require(0 <= fronts <= 64, "grpc_processes", f"{fronts} given, 0 to 64 expected")
        is_shared = not fronts or not self.listen.startswith("unix:")
        _require(is_shared, "grpc_processes", f"{fronts} given, which cannot share {self.listen}; listen on a port")
        for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert"), ("tls_client_ca", "tls_cert")):
            is_whole = getattr(self, name) is None or getattr(self, other) is not None
            _require(is_whole, name, f"given without {other}; give both, or neither", other)
        for name in ("drain_pause_s", "drain_grace_s"):
            _require(getattr(self, name) >= 0, name, f"{getattr(self, name)} given, at least 0 expected")
        slow_s, metrics = self.slow_request_s, self.metrics_listen or ""
        _require(slow_s is None or slow_s > 0, "slow_request_s", f"{slow_s} given, above 0 expected, or none")
        _require(not metrics.startswith("unix:"), "metrics_listen", f"{metrics!r} given, HOST:PORT expected")
        _require(0.0 <= self.trace_share <= 1.0, "trace_share", f"{self.trace_share} given, 0 to 1 expected")
        endpoint = self.otlp_endpoint or "http://"
        _require(
            endpoint.startswith(("http://", "https://")),
            "otlp_endpoint",
            f"{endpoint!r} given, http://HOST:PORT or https://HOST:PORT expected",
        )
        age = self.max_connection_age_s
        longest = MOST_OF_GRPC // 1000
        expected = f"above 0 and at most {longest} expected"
        _require(age is None or 0 < age <= longest, "max_connection_age_s", f"{age} given, {expected}")
        size = self.max_request_bytes
        fits = 2**16 <= size <= MOST_OF_GRPC
        _require(fits, "max_request_bytes", f"{size} given, 64KiB or more and less than 2GiB expected")

    def _check_address(self, name: str, address: str) -> None:
        if address.startswith("unix:"):
            return
        host, colon, port = address.rpartition(":")
        is_number = port.isascii() and port.isdigit() and len(port) <= 5
        well_formed = bool(host and colon and is_number and int(port) < 2**16)
        _require(well_formed, name, f"{address!r} given, HOST:PORT expected, for example 127.0.0.1:50051")
        _require(
            self.insecure_any_address or self.knows_callers or _is_loopback(host),
            name,
            f"{address!r} can be reached from other machines and nobody is authenticated; use 127.0.0.1, "
            "or give tokens_file or tls_client_ca, or insecure_any_address if the network keeps strangers out",
            *("tokens_file", "tls_client_ca", "insecure_any_address"),
        )

    @property
    def knows_callers(self) -> bool:
        """Callers have to show a token, or a certificate."""
        return self.tokens_file is not None or self.tls_client_ca is not None


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """As whom the commands that call a server call it, and over what."""

    token: str | None = field(default=None, repr=False)  # the bearer token itself
    token_file: str | None = None  # a file that holds it
    tls: bool = False  # speak TLS and trust the system's roots
    tls_ca: str | None = None  # speak TLS and trust the authorities in this PEM file
    client_cert: str | None = None  # PEM file of a certificate to show
    client_key: str | None = None  # PEM file of its key
    affinity: bool = False  # of several addresses, ask the one that the prefix hashes to

    def __post_init__(self) -> None:
        is_one = not (self.token and self.token_file)
        _require(is_one, "token_file", "given beside token; leave one of them out", "token")
        for name, other in (("client_cert", "client_key"), ("client_key", "client_cert")):
            is_whole = getattr(self, name) is None or getattr(self, other) is not None
            _require(is_whole, name, f"given without {other}; give both, or neither", other)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """As `Settings.from_environment`."""
        settings: Self = _read_group(cls, environment)
        return settings


@dataclass(frozen=True, slots=True)
class NamesSettings:
    """Where named prefixes are remembered, and which there are from the start."""

    registry: str = field(default="memory", repr=False)  # memory, sqlite:////DIR/FILE or redis://…; may hold a password
    prefixes: str | None = None  # path of a file of prefixes that are built and pinned before the server is ready
    snapshot_dir: str | None = None  # directory where state is kept, so that a restart needs no prefill; None: nowhere
    snapshot_bytes: int = 16 * 2**30  # of all files there; beyond it the oldest go

    def __post_init__(self) -> None:
        scheme = self.registry.partition(":")[0]
        well_formed = self.registry == "memory" or self.registry.startswith(("sqlite:///", "redis://", "rediss://"))
        _require(
            well_formed and self.registry != "sqlite:///",
            "registry",
            f"{scheme[:20]!r} given, memory, sqlite:////DIR/FILE, redis://HOST:PORT/DB or rediss://… expected",
        )
        if self.registry.startswith("sqlite:///"):
            path = self.registry.removeprefix("sqlite:///")
            expected = "an absolute one expected, after three slashes: sqlite:////DIR/FILE"
            _require(path.startswith("/"), "registry", f"path {path!r} given, {expected}")
        _require(self.snapshot_bytes > 0, "snapshot_bytes", f"{self.snapshot_bytes} given, above 0 expected")


@dataclass(frozen=True, slots=True)
class Settings:
    """All of a server's settings."""

    engine: EngineSettings = field(default_factory=EngineSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    names: NamesSettings = field(default_factory=NamesSettings)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Defaults, changed by variables TINYLOOP_<FIELD>; an empty value counts as unset.

        Other variables of the prefix are left alone: Kubernetes makes some for a Service named tinyloop.
        Raises InvalidArgument that names the variable.
        """
        environment = _with_cache_mode(environment)
        groups = {part.name: get_type_hints(cls)[part.name] for part in fields(cls)}
        return cls(**{name: _read_group(group, environment) for name, group in groups.items()})


def _with_cache_mode(environment: Mapping[str, str]) -> Mapping[str, str]:
    """`environment` with TINYLOOP_CACHE_MODE as the switches mean it.  Raises InvalidArgument for a contradiction."""
    given = {name: raw for name in _CACHE_SWITCHES if (raw := environment.get(name, "").strip())}
    on = [name for name, raw in given.items() if _parse(raw, bool, name)]
    if not on:
        return environment
    if _KV_INT8 in on and _KV_INT4 in on:
        raise InvalidArgument(_KV_INT4, f"{_KV_INT8} and {_KV_INT4} are both on; leave one of them out")
    mode = _MODES_OF_SWITCHES.get(frozenset(on))
    if mode is None:
        raise InvalidArgument(_KV_INT4, f"on without {_KV_H_MODE}; only h is stored in four bits: set both, or neither")
    named = environment.get(_CACHE_MODE, "").strip()
    if named and named != mode.value:
        switches = " and ".join(on)
        raise InvalidArgument(
            _CACHE_MODE, f"{named!r} given, but {switches} on means {mode.value}; leave one of them out"
        )
    return {**environment, _CACHE_MODE: mode.value}


def _read_group(group: type[Any], environment: Mapping[str, str]) -> Any:
    """An instance of the dataclass `group` from its fields' variables."""
    hints = get_type_hints(group)
    given: dict[str, Any] = {}
    for part in fields(group):
        variable = _PREFIX + part.name.upper()
        if raw := environment.get(variable, "").strip():
            given[part.name] = _parse(raw, hints[part.name], variable)
    return group(**given)


def _parse(raw: str, kind: Any, variable: str) -> object:
    """`raw` as a value of the annotated type `kind`."""
    if get_origin(kind) in (Union, types.UnionType):
        if raw.lower() == "none":
            return None
        kind = next(option for option in get_args(kind) if option is not type(None))
    try:
        if kind is bool:
            return _TRUTH[raw.lower()]
        return parse_integer(raw) if kind is int else kind(raw)
    except (KeyError, ValueError):
        expected = ", ".join(kind) if issubclass(kind, StrEnum) else {bool: "true or false"}.get(kind, kind.__name__)
        raise InvalidArgument(variable, f"{raw!r} given, {expected} expected") from None


def parse_integer(raw: str) -> int:
    """An integer, or a number of bytes with a unit: 2GiB, 512 MB.  Raises ValueError, KeyError for an unknown unit."""
    digits = raw.rstrip("KMGTIBkmgtib ")
    if digits == raw:
        return int(raw)
    try:
        return round(float(digits) * _UNITS[raw[len(digits) :].strip().upper()])
    except OverflowError:
        raise ValueError(f"{raw} is beyond all numbers") from None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
