"""What `tinyloop_service` exports, and that the two APIs are one."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import tinyloop_service
from tinyloop_service import AsyncClient, Client, Model, errors
from tinyloop_service.errors import TinyLoopError

SHARED = (
    "config",
    "build_prefix_cache",
    "generate_from_prefix_cache",
    "generate",
    "complete",
    "complete_batch",
    "stream",
    "close",
)
NAMED = ("create_prefix", "get_prefix", "list_prefixes", "update_prefix", "delete_prefix", "watch_prefix")


def test_what_is_exported_is_what_is_listed() -> None:
    modules = {name for name, value in vars(tinyloop_service).items() if inspect.ismodule(value)}
    public = {name for name in dir(tinyloop_service) if not name.startswith("_")} - modules
    assert public == set(tinyloop_service.__all__)
    assert list(tinyloop_service.__all__) == sorted(tinyloop_service.__all__)


def test_every_error_is_exported() -> None:
    tree = {
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, TinyLoopError)
    }
    assert tree <= set(tinyloop_service.__all__)


@pytest.mark.parametrize("name", tinyloop_service.__all__)
def test_every_export_says_what_it_is(name: str) -> None:
    assert inspect.getdoc(getattr(tinyloop_service, name))


def parameters(owner: type, name: str) -> list[tuple[str, object, object]]:
    """Name, kind and default of every parameter; annotations may differ, a client takes names as well."""
    found = inspect.signature(getattr(owner, name)).parameters.values()
    return [("**" if p.kind is p.VAR_KEYWORD else p.name, p.kind, p.default) for p in found]


@pytest.mark.parametrize("client", [Client, AsyncClient])
@pytest.mark.parametrize("name", SHARED)
def test_a_client_has_the_signatures_of_the_model(client: type, name: str) -> None:
    assert parameters(client, name) == parameters(Model, name)


@pytest.mark.parametrize("name", (*SHARED, *NAMED))
def test_the_clients_are_alike(name: str) -> None:
    assert parameters(Client, name) == parameters(AsyncClient, name)


def test_the_documented_order_of_generation_parameters() -> None:
    order = [
        "max_tokens",
        "loops",
        "temperature",
        "top_k",
        "top_p",
        "cache_window",
        "repetition_penalty",
        "stop_sequences",
    ]
    for name, first in (("generate", "prompt"), ("generate_from_prefix_cache", "prefix")):
        positional = [p for p, kind, _ in parameters(Model, name) if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        assert positional == ["self", first, *order]


def test_what_is_not_exported_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'tinyloop_service' has no attribute 'nothing'"):
        tinyloop_service.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("statement", "others"),
    [
        ("from tinyloop_service import *", "onnxruntime onnx torch"),
        ("import tinyloop_service", "grpc numpy tinyloop_service.errors"),
        ("import tinyloop_service.front", "numpy tinyloop_service.client tinyloop_service.model"),
    ],
)
def test_what_is_imported_loads_no_more_than_it_needs(statement: str, others: str) -> None:
    code = f"{statement}\nimport sys; print([m for m in {others.split()} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


USER = """from tinyloop_service import Client, Completion, {name}

with Client("127.0.0.1:50051") as client:
    answer: Completion = client.complete("Once", max_tokens=5)
    print(answer.{field})
"""


def test_a_user_s_type_checker_knows_what_there_is_and_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "fits.py").write_text(USER.format(name="Model", field="choices"))
    (tmp_path / "misspelt.py").write_text(USER.format(name="Cleint", field="choises"))
    command = (sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path, tmp_path)
    installed = {"PYTHONPATH": str(Path(tinyloop_service.__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=installed, capture_output=True, text=True)
    assert done.stdout.count("misspelt.py") == 2 and "fits.py" not in done.stdout, done.stdout + done.stderr
    assert 'no attribute "Cleint"' in done.stdout and 'no attribute "choises"' in done.stdout
