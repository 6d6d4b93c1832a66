"""Commands against a running server: prefixes, generation, the model, signals."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import grpc
import pytest
from command_harness import Server, eventually, serving, start, tinyloop, tinyloop_process
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tinyloop_service import Client, QueueFull
from tinyloop_service.pb import generation_pb2, generation_pb2_grpc

IDS = "1,2,3,4,5,6,7,8,9,10"


def test_a_prefix_from_create_to_delete(server: Server) -> None:
    created = server.run("prefix", "create", "life", "Once upon a time", "--ttl", "1h", "--json").json
    assert (created["id"], created["state"], created["token_count"], created["loops"]) == ("life", "ready", 16, 4)
    assert created["expire_time"]

    assert "life" in server.run("prefix", "list").out
    assert [p["id"] for p in server.run("prefix", "list", "--json").json] == ["life"]
    assert "16" in server.run("prefix", "get", "life").out

    updated = server.run("prefix", "update", "life", "--pin", "--no-expiry", "--json").json
    assert (updated["pinned"], updated["expire_time"]) == (True, None)
    assert server.run("prefix", "update", "life", "--unpin", "--json").json["pinned"] is False
    watched = server.run("prefix", "watch", "life", "--json").out.splitlines()
    assert json.loads(watched[-1])["state"] == "ready"

    server.run("prefix", "delete", "life")
    assert server.run("prefix", "list", "--json").json == []
    done = server.run("prefix", "get", "life", status=1)
    assert done.err.startswith("error: ")


def test_a_prefix_that_was_there_already_is_said_to_be(server: Server) -> None:
    create = ("prefix", "create", "again", "Once upon a time", "--json")
    made = server.run(*create)
    again = server.run(*create, "--ttl", "1h")
    assert made.err == "" and again.err.startswith("again was there already, since 20")
    assert again.json["uid"] == made.json["uid"] and again.json["expire_time"], "as asked now"
    server.run("prefix", "delete", "again")
    assert server.run(*create).err == "", "made anew"
    server.run("prefix", "delete", "again")


def test_other_content_under_a_name_is_refused(server: Server) -> None:
    server.run("prefix", "create", "taken", "--tokens", IDS)
    done = server.run("prefix", "create", "taken", "--tokens", "1,2", status=1)
    assert "taken" in done.err
    server.run("prefix", "delete", "taken")


def test_text_comes_from_arguments_files_and_standard_input(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("Grüße")
    ways = [
        server.run("generate", "Grüße", "--max-tokens", "5", "--ids"),
        server.run("generate", "--file", path, "--max-tokens", "5", "--ids"),
        server.run("generate", "--file", "-", "--max-tokens", "5", "--ids", stdin="Grüße"),
    ]
    assert len({way.out for way in ways}) == 1
    assert len(ways[0].out.split()) == 5


def test_a_prefix_and_a_suffix_are_the_whole_prompt(server: Server) -> None:
    """Token ids are taken as they are, so both ways give the same tokens."""
    server.run("prefix", "create", "half", "--tokens", "1,2,3,4,5,6")
    common = ("--max-tokens", "8", "--ignore-eos", "--json")
    warm = server.run("generate", "--prefix", "half", "--tokens", "7,8,9,10", *common).json
    cold = server.run("generate", "--tokens", IDS, *common).json
    assert warm["choices"][0]["token_ids"] == cold["choices"][0]["token_ids"]
    assert (warm["usage"]["cached_tokens"], cold["usage"]["cached_tokens"]) == (6, 0)
    server.run("prefix", "delete", "half")


def test_choices_are_reproducible(server: Server) -> None:
    arguments = ("generate", "--tokens", IDS, "-n", "3", "--temperature", "1", "--seed", "7", "--max-tokens", "6")
    first, second = server.run(*arguments, "--ids"), server.run(*arguments, "--ids")
    assert first.out == second.out
    assert len(set(first.out.splitlines())) == 3


def test_a_refused_value_names_its_field(server: Server) -> None:
    done = server.run("generate", "x", "--temperature", "nan", status=1)
    assert done.err.startswith("error: --temperature")


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (("generate", "x", "--stop-tokens", "999999"), "--stop-tokens"),
        (("generate", "--tokens", "99999999"), "--tokens"),
        (("prefix", "create", "x", "--tokens", "999999"), "--tokens"),
        (("model", "--tls-ca", "/no/such/ca"), "--tls-ca"),
        (("model", "--token-file", "/no/such/token"), "--token-file"),
    ],
)
def test_a_refusal_names_the_flag(server: Server, command: tuple[str, ...], flag: str) -> None:
    assert server.run(*command, status=1).err.startswith(f"error: {flag}: ")


def test_a_refusal_names_the_variable(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYLOOP_TOKEN_FILE", "/no/such/token")
    assert server.run("model", status=1).err.startswith("error: TINYLOOP_TOKEN_FILE: /no/such/token: No such file")
    monkeypatch.setenv("TINYLOOP_CLIENT_KEY", "x")
    assert "Error: TINYLOOP_CLIENT_KEY: given without" in server.run("model", status=2).err


@pytest.mark.parametrize("flag", ["--model", "--prefixes"])
def test_a_file_that_is_not_there_is_named_by_its_flag(tiny: Path, flag: str) -> None:
    addresses = ("--listen", "127.0.0.1:0", "--health-listen", "none", "--log-level", "error")
    done = tinyloop_process("serve", "--model", tiny, *addresses, flag, "/no/such/file", status=1)
    assert done.err == f"error: {flag}: /no/such/file: No such file or directory; check the path\n"


def test_who_reads_no_more_is_no_refusal(server: Server) -> None:
    """`tinyloop model | true`: an error without a file, which is not that of an option that was not given."""
    process = start("model", "--json", "--target", server.address)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    assert (process.communicate(timeout=30)[1], process.returncode) == ("", 1)


def test_model_shows_what_the_server_runs(server: Server, tiny: Path) -> None:
    info = server.run("model", "--json").json
    assert info["model_id"] == tinyloop("inspect", tiny, "--json").json["model_id"]
    assert (info["engine"], info["has_tokenizer"]) == ("cpu", True)
    assert info["model_id"] in server.run("model").out


def test_the_health_port_says_ready(server: Server) -> None:
    assert is_ready(server)


def test_a_taken_port_is_refused(server: Server, tiny: Path) -> None:
    command = ("serve", "--model", tiny, "--listen", server.address, "--health-listen", "none")
    [line] = tinyloop_process(*command, status=1).err.splitlines()
    assert line.startswith(f"error: --listen: cannot listen on {server.address}: Address already in use")


def test_a_create_without_a_server_is_one_line() -> None:
    done = tinyloop_process("prefix", "create", "p", "text", "--target", "127.0.0.1:1", status=1)
    assert "cannot be reached" in done.err and "Traceback" not in done.err and "never retrieved" not in done.err


@contextmanager
def breaking_off(status: grpc.StatusCode, *tokens: int) -> Iterator[str]:
    """The address of a server whose every stream has these tokens, and then ends with this status."""

    def answer(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        started = generation_pb2.GenerateResponse(started=generation_pb2.Started(seed=7))
        delta = generation_pb2.GenerateResponse(delta=generation_pb2.Delta(token_ids=tokens, text="so it"))
        yield from (started.SerializeToString(), delta.SerializeToString())
        context.abort(status, "Socket closed")

    server = grpc.server(ThreadPoolExecutor(1))
    methods = {"Generate": grpc.unary_stream_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("tinyloop.v1.GenerationService", methods),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield address
    server.stop(None).wait()


LOST = (
    "error: after 2 tokens the connection to the server was lost: Socket closed; run it again once the server is back"
)


@pytest.mark.parametrize(
    ("status", "options", "out", "said"),
    [
        ("UNAVAILABLE", (), "so it\n", f"{LOST}\n"),
        ("UNAVAILABLE", ("--ids",), "5 6\n", f"{LOST}\n"),
        ("UNAVAILABLE", ("--temperature", "1"), "so it\n", f"{LOST}, with --seed 7 for the same tokens\n"),
        (
            "DEADLINE_EXCEEDED",
            (),
            "so it\n",
            "error: after 2 tokens the time limit ran out before the answer was complete\n",
        ),
    ],
)
def test_a_stream_that_breaks_off_ends_its_line_and_says_after_how_much(
    status: str, options: tuple[str, ...], out: str, said: str
) -> None:
    with breaking_off(grpc.StatusCode[status], 5, 6) as address:
        done = tinyloop("generate", "x", "--target", address, *options, status=1)
    assert (done.out, done.err) == (out, said)


def test_one_token_is_no_plural() -> None:
    with breaking_off(grpc.StatusCode.UNAVAILABLE, 5) as address:
        assert "error: after 1 token the connection" in tinyloop("generate", "x", "-t", address, status=1).err


def test_a_server_that_closes_amid_an_answer_says_so_and_not_how_to_use_a_model(tiny: Path) -> None:
    asked = ("generate", "--tokens", IDS, "--max-tokens", "2000", "--ignore-eos", "--temperature", "1", "--seed", "7")
    with serving("--model", tiny, "--drain-grace", "0.1") as server:
        process = start(*asked, "--ids", "--target", server.address)
        with Client(server.address) as client:
            eventually(lambda: client.load().rows_running == 1)
        server.stop()
        out, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert err == (
        f"error: after {len(out.split())} tokens the server closed before the answer was complete; "
        "ask again once it is back, or ask another replica, with --seed 7 for the same tokens\n"
    )


def test_what_a_server_says_of_itself_is_no_question_of_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "model", mock.Mock(side_effect=QueueFull("queue full: 8 requests wait; try again")))
    assert tinyloop("model", status=1).err == "error: queue full: 8 requests wait; try again\n"


def test_ctrl_c_ends_a_command_with_130(server: Server) -> None:
    arguments = ("generate", "--tokens", IDS, "--max-tokens", "2000", "--ignore-eos", "--json")
    process = start(*arguments, "--target", server.address)
    with Client(server.address) as client:
        eventually(lambda: client.load().rows_running == 1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out) == (130, "")
        assert "Traceback" not in err
        eventually(lambda: client.load().rows_running == 0)


def test_sigterm_lets_running_requests_finish(tiny: Path) -> None:
    with serving("--model", tiny, "--drain-grace", "60") as server, Client(server.address) as client:
        stream = client.stream([1, 2, 3], max_tokens=400, ignore_eos=True)
        ids = [*next(stream).token_ids]
        server.process.terminate()
        eventually(lambda: not is_ready(server))
        assert status_of_a_new_request(server) == grpc.StatusCode.UNAVAILABLE
        ids += [token for delta in stream for token in delta.token_ids]
        assert len(ids) == 400
        assert server.process.wait(60) == 0
        assert server.process.stderr is not None
        assert server.process.stderr.read() == ""


def is_ready(server: Server) -> bool:
    request = health_pb2.HealthCheckRequest(service="tinyloop.v1.GenerationService")
    with grpc.insecure_channel(server.health) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def status_of_a_new_request(server: Server) -> grpc.StatusCode:
    """Asked without the clients' retries."""
    request = generation_pb2.GenerateUnaryRequest()
    request.generation.input.tokens.ids.append(1)
    without_retries = [("grpc.enable_retries", 0)]
    with grpc.insecure_channel(server.address, without_retries) as channel, pytest.raises(grpc.RpcError) as caught:
        generation_pb2_grpc.GenerationServiceStub(channel).GenerateUnary(request, timeout=10)
    return caught.value.code()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_ends_at_once_with_0(tiny: Path, number: signal.Signals) -> None:
    with serving("--model", tiny) as server:
        assert server.stop(number) == 0


def test_another_model_file_does_not_reuse_old_prefixes(tmp_path: Path) -> None:
    """T24: what was built from a file stays what it was, and the file's successor starts from nothing."""
    path, other = tmp_path / "model.tinyloop", tmp_path / "other.tinyloop"
    tinyloop("init", "--size", "tiny", path, "--seed", "1")
    tinyloop("init", "--size", "tiny", other, "--seed", "2")
    ask = ("generate", "--prefix", "p", "--max-tokens", "8", "--ids", "--ignore-eos")
    with serving("--model", path) as server:
        before = server.run("prefix", "create", "p", "--tokens", IDS, "--json").json
        answer = server.run(*ask).out
        other.replace(path)
        assert server.run(*ask).out == answer, "a replaced file does not change a running server"
    with serving("--model", path) as server:
        server.run(*ask, status=1)
        after = server.run("prefix", "create", "p", "--tokens", IDS, "--json").json
        assert after["uid"] != before["uid"]
        assert server.run(*ask).out != answer
