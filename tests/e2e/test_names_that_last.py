"""`tinyloop serve` with a registry: two processes on one Redis, and a file that cannot be."""

from __future__ import annotations

import signal
from pathlib import Path

from command_harness import Server, eventually, serving, tinyloop_process
from redis_server import RedisServer

TEXT = "In the beginning God created the heaven and the earth."


def answer(server: Server) -> str:
    return server.run("generate", "--prefix", "p", " And", "--max-tokens", "8", "--ignore-eos", "--ids").out


def built(server: Server) -> str:
    state: str = server.run("prefix", "get", "p", "--json").json["state"]
    return state


def test_two_processes_share_their_names(tiny: Path, redis_server: RedisServer, tmp_path: Path) -> None:
    file = tmp_path / "prefixes.toml"
    file.write_text('[[prefix]]\nid = "from-the-file"\ntext = "Once upon a time"\n')
    options = ("--model", tiny, "--registry", redis_server.url, "--prefixes", file)
    with serving(*options) as a, serving(*options) as b:
        uids = {server.run("prefix", "get", "from-the-file", "--json").json["uid"] for server in (a, b)}
        assert len(uids) == 1
        a.run("prefix", "create", "p", TEXT)
        assert built(b) == "evicted"
        first = answer(b)
        assert first == answer(a) and built(b) == "ready"
        a.run("prefix", "delete", "p")
        a.run("prefix", "create", "p", TEXT.upper())
        other = answer(a)
        eventually(lambda: answer(b) == other)


def test_a_killed_server_s_names_and_state_are_there_for_the_next(tiny: Path, tmp_path: Path) -> None:
    """T17: and state that is damaged is refused, and gives the same answer by a prefill."""
    kept = tmp_path / "snapshots"
    options = ("--model", tiny, "--registry", f"sqlite:///{tmp_path}/names.db", "--snapshot-dir", kept)
    request = ("generate", "--prefix", "p", " And", "--max-tokens", "8", "--ignore-eos", "--logprobs", "3", "--json")
    with serving(*options) as first:
        first.run("prefix", "create", "p", TEXT)
        said = first.run(*request).json
        eventually(lambda: list(kept.glob("*.safetensors")))
        first.stop(signal.SIGKILL)
    with serving(*options) as second:
        assert built(second) == "evicted"
        again = second.run(*request).json
        for part in ("token_ids", "logprobs"):
            assert again["choices"][0][part] == said["choices"][0][part]
        assert again["usage"] == said["usage"], "as many cached tokens: nothing of the prefix was computed"
        second.stop(signal.SIGKILL)
    [snapshot] = kept.glob("*.safetensors")
    whole = snapshot.read_bytes()
    snapshot.unlink()
    snapshot.write_bytes(whole[: len(whole) // 2])
    with serving(*options) as third:
        prefilled = third.run(*request).json
        for part in ("token_ids", "logprobs"):
            assert prefilled["choices"][0][part] == said["choices"][0][part]
        assert prefilled["usage"]["cached_tokens"] == 0
        eventually(lambda: snapshot.read_bytes() == whole)
        third.stop()
        assert third.process.stderr is not None and "snapshot refused" in third.process.stderr.read()


def test_a_registry_that_cannot_be_is_one_clear_error(tiny: Path) -> None:
    addresses = ("--listen", "127.0.0.1:0", "--health-listen", "none", "--log-level", "error")
    options = ("--registry", "sqlite:////no/such/directory/names.db")
    done = tinyloop_process("serve", "--model", tiny, *options, *addresses, status=1)
    assert "/no/such/directory/names.db cannot be opened" in done.err and "Traceback" not in done.err
