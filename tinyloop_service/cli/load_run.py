"""A load test from what was asked to what was found: target and fleet opened, the plan made for the model there.

In: `Asked`, a connection.  Out: a `Result`, with who found it.  It refuses to know options, and what a result is for.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime

from tinyloop_service.bench import describe_machine, versions
from tinyloop_service.cli import output
from tinyloop_service.cli.connection import Connection
from tinyloop_service.cli.load_options import Asked
from tinyloop_service.cli.options import read_settings
from tinyloop_service.client import ModelInfo
from tinyloop_service.load.fleet import Endpoint, Fleet, Here, Processes
from tinyloop_service.load.local import Local
from tinyloop_service.load.prompts import Prompts
from tinyloop_service.load.results import Metadata, Result
from tinyloop_service.load.run import LoadTest, Plan, Status, Target, vocabulary_of
from tinyloop_service.load.search import comparisons


async def run(asked: Asked, server: Connection, tell: Callable[[Status], None]) -> Result:
    """Raises what the target raises where nothing can be measured without it."""
    started = datetime.now(UTC)
    endpoint = Endpoint(server.target, server.token, server.tls, server.timeout, server.affinity)
    async with AsyncExitStack() as stack:
        tell(Status("looking at the model"))
        local = None if asked.model is None else await Local.opened(asked.model, read_settings({}))
        target: Target = await stack.enter_async_context(endpoint.connect() if local is None else local)
        model = await target.model()
        plan = await _plan(asked, target, model)
        fleet: Fleet = Here(target, Prompts(plan.workload, plan.seed, plan.vocabulary))
        if asked.processes > 1:
            fleet = Processes(asked.processes, endpoint, plan.workload, plan.seed, plan.vocabulary)
        await stack.enter_async_context(fleet)
        found = await LoadTest(plan, target, fleet, tell).run()
    return Result(
        metadata=_metadata(asked, plan, model, server.target, started),
        phases=found.phases,
        comparisons=tuple(comparisons(found.phases)),
        economy=found.economy,
        setup=found.setup,
        sweeps=found.sweeps,
        verification=found.verification,
    )


async def _plan(asked: Asked, target: Target, model: ModelInfo) -> Plan:
    workload = asked.workload.scaled(model.max_seq_len)
    return Plan(
        workload=workload,
        vocabulary=await vocabulary_of(target, model, workload),
        seed=asked.seed,
        driving=asked.driving,
        loads=asked.loads,
        search_phases=asked.search_phases,
        ways=asked.ways,
        warmup_s=asked.warmup_s,
        measured_s=asked.measured_s,
        slo=asked.slo,
        verify=asked.verify,
        own_loop=asked.model is None,
    )


def _metadata(asked: Asked, plan: Plan, model: ModelInfo, address: str, started: datetime) -> Metadata:
    return Metadata(
        command=f"tinyloop {shlex.join(sys.argv[1:])}",
        start_time=started.isoformat(timespec="seconds").replace("+00:00", "Z"),
        target=address if asked.model is None else f"in process: {asked.model}",
        machine=describe_machine(),
        versions=versions(),
        server=output.plain(model),
        workload=plan.workload.as_data(),
        seed=plan.seed,
        processes=asked.processes,
        slo=plan.slo,
    )
