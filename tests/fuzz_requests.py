"""Every RPC with every kind of value, through the real servicers to the fake engine: no crash, hang or wrong status.

    python tests/fuzz_requests.py [--inputs 100000] [--seed 0]

Requests come from wire_values.py, ten at a time: they meet in the server, some are cancelled on their way, some have a
deadline.  Each ends with what the table of `rpc/status.py` has for its reason, never INTERNAL.  After each ten the
server is idle again, the core's own `check` holds, every page is free or a prefix's, and a plain request gets the
tokens that it always gets; two prefixes are there for the next ten to meet.  The engine is the strict one, which
refuses any plan that it could not carry out.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
from hypothesis import strategies as st

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "rpc")]

from fuzz_rounds import in_rounds, largest_size  # noqa: E402
from rpc_harness import Served, byte_tokenizer, expected_tokens, ids, reason_of, serving  # noqa: E402
from wire_values import IDS, METHODS, Method, requests  # noqa: E402

from tinyloop_service.engine.fake import FAKE_LIMITS, FakeEngine  # noqa: E402
from tinyloop_service.pb import generation_pb2 as g  # noqa: E402
from tinyloop_service.pb import prefix_pb2 as p  # noqa: E402
from tinyloop_service.rpc.status import DETAILS_KEY, TABLE  # noqa: E402
from tinyloop_service.settings import SchedulerSettings  # noqa: E402

AT_ONCE = 10
HANGS_S = 60.0  # whoever waits longer would wait for ever
PROMPT = range(1, 100)
MOST_NAMES, MOST_PINNED = 40, 4  # beyond that all are deleted, as those who made them do not
DOCUMENTED = {(code.name, cls.reason) for cls, code in TABLE.items() if code is not grpc.StatusCode.INTERNAL}
LIMITS = replace(FAKE_LIMITS, num_pages=300, max_rows=16)  # less than what is asked for at once, now and then


@dataclass(frozen=True)
class Call:
    """One request, and what its caller does besides waiting."""

    method: Method
    data: bytes
    cancel_after: int | None  # turns of the event loop
    timeout_s: float | None


@st.composite
def calls(draw: st.DrawFn) -> Call:
    method = draw(st.sampled_from(METHODS))
    cancel_after = draw(st.integers(0, 60)) if draw(st.integers(0, 9)) == 9 else None
    timeout_s = draw(st.sampled_from([1e-4, 1e-3, 5e-3])) if draw(st.integers(0, 19)) == 19 else None
    return Call(method, draw(requests(method)), cancel_after, timeout_s)


batches = st.lists(calls(), min_size=AT_ONCE, max_size=AT_ONCE)


@dataclass
class Fuzzer:
    """A server, what it is sent, and what came of it."""

    served: Served
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)  # by method and status

    async def send(self, batch: list[Call]) -> None:
        """Raises AssertionError for what must not be."""
        async with asyncio.timeout(HANGS_S):
            for call, outcome in zip(batch, await asyncio.gather(*map(self._outcome, batch)), strict=True):
                self.outcomes[call.method.path.rpartition("/")[2], outcome] += 1
            await self.served.settled()
        await self._check()

    async def _outcome(self, call: Call) -> str:
        path = call.method.path
        opened = (self.served.channel.unary_stream if call.method.is_stream else self.served.channel.unary_unary)(path)
        running = opened(call.data, timeout=call.timeout_s)
        cancelling = asyncio.ensure_future(_cancel_after(running, call.cancel_after))
        try:
            await (_read(running, endless=path.endswith("/WatchPrefix")) if call.method.is_stream else running)
            return "OK"
        except grpc.aio.AioRpcError as error:
            return self._status(error, call)
        except asyncio.CancelledError:
            assert call.cancel_after is not None, f"{path} was cancelled by nobody"
            return "CANCELLED"
        finally:
            cancelling.cancel()

    def _status(self, error: grpc.aio.AioRpcError, call: Call) -> str:
        """One that is documented, or that the caller asked for."""
        code = error.code()
        if DETAILS_KEY not in dict(error.trailing_metadata() or ()):
            asked_for = {
                grpc.StatusCode.CANCELLED: call.cancel_after is not None,
                grpc.StatusCode.DEADLINE_EXCEEDED: call.timeout_s is not None,
            }
            assert asked_for.get(code), f"{code} {error.details()!r} has no details"
            return code.name
        found = reason_of(error)
        assert found in DOCUMENTED and error.details(), f"{found} {error.details()!r} for {call}"
        return "/".join(dict.fromkeys(found))

    async def _check(self) -> None:
        served = self.served
        served.scheduler._core.check()
        load = served.scheduler.load()
        assert load.pages_free + load.pages_prefixes == load.pages_total and load.accepting
        plain = g.GenerateRequest(input=ids(1, 2, 3), max_tokens=4, ignore_eos=True)
        answer = await served.generation.GenerateUnary(g.GenerateUnaryRequest(generation=plain))
        assert tuple(answer.choices[0].token_ids) == expected_tokens((1, 2, 3), 4)
        prefixes = (await served.prefixes.ListPrefixes(p.ListPrefixesRequest())).prefixes
        if len(prefixes) > MOST_NAMES or sum(prefix.pinned for prefix in prefixes) > MOST_PINNED:
            for prefix in prefixes:
                with suppress(grpc.aio.AioRpcError):  # expired since
                    await served.prefixes.DeletePrefix(p.DeletePrefixRequest(name=prefix.name))
        for name in IDS[:2]:
            with suppress(grpc.aio.AioRpcError):  # other content has the name
                await served.prefixes.CreatePrefix(p.CreatePrefixRequest(prefix_id=name, input=ids(*PROMPT)))


async def _read(stream: grpc.aio.UnaryStreamCall[bytes, bytes], *, endless: bool) -> None:
    """All of it; of a watch, which may go on as long as nobody builds, the first message."""
    async for _ in stream:
        if endless:
            stream.cancel()
            return


async def _cancel_after(call: grpc.aio.Call, turns: int | None) -> None:
    if turns is not None:
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()


@asynccontextmanager
async def fuzzing() -> AsyncIterator[Fuzzer]:
    scheduler = SchedulerSettings(max_prefixes=12, max_queue=64, pin_fraction=0.3)
    async with serving(FakeEngine(LIMITS, strict=True), scheduler=scheduler, tokenizer=byte_tokenizer()) as served:
        yield Fuzzer(served)


def fuzz(inputs: int, number: int) -> Counter[tuple[str, str]]:
    """What came of `inputs` requests.  Raises what hypothesis found, made as small as it can."""
    with asyncio.Runner() as runner:
        context = fuzzing()
        fuzzer = runner.run(context.__aenter__())
        try:
            in_rounds(inputs // AT_ONCE, number, batches, lambda batch: runner.run(fuzzer.send(batch)))
        finally:
            runner.run(context.__aexit__(None, None, None))
    return fuzzer.outcomes


def main() -> None:
    import structlog

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    given_ = parser.parse_args()
    structlog.configure(processors=[], logger_factory=structlog.ReturnLoggerFactory())
    began_s = time.monotonic()
    outcomes = fuzz(given_.inputs, given_.seed)
    print(f"{outcomes.total()} requests in {time.monotonic() - began_s:.0f} s, none of them ended as it must not")
    print(f"largest size of this process, server and all: {largest_size() / 2**20:.0f} MiB")
    for (method, outcome), count in sorted(outcomes.items()):
        print(f"  {method:14} {outcome:45} {count:7}")


if __name__ == "__main__":
    main()
