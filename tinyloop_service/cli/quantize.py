"""`tinyloop quantize` and `convert`: fp16 → INT4, and INT4 of other makers → model files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinyloop_service.cli import output
from tinyloop_service.cli.made import layer_table, made_facts
from tinyloop_service.cli.options import json_option, named_as_given

if TYPE_CHECKING:
    from tinyloop_service.engine.weights import ModelWeights
    from tinyloop_service.quantize.procedure import Recipe

GROUPS = ("128", "64", "32")
ONLY_GPTQ = ("passes", "depth_weights", "loops", "windows", "window_tokens", "damping", "seed", "device")
model_path = click.Path(path_type=Path, exists=True, dir_okay=False)
new_path = click.Path(path_type=Path, dir_okay=False)


def parse_weights(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[float, ...] | None:
    """ "1,1,0.5" → (1.0, 1.0, 0.5)."""
    if value is None:
        return None
    try:
        numbers = tuple(float(item) for item in value.replace(",", " ").split())
    except ValueError:
        numbers = ()
    if not numbers:
        raise click.BadParameter(f"{value!r} is no list of numbers; example: 1,1,1,2")
    return numbers


@click.command()
@click.argument("source", metavar="IN", type=model_path)
@click.argument("target", metavar="OUT", type=new_path)
@click.option("--method", type=click.Choice(("gptq", "rtn")), required=True, help="GPTQ, or rounding to nearest.")
@click.option("--group", type=click.Choice(GROUPS), default="128", show_default=True, help="Inputs that share a scale.")
@click.option(
    "--head",
    type=click.Choice(("int4", "fp16")),
    default="int4",
    show_default=True,
    help="How the output head is stored.",
)
@click.option(
    "--calibration",
    type=model_path,
    metavar="FILE",
    help="GPTQ: text as the model will see it; or FILE.json, a list of lists of token ids.",
)
@click.option(
    "--windows", type=click.IntRange(1), default=64, show_default=True, help="Pieces of the calibration text to use."
)
@click.option("--window-tokens", type=click.IntRange(2), help="Tokens of a piece.  [default: 512, or the model's most]")
@click.option(
    "--passes",
    type=click.IntRange(1, 8),
    default=2,
    show_default=True,
    help="How often each block is rounded, the last time for the inputs that rounding itself leads to.",
)
@click.option("--loops", type=click.IntRange(1), help="Depth to calibrate for, in loops.  [default: the model's]")
@click.option(
    "--depth-weights",
    callback=parse_weights,
    metavar="W,W,...",
    help="What each loop counts in a loop block's Hessians, first loop first.  [default: all alike]",
)
@click.option(
    "--damping",
    type=click.FloatRange(min=0, min_open=True, max=1),
    default=0.01,
    show_default=True,
    help="Added to Hessians, as a share of their mean diagonal.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Chooses the pieces of text.")
@click.option(
    "--device",
    type=click.Choice(("auto", "cpu", "cuda")),
    default="auto",
    show_default=True,
    help="Where it is computed; auto: on a GPU if there is one.",
)
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@json_option
@named_as_given
def quantize(source: Path, target: Path, force: bool, as_json: bool, **given: Any) -> None:
    """Make an INT4 model of an fp16 model.

    GPTQ rounds each weight so that it makes up for the rounding of others, on the activations that --calibration
    causes.  A loop block is rounded for its inputs at every loop, and in a second pass for those that its own rounding
    leads to.  rtn rounds every weight on its own, and needs no text.

    The table shows for each layer which share of its outputs' energy is lost on that text: by rounding to nearest, and
    by GPTQ.  `tinyloop inspect` shows later how a file was made.

    \b
    Examples:
      tinyloop quantize model-fp16.tinyloop model.tinyloop --method gptq --calibration train.txt
      tinyloop quantize model-fp16.tinyloop model.tinyloop --method gptq --calibration ids.json --head fp16 --passes 1
      tinyloop quantize model-fp16.tinyloop model.tinyloop --method rtn --group 64
    """
    method = given["method"]
    if (given["calibration"] is None) == (method == "gptq"):
        raise click.UsageError(
            "--method gptq needs --calibration FILE, text as the model will see it; or take --method rtn"
            if method == "gptq"
            else "--method rtn takes no --calibration: it rounds every weight on its own; or take --method gptq"
        )
    if method == "rtn":
        _refuse_gptq_options()
    _check_target(target, source, force)
    from tinyloop_service.engine.weights import read_model, write_model

    weights = read_model(source)
    try:
        written = _gptq(weights, given) if method == "gptq" else _rtn(weights, given)
    except MemoryError as error:
        where = str(error).splitlines()[0] if str(error) else "not enough memory"
        raise click.ClickException(f"{where}; take fewer --windows, shorter --window-tokens, or --device cpu") from None
    write_model(target, written)
    _show(target, written, "quantization", as_json)


def _refuse_gptq_options() -> None:
    source = click.get_current_context().get_parameter_source
    given = [name for name in ONLY_GPTQ if source(name) is click.core.ParameterSource.COMMANDLINE]
    if given:
        raise click.UsageError(f"--{given[0].replace('_', '-')} is for --method gptq; rtn has no use for it")


def _check_target(target: Path, source: Path, force: bool) -> None:
    if not target.parent.is_dir():
        raise click.UsageError(f"{target.parent} is no directory; make it first")
    if target.exists() and target.samefile(source):
        raise click.UsageError(f"{target} is the input itself, which would be lost; give another path")
    if target.exists() and not force:
        raise click.UsageError(f"{target} exists; give another path, or --force to replace it")


def _recipe(weights: ModelWeights, given: Mapping[str, Any]) -> Recipe:
    from tinyloop_service.quantize.procedure import Recipe

    loops, depth_weights = given["loops"], given["depth_weights"]
    if loops is not None and depth_weights is not None and len(depth_weights) != loops:
        raise click.UsageError(
            f"--depth-weights has {len(depth_weights)} numbers, expected one for each of {loops} loops"
        )
    weights_by_depth = depth_weights or (1.0,) * (loops or weights.spec.default_loops)
    return Recipe(int(given["group"]), given["head"] == "int4", weights_by_depth, given["passes"], given["damping"])


def _gptq(weights: ModelWeights, given: Mapping[str, Any]) -> ModelWeights:
    from tinyloop_service.quantize.arrays import open_arrays
    from tinyloop_service.quantize.calibration import Wanted, read_calibration
    from tinyloop_service.quantize.procedure import quantize_with_gptq
    from tinyloop_service.quantize.record import quantized_model

    recipe = _recipe(weights, given)
    window_tokens = given["window_tokens"] or min(512, weights.spec.max_seq_len)
    with output.progressing("reading the calibration file") as report:
        calibration = read_calibration(
            given["calibration"], weights, Wanted(given["windows"], window_tokens, given["seed"])
        )
        arrays = open_arrays(given["device"])
        report(0, 1, f"{calibration.num_tokens} tokens in {len(calibration.windows)} windows, on {arrays.name}")
        quantized = quantize_with_gptq(weights, calibration, recipe, arrays, report)
    return quantized_model(weights, quantized, recipe, calibration)


def _rtn(weights: ModelWeights, given: Mapping[str, Any]) -> ModelWeights:
    from tinyloop_service.quantize.procedure import Recipe, round_to_nearest
    from tinyloop_service.quantize.record import quantized_model

    recipe = Recipe(int(given["group"]), given["head"] == "int4")
    with output.waiting("rounding to nearest"):
        return quantized_model(weights, round_to_nearest(weights, recipe), recipe, None)


def _show(path: Path, written: ModelWeights, key: str, as_json: bool) -> None:
    """What was written; `key` names the record of it in the provenance."""
    record = written.provenance[key]
    size = path.stat().st_size
    if as_json:
        output.print_json({"path": str(path), "bytes": size, "model_id": written.model_id, key: record})
        return
    if "layers" in record:
        output.print_table(layer_table(record))
        output.out.print()
    facts = {"path": path, "bytes": output.human_bytes(size), "model_id": written.model_id}
    output.print_facts({**facts, **made_facts({key: record})})


@click.command()
@click.argument("source", metavar="IN.safetensors", type=model_path)
@click.argument("target", metavar="OUT", type=new_path)
@click.option(
    "--config", type=model_path, required=True, metavar="SPEC.json", help="What the model is, as in a model file."
)
@click.option("--tokenizer", type=model_path, help="A Hugging Face tokenizer.json to put in.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@json_option
def convert(source: Path, target: Path, config: Path, tokenizer: Path | None, force: bool, as_json: bool) -> None:
    """Make a model file of GPTQ tensors that AutoGPTQ or GPTQModel wrote, without changing a value.

    IN holds qweight, qzeros and scales (v1 or v2, 4 bits, symmetric) under this project's names, for example
    pre.0.attn.q.qweight; norms, the embedding and a head in floats as .weight.  A group must be neighbouring inputs:
    quantise with desc_act=False or static_groups=True.  bf16 and fp32 become fp16; what fp16 cannot hold is refused,
    what is rounded is counted.

    SPEC.json has the config keys of a model file; `tinyloop inspect --json` shows one under "spec".  With quant null it
    takes a model that is all floats, for `tinyloop quantize`.

    \b
    Examples:
      tinyloop convert gptq.safetensors model.tinyloop --config spec.json --tokenizer tokenizer.json
      tinyloop convert floats.safetensors model-fp16.tinyloop --config spec-fp16.json
    """
    _check_target(target, source, force)
    from tinyloop_service.engine.spec import ModelSpec
    from tinyloop_service.engine.weights import write_model
    from tinyloop_service.errors import ModelFileError
    from tinyloop_service.quantize.foreign import convert_gptq
    from tinyloop_service.text import Tokenizer

    try:
        spec = ModelSpec.from_json(config.read_bytes().decode(errors="replace"))
    except ModelFileError as error:
        raise ModelFileError(f"{config.name}: {error}") from None
    token_bytes = tokenizer.read_bytes() if tokenizer else None
    if token_bytes is not None:
        Tokenizer(token_bytes)  # refuses what is none
    with output.waiting(f"converting {source}"):
        written = convert_gptq(source, spec, token_bytes)
        write_model(target, written)
    _show(target, written, "conversion", as_json)
