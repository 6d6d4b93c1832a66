"""kill -9 at random moments under load: no acknowledged name is lost, no half-built one is served.

    python tests/kill_nine.py [--registry sqlite|redis] [--moments 50] [--seed 0] [--limit-s 600]

Writers create, replace, renew and delete names, children of others among them; readers generate from them.  At a
random moment a server dies: with SQLite the one there is; with Redis one of two replicas, or Redis itself, or all
three at once.  What died is started again, and every name is compared with what its writer was told (name_ledger.py),
at every replica, and generates what its whole content gives.  A change that got no answer may have been made or not,
nothing in between.  State is kept on disk too, and some of what is verified was restored from it.  The engine is the
fake one, whose tokens depend on every token before them.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, Process
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "rpc")]

from name_ledger import NEW_TOKENS, SUFFIX, Gone, Name, State  # noqa: E402
from redis_server import RedisServer, running_redis  # noqa: E402
from rpc_harness import ids  # noqa: E402
from server_process import NO_RETRIES, start_server  # noqa: E402

from tinyloop_service.engine.fake import FAKE_LIMITS  # noqa: E402
from tinyloop_service.pb import generation_pb2 as g  # noqa: E402
from tinyloop_service.pb import generation_pb2_grpc, prefix_pb2_grpc  # noqa: E402
from tinyloop_service.pb import prefix_pb2 as p  # noqa: E402

WRITERS, NAMES_EACH, READERS = 6, 4, 4
STEP_S = 0.002  # of the engine, so that a kill often meets a build
LONGEST = 600  # tokens that a create sends; a plan prefills 256
MOST_TOKENS = FAKE_LIMITS.max_seq_len - len(SUFFIX) - NEW_TOKENS  # of a content, its parent's and theirs among them
LEAST_S, MOST_S = 0.02, 0.8  # from the start of the load to the kill
SETTLE_S = 20.0  # for a replica that lived on to notice that Redis is back


@dataclass
class Replica:
    """One server process, started again under a new address after each kill."""

    registry: str
    snapshots: Path
    process: Process | None = None
    channel: grpc.aio.Channel | None = None

    async def start(self) -> None:
        settings = {"registry": self.registry, "snapshot_dir": self.snapshots, "log_level": "error"}
        running = await start_server(STEP_S, log=DEVNULL, **settings)
        self.process = running.process
        if self.channel is not None:
            await self.channel.close()
        self.channel = grpc.aio.insecure_channel(running.address, options=NO_RETRIES)

    async def kill(self) -> None:
        """kill -9.  Calls in flight find out by themselves."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        self.process = None

    async def close(self) -> None:
        await self.kill()
        if self.channel is not None:
            await self.channel.close()

    @property
    def prefixes(self) -> prefix_pb2_grpc.PrefixServiceStub:
        """Raises Gone while it is dead."""
        if self.process is None:
            raise Gone
        return prefix_pb2_grpc.PrefixServiceStub(self.channel)

    async def generate(self, name: str) -> tuple[int, ...]:
        request = g.GenerateUnaryRequest(
            generation=g.GenerateRequest(
                prefix=f"prefixes/{name}", input=ids(*SUFFIX), max_tokens=NEW_TOKENS, ignore_eos=True
            )
        )
        if self.process is None:
            raise Gone
        answer = await generation_pb2_grpc.GenerationServiceStub(self.channel).GenerateUnary(request)
        return tuple(answer.choices[0].token_ids)

    async def all_prefixes(self) -> dict[str, p.Prefix]:
        found: dict[str, p.Prefix] = {}
        token = ""
        while True:
            request = p.ListPrefixesRequest(page_size=7, page_token=token, view=p.PREFIX_VIEW_FULL)
            page = await self.prefixes.ListPrefixes(request)
            found |= {prefix.name.removeprefix("prefixes/"): prefix for prefix in page.prefixes}
            token = page.next_page_token
            if not token:
                return found


@dataclass
class Trial:
    """Servers, load, and what came of it."""

    replicas: list[Replica]
    redis: RedisServer | None
    rng: random.Random
    names: list[list[Name]] = field(
        default_factory=lambda: [[Name(f"w{w}-{i}") for i in range(NAMES_EACH)] for w in range(WRITERS)]
    )
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    ending: bool = False  # writers and readers stop before their next call

    # ---- load

    async def write(self, own: list[Name], rng: random.Random) -> None:
        """One writer, until its server is gone."""
        try:
            while not self.ending:
                await self._change_one(rng.choice(own), own, rng)
                self.counts["acknowledged"] += 1
        except Gone:
            self.counts["in doubt"] += 1

    async def _change_one(self, name: Name, own: list[Name], rng: random.Random) -> None:
        stub, resource, state = rng.choice(self.replicas).prefixes, f"prefixes/{name.id}", name.certain
        if state is None:
            await self._create(name, own, rng, stub)
        elif (deed := rng.choice(["delete", "update", "create again"])) == "delete":
            await name.change(None, stub.DeletePrefix(p.DeletePrefixRequest(name=resource)))
        elif deed == "update":
            request = p.UpdatePrefixRequest(prefix=p.Prefix(name=resource, pinned=rng.random() < 0.1))
            request.prefix.ttl.seconds = rng.randrange(3600, 7200)
            request.update_mask.paths.extend(["ttl", "pinned"])
            await name.change(State(state.tokens), stub.UpdatePrefix(request))
        else:
            request = p.CreatePrefixRequest(prefix_id=name.id, input=ids(*state.tokens))
            await name.change(State(state.tokens), stub.CreatePrefix(request))

    async def _create(
        self, name: Name, own: list[Name], rng: random.Random, stub: prefix_pb2_grpc.PrefixServiceStub
    ) -> None:
        content = tuple(rng.randrange(1, 500) for _ in range(rng.randrange(1, LONGEST)))
        room = MOST_TOKENS - len(content)
        parents = [other for other in own if other is not name and other.certain and len(other.certain.tokens) <= room]
        request = p.CreatePrefixRequest(prefix_id=name.id, input=ids(*content), build_async=rng.random() < 0.2)
        if parents and rng.random() < 0.3:
            parent = rng.choice(parents)
            request.parent = f"prefixes/{parent.id}"
            assert parent.certain is not None
            content = parent.certain.tokens + content
        await name.change(State(content), stub.CreatePrefix(request))

    async def read(self, rng: random.Random) -> None:
        """One reader, until its server is gone."""
        every = [name for own in self.names for name in own]
        while not self.ending:
            name = rng.choice(every)
            try:
                answer = await rng.choice(self.replicas).generate(name.id)
            except Gone:
                return
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    continue
                if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                    return
                raise
            self.counts["answers"] += 1
            if not name.is_answer(answer):
                self.wrong.append(f"{name.id}: {answer} comes from nothing that it ever stood for")

    # ---- one moment

    async def moment(self) -> None:
        """Load, a kill, a new start, and a look at everything."""
        self.ending = False
        seeds = [random.Random(self.rng.random()) for _ in range(WRITERS + READERS)]
        work = [self.write(own, rng) for own, rng in zip(self.names, seeds[:WRITERS], strict=True)]
        tasks = [asyncio.create_task(task) for task in (*work, *map(self.read, seeds[WRITERS:]))]
        await asyncio.sleep(self.rng.uniform(LEAST_S, MOST_S))  # the moment itself
        victims = self._victims()
        await self._kill(victims)
        self.ending = True
        async with asyncio.timeout(60.0):  # what was sent to those that live is answered
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if result is not None:
                    self.wrong.append(f"a caller was told {result!r}")
        if self.redis in victims:
            await asyncio.to_thread(self.redis.start)  # type: ignore[union-attr]
        await asyncio.gather(*(replica.start() for replica in self.replicas if replica.process is None))
        for replica in self.replicas:
            await self._verify(replica, settle=replica not in victims)

    def _victims(self) -> list[Replica | RedisServer]:
        if self.redis is None:
            return [*self.replicas]
        every: list[Replica | RedisServer] = [*self.replicas, self.redis]
        return self.rng.choice([every, [self.redis], [self.replicas[0]], [self.replicas[1], self.redis]])

    async def _kill(self, victims: list[Replica | RedisServer]) -> None:
        for victim in victims:
            if isinstance(victim, RedisServer):
                victim.kill()
            else:
                await victim.kill()

    async def _verify(self, replica: Replica, *, settle: bool) -> None:
        """`settle`: it lived on, and may not have heard yet of all that happened."""
        found = await self._found(replica)
        for name in [name for own in self.names for name in own]:
            prefix = found.pop(name.id, None)
            if (wrong := name.verify(prefix)) is not None:
                self.wrong.append(wrong)
            elif prefix is not None and not await self._generates(replica, name, settle):
                self.wrong.append(f"{name.id}: does not generate what its content gives")
            self.counts["verified"] += 1
        self.wrong += [f"{name}: was never created" for name in found]

    async def _found(self, replica: Replica) -> dict[str, p.Prefix]:
        deadline = time.monotonic() + SETTLE_S
        while True:
            try:
                return await replica.all_prefixes()
            except grpc.aio.AioRpcError as error:  # Redis has just come back
                if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)

    async def _generates(self, replica: Replica, name: Name, settle: bool) -> bool:
        deadline = time.monotonic() + (SETTLE_S if settle else 0.0)
        while True:
            with suppress(grpc.aio.AioRpcError):
                if name.is_answer(await replica.generate(name.id)):
                    return True
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.05)


@asynccontextmanager
async def trial(registry: str, folder: Path, seed: int, binary: str | None = None) -> AsyncIterator[Trial]:
    """`registry`: sqlite or redis.  Servers run when it is entered, and none afterwards."""
    redis = running_redis(folder, binary) if registry == "redis" else nullcontext()
    with redis as server:
        url = server.url if server is not None else f"sqlite:///{folder}/names.db"
        replicas = [Replica(url, folder / f"snapshots-{i}") for i in range(2 if server is not None else 1)]
        async with AsyncExitStack() as stack:
            for replica in replicas:
                stack.push_async_callback(replica.close)
                await replica.start()
            yield Trial(replicas, server, random.Random(seed))


async def run(registry: str, moments: int, seed: int, limit_s: float) -> int:
    """Prints what was seen; the exit status."""
    deadline, made = time.monotonic() + limit_s, 0
    with tempfile.TemporaryDirectory() as folder:
        async with trial(registry, Path(folder), seed, shutil.which("redis-server")) as found:
            while made < moments and time.monotonic() < deadline and not found.wrong:
                await found.moment()
                made += 1
    facts = ", ".join(f"{count} {what}" for what, count in sorted(found.counts.items()))
    print(f"{registry}: {made} moments, {facts}; {len(found.wrong)} wrong")
    for wrong in found.wrong[:20]:
        print(" ", wrong)
    return 1 if found.wrong or made < moments else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--registry", choices=["sqlite", "redis"], action="append")
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=600.0, help="for each registry")
    given = parser.parse_args()
    registries = given.registry or ["sqlite", "redis"]
    sys.exit(max(asyncio.run(run(name, given.moments, given.seed, given.limit_s)) for name in registries))


if __name__ == "__main__":
    main()
