"""What README and the pages of docs/ state about settings, errors, commands and files is what the code has."""

from __future__ import annotations

import re
import tomllib
from dataclasses import MISSING, Field, fields
from enum import StrEnum
from pathlib import Path
from typing import get_type_hints

import click
import pytest

from tinyloop_service.cli.main import group
from tinyloop_service.cli.options import SETTING_FLAGS, SETTING_SWITCHES
from tinyloop_service.errors import BudgetExceeded, ModelFileError, TinyLoopError, Unavailable, install
from tinyloop_service.observe.exposition import FAMILIES, Counter, Distribution, Gauge
from tinyloop_service.rpc.caller import Right
from tinyloop_service.rpc.status import TABLE
from tinyloop_service.rpc.tokens import parse_tokens
from tinyloop_service.settings import ClientSettings, Settings
from tinyloop_service.types import Quota

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SETTINGS = {f.name: f for group in get_type_hints(Settings).values() for f in fields(group)}


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    """What is under a heading, up to the next of the same level."""
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def rows(text: str) -> list[list[str]]:
    """Cells of the tables in a text, the first heading left out."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def shown(setting: Field[object]) -> str:
    default = setting.default
    assert default is not MISSING
    match default:
        case None:
            return "none"
        case bool():
            return str(default).lower()
        case StrEnum():
            return default.value
    return str(default)


def test_the_settings_table_is_the_settings() -> None:
    expected = {f"`TINYLOOP_{name.upper()}`": shown(field) for name, field in SETTINGS.items()}
    assert {row[0]: row[1] for row in rows(page("settings"))} == expected


def test_the_metrics_table_is_the_metrics() -> None:
    kinds = {Counter: "counter", Gauge: "gauge", Distribution: "histogram"}
    stated = [tuple(row[:3]) for row in rows(page("watching")) if row[1] in kinds.values()]
    assert stated == [(f"`{f.name}`", kinds[type(f)], ", ".join(f.labels)) for f in FAMILIES]


def test_the_table_of_clients_is_their_settings() -> None:
    stated = {row[0]: row[1] for row in rows(page("access")) if row[0].startswith("`TINYLOOP_")}
    names = [field.name for field in fields(ClientSettings)]
    assert list(stated) == [f"`TINYLOOP_{name.upper()}`" for name in names]
    flags = {option for parameter in group.commands["model"].params for option in parameter.opts}
    assert all(not flag or flag.strip("`") in flags for flag in stated.values())
    assert "--token" not in flags


def test_the_printed_tokens_file_is_one_and_every_right_and_quota_is_explained() -> None:
    [example] = re.findall(r"```toml\n(.*?)```", page("access"), re.DOTALL)
    tokens = parse_tokens(example.encode())
    assert tokens.caller("test") is not None and tokens.quotas.keys() == {"acme"}
    explained = {row[0].strip("`") for row in rows(page("access"))}
    assert {*Right, *(field.name for field in fields(Quota))} <= explained


def test_every_flag_is_a_setting() -> None:
    assert SETTING_FLAGS.keys() | SETTING_SWITCHES.keys() <= SETTINGS.keys()


@pytest.mark.parametrize("name", [name for name, text in SETTING_FLAGS.items() if "[default: " in text])
def test_a_default_in_a_flag_s_help_is_the_default(name: str) -> None:
    stated = re.search(r"\[default: (.+)\]", SETTING_FLAGS[name])
    assert stated
    default = SETTINGS[name].default
    if default is None:
        assert not stated[1].isdigit()
    elif isinstance(default, float):
        assert float(stated[1]) == default
    else:
        assert stated[1] == shown(SETTINGS[name])


# Abstract classes have no row of their own, and a model file is read before anybody can call.
NOT_IN_THE_TABLE = {TinyLoopError, BudgetExceeded, Unavailable, ModelFileError}


@pytest.mark.parametrize("error", sorted(TABLE.keys() - NOT_IN_THE_TABLE, key=lambda cls: cls.__name__))
def test_the_error_table_is_the_errors(error: type[TinyLoopError]) -> None:
    [row] = [row for row in rows(section(page("api"), "Errors")) if f"`{error.reason}`" in row[3]]
    _, python, status, _ = row
    assert f"`{TABLE[error].name}`" in status
    built_in = re.match(r"`(\w+)`", python)
    assert built_in
    assert issubclass(error, __builtins__[built_in[1]])  # type: ignore[index]


def test_every_extra_is_told_in_one_wording() -> None:
    """For who installs the package and for who has a checkout; and it is one that pyproject.toml has."""
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tinyloop_service").rglob("*.py")}
    by_hand = [path.name for path, text in sources.items() if "pip install" in text]
    assert by_hand == ["errors.py"]
    asked_for = {extra for text in sources.values() for extra in re.findall(r"\binstall\(['\"](\w+)", text)}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {"load", "plot", "redis", "otel", "cuda13"} == asked_for <= extras.keys()
    command, in_a_checkout = install("load,plot").split(", in a checkout ")
    assert f"`{command}`, in a checkout `{in_a_checkout}`" in README


def test_every_command_is_in_the_table() -> None:
    stated = {re.search(r"tinyloop (\w+)", row[0])[1] for row in rows(section(README, "From a shell"))}  # type: ignore[index]
    assert stated == set(group.commands)
    prefix = group.commands["prefix"]
    assert isinstance(prefix, click.Group)
    [row] = [row for row in rows(section(README, "From a shell")) if "prefix" in row[0]]
    assert set(re.findall(r"`(?:tinyloop prefix )?(\w+)`", row[0])) == set(prefix.commands)


def test_the_line_that_runs_one_file_of_tests_finds_some() -> None:
    [(python, path, words)] = re.findall(r"`(\S+) -m pytest (\S+)`[^`]*`-k (\w+)`", README)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert python == ".venv/bin/python" and "VENV := .venv\n" in makefile and "$(BIN)/python -m pytest" in makefile
    [made] = re.findall(r"`make \.venv/(\S+)`", README)
    assert f"DEV_READY := $(VENV)/{made}\n" in makefile, "after `make demo` alone there is no pytest"
    assert re.search(rf"^(?:async )?def test_\w*{words}", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


def test_every_path_of_the_map_exists() -> None:
    places = (ROOT, ROOT / "tinyloop_service", ROOT / "tinyloop_service" / "engine")
    tree = page("map").split("```")[1]
    paths = [word for line in tree.splitlines() for word in line[:31].split()]
    assert len(paths) > 20
    for path in paths:
        assert any((place / path).exists() for place in places), f"the map names {path}"


def test_every_module_is_on_the_map() -> None:
    tree = page("map").split("```")[1]
    package = ROOT / "tinyloop_service"
    modules = {path.name for path in package.glob("*.py")} | {
        path.name + "/" for path in package.glob("*/") if path.is_dir()
    }
    assert [name for name in modules - {"__init__.py", "__pycache__/"} if name not in tree] == []
