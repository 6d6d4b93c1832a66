"""`tinyloop init`, `inspect` and `model`: model files on disk, and the model that a server runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from tinyloop_service.cli import output
from tinyloop_service.cli.connection import Connection, client_options
from tinyloop_service.cli.made import made_facts
from tinyloop_service.cli.options import json_option

SIZES = ("tiny", "407m")


@click.command()
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--size", type=click.Choice(SIZES), required=True, help="Which reference size.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Draws the random weights.")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A Hugging Face tokenizer.json to put in, so that the model takes text.",
)
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@json_option
def init(path: Path, size: str, seed: int, tokenizer: Path | None, force: bool, as_json: bool) -> None:
    """Write a model file with random INT4 weights, for tests and benchmarks.

    \b
    Examples:
      tinyloop init --size tiny tiny.tinyloop
      tinyloop init --size 407m 407m.tinyloop        # 407 million parameters, as in the benchmarks
    """
    from tinyloop_service.engine.weights import random_model, write_model

    if path.exists() and not force:
        raise click.UsageError(f"{path} exists; give another path, or --force to replace it")
    if not path.parent.is_dir():
        raise click.UsageError(f"{path.parent} is no directory; make it first")
    with output.waiting(f"drawing the weights of {size}") as say:
        weights = random_model(size, seed, tokenizer=tokenizer.read_bytes() if tokenizer else None)
        say(f"writing {path}")
        write_model(path, weights)
    facts = {"path": str(path), "size": size, "seed": seed, "bytes": path.stat().st_size, "model_id": weights.model_id}
    if as_json:
        output.print_json(facts)
    else:
        output.print_facts({**facts, "bytes": output.human_bytes(path.stat().st_size)})


@click.command()
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
@json_option
def inspect(path: Path, as_json: bool) -> None:
    """Verify a model file and show what is in it: sizes, depth, quantisation, where it comes from.

    Of a file that `tinyloop quantize` wrote: the method, the calibration text and the errors; --json has every layer.

    \b
    Examples:
      tinyloop inspect tiny.tinyloop
      tinyloop inspect --json 407m.tinyloop | python3 -m json.tool
    """
    from tinyloop_service.engine.weights import inspect_model

    with output.waiting(f"reading and verifying {path}"):
        summary = inspect_model(path)
    if as_json:
        output.print_json({"path": str(path), **output.plain(summary)})
        return
    output.print_facts(
        {
            "file": f"{path}, {output.human_bytes(summary.file_bytes)}",
            "model_id": f"{summary.model_id} (verified)",
            "parameters": f"{summary.num_parameters / 1e6:.1f} M, {summary.bits_per_weight:.2f} bits per weight",
            **spec_facts(output.plain(summary.spec)),
            "parts": ", ".join(
                f"{name} {output.human_bytes(size)}" for name, size in summary.part_bytes.items() if size
            ),
            "state": f"{output.human_bytes(summary.kv_bytes_1024)} for 1024 tokens at the default depth, fp16",
            "origin": ", ".join(f"{key} {value}" for key, value in summary.provenance.items() if _is_short(value)),
            **made_facts(summary.provenance),
        }
    )


@click.command()
@client_options
@json_option
def model(server: Connection, as_json: bool) -> None:
    """Show the model that a server runs, and what it allows.

    \b
    Examples:
      tinyloop model
      tinyloop model --target 127.0.0.1:50051 --json
    """
    with server.client() as client:
        info = client.model()
    if as_json:
        output.print_json(output.plain(info))
        return
    output.print_facts(
        {
            "server": f"{info.replica}, version {info.server_version}",
            "engine": f"{info.engine}, state in {info.cache_mode.value}, up to {info.max_rows} rows a step",
            "model_id": info.model_id,
            **spec_facts(info.config),
            "takes": "text and token ids" if info.has_tokenizer else "token ids (the model has no tokenizer)",
        }
    )


def _is_short(value: object) -> bool:
    return isinstance(value, str | int | float) and len(str(value)) <= 60


def spec_facts(config: Mapping[str, Any]) -> dict[str, object]:
    """The lines of a model file's config that a person reads first."""
    spec = SimpleNamespace(**config)
    quant = f"INT{spec.quant['bits']}, groups of {spec.quant['group_size']}" if spec.quant else "fp16"
    kv = "" if spec.n_kv_heads == spec.n_heads else f", {spec.n_kv_heads} K/V heads"
    switches = (
        "sandwich norms" if spec.norm_placement == "sandwich" else "",
        "a norm after every loop" if spec.loop_norm else "",
        "input added to every loop" if spec.inject == "add" else "",
        "tied embeddings" if spec.tie_embeddings else "",
    )
    return {
        "width": f"{spec.d_model}, {spec.n_heads} heads of {spec.head_dim}{kv}, feed-forward {spec.d_ff}",
        "blocks": f"{spec.pre_blocks} before, {spec.loop_blocks} looped, {spec.post_blocks} after",
        "loops": f"{spec.default_loops} by default, at most {spec.max_loops}",
        "tokens": f"vocabulary of {spec.vocab_size}, sequences of {spec.max_seq_len}",
        "weights": quant,
        "switches": ", ".join(filter(None, switches)),
    }
