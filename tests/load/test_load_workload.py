"""Workload files: those that ship, how they fit a model, and how a wrong one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tinyloop_service.errors import InvalidArgument
from tinyloop_service.load.workload import Length, parse_workload, read_workload, shipped

BASE: dict[str, Any] = {"about": "x", "prefixes": 4, "prefix_len": 100, "suffix_len": 0, "output_len": 10}
ASKED_FOR = {
    "rag", "chat-template", "few-shot", "gsp", "prefix-repetition", "zipf-churn", "cancel-heavy", "one-huge-build",
}  # fmt: skip


def test_the_workloads_that_ship() -> None:
    assert {*shipped()} == ASKED_FOR


@pytest.mark.parametrize("name", sorted(ASKED_FOR))
@pytest.mark.parametrize("max_seq_len", [256, 2048, 10**6])
def test_every_one_fits_every_model(name: str, max_seq_len: int) -> None:
    workload = read_workload(name)
    scaled = workload.scaled(max_seq_len)
    assert scaled.most_tokens <= max_seq_len
    assert scaled.build_len < max_seq_len
    assert scaled.prefix_len.low > 0 and scaled.output_len.low > 0
    if workload.most_tokens <= max_seq_len:
        assert scaled.prefix_len == workload.prefix_len, "nothing is cut that fits"


@pytest.mark.parametrize("name", sorted(ASKED_FOR))
def test_its_data_is_its_file(name: str) -> None:
    data = read_workload(name).as_data()
    assert parse_workload(data.pop("name"), data) == read_workload(name)


def test_the_published_sizes() -> None:
    gsp, repeated = read_workload("gsp"), read_workload("prefix-repetition")
    assert (gsp.prefixes, gsp.requests_per_prefix) == (64, 16)
    assert [x.high for x in (gsp.prefix_len, gsp.suffix_len, gsp.output_len)] == [2048, 128, 256]
    assert repeated.prefixes == 10
    assert [x.high for x in (repeated.prefix_len, repeated.suffix_len, repeated.output_len)] == [256, 256, 128]


def test_scaling_keeps_proportions() -> None:
    scaled = read_workload("gsp").scaled(1216)
    assert [x.high for x in (scaled.prefix_len, scaled.suffix_len, scaled.output_len)] == [1024, 64, 128]
    odd = parse_workload(
        "odd", {**BASE, "prefix_len": {"median": 300, "sigma": 1, "most": 900}, "output_len": [1, 100]}
    )
    assert odd.scaled(500).prefix_len == Length(1, 450, 150.0, 1.0)
    assert odd.scaled(500).output_len == Length(1, 50)


def test_a_user_s_file_and_changes_to_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('about = "mine"\nprefixes = 2\nprefix_len = 64\nsuffix_len = [0, 8]\noutput_len = 4\n')
    mine = read_workload(str(path), {"prefixes": 3, "ttl_s": 1.5})
    assert (mine.name, mine.prefixes, mine.ttl_s, mine.suffix_len) == ("mine", 3, 1.5, Length(0, 8))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("prefixes", 0), ("prefixes", 1.5), ("prefixes", True), ("prefixes", 10**9), ("about", ""), ("about", 3),
        ("prefix_len", 0), ("prefix_len", [9, 5]), ("prefix_len", [1, 2, 3]), ("prefix_len", "long"),
        ("suffix_len", -1), ("suffix_len", [True, 3]), ("output_len", 0),
        ("output_len", {"median": 9}), ("output_len", {"median": 9, "sigma": 1, "most": 5}),
        ("output_len", {"median": 9, "sigma": 0, "most": 20}),
        ("output_len", {"median": 9, "sigma": 1, "most": 20, "x": 1}),
        ("zipf", -1), ("zipf", float("nan")), ("temperature", "hot"), ("cold_share", 1.1), ("cancel_rate", -0.1),
        ("ttl_s", 0), ("content", "music"), ("expected_errors", "QUEUE_FULL"), ("expected_errors", [1]),
        ("builds", 2), ("requests_per_prefix", 0), ("colour", "red"),
    ],
)  # fmt: skip
def test_a_wrong_key_or_value_is_named(key: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_workload("wrong", {**BASE, key: value})
    assert refused.value.field == key


@pytest.mark.parametrize("key", sorted(BASE))
def test_what_is_missing_is_named(key: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{key}: is missing"):
        parse_workload("wrong", {name: value for name, value in BASE.items() if name != key})


def test_dealing_and_drawing_exclude_each_other() -> None:
    with pytest.raises(InvalidArgument, match="leave one out"):
        parse_workload("wrong", {**BASE, "zipf": 1.0, "requests_per_prefix": 4})


def test_a_deal_has_an_end() -> None:
    with pytest.raises(InvalidArgument, match="times prefixes is more than"):
        parse_workload("wrong", {**BASE, "prefixes": 10**5, "requests_per_prefix": 10**5})


def test_what_is_no_workload_file(tmp_path: Path) -> None:
    for name in ("nonsense", str(tmp_path / "missing.toml")):
        with pytest.raises(InvalidArgument, match="neither a file nor one of cancel-heavy, "):
            read_workload(name)
    (tmp_path / "bad.toml").write_bytes(b"\xff = [")
    with pytest.raises(InvalidArgument, match=r"bad\.toml is no TOML"):
        read_workload(str(tmp_path / "bad.toml"))
    (tmp_path / "odd.toml").write_text("prefixes = 0")
    with pytest.raises(InvalidArgument, match=r"\(workload odd\)"):
        read_workload(str(tmp_path / "odd.toml"))
