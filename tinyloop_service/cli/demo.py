"""`tinyloop demo`: a server, one shared prefix, ten requests at once, and what sharing saved."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import click

from tinyloop_service.cli import output, stage
from tinyloop_service.cli.comparison import Outcome, run_no_cache, run_shared
from tinyloop_service.cli.local_server import local_server
from tinyloop_service.cli.options import json_option
from tinyloop_service.client import AsyncClient
from tinyloop_service.demo import MODEL_PATH, PREFIX_TEXT, SUFFIXES


@click.command()
@click.option("--requests", type=click.IntRange(1, 50), default=10, show_default=True, help="How many at once.")
@click.option("--max-tokens", type=click.IntRange(2, 256), default=32, show_default=True, help="New tokens of each.")
@json_option
def demo(requests: int, max_tokens: int, as_json: bool) -> None:
    """Show it: a server, a prefix of over 800 tokens, ten requests at once, and what sharing saved on this machine.

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
    async with AsyncExitStack() as stack:
        with output.waiting("starting a server with the demo model"):
            address = await stack.enter_async_context(local_server(MODEL_PATH))
            client = await stack.enter_async_context(AsyncClient(address))
            prefix_ids = await client.tokenize(PREFIX_TEXT, bos=True)
            prompts = [[*prefix_ids, *await client.tokenize(suffix, bos=False)] for suffix in suffixes]
            await client.complete(prompts[0][:200], max_tokens=4)  # so that both ways start warm
        if not quiet:
            stage.introduce(address, PREFIX_TEXT, len(prefix_ids), len(suffixes))
        with stage.streams(suffixes, quiet=quiet) as show:
            shared, build_ms, prefix_bytes = await run_shared(client, PREFIX_TEXT, suffixes, max_tokens, show)
        with output.counting("the same requests without a shared prefix", len(prompts)) as count:
            no_cache = await run_no_cache(client, prompts, max_tokens, count)
        loops = (await client.model()).default_loops
        return Outcome(len(prefix_ids), prefix_bytes, loops, build_ms, shared, no_cache)
