"""`tinyloop demo`: a server, one shared prefix, ten requests at once, and what sharing saved."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import click

from tinyloop_service.arguments import parameters
from tinyloop_service.bench import Outcome, run_no_cache, run_shared
from tinyloop_service.cli import output, stage
from tinyloop_service.cli.local_server import local_server
from tinyloop_service.cli.options import json_option
from tinyloop_service.demo import MODEL_PATH, PREFIX_TEXT, SUFFIXES
from tinyloop_service.load.remote import Remote


@click.command()
@click.option("--requests", type=click.IntRange(1, 50), default=10, show_default=True, help="How many at once.")
@click.option("--max-tokens", type=click.IntRange(2, 256), default=32, show_default=True, help="New tokens of each.")
@json_option
def demo(requests: int, max_tokens: int, as_json: bool) -> None:
    """Show it: a server, a prefix of 1117 tokens, ten requests at once, and what sharing saved on this machine.

    Everything runs on loopback and is gone afterwards.

    \b
    Examples:
      tinyloop demo
      tinyloop demo --requests 30 --max-tokens 64
    """
    suffixes = tuple(SUFFIXES[index % len(SUFFIXES)] for index in range(requests))
    outcome = asyncio.run(_run(suffixes, max_tokens, quiet=as_json))
    if as_json:
        output.print_json(outcome.as_dict())
    else:
        stage.print_outcome(outcome, max_tokens)
    if outcome.num_alike != requests:
        raise click.ClickException("the two ways gave different tokens, which must not happen; please report it")


async def _run(suffixes: Sequence[str], max_tokens: int, *, quiet: bool) -> Outcome:
    sampling = parameters(max_tokens, temperature=0.7, top_p=0.9, seed=0)
    async with AsyncExitStack() as stack:
        with output.waiting("starting a server with the demo model"):
            address = await stack.enter_async_context(local_server(MODEL_PATH))
            server = await stack.enter_async_context(Remote(address))
            prefix_ids = await server.tokenize(PREFIX_TEXT, bos=True)
            prompts = [(*prefix_ids, *await server.tokenize(suffix, bos=False)) for suffix in suffixes]
            await run_no_cache(server, [prompts[0][:200]], parameters(4, seed=0))  # so that both ways start warm
        if not quiet:
            stage.introduce(address, PREFIX_TEXT, len(prefix_ids), len(suffixes))
        with stage.streams(suffixes, quiet=quiet) as show:
            shared = await run_shared(server, "demo", PREFIX_TEXT, suffixes, sampling, show)
        with output.counting("the same requests without a shared prefix", len(prompts)) as count:
            no_cache = await run_no_cache(server, prompts, sampling, count)
        loops = (await server.model()).default_loops
        return Outcome(len(prefix_ids), loops, shared, no_cache)
