"""A tokens file for tests: tenants a and b who may generate and build, a reader, an admin, and who nobody knows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tinyloop_service.rpc.tokens import hash_token

A, B, READER, ADMIN, STRANGER = (f"tl_{name}-{'0' * 40}" for name in ("a", "b", "reader", "admin", "stranger"))
KNOWN: dict[str, tuple[str, str]] = {
    A: ("a", "generate build"),
    B: ("b", "generate build"),
    READER: ("a", "generate"),
    ADMIN: ("operators", "admin"),
}


def write_tokens(path: Path, known: Mapping[str, tuple[str, str]] = KNOWN, quotas: str = "") -> Path:
    """`known`: tenant and rights, by token; `quotas`: TOML.  The file is replaced in one step, as a mount is."""
    tables = [
        f'[[token]]\ntenant = "{tenant}"\nsha256 = "{hash_token(token)}"\nrights = {rights.split()}\n'
        for token, (tenant, rights) in known.items()
    ]
    new = path.with_suffix(".new")
    new.write_text("\n".join([*tables, quotas]))
    return new.rename(path)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)
