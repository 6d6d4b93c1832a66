"""The tokens file: what it may say, what is refused with which words, and that secrets stay out of them."""

from __future__ import annotations

import pytest

from tinyloop_service.errors import InvalidArgument, PermissionDenied
from tinyloop_service.rpc.caller import Caller, Right
from tinyloop_service.rpc.tokens import TokensFile, hash_token, new_token, parse_tokens
from tinyloop_service.types import Quota

ONE = 'tenant = "a"\nrights = ["generate"]\n'


def parsed(text: str):  # type: ignore[no-untyped-def]
    return parse_tokens(text.encode())


def token(text: str, secret: str = "tl_1") -> str:
    return f'[[token]]\nsha256 = "{hash_token(secret)}"\n{text}'


def test_a_token_stands_for_its_tenant_and_rights() -> None:
    tokens = parsed(token(ONE) + token('tenant = "b.c-d_1"\nrights = ["build", "admin"]\n', "tl_2"))
    assert tokens.caller("tl_1") == Caller("a", frozenset({Right.GENERATE}), hash_token("tl_1")[:8])
    assert tokens.caller("tl_2").tenant == "b.c-d_1" and tokens.caller("tl_2").rights == {Right.BUILD, Right.ADMIN}
    for unknown in ("tl_3", "", "tl_1 ", "TL_1", hash_token("tl_1"), "ü" * 1000):
        assert tokens.caller(unknown) is None
    assert tokens.quotas == {}


def test_the_hash_is_sha256_in_hex() -> None:
    """What `printf %s TOKEN | sha256sum` prints, so that tokens can be made without us."""
    assert hash_token("test") == "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    assert parsed(f'[[token]]\nsha256 = "{hash_token("t").upper()}"\n{ONE}').caller("t").tenant == "a"


def test_new_tokens_are_long_and_differ() -> None:
    made = {new_token() for _ in range(100)}
    assert len(made) == 100 and all(len(token) == 3 + 43 and token.isascii() for token in made)


def test_quotas_are_by_tenant_with_sizes_in_units() -> None:
    tokens = parsed(
        token(ONE)
        + token(ONE, "tl_2")
        + '[quotas.a]\nprefix_bytes = "1.5GiB"\npinned_bytes = 0\nconcurrent_requests = 2\nqueued_requests = 0\n'
        "tokens_per_s = 7\n"
    )
    assert tokens.quotas == {"a": Quota(3 * 2**29, 0, 2, 0, 7)}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[[token]", "is no TOML"),
        pytest.param("token = " + "[" * 10_000, "is no TOML", id="deep"),
        pytest.param("token = " + "9" * 10_000, "is no TOML", id="long number"),
        ("", r"has no \[\[token\]\]"),
        ("token = []", r"has no \[\[token\]\]"),
        ("token = [3]", "token 1 is no table"),
        ("tokens = 3", "'tokens': expected one of quotas, token"),
        (token(ONE) + token(ONE), "token 2 has the same sha256"),
        (token(ONE) + token(ONE + "name = 3", "tl_2"), "token 2: 'name': expected one of rights, sha256, tenant"),
        (token('rights = ["build"]'), "token 1: tenant"),
        (token('tenant = ""\nrights = ["build"]'), "token 1: tenant"),
        (token('tenant = "a b"\nrights = ["build"]'), "token 1: tenant"),
        (token('tenant = "a"'), "rights: expected a list of generate, build, admin"),
        (token('tenant = "a"\nrights = []'), "rights"),
        (token('tenant = "a"\nrights = "build"'), "rights"),
        (token('tenant = "a"\nrights = ["root"]'), "rights"),
        (f'[[token]]\n{ONE}sha256 = "tl_a-secret"', "sha256: expected 64 hex digits"),
        (f"[[token]]\n{ONE}", "sha256: expected 64 hex digits"),
        (token(ONE) + "[quotas.b]", r"\[quotas.b\]: the tenant: expected one that a \[\[token\]\] names"),
        (token(ONE) + "[quotas.a]\nbytes = 3", "'bytes': expected one of concurrent_requests"),
        (token(ONE) + "[quotas.a]\nprefix_bytes = -1", r"prefix_bytes: expected an integer of at least 0, or a size"),
        (token(ONE) + '[quotas.a]\nprefix_bytes = "2 potatoes"', "prefix_bytes"),
        (token(ONE) + '[quotas.a]\nprefix_bytes = "infGiB"', "prefix_bytes"),
        (token(ONE) + "[quotas.a]\nprefix_bytes = 1.5", "prefix_bytes"),
        (token(ONE) + "[quotas.a]\nconcurrent_requests = true", "concurrent_requests: expected an integer of at le"),
        (token(ONE) + "[quotas.a]\nconcurrent_requests = 0", "concurrent_requests: expected an integer of at least 1"),
        (token(ONE) + '[quotas.a]\ntokens_per_s = "10"', "tokens_per_s: expected an integer of at least 1$"),
        (token(ONE) + "[quotas.a]\nqueued_requests = 0", "queued_requests: expected at least 1, or concurrent_requ"),
        (token(ONE) + "[quotas]\na = 3", r"\[quotas.a\] is no table"),
        ("quotas = 3\n" + token(ONE), "quotas: expected tables"),
    ],
)
def test_what_is_wrong_is_named(text: str, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named) as caught:
        parsed(text)
    assert caught.value.field == "tokens_file"
    assert "secret" not in str(caught.value) and hash_token("tl_1") not in str(caught.value)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidArgument, match="/no/such/file: No such file"):
        TokensFile("/no/such/file")


def test_bytes_that_are_no_text_are_no_toml() -> None:
    with pytest.raises(InvalidArgument, match="is no TOML"):
        parse_tokens(b"\xff\xfe")


def test_a_missing_right_says_which() -> None:
    caller = Caller("a", frozenset({Right.GENERATE}))
    caller.require(Right.GENERATE)
    with pytest.raises(PermissionDenied, match="'build'"):
        caller.require(Right.BUILD)
