"""Commands that need no server: help, wrong usage, model files, the benchmark."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import structlog
from click.testing import CliRunner
from command_harness import Done, tinyloop, tinyloop_process

from tinyloop_service.cli.main import group


def commands(parent: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in parent.commands.items():
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


@pytest.mark.parametrize("path", list(commands(group)), ids=" ".join)
def test_every_command_teaches_by_example(path: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(group, [*path, "--help"], prog_name="tinyloop")
    assert shown.exit_code == 0
    example = f"tinyloop {' '.join(path)}"
    assert "Example" in shown.output
    assert shown.output.count(example) >= 2, "the usage line and an example"


@pytest.mark.parametrize("path", [(), ("prefix",), ("token",)], ids=" ".join)
def test_a_group_shows_of_each_command_its_whole_sentence(path: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(group, [*path, "--help"], terminal_width=80).output
    listed = shown.split("Commands:\n")[1]
    assert "..." not in listed and max(map(len, listed.splitlines())) <= 80


@pytest.mark.parametrize("path", list(commands(group)), ids=" ".join)
def test_every_option_can_be_understood_alone(path: tuple[str, ...]) -> None:
    command: click.Command = group
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    context = click.Context(command)
    for option in (each for each in command.params if isinstance(each, click.Option)):
        assert option.help, option.name
        assert option.help.split()[0] not in ("Of", "That", "For", "Over"), f"{option.name} begins in mid-sentence"
        assert "_" not in option.make_metavar(context), f"{option.name} is named after a function"


@pytest.mark.parametrize(
    "arguments",
    [
        ["bogus"],
        ["prefix"],
        ["prefix", "create", "x"],
        ["prefix", "create", "x", "text", "--tokens", "1,2"],
        ["prefix", "create", "x", "--tokens", "1,two"],
        ["prefix", "create", "x", "text", "--ttl", "soon"],
        ["prefix", "create", "x", "--file", "/nonexistent"],
        ["prefix", "update", "x"],
        ["prefix", "update", "x", "--ttl", "1h", "--no-expiry"],
        ["generate"],
        ["generate", "text", "--max-tokens", "0"],
        ["serve", "--listen", "0.0.0.0:50051"],
        ["serve", "--threads", "many"],
        ["init", "--size", "huge", "x.tinyloop"],
        ["init", "--size", "tiny", "/nonexistent/x.tinyloop"],
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_2(arguments: list[str]) -> None:
    done = tinyloop(*arguments, status=2)
    assert done.out == ""
    assert "Usage: tinyloop" in done.err


@pytest.mark.parametrize(
    ("variables", "arguments", "named"),
    [
        ({}, "serve --grpc-processes x", "Error: --grpc-processes: 'x' given"),
        ({"GRPC_PROCESSES": "x"}, "serve", "Error: TINYLOOP_GRPC_PROCESSES: 'x' given"),
        ({"GRPC_PROCESSES": "1"}, "serve --grpc-processes 65", "Error: --grpc-processes: 65 given"),
        ({"GRPC_PROCESSES": "65"}, "serve --threads 1", "Error: TINYLOOP_GRPC_PROCESSES: 65 given"),
        ({"TRACE_SHARE": "3"}, "serve", "Error: TINYLOOP_TRACE_SHARE: 3.0 given"),  # there is no flag
        ({"KV_INT8": "1"}, "serve --cache-mode fp16", "Error: --cache-mode: 'fp16' given, but TINYLOOP_KV_INT8 on"),
        ({}, "serve --drain-grace -1", "Error: --drain-grace: -1.0 given"),
        ({}, "serve --tokens-file /no/such/file", "error: --tokens-file: /no/such/file: No such file"),
        ({"TOKENS_FILE": "/no/such/file"}, "serve", "error: TINYLOOP_TOKENS_FILE: /no/such/file: No such file"),
        ({}, "bench --kv-memory 1", "error: --kv-memory: 1 bytes given"),
        ({"KV_MEMORY": "1"}, "bench", "error: TINYLOOP_KV_MEMORY: 1 bytes given"),
        ({}, "model --client-cert x", "Error: --client-cert: given without --client-key; give both"),
        ({"CLIENT_CERT": "x"}, "model", "Error: TINYLOOP_CLIENT_CERT: given without TINYLOOP_CLIENT_KEY; give both"),
        ({"TOKEN": "x", "TOKEN_FILE": "x"}, "model", "Error: TINYLOOP_TOKEN_FILE: given beside TINYLOOP_TOKEN; leave"),
        ({}, "serve --tls-key x", "Error: --tls-key: given without --tls-cert; give both"),
        ({"TLS_KEY": "x"}, "serve", "Error: TINYLOOP_TLS_KEY: given without TINYLOOP_TLS_CERT; give both"),
        ({}, "serve --tls-client-ca x", "Error: --tls-client-ca: given without --tls-cert; give both"),
        ({"TOKEN": "a b"}, "model", "error: TINYLOOP_TOKEN: is no bearer token"),
        ({}, "model --tls-ca /dev/null", "error: --tls-ca: /dev/null holds no certificate"),
        ({}, "generate x --temperature nan", "error: --temperature: is nan"),
        ({}, "generate x --stop=", "error: --stop: is empty"),
        ({}, "generate x --stop= --stop-tokens 1", "error: stop_sequences[0]: is empty"),  # given by two flags
    ],
)
def test_an_error_names_the_flag_or_the_variable_that_was_given(
    variables: dict[str, str], arguments: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"TINYLOOP_{name}", value)
    last = tinyloop(*arguments.split(), status=None).err.splitlines()[-1]
    assert last.startswith(named)


FLAGS = "--tokens-file or --tls-client-ca, or --insecure-any-address if"
VARIABLES = "TINYLOOP_TOKENS_FILE or TINYLOOP_TLS_CLIENT_CA, or TINYLOOP_INSECURE_ANY_ADDRESS if"
STRANGERS = "0.0.0.0:1"  # would be let in


@pytest.mark.parametrize(
    ("variables", "arguments", "named"),
    [
        ({}, f"serve --listen {STRANGERS}", FLAGS),
        ({}, f"serve --metrics-listen {STRANGERS}", FLAGS),
        ({"LISTEN": STRANGERS}, "serve", VARIABLES),
        ({"LISTEN": STRANGERS}, "bench", VARIABLES),  # has no such flags
        ({"INSECURE_ANY_ADDRESS": "0"}, f"serve --listen {STRANGERS}", "-ca, or TINYLOOP_INSECURE_ANY_ADDRESS if"),
    ],
)
def test_what_else_an_error_names_is_named_so_too(
    variables: dict[str, str], arguments: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"TINYLOOP_{name}", value)
    assert named in tinyloop(*arguments.split(), status=2).err.splitlines()[-1]


def test_a_server_in_this_process_leaves_the_log_of_other_tests_alone() -> None:
    before = structlog.get_config(), logging.root.handlers.copy()
    tinyloop("serve", "--tokens-file", "/no/such/file", status=1)
    assert (structlog.get_config(), logging.root.handlers) == before, "tests that run later may hear no line"


def test_no_server_is_one_line_and_a_way_out() -> None:
    done = tinyloop("prefix", "list", "--target", "127.0.0.1:1", status=1)
    [line] = done.err.strip().splitlines()
    assert line.startswith("error: ")
    assert "tinyloop serve" in line


def test_inspect_verifies_what_init_wrote(tiny: Path) -> None:
    facts = tinyloop("inspect", tiny, "--json").json
    assert facts["spec"]["default_loops"] == 4
    assert len(facts["model_id"]) == 64
    assert facts["model_id"] in tinyloop("inspect", tiny).out


def test_init_draws_the_same_model_from_the_same_seed(tmp_path: Path) -> None:
    ids = [
        tinyloop("init", "--size", "tiny", tmp_path / f"{n}.tinyloop", "--seed", seed, "--json").json["model_id"]
        for n, seed in enumerate(("0", "0", "1"))
    ]
    assert ids[0] == ids[1] != ids[2]


def test_init_replaces_only_when_told(tmp_path: Path) -> None:
    path = tmp_path / "a.tinyloop"
    path.write_bytes(b"dear")
    tinyloop("init", "--size", "tiny", path, status=2)
    assert path.read_bytes() == b"dear"
    tinyloop("init", "--size", "tiny", path, "--force")
    tinyloop("inspect", path)


@pytest.mark.parametrize("damage", ["truncated", "changed", "foreign", "missing"])
def test_a_damaged_model_file_is_one_clear_error(tiny: Path, tmp_path: Path, damage: str) -> None:
    path, whole = tmp_path / "bad.tinyloop", bytearray(tiny.read_bytes())
    if damage == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "changed":
        whole[-1000] ^= 1
        path.write_bytes(whole)
    elif damage == "foreign":
        path.write_bytes(b"GGUF" + bytes(1000))
    assert_one_clear_error(tinyloop("inspect", path, status=1))


def test_serve_refuses_a_damaged_model_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.tinyloop"
    path.write_bytes(bytes(100))
    addresses = ("--listen", "127.0.0.1:0", "--health-listen", "none")
    assert_one_clear_error(tinyloop_process("serve", "--model", path, *addresses, "--log-level", "error", status=1))


def assert_one_clear_error(done: Done) -> None:
    assert done.out == ""
    [line] = done.err.strip().splitlines()
    assert line.startswith("error: ")
    assert "bad.tinyloop" in line


def test_bench_prints_what_scripts_rely_on(tiny: Path) -> None:
    done = tinyloop(
        *("bench", "--model", tiny, "--prefix", "100", "--rows", "1", "3", "12", "--new-tokens", "4", "--rounds", "1"),
        "--json",
    )
    report = done.json
    for key in ("decode_step_ms", "shared_ms", "no_cache_ms", "speedup", "predicted_speedup"):
        assert report[key].keys() == {"1", "3", "12"}, key
        assert all(value > 0 for value in report[key].values()), key
    assert report["no_cache_scaled"] == ["12"], "measured up to 10 requests"
    assert report["engine"] == "cpu"
    assert report["machine"]
    assert report["prefill_ms"] > 0
    assert report["prefix_bytes"] == 2 * 6 * 64 * 256 * 2 * 2, (
        "two pages of 64 tokens in each of 6 layers, K and V, fp16"
    )
    assert report["active_bytes"] == report["prefix_bytes"] and report["activate_ms"] > 0
    assert report["predicted_speedup"]["1"] == 1.0


def test_bench_in_a_cache_mode_shows_its_bytes(tiny: Path) -> None:
    small = ("--prefix", "100", "--rows", "1", "--new-tokens", "2", "--rounds", "1")
    done = tinyloop("bench", "--model", tiny, "--cache-mode", "h-int4", *small)
    assert "108.0 KiB (h-int4)" in done.out, "2 pages of 9216 bytes in each of 6 layers"
    assert "768.0 KiB while requests read it" in done.out


INTERRUPTED_WHILE = """
import os, runpy, signal, sys
class Finder:  # Ctrl-C comes when {module} is imported
    @staticmethod
    def find_spec(name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
sys.argv = ["tinyloop", "inspect", "/no/such/file"]
"""
BY_SCRIPT = "from tinyloop_service.cli import main; main()"
BY_MODULE = "runpy.run_module('tinyloop_service.cli', run_name='__main__', alter_sys=False)"


def interrupted(module: str, way: str, **options: object) -> tuple[int, str]:
    code = INTERRUPTED_WHILE.format(module=module) + way
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload]
    return done.returncode, done.stderr.strip()


@pytest.mark.parametrize("way", [BY_SCRIPT, BY_MODULE])
@pytest.mark.parametrize("module", ["click", "grpc", "tinyloop_service.cli.top", "tinyloop_service.engine.weights"])
def test_ctrl_c_while_a_command_imports_what_it_needs_ends_it_quietly(module: str, way: str) -> None:
    assert interrupted(module, way) == (130, "")


def test_a_command_that_ignores_ctrl_c_from_the_start_goes_on_ignoring_it() -> None:
    """As one that a shell has put into the background."""
    status, said = interrupted("grpc", BY_SCRIPT, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert status == 1 and said.startswith("error: /no/such/file")


def test_who_imports_the_command_has_his_ctrl_c_back() -> None:
    check = (
        "from tinyloop_service.cli import main; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    )
    done = subprocess.run([sys.executable, "-c", f"import signal; {check}"], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n"
