"""The tokens file: which bearer tokens there are, whom each stands for, what that tenant may take.

    [[token]]
    tenant = "acme"                      # letters, digits, . _ - ; several tokens may name one tenant
    sha256 = "9f86d081884c7d65..."       # 64 hex digits; the token itself is nowhere in the file
    rights = ["generate", "build"]       # and admin; what each allows: rpc/auth.py

    [quotas.acme]                        # what each means: scheduler/quotas.py; left out: no bound
    prefix_bytes = "2GiB"
    pinned_bytes = "512MiB"
    concurrent_requests = 16
    queued_requests = 64
    tokens_per_s = 5000

In: a path.  Out: the caller behind a token, quotas by tenant, and both anew whenever the file has changed.  A file that
cannot be read or understood is refused at start; later it is logged, and what was read before stays in force.

SHA-256 and no slow hash: tokens are random numbers of 256 bits (`tinyloop token new`), which nobody can guess however
fast he hashes, and one is looked at with every call, on the loop that serves all others.  The look-up takes a keyed
hash of the hash, with a key that lives as long as the process, and then compares in constant time: how long it takes
says nothing about the hashes that are known.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import structlog

from tinyloop_service.errors import InvalidArgument
from tinyloop_service.files import read_file
from tinyloop_service.rpc.caller import Caller, Right
from tinyloop_service.settings import parse_integer
from tinyloop_service.types import Quota

LOOK_EVERY_S = 1.0  # whether the file has changed
TOKEN_BYTES = 32
TOKEN_PREFIX = "tl_"  # so that scanners for secrets find tokens where none should be
_FIELD = "tokens_file"
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_LEAST = {"concurrent_requests": 1, "tokens_per_s": 1}  # of a quota; 0 of the others
_log = structlog.get_logger("tinyloop.tokens")


def new_token() -> str:
    return TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def hash_token(token: str) -> str:
    """As it stands in the file: SHA-256 in hex over the token's UTF-8 bytes."""
    return _digest(token).hex()


class Tokens:
    """What one reading of the file gave."""

    def __init__(self, callers: Mapping[bytes, Caller], quotas: Mapping[str, Quota]) -> None:
        """callers: by SHA-256."""
        self.quotas = quotas
        self.callers = tuple(callers.values())
        self._key = secrets.token_bytes(32)
        self._known = {self._slot(digest): (digest, caller) for digest, caller in callers.items()}

    @property
    def digests(self) -> frozenset[bytes]:
        """SHA-256 of all of them."""
        return frozenset(digest for digest, _ in self._known.values())

    def caller(self, token: str) -> Caller | None:
        """Who it stands for; None for nobody."""
        digest = _digest(token)
        known, caller = self._known.get(self._slot(digest), (bytes(32), None))
        return caller if hmac.compare_digest(known, digest) else None

    def _slot(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._key).digest()


class TokensFile:
    """The file and what it said when it could last be understood."""

    def __init__(self, path: str | Path) -> None:
        """Raises InvalidArgument when it cannot be read or understood."""
        self._path = Path(path)
        self._seen = self._read()
        self._is_lost = False  # it could not be read the last time
        self.tokens = parse_tokens(self._seen)

    async def changes(self) -> AsyncIterator[Tokens]:
        """What it says, each time that it says something else.  Never ends."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if (tokens := await self._look()) is not None:
                self.tokens = tokens
                _log.info("tokens read again", tokens=len(tokens.callers))
                yield tokens

    async def _look(self) -> Tokens | None:
        """The new tokens; None when there are none, or none that can be understood, which is logged once."""
        was_lost, self._is_lost = self._is_lost, True
        try:
            seen = await asyncio.to_thread(self._read)
            self._is_lost = False
            if seen == self._seen:
                return None
            self._seen = seen
            return parse_tokens(seen)
        except InvalidArgument as error:
            if not (was_lost and self._is_lost):
                _log.error("the old tokens stay", path=str(self._path), error=error.description)
            return None
        except Exception:  # a bug of ours: who looks no more never hears that a token is gone
            _log.exception("the old tokens stay", path=str(self._path))
            return None

    def _read(self) -> bytes:
        try:
            return read_file(self._path)
        except OSError as error:
            raise InvalidArgument(_FIELD, f"{self._path}: {error.strerror}; check the path") from None


def parse_tokens(content: bytes) -> Tokens:
    """Raises InvalidArgument that says which entry is wrong; no secret is ever part of the message."""
    try:
        document = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # not all that tomllib raises is a TOMLDecodeError
        raise InvalidArgument(_FIELD, f"is no TOML: {error}") from None
    _check_keys("the file", document, {"token", "quotas"})
    tables = document.get("token")
    if not isinstance(tables, list) or not tables:
        raise InvalidArgument(_FIELD, "has no [[token]] table, so nobody could call; `tinyloop token new` makes one")
    callers: dict[bytes, Caller] = {}
    for number, table in enumerate(tables, 1):
        digest, caller = _parse_token(f"token {number}", table)
        if digest in callers:
            raise InvalidArgument(_FIELD, f"token {number} has the same sha256 as one before it; leave one of them out")
        callers[digest] = caller
    return Tokens(callers, _parse_quotas(document.get("quotas", {}), {caller.tenant for caller in callers.values()}))


def _parse_token(where: str, table: Any) -> tuple[bytes, Caller]:
    _check_keys(where, table, {"tenant", "sha256", "rights"})
    tenant, sha256, rights = (table.get(key) for key in ("tenant", "sha256", "rights"))
    _check(_matches(_TENANT, tenant), where, "tenant", "1 to 63 letters, digits, dots, dashes or underscores")
    _check(_matches(_SHA256, sha256), where, "sha256", "64 hex digits, as `tinyloop token hash` prints them")
    known = isinstance(rights, list) and rights and all(right in list(Right) for right in rights)
    _check(known, where, "rights", f"a list of {', '.join(Right)}")
    digest = bytes.fromhex(sha256)
    return digest, Caller(tenant, frozenset(map(Right, rights)), digest.hex()[:8])


def _parse_quotas(tables: Any, tenants: set[str]) -> dict[str, Quota]:
    _check(isinstance(tables, dict), "the file", "quotas", "tables [quotas.TENANT]")
    quotas = {}
    for tenant, table in tables.items():
        where = f"[quotas.{tenant}]"
        _check(tenant in tenants, where, "the tenant", "one that a [[token]] names")
        _check_keys(where, table, {field.name for field in fields(Quota)})
        quota = Quota(**{name: _parse_amount(where, name, value) for name, value in table.items()})
        waits_nowhere = quota.queued_requests == 0 and quota.concurrent_requests is None
        _check(not waits_nowhere, where, "queued_requests", "at least 1, or concurrent_requests beside it")
        quotas[tenant] = quota
    return quotas


def _parse_amount(where: str, name: str, value: Any) -> int:
    """An integer, or a string with a unit for bytes."""
    least = _LEAST.get(name, 0)
    what = f"an integer of at least {least}" + (', or a size as "2GiB"' if name.endswith("_bytes") else "")
    try:
        amount = parse_integer(value) if isinstance(value, str) and name.endswith("_bytes") else value
    except (KeyError, ValueError):
        amount = None
    if type(amount) is not int or amount < least:
        raise InvalidArgument(_FIELD, f"{where}: {name}: expected {what}")
    return amount


def _check_keys(where: str, table: Any, known: Iterable[str]) -> None:
    if not isinstance(table, dict):
        raise InvalidArgument(_FIELD, f"{where} is no table")
    for key in table:
        _check(key in known, where, repr(key), f"one of {', '.join(sorted(known))}")


def _check(condition: Any, where: str, what: str, expected: str) -> None:
    if not condition:
        raise InvalidArgument(_FIELD, f"{where}: {what}: expected {expected}")


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def bearer_token(authorization: str) -> str:
    """The token in a header `authorization: Bearer TOKEN`; empty where there is none."""
    scheme, _, token = authorization.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def digest_of(authorization: str) -> bytes:
    """Of the token in a header; of a header without one, what no token has."""
    token = bearer_token(authorization)
    return _digest(token) if token else b""


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
