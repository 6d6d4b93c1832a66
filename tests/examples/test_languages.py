"""The examples in other languages do what they say, against real servers, and get what a Python client gets."""

from __future__ import annotations

import asyncio
import re

import pytest
from busy import count, kept_busy
from command_harness import ROOT, TIMEOUT_S, Server, eventually
from guarded import STRANGER, Guarded
from programs import PROGRAMS, PROMPT, SUFFIX, Program
from relay import relaying


@pytest.fixture(scope="module")
def expected(guarded: Guarded) -> str:
    """What all of them print, given their prefix's name."""
    with guarded.client("hog") as client:
        client.create_prefix("as-python-does-it", PROMPT, ttl=600)
        options = {"max_tokens": 24, "temperature": 0.7, "seed": 7}
        text = client.complete(prefix="as-python-does-it", suffix=SUFFIX, **options).text
        client.delete_prefix("as-python-does-it")
    return "\n".join(
        [
            "created prefixes/{0}: 12 tokens, 8 loops",
            f"{PROMPT}{SUFFIX}{text}".replace("{", "{{").replace("}", "}}"),
            "FINISH_REASON_LENGTH: 24 tokens",
            "12 of 16 prompt tokens came from the prefix",
            "cancelled",
            "NOT_FOUND, PREFIX_NOT_FOUND: no prefix 'nobody-made-this'; create it first",
            "FAILED_PRECONDITION, LOOPS_MISMATCH: loops mismatch: the request asks for 7, the prefix was built at 8; "
            "leave loops out, or build a prefix at 7",
            "deleted prefixes/{0}",
            "",
        ]
    )


def test_a_full_server_is_asked_again_and_the_rest_goes_as_told(
    program: Program, guarded: Guarded, expected: str
) -> None:
    """Over TLS, each as a tenant of its own."""
    mine = {"tenant": program.language}
    with kept_busy(guarded):
        process = program.start(guarded.address, guarded.environment(program.language))
        eventually(lambda: count(guarded, "rejections_total", reason="QUEUE_FULL", **mine) >= 1)
    out, err = process.communicate(timeout=TIMEOUT_S)
    cancelled = re.search(r"^cancelled after (\d+) tokens$", out, re.M)
    assert (process.returncode, err) == (0, "") and cancelled
    assert out.replace(cancelled[0], "cancelled") == expected.format(program.prefix)
    assert 1 <= int(cancelled[1]) < 1000
    eventually(lambda: count(guarded, "choices_finished_total", finish_reason="cancelled", **mine) == 1)
    assert count(guarded, "generation_tokens_total", **mine) < 500  # the server did not go on


async def test_text_is_shown_as_it_comes_and_proxies_see_which_prefix(program: Program, open_server: Server) -> None:
    async with relaying(open_server.address) as (relay, address), asyncio.timeout(TIMEOUT_S):
        process = await program.start_async(address)
        assert process.stdout is not None
        shown = PROMPT + SUFFIX + await relay.first_text
        out = ""
        while not out.endswith(shown):  # and nothing else will come before it has
            piece = await process.stdout.read(2**16)
            assert piece, f"{program.language} ended: {out}"
            out += piece.decode()
        relay.shown.set()
        assert "deleted" in (await process.stdout.read()).decode()
        assert await process.wait() == 0
    create, *generations, delete = relay.calls
    assert (create.method, delete.method) == ("CreatePrefix", "DeletePrefix")
    assert {call.method for call in generations} == {"Generate"}
    ids = [call.headers["x-tinyloop-prefix"] for call in relay.calls]
    assert ids == [program.prefix] * 3 + ["nobody-made-this"] + [program.prefix] * 2
    assert [call.was_cancelled for call in generations] == [False, True, False, False]
    assert all(call.time_limit_s is not None and 0 < call.time_limit_s < 62 for call in relay.calls)


@pytest.fixture(scope="module")
def in_debt(guarded: Guarded) -> None:
    """The poor tenant has used up its quota of tokens for minutes to come."""
    with guarded.client("poor") as client:
        client.create_prefix("debt", [5] * 600, ttl=600)


def test_what_waiting_helps_says_how_long(program: Program, guarded: Guarded, in_debt: None) -> None:
    process = program.start(guarded.address, guarded.environment("poor"))
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out) == (1, "")
    found = re.fullmatch(r"RESOURCE_EXHAUSTED, TENANT_QUOTA: tokens_per_s: .* \(again in (\d+\.\d+) s\)\n", err)
    assert found and 20 < float(found[1]) < 600


def test_a_token_may_be_given_itself_and_has_to_be_known(program: Program, guarded: Guarded) -> None:
    given = {"TINYLOOP_TLS_CA": str(guarded.authority), "TINYLOOP_TOKEN": STRANGER}
    process = program.start(guarded.address, given)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out) == (1, "")
    assert err.startswith("UNAUTHENTICATED, UNAUTHENTICATED: ") and err.count("\n") == 1 and STRANGER not in err


def test_the_table_names_what_is_installed() -> None:
    assert [program.language for program in PROGRAMS] == ["node", "java", "cpp", "ruby"]
    tools = (ROOT / "examples/tools.sh").read_text().replace("\\\n", "")
    for program in PROGRAMS:
        assert f'[{program.language}]="{program.packages}"' in tools
        assert program.build == f"make -C examples {program.language}"
