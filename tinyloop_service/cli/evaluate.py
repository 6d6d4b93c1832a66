"""`tinyloop evaluate`: how well model files predict a text, at several depths and with several roundings."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinyloop_service.cli import output
from tinyloop_service.cli.options import json_option, named_as_given
from tinyloop_service.errors import install
from tinyloop_service.types import CacheMode

if TYPE_CHECKING:
    from tinyloop_service.evaluate import NamedModel, NamedText, Report

MODEL_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
MEASURED_WITH = ("tinyloop-service", "numpy", "tokenizers")


def parse_depths(value: str | tuple[int, ...]) -> tuple[int, ...]:
    """ "8, 1 4" → (1, 4, 8)."""
    if isinstance(value, tuple):
        return value
    try:
        return tuple(sorted({int(item) for item in value.replace(",", " ").split()}))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of depths; example: 1,2,4,8") from None


def parse_cache_modes(value: str | tuple[CacheMode, ...]) -> tuple[CacheMode, ...]:
    """ "fp16, int8" → modes; "none" → none."""
    if isinstance(value, tuple):
        return value
    names = value.replace(",", " ").split()
    known = [mode.value for mode in CacheMode]
    for name in names if names != ["none"] else []:
        if name not in known:
            raise click.BadParameter(f"{name!r} is none of {', '.join(known)}; or give none")
    return tuple(mode for mode in CacheMode if mode.value in names)


@click.command()
@click.argument("paths", metavar="[MODEL]...", type=MODEL_FILE, nargs=-1)
@click.option(
    "--text",
    "texts",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    multiple=True,
    required=True,
    help="UTF-8 text to predict.  May be given several times; each file is read from its beginning.",
)
@click.option("--reference", type=MODEL_FILE, help="The model that others are compared with.  [default: the first]")
@click.option(
    "--depths",
    type=parse_depths,
    metavar="L,L…",
    help="Depths to score at, in loops.  [default: 1,2,4,6,8,12, as far as the models go]",
)
@click.option(
    "--window-tokens",
    type=click.IntRange(2),
    metavar="N",
    help="Tokens that are predicted from one beginning.  [default: 1535, or the models' max_seq_len]",
)
@click.option("--max-bytes", type=click.IntRange(1), metavar="N", help="Only so much of each text: a quick look.")
@click.option(
    "--cache-modes",
    type=parse_cache_modes,
    metavar="MODE,…",
    help="Score second halves of windows off first halves cached so; none: skip it.  [default: every mode that fits]",
)
@click.option(
    "--int8-activations/--no-int8-activations",
    default=True,
    show_default=True,
    help="Score INT4 files again as the CPU engine rounds activations.",
)
@click.option(
    "--threads",
    type=click.IntRange(1),
    metavar="N",
    help="Windows computed at once.  [default: one per core, at most 8]",
)
@click.option("--save", type=click.Path(path_type=Path), metavar="FILE", help="Write all figures here, a .json file.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw them here: .svg, .png or .pdf.")
@json_option
@named_as_given
def evaluate(
    paths: tuple[Path, ...],
    texts: tuple[Path, ...],
    reference: Path | None,
    max_bytes: int | None,
    save: Path | None,
    plot: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure how well models predict a text, at several depths: bits per byte, agreement, and how errors grow.

    Every row is computed in float32 with one thing changed: the weights in the file, the CPU engine's rounding of
    activations to int8, or what a cache mode stores (with the reference's weights; int8 again as a GPU attends it in
    int8).  All models need the same tokenizer.  MODEL is the demo model where none is given.

    \b
    Examples:
      tinyloop evaluate --text book.txt
      tinyloop evaluate fp16.tinyloop rtn.tinyloop gptq.tinyloop --text book.txt --plot q.svg --save q.json
      tinyloop evaluate int4.tinyloop --reference fp16.tinyloop --text book.txt --max-bytes 20000 --json
    """
    from tinyloop_service.evaluate import Options, evaluate
    from tinyloop_service.evaluate.report import as_dict, render

    _check_outputs(save, plot)
    ordered = _reference_first(paths, reference)
    named_texts = [_read_text(path, max_bytes) for path in texts]
    with output.waiting("reading and verifying the models"):
        models = _read_models(ordered)
    started = time.monotonic()
    chosen = Options(**{name: value for name, value in options.items() if value is not None})
    try:
        with output.progressing("scoring windows") as progress:
            report = evaluate(models, named_texts, chosen, progress)
    except MemoryError as error:
        where = str(error) or "not enough memory"
        raise click.ClickException(f"{where}; take fewer --threads or shorter --window-tokens") from None
    facts = {**_circumstances(time.monotonic() - started), **as_dict(report)}
    _write(report, facts, save, plot)
    if as_json:
        output.print_json(facts)
    else:
        output.print_table(render(report))
        output.out.print(f"\n{facts['seconds']:.0f} s on {facts['machine']}", style="dim")


def _check_outputs(save: Path | None, plot: Path | None) -> None:
    """Before minutes are spent; and a forgotten value may not cost a model file."""
    from tinyloop_service.evaluate.plot import FORMATS
    from tinyloop_service.plotting import can_plot

    if save is not None:
        _check_output("--save", save, ("json",))
    if plot is not None:
        _check_output("--plot", plot, FORMATS)
        if not can_plot():
            raise click.UsageError(f"--plot needs matplotlib: {install('plot')}")


def _check_output(option: str, path: Path, endings: Sequence[str]) -> None:
    if path.suffix.removeprefix(".") not in endings:
        raise click.UsageError(f"{option} {path}: expected a path that ends in .{' or .'.join(endings)}")
    if not path.parent.is_dir():
        raise click.UsageError(f"{option} {path}: {path.parent} is no directory; make it first")


def _reference_first(paths: Sequence[Path], reference: Path | None) -> list[Path]:
    """Each file once."""
    from tinyloop_service.demo import MODEL_PATH

    given = list(paths) or [MODEL_PATH]
    if reference is not None:
        given = [reference, *(path for path in given if not path.samefile(reference))]
    for index, path in enumerate(given):
        if any(path.samefile(other) for other in given[:index]):
            raise click.UsageError(f"{path} is given twice")
    return given


def _read_models(paths: Sequence[Path]) -> list[NamedModel]:
    """Named by their files, by their paths where two files have one name."""
    from tinyloop_service.engine.weights import read_model
    from tinyloop_service.evaluate import NamedModel

    names = [path.name for path in paths]
    return [NamedModel(path.name if names.count(path.name) == 1 else str(path), read_model(path)) for path in paths]


def _read_text(path: Path, max_bytes: int | None) -> NamedText:
    """At most `max_bytes` of a file, without a character cut in two."""
    from tinyloop_service.evaluate import NamedText

    data = path.read_bytes()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    return NamedText(str(path), text if max_bytes is None else data[:max_bytes].decode(errors="ignore"))


def _circumstances(seconds: float) -> dict[str, Any]:
    from tinyloop_service.bench import describe_machine

    versions = {"python": platform.python_version(), **{name: version(name) for name in MEASURED_WITH}}
    return {"machine": describe_machine(), "versions": versions, "seconds": round(seconds, 1)}


def _write(report: Report, facts: dict[str, Any], save: Path | None, plot: Path | None) -> None:
    """Each file whole, or as it was."""
    if save is not None:
        _write_file(save, json.dumps(facts, indent=2, ensure_ascii=False).encode())
    if plot is not None:
        from tinyloop_service.evaluate.plot import draw

        _write_file(plot, draw(report, plot.suffix.removeprefix(".")))


def _write_file(path: Path, data: bytes) -> None:
    from tinyloop_service.engine.container import replacing

    with replacing(path) as temporary:
        temporary.write_bytes(data)
