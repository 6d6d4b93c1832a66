"""How a model file was made, in words: from its provenance to what `quantize`, `convert` and `inspect` show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table


def made_facts(provenance: Mapping[str, Any]) -> dict[str, object]:
    """Lines for `output.print_facts`; none for a model that was neither quantised here nor converted.

    Provenance is not part of what a file's model_id vouches for, so it may be anything.
    """
    try:
        return _facts(provenance)
    except (AttributeError, KeyError, TypeError, ValueError):
        return {"made": "the file's provenance is not as this release writes it"}


def _facts(provenance: Mapping[str, Any]) -> dict[str, object]:
    facts: dict[str, object] = {}
    if record := provenance.get("conversion"):
        rounded = f", {record['rounded_values']} floats rounded to fp16" if record["rounded_values"] else ""
        facts["converted"] = f"from {record['file']} (SHA-256 {record['sha256'][:12]}…), {record['layout']}{rounded}"
    if record := provenance.get("quantization"):
        facts["quantised"] = _method(record)
        if text := record.get("calibration"):
            facts["calibration"] = (
                f"{text['file']} (SHA-256 {text['sha256'][:12]}…), {text['tokens']} tokens "
                f"in {text['windows']} windows of up to {text['window_tokens']}"
            )
        facts["error"] = _error(record)
    return facts


def _method(record: Mapping[str, Any]) -> str:
    parts = [
        {"gptq": "GPTQ", "rtn": "rounded to nearest"}[record["method"]],
        f"groups of {record['group_size']}",
        "head in INT4" if record["head"] == "int4" else "head in fp16",
    ]
    if record["method"] == "gptq":
        weights = record["depth_weights"]
        weighted = "" if len(set(weights)) == 1 else f" weighted {', '.join(f'{w:g}' for w in weights)}"
        passes = f"{record['passes']} pass{'es' * (record['passes'] > 1)}"
        parts += [passes, f"{record['loops']} loops{weighted}", f"damping {record['damping']:g}"]
    return ", ".join(parts)


def _error(record: Mapping[str, Any]) -> str:
    mean = f"{_percent(record['mean_error'])} in the mean of {len(record['layers'])} layers"
    if record["method"] == "rtn":
        return f"{mean}, of the energy of the weights"
    return f"{mean}, of the energy of their outputs; rounding to nearest {_percent(record['mean_rtn_error'])}"


def layer_table(record: Mapping[str, Any]) -> Table:
    """A row per linear."""
    gptq = record["method"] == "gptq"
    columns = ["layer", "RTN error", *(["GPTQ error", "of RTN", "damping", "note"] if gptq else [])]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name, justify="left" if name in ("layer", "note") else "right")
    for layer in record["layers"]:
        cells = [layer["name"], _percent(layer["rtn_error"])]
        if gptq:
            share = f"{layer['error'] / layer['rtn_error']:.2f}×" if layer["rtn_error"] else ""
            cells += [_percent(layer["error"]), share, f"{layer['damping']:g}", layer["note"]]
        table.add_row(*cells)
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.3f} %"
