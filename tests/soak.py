"""A server of the demo model under mixed load for as long as you like: right answers, no lost page, no growth.

    python tests/soak.py [--minutes 10] [--seed 0] [--workers 24] [--report docs/soak.md]

One `tinyloop serve` process on the CPU engine, with less memory than its prefixes take and names in SQLite, is called
through gRPC in every way (soak_load.py).  Then, and once a minute while everybody pauses:

    answers    each whole one has the ids, the text and the bits of the log probabilities that its request gives alone,
               in this process, afterwards (soak_work.py); what came of a cancelled one is the beginning of that
    pages      at idle every page is free or a prefix's; with the last name the last page is free; the server's own
               check, which it makes when it is drained, holds
    memory     the size of the process has no slope that is surely above MOST_GROWTH (soak_watch.py)
    health     answers within 50 ms, its own process asking, less what machine and probe take at the same time
    statuses   only documented ones, and nothing in the log

At last SIGTERM comes while streams run: not ready, new calls refused, the streams finish with right answers, status 0.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "rpc")]

from scraping import scrape  # noqa: E402
from server_process import NO_RETRIES, SERVING, health  # noqa: E402
from soak_load import Ledger, Load  # noqa: E402
from soak_report import Result, write_report  # noqa: E402
from soak_watch import Memory, read_probes  # noqa: E402
from soak_work import TEXT, Answer, Definition, Recipe, draw_definitions, draw_recipes, solo  # noqa: E402

from tinyloop_service import Model, PrefixCache  # noqa: E402
from tinyloop_service.demo import MODEL_PATH  # noqa: E402
from tinyloop_service.engine.weights import read_model  # noqa: E402
from tinyloop_service.pb import generation_pb2 as g  # noqa: E402
from tinyloop_service.pb import model_pb2, prefix_pb2  # noqa: E402
from tinyloop_service.text import Tokenizer  # noqa: E402

BREATHE_S = 60.0  # from one pause to the next
START_S, SETTLE_S = 120.0, 60.0
LAST_STREAMS = 8  # that run when SIGTERM comes


@dataclass(frozen=True)
class Server:
    process: Process
    address: str
    health: str
    metrics: str
    log: Path


@asynccontextmanager
async def serving(folder: Path, kv_mib: int) -> AsyncIterator[Server]:
    """`tinyloop serve`, its pages poisoned when they are given back."""
    ports = ("--listen", "--health-listen", "--metrics-listen")
    addresses = [word for port in ports for word in (port, "127.0.0.1:0")]
    options = ["--engine", "cpu", "--kv-memory", f"{kv_mib}MiB", "--registry", f"sqlite:///{folder}/names.db"]
    command = [sys.executable, "-m", "tinyloop_service.cli", "serve", *addresses, *options, "--log-level", "warning"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TINYLOOP_")}
    environment = {**kept, "TINYLOOP_DEBUG": "true", "TINYLOOP_DRAIN_GRACE_S": "60"}
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=log, env=environment)
    try:
        assert process.stdout is not None
        words = (await asyncio.wait_for(process.stdout.readline(), START_S)).decode().split()
        assert words[:1] == ["serving"], (folder / "log").read_text()
        yield Server(process, words[1], words[3], words[5], folder / "log")
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@dataclass
class Watch:
    """The processes that ask for health, and the samples of memory."""

    server: Server
    memory: list[Memory] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)  # averages of the last minute

    async def sample(self) -> None:
        """Once a second, until it is cancelled."""
        while True:
            self.memory.append(Memory.of(self.server.process.pid))
            self.loads.append(os.getloadavg()[0])
            await asyncio.sleep(1.0)


@asynccontextmanager
async def watching(server: Server, folder: Path) -> AsyncIterator[Watch]:
    script = str(HERE / "soak_watch.py")
    control = await asyncio.create_subprocess_exec(sys.executable, script, "control", stdin=PIPE, stdout=PIPE)
    assert control.stdout is not None
    address = (await control.stdout.readline()).decode().strip()
    with (folder / "probes").open("w+") as probes:
        probing = await asyncio.create_subprocess_exec(
            sys.executable, script, "probe", server.health, address, str(server.process.pid), stdin=PIPE, stdout=probes
        )
        async with asyncio.timeout(START_S):
            while not os.fstat(probes.fileno()).st_size:  # noqa: ASYNC110, another process writes
                await asyncio.sleep(0.05)
        watch = Watch(server)
        sampling = asyncio.create_task(watch.sample())
        try:
            yield watch
        finally:
            sampling.cancel()
            for process in (probing, control):
                await process.communicate(b"")  # the end of their input ends them


class Soak:
    """One run against one server."""

    def __init__(self, server: Server, load: Load, last_tokens: int) -> None:
        """last_tokens: of each stream that runs when SIGTERM comes."""
        self.server, self.load, self.ledger, self.last_tokens = server, load, load.ledger, last_tokens
        self.num_breaths = 0

    async def run(self, minutes: float, workers: int, seed: int) -> None:
        """The load, with a pause now and then."""
        end_s = time.monotonic() + 60 * minutes
        working = [asyncio.create_task(self.load.work(seed * 1000 + i)) for i in range(workers)]
        while (left_s := end_s - time.monotonic()) > 0:
            await asyncio.wait(working, timeout=min(left_s, BREATHE_S), return_when=asyncio.FIRST_EXCEPTION)
            for task in working:
                if task.done():
                    task.result()  # a worker never ends by itself
            self.load.ending = time.monotonic() >= end_s
            await self._breathe()
        await asyncio.gather(*working)

    async def _breathe(self) -> None:
        """Everybody pauses; the server comes to rest, and its pages are counted."""
        self.load.may_go.clear()
        await self._until(lambda: self.load.num_busy == 0, "workers do not come to rest")
        await self._count_pages()
        self.num_breaths += 1
        self.load.may_go.set()

    async def _count_pages(self) -> model_pb2.Load:
        found, listed = await self._rest(), await self._all_prefixes()
        while (now := await self._rest()) != found:  # one has expired meanwhile
            found, listed = now, await self._all_prefixes()
        held = found.pages_prefixes + found.pages_active
        if found.pages_requests or found.pages_free + held != found.pages_total:
            self.ledger.wrong.append(f"pages at rest: {found}")
        ready = [prefix for prefix in listed if prefix.state == prefix_pb2.PREFIX_STATE_READY]
        own = sum(prefix.size_bytes for prefix in ready)  # what hangs from nameless parents shares those too
        shared = sum(prefix.shared_bytes for prefix in listed)  # an evicted child's parents may have no name either
        if not own <= found.pages_prefixes * found.page_bytes <= own + shared:
            self.ledger.wrong.append(f"prefixes hold {found.pages_prefixes} pages, of {own} to {own + shared} bytes")
        scraped = (await scrape(self.server.metrics)).by("kv_pages", "state")
        if sum(scraped.values()) != found.pages_total:
            self.ledger.wrong.append(f"metrics count {scraped}, {found.pages_total} pages are there")
        return found

    async def _rest(self) -> model_pb2.Load:
        """What the server does, once it does nothing."""
        async with asyncio.timeout(SETTLE_S):
            while True:
                found: model_pb2.Load = await self.load.model.GetLoad(model_pb2.GetLoadRequest())
                if not (found.rows_running or found.requests_waiting or found.prefixes_building):
                    return found

    async def _until(self, condition: object, what: str) -> None:
        deadline_s = time.monotonic() + 2 * SETTLE_S
        while not condition():  # type: ignore[operator]
            if time.monotonic() > deadline_s:
                self.ledger.wrong.append(what)
                return
            await asyncio.sleep(0.01)

    async def _all_prefixes(self) -> list[prefix_pb2.Prefix]:
        answer = await self.load.prefixes.ListPrefixes(prefix_pb2.ListPrefixesRequest(page_size=1000))
        return list(answer.prefixes)

    async def leave(self) -> model_pb2.Load:
        """Delete every name; the load before.  The last page comes back."""
        before = await self._count_pages()
        for prefix in await self._all_prefixes():
            try:
                await self.load.prefixes.DeletePrefix(prefix_pb2.DeletePrefixRequest(name=prefix.name))
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.NOT_FOUND, error  # it has expired since
        after = await self._rest()
        if after.pages_free != after.pages_total:
            self.ledger.wrong.append(f"pages without a prefix: {after}")
        return before

    async def stop(self) -> None:
        """SIGTERM while streams run."""
        anyone = self.load.recipes[0]
        longer = {"max_tokens": self.last_tokens, "n": 1, "ignore_eos": True, "stop_sequences": (), "cache_window": 0}
        recipe = Recipe(None, anyone.tokens or (1,), {**anyone.parameters, **longer})
        calls = [self.load.generation.Generate(recipe.request) for _ in range(LAST_STREAMS)]
        answers = [Answer.empty(recipe) for _ in calls]
        for call, answer in zip(calls, answers, strict=True):
            answer.read(await call.read())
        self.server.process.send_signal(signal.SIGTERM)
        while await health(self.server.health) == SERVING:
            pass
        await self._expect_refusal(recipe)
        for call, answer in zip(calls, answers, strict=True):
            while (message := await call.read()) is not grpc.aio.EOF:
                answer.read(message)
            self.ledger.answered(recipe, answer)
            if not answer.is_whole:
                self.ledger.wrong.append("a stream did not finish after SIGTERM")
        status = await asyncio.wait_for(self.server.process.wait(), SETTLE_S)
        log = self.server.log.read_text()
        if status or "Traceback" in log or "error" in log:
            self.ledger.wrong.append(f"the server ended with {status}; its log: {log[-2000:]}")

    async def _expect_refusal(self, recipe: Recipe) -> None:
        try:
            await self.load.generation.GenerateUnary(g.GenerateUnaryRequest(generation=recipe.request))
            self.ledger.wrong.append("a server that drains took a new request")
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                self.ledger.wrong.append(f"a server that drains refused with {error.code()}")


def check_answers(ledger: Ledger, *, progress: bool = False) -> tuple[int, int]:
    """How many recipes were compared, and how many answers of them are wrong."""
    wrong, asked = 0, [*dict.fromkeys([*ledger.whole, *ledger.parts])]
    built: dict[Definition, PrefixCache] = {}
    with Model(MODEL_PATH, engine="cpu") as model:
        for number, recipe in enumerate(asked, 1):
            whole = solo(model, recipe, built)
            wrong += sum(count for answer, count in ledger.whole[recipe].items() if answer != whole)
            wrong += sum(count for answer, count in ledger.parts[recipe].items() if not answer.begins(whole))
            if progress and number % 50 == 0:
                print(f"  {number} of {len(asked)} requests computed alone", flush=True)
    return len(asked), wrong


async def soak(
    folder: Path,
    minutes: float,
    seed: int,
    *,
    workers: int = 24,
    num_definitions: int = 28,
    num_recipes: int = 400,
    kv_mib: int = 96,
    last_tokens: int = 400,
) -> Result:
    """`folder`: for what the processes write.  `kv_mib`: less than the definitions take, which is about 300."""
    rng, ledger = random.Random(seed), Ledger()
    tokenizer = read_model(MODEL_PATH).tokenizer
    assert tokenizer is not None
    text = Tokenizer(tokenizer).encode(TEXT.read_text(), bos=False)
    definitions = draw_definitions(rng, text, num_definitions)
    recipes = draw_recipes(rng, text, definitions, num_recipes)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(folder, kv_mib))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address, options=NO_RETRIES))
        run = Soak(server, Load(channel, definitions, recipes, ledger), last_tokens)
        async with watching(server, folder) as watch:
            load_began_s = time.monotonic()
            await run.run(minutes, workers, seed)
            load_ended_s = time.monotonic()
            last_load = await run.leave()
        assert await health(server.health) == SERVING
        await run.stop()
        probes = read_probes((folder / "probes").read_text().splitlines(keepends=True))
    return Result(
        minutes=(load_ended_s - load_began_s) / 60, seed=seed, workers=workers, ledger=ledger, last_load=last_load,
        probes=[probe for probe in probes if load_began_s <= probe.at_s <= load_ended_s],
        memory=[sample for sample in watch.memory if load_began_s <= sample.at_s <= load_ended_s],
        machine_loads=watch.loads, num_breaths=run.num_breaths,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=24)
    parser.add_argument("--report", type=Path, help="a Markdown file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(soak(Path(folder), given.minutes, given.seed, workers=given.workers))
    print(f"{result.ledger.num_whole} answers, {result.ledger.num_parts} beginnings; comparing ...", flush=True)
    result.num_compared, result.num_wrong_answers = check_answers(result.ledger, progress=True)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=HERE).stdout
    report = write_report(result, command=f"python tests/soak.py {' '.join(sys.argv[1:])}", commit=commit.strip())
    print(report)
    if given.report is not None:
        given.report.write_text(report)
    sys.exit(0 if result.holds else 1)


if __name__ == "__main__":
    main()
