"""A report as people and scripts read it: one table a span, a sentence a row on how its error grows, one JSON object.

In: a `Report`.  Out: rich renderables, sentences, plain dictionaries.  Refuses to know where they go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tinyloop_service.engine.spec import ModelSpec
from tinyloop_service.evaluate.run import Report, Row
from tinyloop_service.evaluate.windows import Span

HEADINGS: dict[Span, str] = {
    "all": "All of the text",
    "second half": "The second half of each window, off a cached first half",
}


def label(row: Row) -> str:
    """What a line is called: over second halves only the cache differs, else the model and its activations."""
    if row.span == "second half":
        attended = ", attended in int8" if row.rounding.attention == "int8" else ""
        name = f"{row.rounding.cache or 'float32'} cache{attended}"
    else:
        name = row.model + (", int8 activations" if row.rounding.activations == "int8" else "")
    return f"{name} (reference)" if row.is_reference else name


def describe_weights(spec: ModelSpec) -> str:
    return "fp16" if spec.quant is None else f"INT{spec.quant.bits}, groups of {spec.quant.group_size}"


# --- for people ---


def render(report: Report) -> Group:
    """Everything, in the order it should be read."""
    parts: list[RenderableType] = []
    for span in HEADINGS:
        if rows := report.over(span):
            quality = rows[0].quality
            facts = f"{quality.num_bytes} bytes, {quality.num_tokens} tokens"
            weights = f", weights of {report.reference}" if span == "second half" else ""
            parts += [Text.assemble((HEADINGS[span], "bold"), f": {facts}{weights}"), *_blocks(report, rows), Text()]
    return Group(*parts, *(Text(sentence) for sentence in growth_sentences(report)))


def _blocks(report: Report, rows: tuple[Row, ...]) -> Iterator[RenderableType]:
    """A title and a table for each measure, a column a depth; columns are below each other."""
    others = tuple(row for row in rows if not row.is_reference)
    labels = max(len(label(row)) for row in rows)

    def block(title: str, lines: tuple[Row, ...], cells: Callable[[Row], list[Text]]) -> Iterator[RenderableType]:
        if not lines:
            return
        yield Text(title, style="dim")
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("", min_width=labels + 2)
        for index, depth in enumerate(report.depths):
            table.add_column(str(depth) if index else f"L = {depth}", justify="right", min_width=9, no_wrap=True)
        for row in lines:
            table.add_row(Padding(label(row), (0, 0, 0, 2)), *cells(row))
        yield table

    yield from block("bits per byte", rows, lambda row: [Text(f"{bits:.4f}") for bits in row.quality.bits_per_byte])
    yield from block("added to the reference's, ± standard error", others, _added)
    yield from block(
        "top-1 agreement with the reference", others, lambda row: [Text(percent(a)) for a in row.quality.agreement]
    )
    yield from block("state's distance from the reference's", others, lambda row: _distances(report, row))


def _added(row: Row) -> list[Text]:
    """Signed, the standard error beneath."""
    errors = row.quality.added_bits_error
    cells = [Text(signed(bits)) for bits in row.quality.added_bits]
    for cell, error in zip(cells, errors or (), strict=errors is not None):
        cell.append(f"\n±{error:.4f}", style="dim")
    return cells


def _distances(report: Report, row: Row) -> list[Text]:
    distance = row.quality.distance
    return [Text("–" if distance is None else percent(distance[depth])) for depth in report.depths]


def growth_sentences(report: Report) -> Iterator[str]:
    """How far each row's state is from the reference's before the loops, after the first and after the last."""
    for row in report.rows:
        distance = row.quality.distance
        if row.is_reference or distance is None:
            continue
        loops = len(distance) - 1
        beginning = f"{label(row)}: the state is {percent(distance[0])} off before the first loop"
        if loops == 1:
            yield f"{beginning} and {percent(distance[1])} after it."
            continue
        growth = f", {distance[-1] / distance[1]:.2f} times that after the first" if distance[1] else ""
        yield f"{beginning}, {percent(distance[1])} after it and {percent(distance[-1])} after loop {loops}{growth}."


def percent(share: float) -> str:
    """Three digits that count, however small: "86.7 %", "0.0412 %"."""
    return f"{100 * share:#.3g} %" if share < 0.1 else f"{100 * share:.1f} %"


def signed(bits: float) -> str:
    """ "+0.0012", "−0.0003"; what rounds to nothing has no sign."""
    shown = f"{bits:+.4f}"
    return shown[1:] if float(shown) == 0 else shown.replace("-", "−")


# --- for scripts ---


def as_dict(report: Report) -> dict[str, Any]:
    """Figures per depth under the depth; `distance` per loop, that before the first loop first."""
    return {
        "reference": report.reference,
        "depths": list(report.depths),
        "window_tokens": report.window_tokens,
        "windows": report.num_windows,
        "texts": [
            {"name": text.name, "bytes": text.num_bytes, "tokens": text.num_tokens, "sha256": text.sha256}
            for text in report.texts
        ],
        "models": [
            {
                "name": model.name,
                "model_id": model.weights.model_id,
                "weights": describe_weights(model.weights.spec),
                "provenance": model.weights.provenance,
            }
            for model in report.models
        ],
        "rows": [_row_dict(report, row) for row in report.rows],
    }


def _row_dict(report: Report, row: Row) -> dict[str, Any]:
    quality = row.quality

    def by_depth(values: tuple[float, ...] | None) -> dict[str, float] | None:
        if values is None:
            return None
        return {str(depth): round(value, 7) for depth, value in zip(report.depths, values, strict=True)}

    return {
        "model": row.model,
        "is_reference": row.is_reference,
        "activations": row.rounding.activations,
        "cache": row.rounding.cache.value if row.rounding.cache else "float32",
        "attention": row.rounding.attention,
        "scored": row.span,
        "tokens": quality.num_tokens,
        "bytes": quality.num_bytes,
        "bits_per_byte": by_depth(quality.bits_per_byte),
        "added_bits_per_byte": by_depth(quality.added_bits),
        "added_bits_per_byte_error": by_depth(quality.added_bits_error),
        "top1_agreement": by_depth(quality.agreement),
        "distance": None if quality.distance is None else [round(value, 7) for value in quality.distance],
    }
