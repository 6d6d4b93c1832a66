"""What is watched of a server from outside while it is soaked: does health answer in time, does memory grow.

    python tests/soak_watch.py probe SERVER CONTROL PID  asks both until its input ends; one JSON line each time
    python tests/soak_watch.py control                   a server of health alone; prints its address

The probe is a process of its own.  Before each question it says how much too late it woke up, and it asks a second
server, the control, which does nothing else in the world: what the control takes, at the same time, is the machine's
and the probe's own lag.  A machine with more work than cores makes a busy server wait where an idle one is let in at
once: so the probe also reads how long the server's threads stood ready without a core while they answered (Linux's
schedstat).  Memory is read from /proc too.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

EVERY_S = 0.05
LIMIT_MS = 50.0
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Probe:
    """One question to each."""

    at_s: float  # of the monotonic clock, which all processes share
    late_ms: float  # the probe woke up so much after it wanted to
    server_ms: float
    control_ms: float
    ready_ms: float  # of server_ms, what threads of the server were ready and had no core, all together
    is_serving: bool

    @property
    def own_ms(self) -> float:
        """What the server has no part in."""
        return max(self.late_ms, self.control_ms, self.ready_ms)


def read_probes(lines: Iterable[str]) -> list[Probe]:
    return [Probe(**json.loads(line)) for line in lines if line.endswith("\n")]


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# ---- memory


@dataclass(frozen=True, slots=True)
class Memory:
    """A process at one time."""

    at_s: float
    resident_mib: float
    num_files: int
    num_threads: int

    @classmethod
    def of(cls, pid: int) -> Self:
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
        )
        num_files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        resident_kib = int(status["VmRSS"].split()[0])
        return cls(time.monotonic(), resident_kib / 1024, num_files, int(status["Threads"]))


@dataclass(frozen=True, slots=True)
class Slope:
    """A line through samples: growth per hour, and its 95% confidence interval."""

    per_hour: float
    low: float
    high: float

    @classmethod
    def through(cls, seconds: Sequence[float], values: Sequence[float]) -> Self:
        """The median of the slopes of all pairs (Theil and Sen), which a burst of memory here and there does not turn;
        the interval by Kendall's variance, wider where neighbouring residuals are alike."""
        n, points = len(values), list(zip(seconds, values, strict=True))
        slopes = sorted(3600 * (v - u) / (t - s) for (s, u), (t, v) in itertools.combinations(points, 2))
        slope = statistics.median(slopes)
        bare = [v - slope / 3600 * s for s, v in points]
        residuals = [value - statistics.fmean(bare) for value in bare]
        spread = sum(r * r for r in residuals)
        alike = max(0.0, sum(a * b for a, b in itertools.pairwise(residuals)) / spread) if spread else 0.0
        variance = n * (n - 1) * (2 * n + 5) / 18 * (1 + alike) / (1 - alike)
        reach = statistics.NormalDist().inv_cdf(0.975) * math.sqrt(variance)
        first, last = int((len(slopes) - reach) / 2), int((len(slopes) + reach) / 2) + 1
        return cls(slope, slopes[max(0, first)], slopes[min(len(slopes) - 1, last)])

    def __str__(self) -> str:
        return f"{self.per_hour:+.1f} MiB/hour ({self.low:+.1f} to {self.high:+.1f})"


# ---- the two processes


def _ready_ns(pid: str) -> int:
    """How long threads of a process have been ready without a core; 0 where the kernel does not say."""
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            total += int(path.read_text().split()[1])
    return total


def _probes(server: str, control: str, pid: str) -> Iterator[Probe]:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from tinyloop_service.rpc.health import READY_SERVICE

    request = health_pb2.HealthCheckRequest(service=READY_SERVICE)
    stubs = [health_pb2_grpc.HealthStub(grpc.insecure_channel(address)) for address in (server, control)]
    for stub in stubs:
        stub.Check(request, timeout=_TIMEOUT_S)  # the connection stands
    wanted_s = time.monotonic()
    while True:
        wanted_s = max(wanted_s + EVERY_S, time.monotonic())
        time.sleep(max(0.0, wanted_s - time.monotonic()))
        late_s, ready_ns = time.monotonic() - wanted_s, _ready_ns(pid)
        began_s = time.monotonic()
        answer = stubs[0].Check(request, timeout=_TIMEOUT_S)
        answered_s = time.monotonic()
        ready_ns, asked_s = _ready_ns(pid) - ready_ns, time.monotonic()
        stubs[1].Check(request, timeout=_TIMEOUT_S)
        controlled_s = time.monotonic()
        yield Probe(
            began_s,
            1000 * late_s,
            1000 * (answered_s - began_s),
            1000 * (controlled_s - asked_s),
            ready_ns / 1e6,
            answer.status == health_pb2.HealthCheckResponse.SERVING,
        )


def _probe(server: str, control: str, pid: str) -> None:
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    for probe in _probes(server, control, pid):
        print(json.dumps({name: getattr(probe, name) for name in Probe.__slots__}), flush=True)
        if ended.is_set():
            return


async def _control() -> None:
    from tinyloop_service.rpc.addresses import listen
    from tinyloop_service.rpc.health import Health
    from tinyloop_service.rpc.server import make_health_server

    health = Health()
    health.set_ready(True)
    server = make_health_server(health)
    print(listen(server, "127.0.0.1:0", "health_listen"), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    if sys.argv[1:2] == ["probe"]:
        _probe(*sys.argv[2:])
    else:
        asyncio.run(_control())
