"""What people and scripts read, and the plot."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from small_models import TEXT, model, small_report

from tinyloop_service.evaluate import NamedModel, Options, Report, evaluate
from tinyloop_service.evaluate.plot import draw
from tinyloop_service.evaluate.report import as_dict, growth_sentences, percent, render, signed
from tinyloop_service.plotting import can_plot


def printed(report: Report) -> str:
    console = Console(file=io.StringIO(), width=120, highlight=False)
    console.print(render(report))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def with_distance(distance: tuple[float, ...] | None) -> Report:
    """A report whose one row beside the reference has this distance."""
    report = small_report()
    row = report.rows[2]
    return replace(report, rows=(report.rows[0], replace(row, quality=replace(row.quality, distance=distance))))


def test_the_tables_hold_every_row_under_every_measure() -> None:
    lines = printed(small_report()).splitlines()
    assert sum(line.startswith("  int4.tinyloop ") for line in lines) == 4
    assert sum(line.startswith("  int4.tinyloop, int8 activations ") for line in lines) == 4
    assert sum(line.startswith("  fp16.tinyloop (reference) ") for line in lines) == 1
    assert sum(line.startswith("  fp16 cache ") for line in lines) == 4
    assert sum(line.startswith("  int8 cache, attended in int8 ") for line in lines) == 4
    assert sum(line.startswith("  float32 cache (reference) ") for line in lines) == 1
    [first] = (line for line in lines if line.startswith("  fp16.tinyloop (reference)"))
    assert first.split()[2:] == [f"{bits:.4f}" for bits in small_report().rows[0].quality.bits_per_byte]
    assert "All of the text: 194 bytes, 194 tokens" in lines[0]


def test_a_lone_model_has_bits_and_nothing_to_compare() -> None:
    alone = Options(int8_activations=False, cache_modes=())
    report = evaluate([NamedModel("one.tinyloop", model("pre"))], [TEXT], alone)
    text = printed(report)
    assert "one.tinyloop (reference)" in text
    assert "agreement" not in text and "distance" not in text and "second half" not in text.lower()


def test_growth_is_a_sentence_a_row() -> None:
    [sentence] = growth_sentences(with_distance((0.01, 0.02, 0.025, 0.03)))
    assert sentence == (
        "int4.tinyloop: the state is 1.00 % off before the first loop, 2.00 % after it and 3.00 % after loop 3, "
        "1.50 times that after the first."
    )
    [sentence] = growth_sentences(with_distance((0.0, 0.2)))
    assert sentence == "int4.tinyloop: the state is 0.00 % off before the first loop and 20.0 % after it."
    assert list(growth_sentences(with_distance(None))) == []


def test_a_state_of_another_width_is_a_dash() -> None:
    assert printed(with_distance(None)).count("–") == len(small_report().depths)


@pytest.mark.parametrize(
    ("share", "shown"), [(1, "100.0 %"), (0.8666, "86.7 %"), (0.05, "5.00 %"), (0.000141, "0.0141 %")]
)
def test_shares_keep_three_digits(share: float, shown: str) -> None:
    assert percent(share) == shown


@pytest.mark.parametrize(("bits", "shown"), [(0.00124, "+0.0012"), (-0.0003, "−0.0003"), (-1e-9, "0.0000")])
def test_differences_have_a_sign_unless_they_are_none(bits: float, shown: str) -> None:
    assert signed(bits) == shown


def test_the_dictionary_is_json_and_whole() -> None:
    found = json.loads(json.dumps(as_dict(small_report()), allow_nan=False))
    assert found["reference"] == "fp16.tinyloop" and found["depths"] == [1, 2, 4]
    assert [each["weights"] for each in found["models"]] == ["fp16", "INT4, groups of 32"]
    assert [each["model_id"] for each in found["models"]] == [model("fp16").model_id, model("pre").model_id]
    [text] = found["texts"]
    assert (text["bytes"], text["tokens"], len(text["sha256"])) == (194, 194, 64)
    row = found["rows"][2]
    assert (row["model"], row["activations"], row["cache"], row["scored"]) == (
        "int4.tinyloop",
        "float32",
        "float32",
        "all",
    )
    attended = [(each["cache"], each["scored"]) for each in found["rows"] if each["attention"] == "int8"]
    assert attended == [("int8", "second half")]
    assert row["bits_per_byte"].keys() == row["top1_agreement"].keys() == {"1", "2", "4"}
    assert len(row["distance"]) == 5


# --- the plot ---

needs_matplotlib = pytest.mark.skipif(not can_plot(), reason="matplotlib is not installed")


@needs_matplotlib
def test_the_plot_names_rows_axes_and_units() -> None:
    image = draw(small_report(), "svg").decode()
    assert image.startswith("<?xml")
    # matplotlib draws letters as curves and notes the text beside them.
    for text in (
        *(
            "fp16.tinyloop (reference)",
            "int4.tinyloop",
            "int4.tinyloop, int8 activations",
            "fp16 cache (second halves)",
            "int8 cache, attended in int8 (second halves)",
        ),
        *("bits per byte (lower is better)", "loops", "added bits per byte, ± standard error"),
        *("loops done (0: what enters the first)", "distance, % of the reference state's length"),
    ):
        assert f"<!-- {text} -->" in image, text


@needs_matplotlib
@pytest.mark.parametrize(("image_format", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_other_formats(image_format: str, magic: bytes) -> None:
    assert draw(small_report(), image_format).startswith(magic)


@needs_matplotlib
def test_a_report_without_a_comparison_is_one_panel_and_drawn_alike_twice() -> None:
    alone = replace(small_report(), rows=small_report().rows[:1])
    image = draw(alone, "svg")
    assert b"bits per byte" in image and b"standard error" not in image
    assert draw(alone, "svg") == image
